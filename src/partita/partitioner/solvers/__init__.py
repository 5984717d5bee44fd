"""The one door to OR-Tools: functions that import it when they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.partitioner.problem import PipelineProblem, StageSolution

__all__ = ["solve_slots"]


def solve_slots(
    problem: PipelineProblem,
    *,
    incumbent: StageSolution | None = None,
    deterministic_limit: float = 10.0,
    workers: int = 1,
    seed: int = 0,
) -> StageSolution:
    """Solve the ordered-slot model by CP-SAT; see `partita.partitioner.solvers.stages`."""
    from partita.partitioner.solvers import stages

    return stages.solve(
        problem, incumbent=incumbent, deterministic_limit=deterministic_limit, workers=workers, seed=seed
    )
