"""The answer of ``partita inspect``: a plan as text, JSON or one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partita.ir.frozen import dataclass
from partita.ir.plan import Plan
from partita.ir.summary import headline
from partita.report.bars import CATEGORIES, bar_rows, memory_bars
from partita.report.grid import lay_out, schedule_grid
from partita.report.table import honest_line, plan_table

if TYPE_CHECKING:
    from pathlib import Path

REPORT_VERSION = 1
"""Version of the JSON that `Report.to_json` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What there is to see of a plan.

    Attributes:
        plan: The plan.
        against: Another plan to compare it with, or None.
    """

    plan: Plan
    against: Plan | None = None

    def __str__(self) -> str:
        """Return the report as plain text."""
        return self.text()

    def text(self, *, colour: bool = False, width: int = 120) -> str:
        """Return the report as text.

        Args:
            colour: Use colours of a terminal.
            width: Characters of the grid's longest line.

        Returns:
            Lines without a line break at the end.
        """
        plan = self.plan
        parts = [headline(plan), plan_table(plan), schedule_grid(plan, width=width, colour=colour)]
        parts.append(memory_bars(plan, colour=colour))
        if plan.notes:
            parts.append("\n".join(f"note: {note}" for note in plan.notes))
        if self.against:
            from partita.report.compare import diff

            parts.append(f"compared with the other plan (first), this one (second):\n{diff(self.against, plan)}")
        parts.append(honest_line(plan))
        return "\n\n".join(parts)

    def to_json(self) -> str:
        """Return the report for programs, stable to the byte, with a line break at the end."""
        from partita.ir.serde import layout_json

        return layout_json({"schema": "partita.report", "version": REPORT_VERSION} | self._document())

    def _document(self) -> dict[str, object]:
        plan = self.plan
        stages = [
            {
                "index": stage.index,
                "blocks": list(stage.blocks),
                "ranks": list(stage.ranks),
                "forward_s": stage.forward_s.value,
                "backward_s": stage.backward_s.value,
                "communication_s": stage.communication_s.value,
                "reduction_s": stage.reduction_s.value,
                "optimizer_s": stage.optimizer_s.value,
                "recompute": stage.recompute,
            }
            for stage in plan.stages
        ]
        memory = [
            {"ranks": ranks, "peak_bytes": peak, "limit_bytes": limit}
            | {f"{name}_bytes": getattr(memory, name) for name, _, _ in CATEGORIES}
            for ranks, memory, peak, limit in bar_rows(plan)
        ]
        grid = [
            " ".join("." if action is None else str(action) for action in row) for row in lay_out(plan.schedule).rows
        ]
        document: dict[str, object] = {
            "line": honest_line(plan),
            "headline": headline(plan),
            "figures": _named(plan),
            "step_s": [plan.predicted.step_time.low, plan.predicted.step_time.value, plan.predicted.step_time.high],
            "stages": stages,
            "memory": memory,
            "grid": grid,
            "notes": list(plan.notes),
        }
        return document | ({"against": _named(self.against)} if self.against else {})

    def save_html(self, path: str | Path) -> None:
        """Write one self-contained HTML page; it needs no network."""
        from partita.report.page import render_page

        with open(path, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123  (pathlib costs the CLI 4 ms)
            file.write(render_page(self.plan, self.against))


def _named(plan: Plan) -> dict[str, float | str]:
    from partita.report.compare import figures

    return {f"{name}_{unit}" if unit else name: value for name, unit, value in figures(plan)}


def report(plan: Plan, against: Plan | None = None) -> Report:
    """Return the report of a plan.

    Args:
        plan: The plan.
        against: Another plan to compare it with.
    """
    return Report(plan=plan, against=against)
