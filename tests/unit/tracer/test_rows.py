"""Which results can be put together from parts of the batch, rule by rule."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from partita.tracer.capture import capture_model
from partita.tracer.rows import CoupledError, Join
from tests.unit.tracer.traces import WIDTH, Model, rows, trace

TARGETS = torch.tensor([0, 1, 2, -100, 1, 0])


def join(function, *more, axis=(0, 0), **members):
    """Return how the only result of a model of (x, *more) is put together, from the structure alone."""
    traced = trace(Model(function, **members), rows(), *more)
    (found,) = traced.rows(axis).joins.values()
    return found


# ---------------------------------------------------------------- what can be put together


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda self, x: self.linear(x), Join("rows", dim=0)),
        (lambda self, x: self.linear(x).T, Join("rows", dim=1)),
        (lambda self, x: self.linear(x).softmax(1), Join("rows", dim=0)),
        (lambda self, x: self.linear(x).repeat_interleave(2, 1).reshape(-1), Join("rows", dim=0)),
        (lambda self, x: self.linear.weight.sum(), Join("whole")),
        (lambda self, x: self.linear(x).mean(), Join("mean")),
        (lambda self, x: self.linear(x).mean(0), Join("mean")),
        (lambda self, x: self.linear(x).sum(), Join("sum")),
        (lambda self, x: -3 * self.linear(x).mean() / 7, Join("mean")),
        (lambda self, x: self.linear(x).mean() + 1, Join("mean")),
        (lambda self, x: self.linear(x).mean() + x.std(1).mean(), Join("mean")),
        (lambda self, x: self.linear(x).sum() + x.sum(), Join("sum")),
        (lambda self, x: self.linear(x).sum() / x.shape[0], Join("mean")),
        (lambda self, x: self.linear(x).sum() / x.numel(), Join("mean")),
        (lambda self, x: functional.mse_loss(self.linear(x), x), Join("mean")),
        (lambda self, x: functional.mse_loss(self.linear(x), x, reduction="sum"), Join("sum")),
        (lambda self, x: functional.kl_div(self.linear(x), x, reduction="batchmean"), Join("mean")),
        (lambda self, x: functional.cross_entropy(self.linear(x), x.softmax(1)), Join("mean")),
    ],
)
def test_parts_are_put_together(function, expected):
    assert join(function) == expected


def test_a_mean_over_counted_targets_knows_its_targets():
    found = join(lambda self, x, y: functional.cross_entropy(self.linear(x), y, ignore_index=-7), TARGETS)
    assert (found.how, found.targets, found.ignored) == ("count", "in:args[1]", -7)
    smoothed = join(lambda self, x, y: functional.cross_entropy(self.linear(x), y, label_smoothing=0.1) * 2, TARGETS)
    assert (smoothed.how, smoothed.ignored) == ("count", -100)
    summed = join(lambda self, x, y: functional.nll_loss(self.linear(x), y, reduction="sum"), TARGETS)
    assert summed == Join("sum")


def test_rows_may_lie_in_any_dim_and_other_inputs_stay_whole():
    traced = trace(Model(lambda self, x, y: self.linear(x + y)), torch.zeros(3, 6, WIDTH), torch.zeros(WIDTH))
    assert traced.rows((0, 1)).dims == (1, None)
    assert traced.rows((0, 0)).dims == (0, None)


def test_a_model_of_several_results_has_a_join_for_each():
    traced = trace(Model(lambda self, x: (self.linear(x), {"loss": x.mean(), "weight": self.linear.bias})), rows())
    assert sorted(found.how for found in traced.rows((0, 0)).joins.values()) == ["mean", "rows", "whole"]


# ---------------------------------------------------------------- what cannot


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda self, x: x - x.mean(0), "reads a reduction over the batch"),
        (lambda self, x: x / x.sum(), "reads a reduction over the batch"),
        (lambda self, x: self.linear(x).softmax(0), "works along the rows"),
        (lambda self, x: self.linear(x).log_softmax(-2), "works along the rows"),
        (lambda self, x: self.linear(x).cumsum(0), "works along the rows"),
        (lambda self, x: self.linear(x).flip(0), "works along the rows"),
        (lambda self, x: self.linear(x).roll(1, -2), "works along the rows"),
        (lambda self, x: self.linear(x).sort(0).values, "works along the rows"),
        (lambda self, x: self.linear(x) @ x.T, "pairs the rows"),
        (lambda self, x: torch.cdist(self.linear(x), x), "pairs the rows"),
        (lambda self, x: x.T @ self.linear(x), "reduces over the rows by 'matmul'"),
        (lambda self, x: self.linear(x).max(), "reduces over the rows by 'max'"),
        (lambda self, x: self.linear(x).norm(), "reduces over the rows by"),
        (lambda self, x: self.linear(x).std(0), "reduces over the rows by"),
        (lambda self, x: self.linear(x).mean().sqrt(), "not linear"),
        (lambda self, x: 1 / self.linear(x).mean(), "not linear"),
        (lambda self, x: self.linear(x).sum() + 1, "not linear"),
        (lambda self, x: self.linear(x).mean() * x.shape[0], "not linear"),
        (lambda self, x: self.linear(x).mean() + x.sum(), "mixes different reductions"),
        (lambda self, x: self.linear(x).sum() / x.abs().sum(), "not linear"),
        (lambda self, x: self.linear(x)[0], "reduces over the rows by 'select'"),
        (lambda self, x: self.linear(x)[1:], "not proportional"),
        (lambda self, x: self.linear(x)[x[:, 0] > 0].mean(), "reduces over the rows by 'index'"),
        (lambda self, x: torch.cat([x, self.linear(x)[:1]]), "reduces over the rows by 'slice'"),
        (lambda self, x: x + torch.arange(x.shape[0]).outer(torch.arange(x.shape[0])).sum(), "pairs the rows"),
        (lambda self, x: functional.mse_loss(x[:, :1], x[:, 0], reduction="mean"), "pairs the rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_rows_that_depend_on_each_other_are_coupled(function, reason):
    with pytest.raises(CoupledError, match=reason) as caught:
        join(function)
    assert re.search(r"test_rows\.py:\d+", str(caught.value)), "the line of the user's forward is missing"


def test_batch_norm_couples_in_training_only():
    model = Model(lambda self, x: self.norm(self.linear(x)), norm=nn.BatchNorm1d(WIDTH))
    with pytest.raises(CoupledError, match=r"'norm\.num_batches_tracked', once per step"):
        trace(model, rows()).rows((0, 0))
    free = Model(lambda self, x: self.norm(self.linear(x)), norm=nn.BatchNorm1d(WIDTH, track_running_stats=False))
    with pytest.raises(CoupledError, match="normalises over the rows"):
        trace(free, rows()).rows((0, 0))
    assert trace(model.eval(), rows()).rows((0, 0)).dims == (0,)


def test_a_changed_buffer_couples():
    model = Model(lambda self, x: self.linear(x) + self.seen.add_(1))
    model.register_buffer("seen", torch.zeros(()))
    with pytest.raises(CoupledError, match="'seen', once per step"):
        trace(model, rows()).rows((0, 0))


def test_class_weights_couple():
    weights = torch.rand(WIDTH)
    with pytest.raises(CoupledError, match="class weights"):
        join(lambda self, x, y: functional.cross_entropy(self.linear(x), y, weight=weights), TARGETS)


def test_an_axis_of_fixed_size_is_no_batch():
    with pytest.raises(CoupledError, match=r"the size of args\[0\] in dim 1 is fixed at 4"):
        trace(Model(lambda self, x: self.linear(x)), rows()).rows((0, 1))


# ---------------------------------------------------------------- what only numbers tell


def doubled_rows(self, x):
    return torch.cat([self.linear(x), x])


def counted_rows(self, x):
    return self.linear(x) + torch.arange(x.shape[0])[:, None]


def rows_inside(self, x):
    """The rows end up as the inner part of a dim, as in the outputs of models whose sequence comes first."""
    return self.linear(x)[:, None].repeat(1, 3, 1).transpose(0, 1).flatten(0, 1)


def attention_over_rows(self, x):
    return functional.scaled_dot_product_attention(x[None], self.linear(x)[None], x[None])[0]


def norm_over_rows(self, x):
    return functional.layer_norm(self.linear(x).T, (x.shape[0],)).T


def squared_mean(self, x):
    mean = self.linear(x).mean()
    return mean * mean


MIXING = [doubled_rows, counted_rows, rows_inside, attention_over_rows, norm_over_rows, squared_mean]


@pytest.mark.parametrize("function", MIXING, ids=lambda function: function.__name__)
def test_a_trial_finds_what_the_sizes_do_not_show(function):
    assert capture_model(Model(function), (rows(),)).rows is None


def test_a_square_of_a_mean_is_seen_in_the_structure():
    with torch.device("meta"):
        model = Model(squared_mean)
    captured = capture_model(model, (rows(),))
    assert captured.rows is None
    assert any("not linear in a reduction" in note for note in captured.graph.notes)


@pytest.mark.parametrize("function", [rows_inside, attention_over_rows])
def test_an_example_of_zeros_does_not_fool_the_trial(function):
    assert capture_model(Model(function), (torch.zeros(6, WIDTH),)).rows is None


def test_an_example_whose_rows_are_alike_and_cannot_vary_proves_nothing():
    tokens = torch.zeros(6, 3, dtype=torch.long)
    captured = capture_model(Model(lambda self, t: self.embed(t), embed=nn.Embedding(5, WIDTH)), (tokens,))
    assert captured.rows is None
    assert any("give rows that differ" in note for note in captured.graph.notes)


def test_an_input_that_never_meets_the_rows_stays_whole():
    model = Model(lambda self, x, y: (self.linear(x), self.other(y)), other=nn.Linear(WIDTH, WIDTH))
    captured = capture_model(model, (rows(), rows()))
    assert captured.rows.dims == (0, None)
    assert sorted(found.how for found in captured.rows.joins.values()) == ["rows", "whole"]


def test_a_loss_ties_the_rows_of_its_targets_to_those_of_the_input():
    model = Model(lambda self, x, y: functional.cross_entropy(self.linear(x), y))
    captured = capture_model(model, (rows(), TARGETS))
    assert captured.rows.dims == (0, 0)
    assert not captured.traced.program.sizes.holds(((6, 4), (5,)))


def test_running_statistics_of_any_normalisation_keep_the_batch_whole():
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    traced = trace(Model(lambda self, x: self.norm(x), norm=norm), torch.randn(6, 3, 5))
    assert {name.removeprefix("b:norm.") for name in traced.program.changed} >= {"running_mean", "running_var"}
    with pytest.raises(CoupledError, match="once per step"):
        traced.rows((0, 0))
    still = nn.InstanceNorm1d(3)
    assert trace(Model(lambda self, x: self.norm(x), norm=still), torch.randn(6, 3, 5)).rows((0, 0)).dims == (0,)
