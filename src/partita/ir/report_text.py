"""The text form of a `CaptureReport`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from partita.ir.report import CaptureReport, Comparison, InputEntry, ModuleEntry

RUNGS = {
    "recorded": "the containers of your layers are opened, everything else is a call of your own modules",
    "classes kept": "as recorded, with the classes kept whole that the trace could not enter",
    "whole": "the model is one block and runs as you wrote it, on one device",
}
"""What each rung means."""
CONTAINER = "it holds layers that may go to different devices"
"""Why a module is opened that has no other reason."""
MANY_PATHS = 3
"""Module paths of one entry that are written out."""


def report_text(report: CaptureReport) -> str:
    """Return a capture's report as text with a heading per part; lines have no fixed width."""
    parts = [
        _heading(report),
        _part("compared with the model", [_comparison(c) for c in report.comparisons] or ["nothing was compared"]),
        _part("inputs", [_input(entry) for entry in report.inputs]),
        _part("modules", [_module(entry) for entry in report.modules]),
        _part(
            "operators without a cost formula (their work is not in any prediction)",
            [f"{entry.target}, {_times(entry.count)}" for entry in report.unknown],
        ),
        _part("remarks", list(report.remarks)),
    ]
    return "\n\n".join(part for part in parts if part)


def _part(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""


def _heading(report: CaptureReport) -> str:
    lines = [f"rung       {report.rung}: {RUNGS[report.rung]}"]
    if report.reason:
        lines.append(f"because    {report.reason}")
    if report.stopped_at:
        lines.append(f"stopped    at {report.stopped_at}")
    lines.append(
        f"items      {report.calls} calls of modules and {report.glue} operators between them; "
        f"{report.operators} operators in all"
    )
    if report.blocks is not None:
        lines.append(f"blocks     {report.blocks}, of which {report.distinct_blocks} differ in structure")
    lines.append(f"batch      {_batch(report)}")
    return "\n".join(lines)


def _batch(report: CaptureReport) -> str:
    if report.rows is not None:
        return f"{report.rows} rows, which may be computed apart"
    return f"is not cut: {report.why_not_cut}" if report.why_not_cut else "is not cut"


def _comparison(comparison: Comparison) -> str:
    if comparison.problem:
        return f"{comparison.call}: {comparison.problem}"
    equal = "equal to the bit" if comparison.difference == 0 else f"equal to {comparison.difference:.1e} relative"
    what = ", ".join(comparison.compared)
    return f"{comparison.call} {_shapes(comparison.shapes)}: {what} {equal}"


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes) or "without inputs"


def _input(entry: InputEntry) -> str:
    text = f"{entry.name} {_shapes((entry.shape,))}"
    if entry.batch_dim is not None:
        text += f", rows in dim {entry.batch_dim}"
    if not entry.shape:
        return text
    if len(entry.fixed_dims) == len(entry.shape):
        return f"{text}, every size is fixed"
    if entry.fixed_dims:
        return f"{text}, fixed in dim{'s' * (len(entry.fixed_dims) > 1)} {', '.join(map(str, entry.fixed_dims))}"
    return f"{text}, every size is free"


def _module(entry: ModuleEntry) -> str:
    return "".join(_module_parts(entry))


def _module_parts(entry: ModuleEntry) -> Iterator[str]:
    paths = [path or "the model" for path in entry.paths]
    yield f"{entry.decision} {entry.class_name}"
    if entry.source:
        yield f" ({entry.source})"
    yield f": {', '.join(paths[:MANY_PATHS])}"
    if len(paths) > MANY_PATHS:
        yield f" and {len(paths) - MANY_PATHS} more"
    if entry.reason or entry.decision == "opened":
        yield f"; {entry.reason or CONTAINER}"
    if entry.stopped_at and entry.stopped_at not in entry.reason:
        yield f" (the trace stopped at {entry.stopped_at})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
