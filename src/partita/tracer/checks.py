"""Checks of values in a forward: an ``assert``, or an ``if`` that does nothing but raise.

What such a check looks at is not known while tracing, but the way on is: the one that does not raise.  The trace takes
it, and the check becomes an operator of the graph that raises where the user's own code would have raised.  That the
other way raises is read off the source, so nothing is assumed about values.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

from partita.errors import ExecutionError

_LIBRARY = torch.library.Library("partita", "FRAGMENT")
_LIBRARY.define("expect(Tensor value, bool answer, str place) -> ()")


def _expect(value: torch.Tensor, answer: bool, place: str) -> None:  # noqa: FBT001  (the operator's schema)
    """Raise where the user's forward would have raised.

    Raises:
        ExecutionError: If the value is not the one that lets the forward go on.
    """
    if bool(value) is not answer:
        raise ExecutionError(
            f"the check of values at {place} fails: what it looks at is {bool(value)}",
            hint="the model's own forward raises an error there",
        )


def _expect_fake(*_operands: object) -> None:
    """Nothing comes out."""


_LIBRARY.impl("expect", _expect, "CompositeExplicitAutograd")
torch.library.register_fake("partita::expect", _expect_fake, lib=_LIBRARY)

Span = tuple[int, int, int, int]
"""First line, first column, last line, last column."""


def passing_answer(frame: FrameType) -> bool | None:
    """Return the truth of what a frame looks at that makes it go on without raising.

    Args:
        frame: Where a value's truth is asked for.

    Returns:
        The truth; None if the line is not a check, or too intricate to tell.
    """
    for asked in _spans_at(frame):
        around = [(test, wanted) for test, span, wanted in _tests_of(frame.f_code) if _inside(asked, span)]
        if around:
            test, wanted = around[-1]
            return None if wanted is None else _answer(test, asked, wanted=wanted, code=frame.f_code)
    return None


def _spans_at(frame: FrameType) -> Iterator[Span]:
    """Yield where the running instruction stands, and the one before: a jump stands for its whole statement."""
    at = frame.f_lasti // 2
    for line, last_line, column, last_column in reversed(
        list(itertools.islice(frame.f_code.co_positions(), max(at - 1, 0), at + 1))
    ):
        if line is not None and last_line is not None and column is not None and last_column is not None:
            yield line, column, last_line, last_column


@functools.lru_cache(maxsize=1024)
def _source(code: CodeType) -> tuple[ast.Module, int, int] | None:
    """Return a function's syntax tree, and how far its lines and columns are from the file's."""
    try:
        lines, start = inspect.getsourcelines(code)
        text = textwrap.dedent("".join(lines))
        return ast.parse(text), start - 1, len(lines[0]) - len(text.splitlines(keepends=True)[0])
    except (OSError, TypeError, SyntaxError):
        return None


@functools.lru_cache(maxsize=1024)
def _tests_of(code: CodeType) -> tuple[tuple[ast.expr, Span, bool | None], ...]:
    """Return the tests of a function, outermost first: where they are, and the truth that does not raise (or None)."""
    source = _source(code)
    found: list[tuple[ast.expr, Span, bool | None]] = []
    for node in ast.walk(source[0]) if source else ():
        if isinstance(node, ast.Assert):
            found.append((node.test, _span(node.test, code), True))
        elif isinstance(node, ast.If):
            raises = isinstance(node.body[-1], ast.Raise)
            found.append((node.test, _span(node.test, code), False if raises else None))
        elif isinstance(node, ast.While | ast.IfExp):
            found.append((node.test, _span(node.test, code), None))
    return tuple(found)


def _span(node: ast.expr, code: CodeType) -> Span:
    source = _source(code)
    assert source is not None
    _, lines, columns = source
    end, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno + lines, node.col_offset + columns, end + lines, end_column + columns


def _inside(inner: Span, outer: Span) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


def _answer(test: ast.expr, asked: Span, *, wanted: bool, code: CodeType) -> bool | None:
    """Return the truth of the operand at a place that gives a whole test the wanted truth.

    An operand decides alone if every operand has to have the wanted truth, or if it is the last that is looked at.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _answer(test.operand, asked, wanted=not wanted, code=code)
    if isinstance(test, ast.BoolOp):
        operand = next((v for v in test.values if _inside(asked, _span(v, code))), None)
        alone = isinstance(test.op, ast.And) is wanted or operand is test.values[-1]
        return _answer(operand, asked, wanted=wanted, code=code) if operand is not None and alone else None
    return None if isinstance(test, ast.IfExp | ast.NamedExpr | ast.Lambda) else wanted
