"""What differs between two plans."""

from __future__ import annotations

from partita.ir.plan import ParameterPlan, Plan
from partita.report.text import ranges, render_table
from partita.units import format_bytes, format_seconds

SHOWN = 20
"""Moved blocks or parameters that are listed one by one."""


def diff(first: Plan, second: Plan) -> str:
    """Return what differs between two plans as text: figures side by side, then what moved.

    Args:
        first: The plan to start from.
        second: The plan to compare with it.

    Returns:
        Lines without a line break at the end; one sentence if the plans are equal.
    """
    if first == second:
        return "The plans are equal."
    rows = [row for row in _figures(first, second) if row[1] != row[2]]
    lines = render_table(("", "first", "second", "change"), rows, right=(1, 2, 3)) if rows else []
    for title, moves in (
        ("Blocks that move", _moved_blocks(first, second)),
        ("Parameters", _parameters(first, second)),
    ):
        if moves:
            more = [f"… and {len(moves) - SHOWN} more"] if len(moves) > SHOWN else []
            lines += ["", title, *(f"  {move}" for move in moves[:SHOWN] + more)]
    if not lines:
        lines = ["The plans differ only in details that no table shows: compare the files line by line."]
    return "\n".join(lines).removeprefix("\n")


def figures(plan: Plan) -> list[tuple[str, str, float | str]]:
    """Return what is compared side by side: name, unit (``s``, ``bytes``, ``share`` or "") and value."""
    peaks, solve = plan.predicted.peak_bytes, plan.solve
    used = [rank for stage in plan.stages for rank in stage.ranks]
    return [
        ("model", "", plan.model),
        ("graph", "", plan.graph_fingerprint),
        ("cluster", "", plan.cluster.name),
        ("step", "s", plan.predicted.step_time_s),
        ("bound", "s", solve.bound),
        ("gap", "share", solve.gap),
        ("bubble", "share", plan.predicted.bubble_fraction),
        ("measured", "share", plan.predicted.measured_share),
        ("peak", "bytes", max((peaks[rank] for rank in used), default=0)),
        ("stages", "", len(plan.stages)),
        ("replicas", "", plan.data_degree),
        ("ranks_used", "", len(used)),
        ("microbatches", "", plan.num_microbatches),
        ("schedule", "", plan.schedule.name),
        ("rows_per_step", "", plan.global_batch),
        ("slowest_stage", "s", max(stage.time_s for stage in plan.stages)),
        ("between_stages", "bytes", sum(edge.bytes + edge.backward_bytes for edge in plan.edges)),
        ("optimizer", "", plan.optimizer),
        ("precision", "", plan.precision),
        ("loss", "", plan.loss),
        ("solver", "", f"{solve.method}, {solve.status}"),
    ]


def _figures(first: Plan, second: Plan) -> list[tuple[str, str, str, str]]:
    rows = []
    for (name, unit, one), (_, _, other) in zip(figures(first), figures(second), strict=True):
        change = ""
        if isinstance(one, float | int) and isinstance(other, float | int) and one and other != one:
            change = f"{100 * (other - one):+.1f} points" if unit == "share" else f"{100 * (other - one) / one:+.1f} %"
        rows.append((name.replace("_", " "), _show(one, unit), _show(other, unit), change))
    return rows


def _show(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{100 * value:.1f} %" if unit == "share" else str(value)


def _stage_of_blocks(plan: Plan) -> dict[tuple[int, ...], int]:
    return {plan.blocks[block].items: stage.index for stage in plan.stages for block in stage.blocks}


def _moved_blocks(first: Plan, second: Plan) -> list[str]:
    """Return the blocks with another stage; empty if the plans' graphs or blocks differ."""
    if first.graph_fingerprint != second.graph_fingerprint:
        return []
    one, other = _stage_of_blocks(first), _stage_of_blocks(second)
    if one.keys() != other.keys():
        return [f"{len(first.blocks)} blocks and {len(second.blocks)}: they are cut differently"]
    labels = {block.items: f"block {block.id} {block.label!r}" for block in first.blocks}
    return [
        f"{labels[items]}: stage {one[items]} -> {other[items]}" for items in sorted(one) if one[items] != other[items]
    ]


def _parameters(first: Plan, second: Plan) -> list[str]:
    one, other = first.parameters, second.parameters
    lines = [f"{name}: only in the first" for name in one if name not in other]
    lines += [f"{name}: only in the second" for name in other if name not in one]
    for name, home in one.items():
        if name in other and _home(home) != _home(other[name]):
            lines.append(f"{name}: {_home(home)} -> {_home(other[name])}")
    return lines


def _home(parameter: ParameterPlan) -> str:
    return f"rank {ranges(sorted(parameter.ranks))} {parameter.layout}"
