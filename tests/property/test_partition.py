"""Properties of partitions that hold whatever the problem."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partita.partitioner import PARTITIONERS
from partita.partitioner.exact_dp import solve_dp
from partita.partitioner.problem import evaluate
from tests.property.pipeline_strategies import pipeline_problems

QUICK = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@QUICK
@given(pipeline_problems(max_blocks=9))
def test_no_baseline_beats_the_optimum(problem):
    best = solve_dp(problem).objective
    for name in ("uniform", "greedy"):
        assert PARTITIONERS[name](problem).objective >= best * (1 - 1e-9)


@QUICK
@given(pipeline_problems(max_blocks=9))
def test_stages_are_convex_and_fit(problem):
    answer = solve_dp(problem)
    if answer.assignment:
        evaluation = evaluate(problem, answer.assignment)
        assert all(answer.assignment[a] <= answer.assignment[b] for a, b in problem.edges)
        assert all(
            stage.memory_bytes <= limit for stage, limit in zip(evaluation.stages, problem.capacities, strict=True)
        )


@QUICK
@given(pipeline_problems(max_blocks=8), st.integers(1, 20))
def test_more_memory_is_never_worse(problem, extra):
    roomier = replace(problem, capacities=tuple(limit + extra for limit in problem.capacities))
    assert solve_dp(roomier).objective <= solve_dp(problem).objective * (1 + 1e-9)


@QUICK
@given(pipeline_problems(max_blocks=8))
def test_fill_drain_is_never_better_than_1f1b(problem):
    interleaved, drained = (solve_dp(replace(problem, schedule=name)).objective for name in ("1f1b", "gpipe"))
    assert interleaved <= drained * (1 + 1e-9)


@QUICK
@given(pipeline_problems(max_blocks=7), st.randoms(use_true_random=False))
def test_the_numbering_of_independent_blocks_does_not_matter(problem, random):
    order = _topological_shuffle(problem.num_blocks, problem.edges, random)
    assert solve_dp(_renumbered(problem, order)).objective == pytest.approx(solve_dp(problem).objective, rel=1e-9)


def _topological_shuffle(n, edges, random):
    missing, order = {v: {a for a, b in edges if b == v} for v in range(n)}, []
    while missing:
        v = random.choice(sorted(v for v, needs in missing.items() if not needs - set(order)))
        order.append(v)
        del missing[v]
    return order


def _renumbered(problem, order):
    new = {old: position for position, old in enumerate(order)}

    def moved(values):
        return tuple(values[old] for old in order) if values else values

    def blocks(old):
        return tuple(sorted(new[v] for v in old))

    return replace(
        problem,
        forward_s=moved(problem.forward_s),
        backward_s=moved(problem.backward_s),
        saved_bytes=moved(problem.saved_bytes),
        transient_bytes=moved(problem.transient_bytes),
        pins=moved(problem.pins),
        edges=tuple(sorted((new[a], new[b]) for a, b in problem.edges)),
        nets=tuple(
            replace(net, producer=new[net.producer], readers=blocks(net.readers), savers=blocks(net.savers))
            for net in problem.nets
        ),
        parameters=tuple(replace(group, readers=blocks(group.readers)) for group in problem.parameters),
    )
