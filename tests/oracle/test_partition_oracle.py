"""DP = CP-SAT = brute force: three independent answers to the same small problems."""

from itertools import product
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings

from partita.partitioner import exact_dp
from partita.partitioner.bounds import work_bound
from partita.partitioner.exact_dp import least_excess, solve_dp
from partita.partitioner.problem import evaluate, is_ordered
from partita.partitioner.solvers import solve_slots
from tests.property.pipeline_strategies import pipeline_problems


def brute_force(problem):
    assignments = product(range(problem.num_stages), repeat=problem.num_blocks)
    return min((evaluate(problem, assignment).objective for assignment in assignments), default=inf)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pipeline_problems())
def test_dp_is_brute_force(problem):
    answer, best = solve_dp(problem), brute_force(problem)
    assert answer.status == ("optimal" if best < inf else "infeasible")
    assert answer.objective == pytest.approx(best, rel=1e-9)
    assert answer.bound == answer.objective
    assert work_bound(problem) <= best * (1 + 1e-9)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pipeline_problems())
def test_cp_sat_without_a_hint_is_brute_force(problem):
    answer, best = solve_slots(problem), brute_force(problem)
    assert answer.status == ("optimal" if best < inf else "infeasible")
    assert answer.objective == pytest.approx(best, rel=1e-5)
    assert answer.bound <= answer.objective


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pipeline_problems(max_blocks=9, chain=True))
def test_cp_sat_with_the_hint_confirms_the_dp(problem):
    exact = solve_dp(problem)
    answer = solve_slots(problem, incumbent=exact)
    assert answer.status == exact.status
    assert answer.objective == pytest.approx(exact.objective, rel=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pipeline_problems(max_blocks=6))
def test_linear_orders_give_valid_answers_and_bounds(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_dp, "enumerate_ideals", lambda *_args, **_kwargs: None)
        answer = solve_dp(problem)
    best = brute_force(problem)
    assert answer.bound <= best * (1 + 1e-9)
    assert answer.objective >= best * (1 - 1e-9)
    assert answer.status in ({"feasible", "unknown"} if best < inf else {"infeasible", "unknown"})


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(pipeline_problems(max_blocks=6))
def test_least_excess_is_brute_force(problem):
    excesses = [
        max(
            cost.memory_bytes - limit
            for cost, limit in zip(evaluate(problem, a).stages, problem.capacities, strict=True)
        )
        for a in product(range(problem.num_stages), repeat=problem.num_blocks)
        if is_ordered(problem, a)
    ]
    excess, assignment = least_excess(problem)
    assert bool(assignment) == bool(excesses)
    if excesses:
        assert excess == min(excesses)
