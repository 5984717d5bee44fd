"""The one door to OR-Tools: functions that import it when they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.partitioner.maxload.line_dp import Line
    from partita.partitioner.maxload.reduction import Reduced
    from partita.partitioner.maxload.result import Limits
    from partita.partitioner.problem import PipelineProblem, StageSolution
    from partita.partitioner.solvers.search import Outcome

__all__ = ["solve_line", "solve_placement", "solve_slots"]


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


def solve_line(reduced: Reduced, *, incumbent: Line, limits: Limits) -> Outcome[Line]:
    """Solve a contiguous bare problem by CP-SAT; see `partita.partitioner.solvers.line`."""
    from partita.partitioner.solvers import line

    return line.solve(reduced, incumbent=incumbent, limits=limits)


def solve_placement(
    reduced: Reduced, *, incumbent: Sequence[int], ceiling: float, limits: Limits
) -> Outcome[tuple[int, ...]]:
    """Solve a bare problem with several chunks per device by CP-SAT; see `partita.partitioner.solvers.placement`."""
    from partita.partitioner.solvers import placement

    return placement.solve(reduced, incumbent=incumbent, ceiling=ceiling, limits=limits)
