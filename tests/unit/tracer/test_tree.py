"""Trees of users' arguments and results: every container kept, no constructor called."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from partita.tracer.tree import leaves, map_leaves, path_text


class Point(NamedTuple):
    x: object
    y: object


@dataclass
class Checked:
    """A dataclass whose constructor refuses everything but numbers."""

    value: int
    note: str = "none"
    late: int = field(init=False, default=0)

    def __post_init__(self):
        if not isinstance(self.value, int):
            raise TypeError("value must be a number")


@dataclass(frozen=True, slots=True)
class Sealed:
    first: object
    second: object = None


@dataclass
class Output(OrderedDict):
    """A dict and a dataclass at once, as the outputs of transformers are; it refuses to be written by item."""

    loss: object = None
    logits: object = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                OrderedDict.__setitem__(self, name, getattr(self, name))

    def __setitem__(self, key, value):
        raise TypeError("outputs are not written by item")


def doubled(tree):
    return map_leaves(lambda _path, leaf: leaf * 2 if isinstance(leaf, int) else leaf, tree)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (3, 6),
        ((1, [2, {"a": 3}]), (2, [4, {"a": 6}])),
        (Point(1, (2,)), Point(2, (4,))),
        ({}, {}),
        ([(), None, "text"], [(), None, "text"]),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
        (Sealed(1, Sealed(2)), Sealed(2, Sealed(4))),
        (torch.Size([2, 3]), (4, 6)),
    ],
)
def test_leaves_are_replaced_and_containers_kept(tree, expected):
    found = doubled(tree)
    assert found == expected
    if not isinstance(tree, torch.Size):
        assert type(found) is type(tree)


def test_constructors_are_not_called():
    found = map_leaves(lambda path, leaf: f"<{path_text(path)}>", Checked(5))
    assert type(found) is Checked
    assert (found.value, found.note, found.late) == ("<value>", "<note>", "<late>")


def test_an_output_that_is_dict_and_dataclass_keeps_both_faces():
    found = doubled(Output(loss=1, logits=(2, None)))
    assert type(found) is Output
    assert found["logits"] == (4, None)
    assert (found.loss, found.logits) == (2, (4, None))
    assert list(found) == ["loss", "logits"]
    assert list(doubled(Output(logits=3))) == ["logits"]


def test_the_given_tree_stays_as_it_is():
    tree = {"a": [1, Sealed(2)]}
    doubled(tree)
    assert tree == {"a": [1, Sealed(2)]}


def test_leaves_come_in_order_with_their_paths():
    tree = ([1, {"a": 2}], Sealed(3, (4,)))
    assert [(path_text(path), leaf) for path, leaf in leaves(tree)] == [
        ("[0][0]", 1),
        ("[0][1].a", 2),
        ("[1].first", 3),
        ("[1].second[0]", 4),
    ]
    assert path_text(()) == "<value>"


def test_other_objects_are_leaves():
    strange = UserDict(a=1)
    assert [leaf for _, leaf in leaves({"k": strange, "t": {1, 2}})] == [strange, {1, 2}]
