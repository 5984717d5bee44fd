"""Write a capture's report: what was decided about each module and size, and what was compared."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping

from partita.ir.graph import ModelGraph
from partita.ir.report import CaptureReport, Comparison, Decision, InputEntry, ModuleEntry, OperatorCount, Rung
from partita.tracer.traced import Rows, Traced, Tracer


def module_entries(tracer: Tracer, traced: Traced) -> tuple[ModuleEntry, ...]:
    """Return the decisions about the modules of a traced call, modules of one decision, class and reason together."""
    if traced.folded is None:
        return ()
    modules = dict(tracer.model.named_modules(remove_duplicate=False))
    grouped: dict[tuple[Decision, type, str], dict[str, None]] = {}

    def note(decision: Decision, path: str, reason: str) -> None:
        grouped.setdefault((decision, type(modules[path]), reason), {})[path] = None

    for path in sorted(traced.folded.paths & modules.keys()):
        note("opened", path, traced.folded.opened.get(path, ""))
    for step in traced.program.steps:
        if step.target is None:
            kind = type(modules[step.path])
            whole = tracer.opaque.get(kind) or _state(tracer, step.path)
            note("kept whole" if whole else "folded", step.path, whole)
    return tuple(
        ModuleEntry(
            decision=decision,
            class_name=kind.__name__,
            paths=tuple(paths),
            reason=reason,
            source=source_of_class(kind),
            stopped_at=tracer.stopped_at.get(kind, "") if decision == "kept whole" else "",
        )
        for (decision, kind, reason), paths in sorted(grouped.items(), key=lambda entry: _ORDER[entry[0][0]])
    )


_ORDER: Mapping[Decision, int] = {"opened": 0, "kept whole": 1, "folded": 2}


def _state(tracer: Tracer, path: str) -> str:
    """Say which attribute keeps a module in one piece ("" if none does)."""
    attribute = tracer.stateful.get(path, "")
    return attribute and f"every call changes its {attribute!r}"


def source_of_class(kind: type) -> str:
    """Return ``file:line`` of a class's forward; "" for torch's own classes and where there is no Python code."""
    forward = inspect.unwrap(getattr(kind, "forward", kind))
    code = getattr(forward, "__code__", None)
    torch_own = kind.__module__.partition(".")[0] == "torch"
    return "" if code is None or torch_own else f"{code.co_filename}:{code.co_firstlineno}"


def input_entries(traced: Traced, rows: Rows | None) -> tuple[InputEntry, ...]:
    """Return what is known of each input's sizes and rows."""
    axes = traced.program.sizes.axes
    dims = (None,) * len(axes) if rows is None else rows.dims
    return tuple(
        InputEntry(
            name=name,
            shape=tuple(shape),
            fixed_dims=tuple(d for d, axis in enumerate(own) if not axis.free_symbols),
            batch_dim=dim,
        )
        for name, shape, own, dim in zip(traced.signature.names, traced.shapes, axes, dims, strict=True)
    )


def loop_remarks(graph: ModelGraph) -> tuple[str, ...]:
    """Say of which loops the cost is a guess."""
    loops = [op for op in graph.ops if op.target == "while_loop"]
    where = ", ".join(op.source or op.name for op in loops)
    return (f"only values decide how often these loops run, they are priced as one step: {where}",) if loops else ()


def report_of(
    graph: ModelGraph,
    traced: Traced,
    rows: Rows | None,
    *,
    modules: tuple[ModuleEntry, ...],
    comparisons: Iterable[Comparison],
    why_not_cut: str,
    remarks: Iterable[str] = (),
) -> CaptureReport:
    """Return the report of a capture.

    Args:
        graph: The captured call as data.
        traced: The captured call.
        rows: How it may be cut, or None.
        modules: From `module_entries`; left out for a model kept whole.
        comparisons: What was compared with the real model.
        why_not_cut: Why the batch is not cut.
        remarks: Further sentences.
    """
    whole = traced.kept_whole
    kept = any(entry.decision == "kept whole" and entry.stopped_at for entry in modules)
    rung: Rung = "whole" if whole else "classes kept" if kept else "recorded"
    unknown = Counter(op.target for op in graph.ops if op.kind == "unknown")
    calls = sum(item.kind == "call" for item in graph.items)
    return CaptureReport(
        rung=rung,
        reason=traced.refusal,
        stopped_at=traced.stopped_at,
        calls=calls,
        glue=len(graph.items) - calls,
        operators=len(graph.ops),
        modules=() if whole else modules,
        comparisons=tuple(comparisons),
        inputs=input_entries(traced, rows),
        rows=None if rows is None else rows.count(traced.shapes),
        why_not_cut=why_not_cut,
        unknown=tuple(OperatorCount(target=name, count=number) for name, number in sorted(unknown.items())),
        remarks=tuple(remarks),
    )
