"""Which device runs what: coarsening, the pipeline problem, and the partitioners that solve it.

Nothing here imports torch; OR-Tools is imported when the ``"ilp"`` partitioner is called.
"""

from __future__ import annotations

from typing import Protocol

from partita.partitioner.baselines import solve_greedy, solve_uniform
from partita.partitioner.exact_dp import solve_dp
from partita.partitioner.maxload import DeviceClass, PartitionProblem, PartitionResult, solve
from partita.partitioner.problem import PipelineProblem, StageSolution
from partita.partitioner.solvers import solve_slots

__all__ = [
    "PARTITIONERS",
    "DeviceClass",
    "PartitionProblem",
    "PartitionResult",
    "Partitioner",
    "PipelineProblem",
    "StageSolution",
    "solve",
]


class Partitioner(Protocol):
    """Solve a pipeline problem.

    A partitioner is deterministic: the same problem and seed give the same answer.  Its objective is what
    `partita.partitioner.problem.evaluate` says of its assignment, its bound is valid, and it claims ``optimal`` or
    ``infeasible`` only with proof.
    """

    def __call__(self, problem: PipelineProblem, *, seed: int = 0) -> StageSolution:
        """Return the best assignment found."""
        ...


def _dp(problem: PipelineProblem, *, seed: int = 0) -> StageSolution:
    del seed  # nothing is drawn
    return solve_dp(problem)


def _ilp(problem: PipelineProblem, *, seed: int = 0) -> StageSolution:
    return solve_slots(problem, incumbent=solve_dp(problem), seed=seed)


def _uniform(problem: PipelineProblem, *, seed: int = 0) -> StageSolution:
    del seed
    return solve_uniform(problem)


def _greedy(problem: PipelineProblem, *, seed: int = 0) -> StageSolution:
    del seed
    return solve_greedy(problem)


PARTITIONERS: dict[str, Partitioner] = {"dp": _dp, "ilp": _ilp, "uniform": _uniform, "greedy": _greedy}
"""The partitioners by name; the one place where one is registered."""
