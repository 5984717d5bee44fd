"""What one would do without an optimiser; every plan shows its advantage over these."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from partita.partitioner.bounds import work_bound
from partita.partitioner.problem import PipelineProblem, StageSolution, evaluate


def solve_uniform(problem: PipelineProblem) -> StageSolution:
    """Give every stage the same number of blocks, in order."""
    n, stages = problem.num_blocks, problem.num_stages
    return _answer(problem, tuple(v * stages // n for v in range(n)), "uniform")


def solve_greedy(problem: PipelineProblem) -> StageSolution:
    """Fill stages in order, each up to its share of the time: block v goes where the middle of its time falls."""
    total, stages = sum(problem.block_s), problem.num_stages
    assignment: list[int] = []
    for v, (end, own) in enumerate(zip(accumulate(problem.block_s), problem.block_s, strict=True)):
        share = int((end - own / 2) / total * stages) if total > 0 else v * stages // problem.num_blocks
        previous = assignment[-1] if assignment else -1
        # At most one stage further than the block before, and no further back than the blocks left can make up for.
        latest, earliest = previous + 1, stages - (problem.num_blocks - v)
        assignment.append(min(max(share, earliest, previous, 0), latest, stages - 1))
    return _answer(problem, assignment, "greedy")


def _answer(problem: PipelineProblem, assignment: Sequence[int], method: str) -> StageSolution:
    evaluation = evaluate(problem, assignment)
    return StageSolution(
        assignment=tuple(assignment) if evaluation.feasible else (),
        objective=evaluation.objective,
        bound=min(work_bound(problem), evaluation.objective),
        status="feasible" if evaluation.feasible else "unknown",
        method=method,
    )
