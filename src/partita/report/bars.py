"""Memory: one bar per rank, split into what fills it, against the limit."""

from __future__ import annotations

from partita.ir.plan import Memory, Plan
from partita.report.table import of_limit
from partita.report.text import paint, ranges, share_cells

CATEGORIES = (
    ("weights", "█", "blue"),
    ("gradients", "▓", "cyan"),
    ("optimizer", "▒", "magenta"),
    ("activations", "░", "green"),
    ("skips", "▚", "yellow"),
    ("buffers", "▞", "red"),
    ("transient", "▪", "bold"),
)
"""Fields of `Memory` with a mark for plain text and a colour for terminals."""
FREE = "·"
"""Mark of what the limit leaves free."""


def parts(memory: Memory) -> tuple[int, ...]:
    """Return the categories' bytes in the order of `CATEGORIES`."""
    return tuple(getattr(memory, name) for name, _, _ in CATEGORIES)


def memory_bars(plan: Plan, *, width: int = 48, height: int = 64, colour: bool = False) -> str:
    """Return one bar per rank, ranks of one stage with equal limits together, and a legend.

    Args:
        plan: The plan.
        width: Cells of a full bar, which is the rank's limit (its peak, if that is more).
        height: Bars shown; later ones are left out with a note.
        colour: Colour the categories.

    Returns:
        Lines without a line break at the end.
    """
    rows = [(ranges(ranks), memory, peak, limit) for ranks, memory, peak, limit in bar_rows(plan)]
    margin = max(len(ranks) for ranks, _, _, _ in rows) + len("rank ")
    lines = []
    for ranks, memory, peak, limit in rows[:height]:
        values = parts(memory) if peak else (0,) * len(CATEGORIES)
        cells = share_cells(values, max(limit, sum(values)), width)
        bar = "".join(
            paint(mark * count, tint, wanted=colour) for (_, mark, tint), count in zip(CATEGORIES, cells, strict=True)
        )
        free = paint(FREE * (width - sum(cells)), "dim", wanted=colour)
        share = f"{100 * peak / limit:.0f} %" if limit else "-"
        lines.append(f"{f'rank {ranks}'.ljust(margin)} {bar}{free} {of_limit(peak, limit)} ({share})")
    if len(rows) > height:
        lines.append(f"… {height} of {len(rows)} bars shown")
    used = [entry for entry in CATEGORIES if any(getattr(stage.memory, entry[0]) for stage in plan.stages)]
    legend = [f"{paint(mark, tint, wanted=colour)} {name}" for name, mark, tint in used]
    lines.append(f"{' ' * margin} {'  '.join([*legend, f'{FREE} free'])}")
    return "\n".join(lines)


def bar_rows(plan: Plan) -> list[tuple[list[int], Memory, int, int]]:
    """Return ranks, memory, peak and limit of each bar: equal ranks of a stage share one, unused ones come last."""
    rows: list[tuple[list[int], Memory, int, int]] = []
    used: set[int] = set()
    for stage in plan.stages:
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in sorted(stage.ranks):
            groups.setdefault((plan.predicted.peak_bytes[rank], plan.memory_limits[rank]), []).append(rank)
        rows += [(ranks, stage.memory, peak, limit) for (peak, limit), ranks in groups.items()]
        used.update(stage.ranks)
    idle: dict[int, list[int]] = {}
    for rank in range(plan.num_ranks):
        if rank not in used:
            idle.setdefault(plan.memory_limits[rank], []).append(rank)
    return rows + [(ranks, Memory(), 0, limit) for limit, ranks in idle.items()]
