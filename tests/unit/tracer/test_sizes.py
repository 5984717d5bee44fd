"""Sizes are expressions over the inputs' sizes; a capture holds where the branches taken for a size hold."""

import pytest
import sympy
import torch

from partita.tracer.sizes import Size, SizeRules, evaluate
from tests.unit.tracer.traces import Model, rows, trace

A, B = sympy.symbols("a b", integer=True, positive=True)


def rules(axes=((A, B),), conditions=(), lower=None, upper=None):
    return SizeRules(axes=axes, conditions=conditions, lower=lower or {}, upper=upper or {})


def test_numbers_follow_the_shapes():
    found = rules()
    assert found.number(Size(A * B), ((3, 4),)) == 12
    assert found.number(Size(A * B), ((5, 4),)) == 20
    assert found.number(Size(A + sympy.Rational(1, 2), float), ((3, 4),)) == 3.5
    assert found.number(Size(sympy.Gt(A, 3), bool), ((3, 4),)) is False


def test_shapes_of_another_form_do_not_hold():
    found = rules(axes=((A, B), (A, sympy.Integer(3))))
    assert found.holds(((5, 2), (5, 3)))
    for shapes in [((5, 2), (6, 3)), ((5, 2), (5, 4)), ((5, 2),), ((5,), (5, 3)), ((5, 2), (5, 3), ())]:
        assert not found.holds(shapes), shapes
        with pytest.raises(ValueError, match="does not hold"):
            found.number(Size(A), shapes)


def test_conditions_and_limits_hold_or_do_not():
    found = rules(conditions=(sympy.Ne(A, B),), lower={A: 2}, upper={B: 8})
    assert found.holds(((2, 8),))
    assert not found.holds(((1, 8),))
    assert not found.holds(((2, 9),))
    assert not found.holds(((4, 4),))


def test_a_waiver_accepts_shapes_below_the_limits_until_it_is_taken_back():
    found = rules(lower={A: 2})
    shapes = ((1, 5),)
    assert not found.holds(shapes)
    assert found.waive(shapes)
    assert found.holds(shapes)
    assert found.number(Size(A * B), shapes) == 5
    found.refuse(shapes)
    assert not found.holds(shapes)
    assert not rules(axes=((sympy.Integer(2), B),)).waive(shapes), "a fixed axis cannot be waived"


def test_open_symbols_have_no_value():
    assert evaluate(A + B, {A: 1}) is None
    assert evaluate(sympy.Eq(A, 1), {A: 1}) is True


# ---------------------------------------------------------------- what a trace learns


def test_sizes_of_the_example_are_not_frozen():
    traced = trace(Model(lambda self, x: self.linear(x).reshape(-1)[: x.shape[0]] * x.shape[0]), rows(6))
    assert traced.program.sizes.holds(((9, 4),))
    result = traced.result_stand_ins(((9, 4),))
    assert result.shape == (9,)


def test_a_branch_on_a_size_is_a_condition():
    traced = trace(Model(lambda self, x: self.linear(x) if x.shape[0] > 4 else x), rows(6))
    assert traced.program.sizes.holds(((5, 4),))
    assert not traced.program.sizes.holds(((4, 4),))


def test_a_division_without_rest_is_a_condition():
    traced = trace(Model(lambda self, x: self.linear(x).view(2, -1, 4)), rows(6))
    assert traced.program.sizes.holds(((8, 4),))
    assert not traced.program.sizes.holds(((7, 4),))


def test_an_axis_that_is_used_as_a_constant_is_fixed():
    traced = trace(Model(lambda self, x, y: self.linear(x) + y), rows(6), torch.zeros(6, 4))
    assert traced.program.sizes.holds(((5, 4), (5, 4)))
    assert not traced.program.sizes.holds(((5, 4), (6, 4)))
    assert not traced.program.sizes.holds(((6, 3), (6, 3)))


def test_a_loop_over_a_size_fixes_it():
    traced = trace(Model(lambda self, x: sum(self.linear(row) for row in x)), rows(6))
    assert not traced.program.sizes.holds(((5, 4),))
