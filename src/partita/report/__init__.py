"""Plans for people to look at: tables, grids, bars, comparisons and pages; no torch and no dependency."""

from __future__ import annotations

from partita.report.bars import memory_bars
from partita.report.build import Report, report
from partita.report.grid import schedule_grid
from partita.report.table import honest_line, plan_table

TYPE_CHECKING = False  # spares the import of `typing`; type checkers know the name
if TYPE_CHECKING:
    from partita.report.compare import diff

__all__ = ["Report", "diff", "honest_line", "memory_bars", "plan_table", "report", "schedule_grid"]


def __getattr__(name: str) -> object:
    if name == "diff":  # no part of a plan's own report, which has to appear at once
        from partita.report.compare import diff as function

        return function
    raise AttributeError(f"module 'partita.report' has no attribute {name!r}")
