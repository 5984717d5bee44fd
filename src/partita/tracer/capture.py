"""Capture a model: trace, fold, find the batch axis, verify, lift.

`Tracer` keeps a weightless copy of the model and can trace any call of it at any time; `Traced` is one traced call;
`Rows` says how a call may be cut along the batch.  `capture_model` walks the whole way for a user's example.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError
from partita.ir.graph import ModelGraph
from partita.ir.request import Example
from partita.tracer.fold import Folded, fold
from partita.tracer.lift import lift
from partita.tracer.program import Program, refs
from partita.tracer.record import Recording, Ref, record
from partita.tracer.rows import CoupledError, Join, RowAnalysis, batch_symbols
from partita.tracer.signature import Signature, plain_attributes, signature_of
from partita.tracer.sizes import Binding, Size
from partita.tracer.skeleton import skeleton
from partita.tracer.tree import leaves, map_leaves, path_text
from partita.tracer.verify import check_equal, rows_apart
from partita.tracer.whole import whole_graph, whole_program

MAX_TIED_SETS = 6
"""How many sets of equally many tied inputs are tried; each costs a trace."""


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


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """How a call may be cut along the batch.

    Attributes:
        axis: (input, dim) that counts the rows.
        dims: For each input the dim that carries the rows, or None.
        joins: For each value of the result how parts are put together.
    """

    axis: tuple[int, int]
    dims: tuple[int | None, ...]
    joins: Mapping[str, Join]

    def count(self, shapes: Binding) -> int:
        """Return the number of rows of a call."""
        return shapes[self.axis[0]][self.axis[1]]


@dataclass(eq=False, slots=True)
class Traced:
    """One traced call.

    Attributes:
        signature: The call's structure.
        shapes: Shapes of the traced example.
        program: Executable form.
        recording: The trace (None for a model kept whole).
        folded: Value names and opened calls (None for a model kept whole).
        refusal: Why the model is kept whole ("" if it is not).
        tied: Input axes that were taken to have one size.
    """

    signature: Signature
    shapes: Binding
    program: Program
    recording: Recording | None
    folded: Folded | None
    refusal: str = ""
    tied: tuple[tuple[int, int], ...] = ()
    _rows: dict[tuple[int, int], Rows] = field(default_factory=dict)

    def rows(self, axis: tuple[int, int]) -> Rows:
        """Follow the rows of one axis through the call.

        Raises:
            CoupledError: If parts of the batch cannot be put together, with the reason.
        """
        if axis not in self._rows:
            self._rows[axis] = self._follow(axis)
        return self._rows[axis]

    def analysis(self, axis: tuple[int, int]) -> RowAnalysis:
        """Return the analysis of one axis.

        Raises:
            CoupledError: If the axis has no symbol of its own.
        """
        if self.recording is None:
            raise CoupledError("the model is kept whole")
        symbol = self.recording.sizes.axes[axis[0]][axis[1]]
        if not symbol.is_Symbol:
            raise CoupledError(f"the size of {self.signature.names[axis[0]]} in dim {axis[1]} is fixed at {symbol}")
        return RowAnalysis(self.recording, symbol)

    @property
    def scalars(self) -> frozenset[str]:
        """Values of the result that are 0-dim floating tensors."""
        values = {n: self._node_value(n) for n in refs(self.program.result)}
        return frozenset(
            n for n, v in values.items() if isinstance(v, torch.Tensor) and v.ndim == 0 and v.is_floating_point()
        )

    def _node_value(self, name: str) -> Any:
        if self.recording is None or self.folded is None:
            return None
        node = {value: node for node, value in self.folded.names.items()}.get(name, name)
        return next((n.meta.get("val") for n in self.recording.nodes if n.name == node), None)

    def result_stand_ins(self, shapes: Binding) -> Any:
        """Return the result's structure with uninitialised tensors of the shapes it has for these input shapes."""
        assert self.recording is not None
        settle, sizes = self.recording.settle, self.program.sizes

        def leaf(_path: object, value: Any) -> Any:
            if isinstance(value, Size):
                return sizes.number(value, shapes)
            if not isinstance(value, Ref):
                return value
            known = self._node_value(value.name)
            shape = tuple(sizes.number(Size(settle(s)), shapes) for s in known.shape)
            return torch.empty(shape, dtype=known.dtype)

        return map_leaves(leaf, self.program.result)

    def _follow(self, axis: tuple[int, int]) -> Rows:
        analysis = self.analysis(axis)
        assert self.folded is not None
        if self.program.changed:
            name = self.program.tensors[min(self.program.changed)][0]
            raise CoupledError(f"the forward changes {name!r}, once per step")
        nodes = {value: node for node, value in self.folded.names.items()}
        made = {*self.program.inputs, *(w for step in self.program.steps for w in step.writes)}
        joins = {}
        for name in refs(self.program.result):
            join = analysis.join(nodes.get(name, name))
            if join.how == "count":
                targets = self.folded.names.get(join.targets, join.targets)
                if targets not in made:
                    raise CoupledError("the targets of the loss are inside a module")
                join = Join("count", targets=targets, ignored=join.ignored)
            joins[name] = join
        if not any(d is not None for d in analysis.input_dims()):
            raise CoupledError("no input carries the rows")
        return Rows(axis=axis, dims=analysis.input_dims(), joins=joins)


class Tracer:
    """Traces calls of one model on a weightless copy of it.

    Args:
        model: The user's model; it is copied without its weights and not changed.
        device: Where the program will run.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = skeleton(model)
        self.device = device
        self.name = type(model).__name__
        self.stateful: dict[str, str] = {}

    def follow(self, model: nn.Module) -> None:
        """Take over the training flags, plain attributes and trainability of the live model."""
        for mine, live in zip(self.model.modules(), model.modules(), strict=True):
            for name, value in plain_attributes(live).items():
                object.__setattr__(mine, name, value)
        for mine_p, live_p in zip(self.model.parameters(), model.parameters(), strict=True):
            mine_p.requires_grad_(live_p.requires_grad)

    def trace(
        self,
        signature: Signature,
        tensors: tuple[torch.Tensor, ...],
        *,
        tied: tuple[tuple[int, int], ...] = (),
        whole: bool = True,
    ) -> Traced:
        """Trace one call.

        Args:
            signature: Its structure.
            tensors: Its tensors; only shapes, dtypes and flags matter.
            tied: Input axes that are taken to have one size.
            whole: Keep a model that cannot be traced as one block; otherwise raise.

        Returns:
            The traced call.

        Raises:
            CaptureError: If the call cannot be traced and ``whole`` is False.
        """
        shapes = tuple(tuple(t.shape) for t in tensors)
        names = tuple(f"in:{name}" for name in signature.names)
        try:
            recording = record(self.model, tensors, signature.call, self.device, tied=tied, stateful=self.stateful)
            folded = fold(recording, self.model, names)
        except CaptureError as error:
            if not whole:
                raise
            program = whole_program(self.model, signature, names, shapes)
            return Traced(signature, shapes, program, None, None, refusal=str(error))
        return Traced(signature, shapes, folded.program, recording, folded, tied=tied)


def find_rows(
    tracer: Tracer, traced: Traced, tensors: tuple[torch.Tensor, ...], model: nn.Module | None
) -> tuple[Traced, Rows | None, str]:
    """Find the batch axis of a call.

    Candidates are the symbols of the inputs' axes, leading axes first.  A candidate is accepted if the structure allows
    to put parts together and, where the weights are at hand, the parts of the example really give what the whole gives.
    Inputs that the model never combines in one operator have symbols of their own; for them leading axes of equal size
    are tried as one, as a condition of the capture that every call has to meet.

    Args:
        tracer: Traces the call again with tied axes.
        traced: The traced call.
        tensors: The example's tensors.
        model: The model with real weights, or None if there are none.

    Returns:
        The traced call to use, its rows or None, and the reasons why an axis may not be cut.
    """
    if traced.recording is None:
        return traced, None, traced.refusal
    hooked = gradient_hooks(tracer.model)
    if hooked:
        return traced, None, f"{hooked} has gradient hooks, which see the gradient of the whole batch"
    reasons = []
    for symbol in batch_symbols(traced.recording):
        axis = next(
            (i, d)
            for i, axes in enumerate(traced.recording.sizes.axes)
            for d, axis in enumerate(axes)
            if axis == symbol
        )
        rows, problem = _try_axis(traced, axis, tensors, model)
        if rows is not None:
            return traced, rows, ""
        reasons.append(f"dim {axis[1]} of {traced.signature.names[axis[0]]}: {problem}")
    for tied in _tied_axes(traced.shapes):
        try:
            again = tracer.trace(traced.signature, tensors, tied=tied, whole=False)
        except CaptureError:
            continue
        rows, _ = _try_axis(again, tied[0], tensors, model)
        if rows is not None:
            return again, rows, ""
    return traced, None, "; ".join(reasons) or "no input has an axis of variable size"


def gradient_hooks(model: nn.Module) -> str:
    """Return the name of the first module or parameter with backward hooks, or ""."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return path or "the model"
    return next(
        (
            n
            for n, p in model.named_parameters()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ),
        "",
    )


def _try_axis(
    traced: Traced, axis: tuple[int, int], tensors: tuple[torch.Tensor, ...], model: nn.Module | None
) -> tuple[Rows | None, str]:
    try:
        rows = traced.rows(axis)
    except CoupledError as error:
        return None, str(error)
    problem = "" if model is None else rows_apart(model, traced.program, tensors, rows.dims, rows.joins)
    return (None, problem) if problem else (rows, "")


def _tied_axes(shapes: Binding) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield sets of at least two inputs with leading axes of one size, largest sets first."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for i, shape in enumerate(shapes):
        if shape and shape[0] > 1:
            by_size.setdefault(shape[0], []).append((i, 0))
    for axes in by_size.values():
        for size in range(len(axes), 1, -1):
            yield from itertools.islice(itertools.combinations(axes, size), MAX_TIED_SETS)


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
    """

    tracer: Tracer
    traced: Traced
    rows: Rows | None
    graph: ModelGraph

    @property
    def unseen(self) -> bool:
        """Whether there was no example to capture."""
        return self.traced.recording is None and not self.traced.signature.paths


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
        CaptureError: If the capture differs from the model.
    """
    if example is None:
        return _capture_unseen(model, device)
    examples: Sequence[Example] = examples_of(example)
    signature, tensors = signature_of(examples[0].args, examples[0].kwargs)
    tracer = Tracer(model, device)
    traced = tracer.trace(signature, tensors)
    live = model if has_weights(model) and not any(t.is_meta for t in tensors) else None
    notes = [
        f"{path or 'the model'} is not folded: {reason}"
        for path, reason in (traced.folded.opened if traced.folded else {}).items()
    ]
    best: list[Traced] = [traced]

    def decide() -> tuple[tuple[tuple[int, int], ...], tuple[int, int] | None, str]:
        if live is not None and verify and traced.recording is not None:
            check_equal(live, traced.program, signature, tensors)
        best[0], rows, reason = find_rows(tracer, traced, tensors, live)
        return best[0].tied, None if rows is None else rows.axis, reason

    tied, axis, reason = agree(decide)
    if tied != best[0].tied:
        best[0] = tracer.trace(signature, tensors, tied=tied)
    traced, rows = best[0], None if axis is None else best[0].rows(axis)
    if rows is None:
        notes.append(f"the batch is not cut: {reason}")
    elif live is None:
        notes.append("rows are taken to be independent from the structure alone: there are no weights to try it")
    return Captured(tracer, traced, rows, graph_of(model, traced, rows, tuple(notes)))
