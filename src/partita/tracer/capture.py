"""Capture a model: trace, fold, verify, find the batch axis, lift.

`Tracer` keeps a weightless copy of the model and can trace any call of it at any time; `Traced` is one traced call;
`Rows` says how a call may be cut along the batch.  `capture_model` walks the whole way for a user's example.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError
from partita.ir.graph import ModelGraph
from partita.ir.report import Comparison
from partita.ir.request import Example
from partita.tracer.ahead import EVALUATION, Ahead, Forecast
from partita.tracer.batch import check_batch_dims
from partita.tracer.decide import Agree, Settings, decide_alone, settle_call
from partita.tracer.findings import loop_remarks, module_entries, report_of
from partita.tracer.lift import lift
from partita.tracer.program import Program
from partita.tracer.recorder import Ref, refs
from partita.tracer.signature import Signature, signature_of
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.tree import leaves, path_text
from partita.tracer.trials import PATIENCE_S, Verify
from partita.tracer.verify import weights_as_they_were
from partita.tracer.whole import whole_graph, whole_program


def examples_of(example: Any) -> tuple[Example, ...]:
    """Return what a user passed as the example as one or more `Example`s.

    Args:
        example: A tuple of positional arguments, a dict of keyword arguments, an `Example`, a tensor (the only
            argument), or a list of `Example`s.

    Raises:
        TypeError: For anything else.
    """
    if isinstance(example, Example):
        return (example,)
    if isinstance(example, torch.Tensor):
        return (Example(args=(example,)),)
    if isinstance(example, tuple):
        return (Example(args=example),)
    if isinstance(example, Mapping):
        return (Example(kwargs=example),)
    if (
        isinstance(example, list)
        and example
        and all(isinstance(e, Example | tuple | Mapping | torch.Tensor) for e in example)
    ):
        return tuple(e for entry in example for e in examples_of(entry))
    raise TypeError(
        f"an example is a tuple of arguments, a dict of keyword arguments, a partita.Example or a list of them, "
        f"not {type(example).__name__}"
    )


def loss_value(program: Program) -> str | None:
    """Return the value that is the call's loss: its only result, or the result's ``loss``."""
    if isinstance(program.result, Ref):
        return program.result.name
    for path, leaf in leaves(program.result):
        if path_text(path) == "loss" and isinstance(leaf, Ref):
            return leaf.name
    return None


def graph_of(model: nn.Module, traced: Traced, rows: Rows | None) -> ModelGraph:
    """Lift a traced call of ``model`` to a `ModelGraph` at the example's shapes, without a report."""
    if traced.recording is None or traced.folded is None:
        return whole_graph(model, traced.program, traced.shapes)
    graph = lift(
        type(model).__name__,
        traced.program,
        traced.recording,
        traced.folded.names,
        traced.shapes,
        None if rows is None else traced.analysis(rows.axis),
        training=model.training,
        outputs=tuple(refs(traced.program.result)),
        batch_rows=None if rows is None else rows.count(traced.shapes),
        scalar_loss=False,
    )
    loss = loss_value(traced.program)
    spec = graph.tensor_map().get(loss or "")
    if spec is not None and spec.shape == () and spec.requires_grad:
        graph = dataclasses.replace(graph, scalar_loss=True)
    return graph


@dataclass(frozen=True, eq=False, slots=True)
class Captured:
    """A verified capture of the user's example.

    Attributes:
        tracer: Traces further calls.
        traced: The example's call.
        rows: How it may be cut, or None.
        graph: The call as data.
        tried: The cut was tried on numbers, not only read off the structure.
        ahead: Further calls, captured before they first occur.
    """

    tracer: Tracer
    traced: Traced
    rows: Rows | None
    graph: ModelGraph
    tried: bool = False
    ahead: tuple[Ahead, ...] = ()

    @property
    def unseen(self) -> bool:
        """Whether there was no example to capture."""
        return self.traced.kept_whole and not self.traced.signature.paths


def _capture_unseen(model: nn.Module, device: str) -> Captured:
    """Return what can be said of a model without an example: it is kept whole."""
    signature, _ = signature_of((), {})
    tracer = Tracer(model, device)
    refusal = "there is no example of a call"
    traced = Traced(signature, (), whole_program(tracer.model, signature, (), ()), None, None, refusal=refusal)
    remarks = ("every rank runs the whole model on the whole batch: give an example to divide the work",)
    graph = graph_of(model, traced, None)
    report = report_of(graph, traced, None, modules=(), comparisons=(), why_not_cut="", remarks=remarks)
    return Captured(tracer, traced, None, dataclasses.replace(graph, report=report))


def has_weights(model: nn.Module) -> bool:
    """Whether every parameter and buffer has data."""
    return not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def capture_model(
    model: nn.Module,
    example: Any,
    *,
    device: str = "cpu",
    verify: Verify = "auto",
    agree: Agree = decide_alone,
) -> Captured:
    """Capture a model on a user's examples.

    The first example is what plans are made for.  Further ones, and evaluation, are captured ahead where the first
    capture does not hold for them.

    Args:
        model: On CPU, on a device, or on meta.
        example: See `examples_of`; None keeps the model whole.
        device: Where the program will run.
        verify: How much is compared with the real model where there are weights: ``off`` nothing; ``auto`` all that
            does not follow something slow (see `partita.tracer.trials.PATIENCE_S`); ``always`` all.
        agree: Runs what has to be tried on numbers on one rank and gives every rank its answer.

    Returns:
        The capture.

    Raises:
        CaptureError: If the model cannot be captured.
        ValueError: If an example names an argument or dim of the batch that it does not have.
    """
    if example is None:
        return _capture_unseen(model, device)
    first, *others = examples_of(example)
    signature, tensors = signature_of(first.args, first.kwargs)
    check_batch_dims(first.batch_dims, signature, tensors)
    tracer = Tracer(model, device, first.batch_dims)
    live = model if has_weights(model) and not any(t.is_meta for t in tensors) else None
    settings = Settings(tracer, live, verify, agree)
    with weights_as_they_were(None if verify == "off" else live):
        return _captured(settings, model, signature, tensors, others)


def _captured(
    settings: Settings,
    model: nn.Module,
    signature: Signature,
    tensors: tuple[torch.Tensor, ...],
    others: Sequence[Example],
) -> Captured:
    """Trace, verify, look ahead and report."""
    tracer, live, verify, agree = settings.tracer, settings.live, settings.verify, settings.agree
    begin = time.perf_counter()
    traced = tracer.trace(signature, tensors, live=live)
    slow = verify != "always" and time.perf_counter() - begin > PATIENCE_S
    modules = module_entries(tracer, traced)
    traced, decision = settle_call(settings, traced, tensors)
    rows = None if decision.axis is None else traced.rows(decision.axis)
    forecast = Forecast(settings, model, traced, rows)
    refusal = decision.refusal or _look_ahead(
        forecast, others, tensors, quick=agree(lambda: decision.quick and not slow)
    )
    if refusal:
        traced, rows = tracer.whole(signature, tensors, refusal), None
        forecast = Forecast(settings, model, traced, None)
    remarks = [
        f"{a.place} reads a value of the input, {a.value!r} here; calls are checked, another value is captured anew"
        for a in traced.program.assumptions
    ]
    remarks += [*loop_remarks(graph := graph_of(model, traced, rows)), *forecast.remarks]
    if rows is not None and live is None:
        remarks.append("rows are taken to be independent from the structure alone: there are no weights to try it")
    report = report_of(
        graph,
        traced,
        rows,
        modules=modules,
        comparisons=() if refusal else (*decision.comparisons, *forecast.comparisons),
        why_not_cut="" if rows is not None else refusal or decision.reason,
        remarks=remarks,
    )
    graph = dataclasses.replace(graph, report=report)
    return Captured(tracer, traced, rows, graph, tried=live is not None, ahead=tuple(forecast.found))


def _look_ahead(
    forecast: Forecast, others: Sequence[Example], tensors: tuple[torch.Tensor, ...], *, quick: bool
) -> str:
    """Capture the further examples and, if that does not take long, evaluation.

    Returns:
        Why the model has to be kept whole ("" if it has not).
    """
    settings = forecast.settings
    if forecast.base.kept_whole:
        return ""
    try:
        forecast.examples(others)
    except CaptureError as error:
        return str(error)
    if settings.live is None or settings.verify == "off" or not any(m.training for m in settings.live.modules()):
        return ""
    if quick:
        forecast.evaluation(tensors)
        return forecast.refusal and f"evaluation of {type(settings.live).__name__}: {forecast.refusal}"
    why = "not tried, the capture took long; verify='always' tries it, otherwise it is captured when it first occurs"
    forecast.comparisons.append(Comparison(call=EVALUATION, problem=why))
    return ""
