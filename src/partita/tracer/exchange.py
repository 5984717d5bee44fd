"""What modules may pass each other beside their arguments and results.

The fold check sees every tensor that leaves a module's body.  A module that the trace does not enter has no recorded
body; an object that it shares with other calls may carry values that only a run would show.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from partita.tracer.recorder import UNTRACED, Call
from partita.tracer.tree import PLAIN, Marker, leaves

_UNWRITTEN = (*PLAIN, Marker, torch.Tensor, nn.Module, type, enum.Enum)


def objects_of(call: Call) -> list[Any]:
    """Return the objects among a call's arguments that a module can write into."""
    found = (leaf for _, leaf in leaves((call.args, call.kwargs)))
    return [
        leaf for leaf in found if hasattr(leaf, "__dict__") and not isinstance(leaf, _UNWRITTEN) and not callable(leaf)
    ]


def unseen_exchange(call: Call, related: Callable[[Call], bool], holders: Mapping[int, Sequence[Call]]) -> str:
    """Say by what object an untraced module may exchange values with other calls ("" if by none).

    Args:
        call: A call that is to be folded.
        related: Whether another call is inside it or around it.
        holders: Identity of each object to the calls that are given it.
    """
    for held in (held for inner in _calls(call) if inner.opaque == UNTRACED for held in objects_of(inner)):
        if not all(related(other) for other in holders[id(held)]):
            return f"the {type(held).__name__} that it is given may carry values between it and other calls"
    return ""


def _calls(call: Call) -> Iterator[Call]:
    yield call
    for child in call.children:
        yield from _calls(child)
