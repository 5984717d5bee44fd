"""The plan's table, one row per stage, and its one honest line."""

from __future__ import annotations

from collections import Counter

from partita.ir.plan import Plan, StagePlan
from partita.ir.summary import fullest_rank
from partita.report.text import ranges, render_table, shorten
from partita.units import format_bytes, format_seconds

COLUMNS = (
    *("stage", "blocks", "ranks", "dp", "tp", "sharding", "recompute"),
    *("forward", "backward", "send/recv", "reduce", "update", "peak of limit"),
)
"""Titles; times are per microbatch, reduction and update per step."""
LABEL = 26
"""Characters for the labels of a stage's blocks."""


def plan_table(plan: Plan) -> str:
    """Return the stages as an aligned table."""
    rows = [row(plan, stage) for stage in plan.stages]
    return "\n".join(render_table(COLUMNS, rows, right=(0, 3, 4, 7, 8, 9, 10, 11, 12)))


def row(plan: Plan, stage: StagePlan) -> tuple[str, ...]:
    """Return the cells of one stage, in the order of `COLUMNS`."""
    times = (stage.forward_s, stage.backward_s, stage.communication_s, stage.reduction_s, stage.optimizer_s)
    rank = max(stage.ranks, key=lambda rank: (plan.predicted.peak_bytes[rank], -rank))
    return (
        str(stage.index),
        blocks_text(plan, stage),
        ranges(sorted(stage.ranks)),
        str(plan.data_degree),
        str(stage.tensor_degree),
        sharding(plan, stage),
        stage.recompute,
        *(format_seconds(time.value) for time in times),
        of_limit(plan.predicted.peak_bytes[rank], plan.memory_limits[rank]),
    )


def blocks_text(plan: Plan, stage: StagePlan) -> str:
    """Return e.g. ``0-1 embed … layers.0``."""
    if not stage.blocks:
        return "none"
    first, last = plan.blocks[stage.blocks[0]].label, plan.blocks[stage.blocks[-1]].label
    labels = first if len(stage.blocks) == 1 else f"{shorten(first, LABEL // 2 - 1)} … {shorten(last, LABEL // 2 - 1)}"
    return f"{ranges(stage.blocks)} {shorten(labels, LABEL)}"


def sharding(plan: Plan, stage: StagePlan) -> str:
    """Return the most frequent layouts of the stage's parameters."""
    counts = Counter(str(parameter.layout) for parameter in plan.parameter_plans if stage.index in parameter.stages)
    common = sorted(counts, key=lambda layout: (-counts[layout], layout))
    return ", ".join(common[:2]) + (" …" if len(common) > 2 else "") if common else "-"


def of_limit(peak: int, limit: int) -> str:
    """Return e.g. ``71.3 of 80 GiB``, or with both units where they differ."""
    part, part_unit = format_bytes(peak).split(" ")
    whole, unit = format_bytes(limit).split(" ")
    whole = whole.rstrip("0").rstrip(".") if "." in whole else whole
    return f"{part} of {whole} {unit}" if part_unit == unit else f"{part} {part_unit} of {whole} {unit}"


def honest_line(plan: Plan) -> str:
    """Say in one line what to expect, how sure that is, and how much better a plan could be.

    Example:
        ``step 412 ms (387–455), 63 % of the time measured, gap 2.1 % (bound 403 ms), bubble 9 %, peak 71.3 of 80 GiB
        on rank 5`` (in one line).
    """
    predicted, rank = plan.predicted, fullest_rank(plan)
    time = predicted.step_time
    value = format_seconds(time.value)
    ends = [format_seconds(end) for end in (time.low, time.high)]
    unit = value.split(" ")[1]
    same = all(end.endswith(f" {unit}") for end in ends)
    spread = "–".join(end.removesuffix(f" {unit}") if same else end for end in ends)
    return ", ".join((
        f"step {value} ({spread})",
        f"{100 * predicted.measured_share:.0f} % of the time measured",
        _gap(plan),
        f"bubble {100 * predicted.bubble_fraction:.0f} %",
        f"peak {of_limit(predicted.peak_bytes[rank], plan.memory_limits[rank])} on rank {rank}",
    ))  # fmt: skip


def _gap(plan: Plan) -> str:
    """Say how far from the optimum the plan can be at most.

    The bound holds for the cost model's objective; where the simulated step is shorter than that (overlap), it is no
    bound of the step, and the line says so.
    """
    bound, objective = format_seconds(plan.solve.bound), format_seconds(plan.solve.objective)
    told = f"bound {bound}" if plan.solve.bound <= plan.predicted.step_time_s else f"of the cost model's {objective}"
    return f"gap {100 * plan.solve.gap:.1f} % ({told})"
