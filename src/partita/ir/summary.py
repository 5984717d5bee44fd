"""A plan in one line."""

from __future__ import annotations

from partita.ir.plan import Plan


def headline(plan: Plan) -> str:
    """Return e.g. ``TinyLM on 5xcpu: 2 stages x 2 replicas on 4 of 5 ranks, 1f1b with 2 microbatches, adamw, fp32``."""
    used = sum(len(stage.ranks) for stage in plan.stages)
    degrees = f"{counted(len(plan.stages), 'stage')} x {counted(plan.data_degree, 'replica')}"
    ranks = f"{used} of {counted(plan.num_ranks, 'rank')}"
    schedule = f"{plan.schedule.name} with {counted(plan.num_microbatches, 'microbatch', 'microbatches')}"
    return f"{plan.model} on {plan.cluster.name}: {degrees} on {ranks}, {schedule}, {plan.optimizer}, {plan.precision}"


def fullest_rank(plan: Plan) -> int:
    """Return the used rank whose peak is nearest to its limit."""
    used = [rank for stage in plan.stages for rank in stage.ranks]
    return max(used, key=lambda rank: (plan.predicted.peak_bytes[rank] / max(1, plan.memory_limits[rank]), -rank))


def counted(number: int, one: str, many: str = "") -> str:
    """Return e.g. ``2 stages``; ``many`` is the plural where it is not just an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"
