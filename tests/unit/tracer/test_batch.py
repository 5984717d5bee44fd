"""The user's word on the batch axis: it chooses the axis, and nothing else."""

import pytest
import torch
from torch import nn

import partita
from partita.tracer.capture import capture_model


class Positions(nn.Module):
    """Every position of a (time, rows, features) tensor by itself: both leading axes may be cut."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x)


class Apart(nn.Module):
    """Two inputs that meet in no operator."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.left(x), self.right(y)


def captured(model, *shapes, **word):
    return capture_model(model, partita.Example(args=tuple(torch.randn(shape) for shape in shapes), **word))


def test_the_leading_axis_without_a_word_and_the_named_one_with_it():
    assert captured(Positions(), (5, 3, 4)).rows.axis == (0, 0)
    said = captured(Positions(), (5, 3, 4), batch_dims={"args[0]": 1})
    assert said.rows.axis == (0, 1)
    assert said.graph.batch_rows == 3
    assert [join.dim for join in said.rows.joins.values()] == [1]


def test_no_axis_keeps_the_batch_whole():
    found = captured(Positions(), (5, 3, 4), batch_dims={})
    assert found.rows is None
    assert any("the batch is not to be cut" in note for note in found.graph.notes)


def test_dependent_rows_stay_together_whatever_is_said():
    found = captured(Normed(), (6, 4), batch_dims={"args[0]": 0})
    assert found.rows is None
    assert any("as said" in note for note in found.graph.notes)


def test_inputs_that_never_meet_are_cut_together():
    found = captured(Apart(), (6, 4), (6, 4), batch_dims={"args[0]": 0, "args[1]": 0})
    assert found.rows.dims == (0, 0)
    alone = captured(Apart(), (6, 4), (6, 4), batch_dims={"args[1]": 0})
    assert alone.rows.dims == (None, 0)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ({"y": 0}, r"the tensors of the example are args\[0\], args\[1\]"),
        ({"args[0]": 2}, r"whose shape is \[6, 4\]"),
        ({"args[0]": 0, "args[1]": 0}, "different sizes"),
    ],
)
def test_a_word_that_does_not_fit_the_example_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        captured(Apart(), (6, 4), (5, 4), batch_dims=word)
