"""Sizes as expressions over the sizes of the inputs, and the conditions under which a capture holds.

Every axis of every input tensor gets a symbol while tracing.  What the model computes from sizes is kept as an
expression and evaluated again for every call, so no size of the example is frozen; the branches that the model took
because of a size are kept as conditions, and a call that breaks one needs a capture of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._sympy.numbers import int_oo

from partita.tracer.tree import Marker

Binding = tuple[tuple[int, ...], ...]
"""The shapes of the input tensors of one call, in the program's input order."""


@dataclass(frozen=True, eq=False, slots=True)
class Size(Marker):
    """A number computed from the sizes of the inputs.

    Attributes:
        expression: Over the symbols of the input axes; free of symbols that depend on values.
        kind: The Python type that the model saw.
    """

    expression: sympy.Basic
    kind: type = int

    def __repr__(self) -> str:
        """Return the expression."""
        return f"Size({self.expression})"


def expression_of(value: Any) -> sympy.Basic | None:
    """Return the expression of a symbolic number, or None for anything else."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return sympy.sympify(value.node.expr)
    return None


def depends_on_values(expression: sympy.Basic) -> bool:
    """Whether the expression holds an unbacked symbol (a size that only the data decides)."""
    return any(str(symbol).startswith(("u", "zuf")) for symbol in expression.free_symbols)


@dataclass(eq=False)
class SizeRules:
    """How sizes follow from input shapes, and when.

    Attributes:
        axes: For each input its dims as expressions, at the example's capture.
        conditions: Relations that must hold for the capture to be valid.
        lower: Smallest value of each symbol for which the capture is valid.
        upper: Largest value of each symbol, where there is one.
        also: Says for input shapes that meet all this whether the capture is valid for them, or None; it asks the
            process' own copy of the model, so it does not travel.
    """

    axes: tuple[tuple[sympy.Basic, ...], ...]
    conditions: tuple[sympy.Basic, ...]
    lower: Mapping[sympy.Symbol, int]
    upper: Mapping[sympy.Symbol, int]
    also: Callable[[Binding], bool] | None = None
    _refused: set[Binding] = field(default_factory=set)
    _values: dict[Binding, dict[sympy.Symbol, int]] = field(default_factory=dict)
    _numbers: dict[tuple[Binding, sympy.Basic], Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but `also`."""
        return {**vars(self), "also": None}

    def bind(self, shapes: Binding) -> dict[sympy.Symbol, int] | None:
        """Return the symbols' values for these input shapes, or None if the capture does not hold for them."""
        values = self._symbols(shapes)
        if values is None or any(values[symbol] < low for symbol, low in self.lower.items() if symbol in values):
            return None
        if any(values[symbol] > high for symbol, high in self.upper.items() if symbol in values):
            return None
        return values if all(evaluate(condition, values) is not False for condition in self.conditions) else None

    def _symbols(self, shapes: Binding) -> dict[sympy.Symbol, int] | None:
        """Return the symbols' values, or None if the shapes do not have the capture's form."""
        if len(shapes) != len(self.axes) or any(
            len(shape) != len(axes) for shape, axes in zip(shapes, self.axes, strict=True)
        ):
            return None
        pairs = [
            (size, axis)
            for shape, axes in zip(shapes, self.axes, strict=True)
            for size, axis in zip(shape, axes, strict=True)
        ]
        values = {axis: size for size, axis in reversed(pairs) if isinstance(axis, sympy.Symbol)}
        return None if any(evaluate(axis, values) != size for size, axis in pairs) else values

    def holds(self, shapes: Binding) -> bool:
        """Whether the capture is valid for these input shapes."""
        if shapes not in self._values:
            values = None if shapes in self._refused else self.bind(shapes)
            if values is None or (self.also is not None and not self.also(shapes)):
                self._refused.add(shapes)
                return False
            self._values[shapes] = values
        return True

    def waive(self, shapes: Binding) -> bool:
        """Accept input shapes below the smallest sizes of the capture, for which the program was seen to be the same.

        Returns:
            Whether the axes allow it.
        """
        values = self._symbols(shapes)
        if values is not None:
            self._values[shapes] = values
        return values is not None

    def refuse(self, shapes: Binding) -> None:
        """Take `waive` back: the program is another one for these input shapes."""
        self._values.pop(shapes, None)

    def number(self, size: Size, shapes: Binding) -> Any:
        """Evaluate a size for these input shapes (which must hold)."""
        key = (shapes, size.expression)
        if key not in self._numbers:
            if not self.holds(shapes):
                raise ValueError(f"the capture does not hold for input shapes {shapes}")
            self._numbers[key] = evaluate(size.expression, self._values[shapes])
        return size.kind(self._numbers[key])


def evaluate(expression: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> Any:
    """Evaluate to a Python number or truth value; None if symbols stay open."""
    if isinstance(expression, int | float | bool):
        return expression
    result = expression.xreplace({symbol: sympy.Integer(number) for symbol, number in values.items()})
    if result in {sympy.true, sympy.false}:
        return bool(result)
    if not result.is_number:
        return None
    return int(result) if result.is_integer else float(result)


def settled(shape_env: Any) -> Callable[[Any], sympy.Basic]:
    """Return a function from a size to its expression under everything that the trace has learnt."""

    def settle(size: Any) -> sympy.Basic:
        if isinstance(size, sympy.Basic):
            return shape_env.replace(size)
        expression = expression_of(size)
        return sympy.Integer(size) if expression is None else shape_env.replace(expression)

    return settle


def rules_from(shape_env: Any, input_shapes: Sequence[Iterable[Any]]) -> SizeRules:
    """Read the rules out of a trace's shape environment.

    Args:
        shape_env: The trace's ``ShapeEnv``.
        input_shapes: Shapes of the traced inputs, symbolic.

    Returns:
        The axes' expressions with the trace's replacements applied, and every guard that the trace took.
    """
    settle = settled(shape_env)
    axes = tuple(tuple(settle(size) for size in shape) for shape in input_shapes)
    known = {symbol for shape in axes for axis in shape for symbol in axis.free_symbols}
    conditions = [shape_env.replace(sympy.sympify(guard.expr)) for guard in shape_env.guards]
    lower = {s: int(r.lower) for s, r in shape_env.var_to_range.items() if s in known}
    upper = {
        s: int(r.upper)
        for s, r in shape_env.var_to_range.items()
        if s in known and r.upper not in {int_oo, sympy.oo} and r.upper < 2**31
    }
    open_conditions = tuple(c for c in conditions if c not in {sympy.true, sympy.false} and not depends_on_values(c))
    return SizeRules(axes=axes, conditions=open_conditions, lower=lower, upper=upper)
