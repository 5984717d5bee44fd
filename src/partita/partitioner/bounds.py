"""Lower bounds of the objective that need no search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from partita.partitioner.problem import PipelineProblem


def work_bound(problem: PipelineProblem) -> float:
    """Return a lower bound of the objective, infinity if the devices together cannot hold the model.

    Equation (7) of `lower_bound`, and for the memory: every parameter lies somewhere, and every saved byte is held
    ``min_s k_s`` times.  If that exceeds the sum of the capacities there is no plan.
    """
    static = sum(group.bytes for group in problem.parameters) + problem.base_bytes
    kept = min(map(problem.in_flight, range(problem.num_stages))) * sum(problem.saved_bytes)
    if static + kept > sum(problem.capacities) or problem.num_stages > problem.num_blocks:
        return inf
    return lower_bound(
        tuple(accumulate(sorted(problem.block_s))),
        num_stages=problem.num_stages,
        num_microbatches=problem.num_microbatches,
        once_s=sum(group.seconds for group in problem.parameters),
        stage_s=problem.stage_s,
    )


def lower_bound(
    ascending: Sequence[float], *, num_stages: int, num_microbatches: int, once_s: float = 0.0, stage_s: float = 0.0
) -> float:
    """Return a lower bound of the objective over all assignments, memory aside.

    With F the blocks' seconds in all and R those of the parameters (each counts on one stage at least)::

        (7)  T >= F + stage_s + max( ((m-1) F + R) / S,  (m-1) longest block,  (m-1) shortest ceil(n / S) blocks )

    ``sum_s t_s >= F``; the largest W is at least the mean, and some stage has ``ceil(n / S)`` blocks or more.

    Args:
        ascending: Prefix sums of the blocks' seconds in ascending order.
        num_stages: S, at most the number of blocks n.
        num_microbatches: m.
        once_s: R.
        stage_s: Seconds once per step on every stage.
    """
    n, work, again = len(ascending), ascending[-1], num_microbatches - 1
    longest = work - (ascending[-2] if n > 1 else 0.0)
    mean = (again * work + once_s) / num_stages
    slowest = max(mean, again * longest, again * ascending[-(-n // num_stages) - 1])
    # Sums in another order differ in the last digits.
    return (work + stage_s + slowest) * (1 - 1e-12)
