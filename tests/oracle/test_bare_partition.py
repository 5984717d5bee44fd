"""The bare problem: integer model = dynamic program = brute force, and no method below the bound."""

from math import inf, isfinite

import pytest
from hypothesis import given, settings

from partita.partitioner import PartitionProblem
from partita.partitioner.maxload import METHODS, evaluate, solve
from partita.partitioner.maxload import methods as methods_module
from partita.partitioner.maxload.line_dp import Line
from partita.partitioner.maxload.reduction import reduce_problem
from partita.partitioner.maxload.result import Limits
from partita.partitioner.solvers import solve_line, solve_placement
from tests.property.partition_problems import brute_force, partition_problems

LIMITS = Limits(deterministic_time=5.0)


@settings(max_examples=60, deadline=None)
@given(problem=partition_problems())
def test_contiguous_model_without_a_hint_equals_brute_force(problem: PartitionProblem):
    reduced = reduce_problem(problem, contiguous=True)
    best = brute_force(problem, contiguous=True)
    outcome = solve_line(reduced, incumbent=Line(objective=inf), limits=LIMITS)
    assert outcome.status == ("optimal" if isfinite(best) else "infeasible")
    if outcome.answer is not None:
        found = evaluate(problem, reduced.seat(outcome.answer.stages), contiguous=True).objective
        assert found == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert outcome.bound <= best + 1e-9


@settings(max_examples=60, deadline=None)
@given(problem=partition_problems(max_nodes=5))
def test_placement_model_without_a_hint_equals_brute_force(problem: PartitionProblem):
    reduced = reduce_problem(problem, contiguous=False)
    best = brute_force(problem, contiguous=False)
    outcome = solve_placement(reduced, incumbent=(), ceiling=inf, limits=LIMITS)
    assert outcome.status == ("optimal" if isfinite(best) else "infeasible")
    if outcome.answer is not None:
        found = evaluate(problem, reduced.expand(outcome.answer), contiguous=False).objective
        assert found == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert outcome.bound <= best + 1e-9


@settings(max_examples=60, deadline=None)
@given(problem=partition_problems())
def test_dp_over_all_down_sets_equals_brute_force(problem: PartitionProblem):
    result = solve(problem, method="dp")
    assert result.objective == pytest.approx(brute_force(problem, contiguous=True))
    assert result.status == ("OPTIMAL" if isfinite(result.objective) else "INFEASIBLE")


@settings(max_examples=25, deadline=None)
@given(problem=partition_problems(max_nodes=5))
def test_every_method_is_between_the_optimum_and_its_own_evaluation(problem: PartitionProblem):
    for contiguous in (True, False):
        best = brute_force(problem, contiguous=contiguous)
        for name in METHODS:
            result = solve(problem, method=name, contiguous=contiguous, time_limit_s=5, workers=1)
            assert result.bound <= best + 1e-9, name
            assert result.objective >= best - 1e-9, name
            if result.assignment:
                again = evaluate(problem, result.assignment, contiguous=contiguous)
                assert result.objective == again.objective
                assert result.loads == again.loads
            if result.status == "OPTIMAL":
                assert result.objective == pytest.approx(best, rel=1e-6, abs=1e-9), name
            if name == "ilp":
                assert result.status in {"OPTIMAL", "INFEASIBLE"}
                assert isfinite(best) == (result.status == "OPTIMAL")


@settings(max_examples=25, deadline=None)
@given(problem=partition_problems())
def test_shuffled_orders_and_the_model_end_at_the_optimum(problem: PartitionProblem):
    """The path of large graphs, where the down-sets are too many, forced on small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods_module, "solve_ideals", lambda *_, **__: None)
        result = solve(problem, time_limit_s=5, workers=1)
    assert result.objective == pytest.approx(brute_force(problem, contiguous=True), rel=1e-6, abs=1e-9)
