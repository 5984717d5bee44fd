from dataclasses import replace
from math import inf

import pytest

from partita.partitioner import exact_dp
from partita.partitioner.exact_dp import make_tables, solve_dp
from partita.partitioner.ideals import enumerate_ideals, linear_families
from partita.partitioner.problem import Net, PipelineProblem, evaluate
from partita.partitioner.solvers import solve_slots


def chain(n, stages, *, microbatches=4, capacity=10**9, schedule="1f1b"):
    return PipelineProblem(
        num_stages=stages,
        num_microbatches=microbatches,
        schedule=schedule,
        capacities=(capacity,) * stages,
        forward_s=tuple(1.0 + v % 3 for v in range(n)),
        backward_s=tuple(2.0 + v % 5 for v in range(n)),
        saved_bytes=(10,) * n,
        transient_bytes=(1,) * n,
        edges=tuple((v, v + 1) for v in range(n - 1)),
        nets=tuple(Net(producer=v, readers=(v + 1,), bytes=3, seconds=0.1 * (v % 4)) for v in range(n - 1)),
    )


def test_ideals_of_a_chain_and_of_branches():
    assert enumerate_ideals(5, [(v, v + 1) for v in range(4)], limit=100).count == 6
    towers = enumerate_ideals(5, [(0, 1), (2, 3), (3, 4)], limit=100)
    assert towers.count == 3 * 4
    assert int(towers.below.sum()) == (6 * 10) - 12  # pairs of nested prefixes in both towers, equal ones left out
    assert enumerate_ideals(12, [], limit=1000) is None


def test_linear_families_hold_ideals_only():
    edges = [(0, 3), (1, 3), (2, 4), (3, 5)]
    for family in linear_families(6, edges, (5.0, 1.0, 3.0, 2.0, 9.0, 1.0)):
        assert family.count == 7
        assert not family.complete
        assert all(row[a] or not row[b] for row in family.members for a, b in edges)


def test_unequal_capacities_move_the_cut():
    problem = chain(8, 2, capacity=60)
    roomy = replace(problem, capacities=(30, 10**9))
    assert solve_dp(roomy).assignment.count(0) == 1
    assert solve_dp(replace(problem, capacities=(0, 10**9))).status == "infeasible"


def test_tables_serve_other_stages_schedules_and_capacities():
    problem = chain(9, 3)
    tables = make_tables(problem)
    for other in (chain(9, 4), chain(9, 2, schedule="gpipe", microbatches=7), chain(9, 3, capacity=70)):
        assert solve_dp(other, tables) == solve_dp(other)


def test_more_stages_than_blocks_are_infeasible():
    assert solve_dp(chain(2, 3)).status == "infeasible"


def test_a_free_model_ends():
    free = replace(chain(4, 2), forward_s=(0.0,) * 4, backward_s=(0.0,) * 4, nets=())
    assert solve_dp(free).objective == 0.0


def test_the_sweep_limit_is_reported_with_a_valid_bound(monkeypatch):
    full = solve_dp(chain(30, 4))
    monkeypatch.setattr(exact_dp, "MAX_SWEEPS", 1)
    cut = solve_dp(chain(30, 4))
    assert cut.status == "feasible"
    assert cut.limit
    assert cut.bound <= full.objective <= cut.objective


def test_a_wide_graph_falls_back_to_linear_orders():
    wide = replace(chain(16, 4), edges=(), nets=())
    answer = solve_dp(wide)
    assert answer.status == "feasible"
    assert "linear orders" in answer.limit
    assert answer.bound <= answer.objective == evaluate(wide, answer.assignment).objective


def test_cp_sat_proves_what_the_dp_cannot():
    wide = replace(chain(13, 3), edges=(), nets=())
    rough = solve_dp(wide)
    answer = solve_slots(wide, incumbent=rough, deterministic_limit=20)
    assert answer.objective <= rough.objective
    assert answer.bound >= rough.bound


def test_cp_sat_reports_its_limit():
    answer = solve_slots(chain(40, 8), incumbent=solve_dp(chain(40, 8)), deterministic_limit=1e-6)
    assert answer.status == "feasible"
    assert answer.limit.startswith("deterministic time")
    assert solve_slots(chain(40, 8), deterministic_limit=1e-6).status == "unknown"


def test_cp_sat_is_deterministic():
    assert solve_slots(chain(12, 4), seed=3) == solve_slots(chain(12, 4), seed=3)


@pytest.mark.parametrize("capacity", [1, 25])
def test_what_does_not_fit_is_infeasible_for_both(capacity):
    problem = chain(6, 2, capacity=capacity)
    for answer in (solve_dp(problem), solve_slots(problem)):
        assert (answer.status, answer.objective, answer.bound) == ("infeasible", inf, inf)
