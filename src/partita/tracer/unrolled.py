"""End a trace early that unrolls a long loop.

A Python loop over time steps leaves its operators once per step in the trace. Every operator costs the trace 3 to 5 ms
(nearly all of it symbolic arithmetic on the strides of torch's fake tensors), so a loop over a thousand steps takes
minutes, and what comes out is of no use to a partitioner: the steps depend on each other and share their weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from partita.errors import CaptureError
from partita.tracer.places import is_users_code

if TYPE_CHECKING:
    from partita.tracer.recorder import Call

MOST_OPERATORS = 3_000
"""Operators that one call of a module may run by itself and in repeated calls of modules inside it.

It costs 10 to 15 s to reach.  Layers of a model count for themselves, not for the container that calls each of them
once, so depth alone does not come near: a layer of a language model runs 50 to 150 operators.
"""


def count_operators(tracer: Any, stack: Sequence[Call], paths: Mapping[int, str]) -> None:
    """Count from now on what each open call runs by itself; end the trace where it is too much.

    Args:
        tracer: The proxy tracer that is at work.
        stack: The open calls, innermost last; the recorder keeps it up to date.
        paths: Id of a module's ``__dict__`` to its path.
    """
    create = tracer.create_node

    def counted(*args: Any, **kwargs: Any) -> Any:
        if stack:
            _add(stack[-1], 1, paths)
        return create(*args, **kwargs)

    tracer.create_node = counted


def count_repeated(call: Call, around: Call, paths: Mapping[int, str]) -> None:
    """Count a call that has ended for the call around it, unless it is the first of its module.

    Args:
        call: The call that has ended.
        around: The call that it was made in.
        paths: Id of a module's ``__dict__`` to its path.
    """
    if call.occurrence:
        _add(around, call.end - call.start, paths)


def _add(call: Call, number: int, paths: Mapping[int, str]) -> None:
    call.operators += number
    if call.operators > MOST_OPERATORS:
        place = _place(call.path, paths)
        raise CaptureError(
            f"the forward of {call.path or 'the model'!r} unrolls to more than {MOST_OPERATORS:,} operators "
            f"in one call, in a loop at {place}",
            hint="write the loop with torch's scan (torch._higher_order_ops.scan); as it is, it runs as one piece",
            module=call.path,
            place=place,
            unrolled=True,
        )


def _place(path: str, paths: Mapping[int, str]) -> str:
    """Return ``file:line`` of what the forward of a module is running, or of the innermost code of the user's."""
    innermost = ""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_code(file):
            innermost = innermost or f"{file}:{frame.f_lineno}"
            owner = frame.f_locals.get("self")
            if owner is not None and paths.get(id(getattr(owner, "__dict__", None))) == path:
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost or "unknown line"
