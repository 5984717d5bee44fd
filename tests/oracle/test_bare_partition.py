"""The bare problem: integer model = dynamic program = brute force, and no method below the bound."""

from dataclasses import replace
from math import inf, isfinite

import pytest
from hypothesis import given, settings

from partita.partitioner import DeviceClass, PartitionProblem
from partita.partitioner.maxload import METHODS, evaluate, solve
from partita.partitioner.maxload import methods as methods_module
from partita.partitioner.maxload.line_dp import Line
from partita.partitioner.maxload.reduction import reduce_problem
from partita.partitioner.maxload.result import Limits
from partita.partitioner.solvers import line as line_module
from partita.partitioner.solvers import placement as placement_module
from partita.partitioner.solvers import solve_line, solve_placement
from tests.property.partition_problems import brute_force, partition_problems

LIMITS = Limits(deterministic_time=5.0)


@settings(max_examples=250, deadline=None)
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


@settings(max_examples=250, deadline=None)
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


@settings(max_examples=250, deadline=None)
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


def _problem(
    times, *, costs=None, sizes=None, edges=None, memory=None, count=2, more=(), together=()
) -> PartitionProblem:
    n = len(times)
    chain = tuple((v, v + 1) for v in range(n - 1)) if edges is None else edges
    first = DeviceClass(name="a", count=count, times=times, memory_bytes=memory)
    return PartitionProblem(
        nodes=tuple(map(str, range(n))),
        classes=(first, *more),
        sizes=sizes or (0,) * n,
        edges=chain,
        costs=costs or (0.0,) * n,
        order=chain,
        colocated=together,
    )


FREE = DeviceClass(name="b", count=1, times=(1.0, inf, 1.0), communicates=False)
FIXED = [
    _problem((3.0, 1.0, 3.0)),  # contiguity: 3 + 3 apart from 1 is only allowed out of line
    _problem((1.0, 3.0, 1.0, 3.0, 2.0), costs=(2.0, 4.0, 1.0, 4.0, 0.0), count=3),  # traffic decides where to cut
    _problem((4.0, 1.0, 1.0), sizes=(1, 8, 8), memory=9),  # memory forces the middle item to the long one
    _problem((4.0, 4.0, 4.0), more=(FREE,), count=1),  # one class cannot run the middle, and pays no traffic
    _problem((2.0, 2.0, 2.0, 2.0), together=((0, 1, 2),)),
]
LINE_MUTANTS = {
    "order": ("_order", lambda self: None),
    "classes": ("_classes", lambda self: None),
    "traffic": ("_cuts", lambda self, items: [self._never] * self.slots),
    "times": ("units", lambda self, time: 0),
}


def _line_is_right(problem: PartitionProblem) -> bool:
    reduced = reduce_problem(problem, contiguous=True)
    try:
        outcome = solve_line(reduced, incumbent=Line(objective=inf), limits=LIMITS)
        assignment = reduced.seat(outcome.answer.stages) if outcome.answer else ()
        found = evaluate(problem, assignment, contiguous=True).objective
    except ValueError:  # no answer, no class for a slot, or more devices of a class than there are
        return False
    best = brute_force(problem, contiguous=True)
    return found == pytest.approx(best, rel=1e-6) and outcome.bound == pytest.approx(best, rel=1e-6)


def test_the_contiguous_model_is_right_on_the_fixed_problems():
    assert all(_line_is_right(problem) for problem in FIXED)


@pytest.mark.parametrize("part", sorted(LINE_MUTANTS))
def test_a_contiguous_model_without_one_of_its_parts_is_wrong_somewhere(part, monkeypatch):
    name, mutant = LINE_MUTANTS[part]
    monkeypatch.setattr(line_module._Line, name, mutant)
    assert not all(_line_is_right(problem) for problem in FIXED)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_model_without_memory_is_wrong(contiguous):
    problem = FIXED[2]
    reduced = reduce_problem(problem, contiguous=contiguous)
    loose = replace(reduced, sizes=(0,) * reduced.num_items)
    if contiguous:
        answer = solve_line(loose, incumbent=Line(objective=inf), limits=LIMITS).answer
        assignment = loose.seat(answer.stages)
    else:
        assignment = loose.expand(solve_placement(loose, incumbent=(), ceiling=inf, limits=LIMITS).answer)
    assert evaluate(problem, assignment, contiguous=contiguous).violations


@pytest.mark.parametrize("part", ["_cuts", "floor"])
def test_a_placement_model_without_a_cost_is_wrong(part, monkeypatch):
    problem = FIXED[1]
    if part == "_cuts":
        monkeypatch.setattr(
            placement_module._Placement, "_cuts", lambda self, items: [self.model.new_constant(0)] * len(self.kinds)
        )
    else:
        monkeypatch.setattr(placement_module, "floor", lambda value: 10**8 if value > 10**7 else 0)
    reduced = reduce_problem(problem, contiguous=False)
    outcome = solve_placement(reduced, incumbent=(), ceiling=inf, limits=LIMITS)
    best = brute_force(problem, contiguous=False)
    assert outcome.bound != pytest.approx(best, rel=1e-6)
