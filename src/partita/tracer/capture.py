"""Capture a model: trace, fold, verify, find the batch axis, lift.

`Tracer` keeps a weightless copy of the model and can trace any call of it at any time; `Traced` is one traced call;
`Rows` says how a call may be cut along the batch.  `capture_model` walks the whole way for a user's example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError
from partita.ir.graph import ModelGraph
from partita.ir.request import Example
from partita.tracer.batch import find_rows
from partita.tracer.lift import lift
from partita.tracer.program import Program, refs
from partita.tracer.recorder import Ref
from partita.tracer.signature import signature_of
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.tree import leaves, path_text
from partita.tracer.verify import check_equal
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


def graph_of(model: nn.Module, traced: Traced, rows: Rows | None, notes: tuple[str, ...]) -> ModelGraph:
    """Lift a traced call of ``model`` to a `ModelGraph` at the example's shapes."""
    name, training = type(model).__name__, model.training
    if traced.recording is None or traced.folded is None:
        text = f"the model is kept whole: {traced.refusal}"
        return whole_graph(model, traced.program, traced.shapes, (*notes, text))
    analysis = None if rows is None else traced.analysis(rows.axis)
    batch_rows = None if rows is None else rows.count(traced.shapes)
    outputs = tuple(refs(traced.program.result))
    graph = lift(
        name,
        traced.program,
        traced.recording,
        traced.folded.names,
        traced.shapes,
        analysis,
        training=training,
        outputs=outputs,
        batch_rows=batch_rows,
        scalar_loss=False,
        notes=notes,
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
    """

    tracer: Tracer
    traced: Traced
    rows: Rows | None
    graph: ModelGraph
    tried: bool = False

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
    notes = ("every rank runs the whole model on the whole batch: give an example to divide the work",)
    return Captured(tracer, traced, None, graph_of(model, traced, None, notes))


def has_weights(model: nn.Module) -> bool:
    """Whether every parameter and buffer has data."""
    return not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


@dataclass(frozen=True, slots=True)
class _Decision:
    """What one rank found out by trying.

    Attributes:
        tied: Input axes that are taken to have one size.
        axis: The batch axis, or None.
        reason: Why there is none.
        refusal: Why the capture was rejected ("" if it was not).
    """

    tied: tuple[tuple[int, int], ...] = ()
    axis: tuple[int, int] | None = None
    reason: str = ""
    refusal: str = ""


def decide_alone(decide: Callable[[], Any]) -> Any:
    """Decide without asking other ranks."""
    return decide()


def capture_model(
    model: nn.Module,
    example: Any,
    *,
    device: str = "cpu",
    verify: bool = True,
    agree: Callable[[Callable[[], Any]], Any] = decide_alone,
) -> Captured:
    """Capture a model on a user's example.

    Args:
        model: On CPU, on a device, or on meta.
        example: See `examples_of`; None keeps the model whole.
        device: Where the program will run.
        verify: Compare with the real model where there are weights.
        agree: Runs what has to be tried on numbers on one rank and gives every rank its answer.

    Returns:
        The capture.

    Raises:
        CaptureError: If the model cannot be captured.
    """
    if example is None:
        return _capture_unseen(model, device)
    examples: Sequence[Example] = examples_of(example)
    signature, tensors = signature_of(examples[0].args, examples[0].kwargs)
    tracer = Tracer(model, device)
    live = model if has_weights(model) and not any(t.is_meta for t in tensors) else None
    traced = tracer.trace(signature, tensors, live=live)
    notes = [
        f"{path or 'the model'} is not folded: {reason}"
        for path, reason in (traced.folded.opened if traced.folded else {}).items()
    ]
    notes += [f"modules of class {cls.__name__} are kept whole: {reason}" for cls, reason in tracer.opaque.items()]
    notes += [
        f"{a.place} reads a value of the input, {a.value!r} here; calls are checked, another value is captured anew"
        for a in traced.program.assumptions
    ]
    best: list[Traced] = [traced]

    def decide() -> _Decision:
        if live is not None and verify and traced.recording is not None:
            try:
                check_equal(live, traced.program, signature, tensors)
            except CaptureError as error:
                return _Decision(refusal=str(error))
        best[0], rows, reason = find_rows(tracer, traced, tensors, live)
        return _Decision(tied=best[0].tied, axis=None if rows is None else rows.axis, reason=reason)

    decision: _Decision = agree(decide)
    if decision.refusal:
        best[0] = tracer.whole(signature, tensors, decision.refusal)
    elif decision.tied != best[0].tied:
        best[0] = tracer.trace(signature, tensors, tied=decision.tied, live=live)
    traced, rows = best[0], None if decision.axis is None else best[0].rows(decision.axis)
    reason = decision.reason or decision.refusal
    if rows is None:
        notes.append(f"the batch is not cut: {reason}")
    elif live is None:
        notes.append("rows are taken to be independent from the structure alone: there are no weights to try it")
    return Captured(tracer, traced, rows, graph_of(model, traced, rows, tuple(notes)), tried=live is not None)
