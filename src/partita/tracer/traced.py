"""One traced call, and the tracer that makes them.

The ladder: the whole call as recorded export sees it; the same with classes kept whole that the trace cannot enter; the
model as one block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.assume import LEVELS, Reading
from partita.tracer.fold import Folded, fold
from partita.tracer.hooks import check_no_global_hooks
from partita.tracer.opaque import Observations, kept_whole, observe
from partita.tracer.program import Program
from partita.tracer.reconcile import Foresight, without_data
from partita.tracer.record import record
from partita.tracer.recorder import Assumption, Recording, Ref, refs
from partita.tracer.rows import CoupledError, Join, RowAnalysis
from partita.tracer.signature import Signature, plain_attributes
from partita.tracer.sizes import Binding, Size
from partita.tracer.skeleton import skeleton
from partita.tracer.tree import map_leaves
from partita.tracer.verify import copies, same_chance, shadow
from partita.tracer.whole import whole_program

MAX_OPAQUE_CLASSES = 6
"""How many classes are kept whole before the model is."""


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


@dataclass(frozen=True, eq=False, slots=True)
class ResultSpec:
    """What a tensor of the result looks like.

    Attributes:
        shape: Its sizes.
        dtype: Its dtype.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype


def _result_specs(program: Program, recording: Recording, folded: Folded) -> dict[str, ResultSpec]:
    values = {folded.names.get(node.name, node.name): node.meta.get("val") for node in recording.nodes}
    tensors = {n: v for n in refs(program.result) if isinstance(v := values.get(n), torch.Tensor)}
    return {n: ResultSpec(tuple(Size(recording.settle(s)) for s in v.shape), v.dtype) for n, v in tensors.items()}


@dataclass(eq=False, slots=True)
class Traced:
    """One traced call.

    Attributes:
        signature: The call's structure.
        shapes: Shapes of the traced example.
        program: Executable form.
        recording: The trace (None for a model kept whole, and where another rank has traced).
        folded: Value names and opened calls, where there is a recording.
        refusal: Why the model is kept whole ("" if it is not).
        stopped_at: ``file:line`` where the trace of a model kept whole stopped.
        tied: Input axes that were taken to have one size.
        results: What the tensors of the result look like (unknown for a model kept whole).
        paths: Paths of all modules whose own code is part of the capture.
        foresight: What to ask about other sizes, if something was left out that only a trace makes.
    """

    signature: Signature
    shapes: Binding
    program: Program
    recording: Recording | None
    folded: Folded | None
    refusal: str = ""
    tied: tuple[tuple[int, int], ...] = ()
    results: Mapping[str, ResultSpec] = field(default_factory=dict)
    paths: frozenset[str] = frozenset()
    foresight: Foresight | None = None
    stopped_at: str = ""
    _rows: dict[tuple[int, int], Rows] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the recording, which is of use only where it was made."""
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return state | {"recording": None, "folded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        for name, value in state.items():
            setattr(self, name, value)

    def rows(self, axis: tuple[int, int]) -> Rows:
        """Follow the rows of one axis through the call.

        Raises:
            CoupledError: If parts of the batch cannot be put together, with the reason.
        """
        if axis not in self._rows:
            self._rows[axis] = self._follow(axis)
        return self._rows[axis]

    def cut_if_tied(self, tied: Sequence[tuple[int, int]]) -> bool:
        """Whether the structure allows to cut the batch if these input axes count the same rows."""
        try:
            self._follow(tied[0], tied[1:])
        except CoupledError:
            return False
        return True

    def analysis(self, axis: tuple[int, int], alike: Sequence[tuple[int, int]] = ()) -> RowAnalysis:
        """Return the analysis of one axis.

        Args:
            axis: The (input, dim) that counts the rows.
            alike: Further axes that are taken to count the same rows.

        Raises:
            CoupledError: If the axis has no symbol of its own.
        """
        if self.recording is None:
            raise CoupledError("the model is kept whole")
        symbol = self.recording.sizes.axes[axis[0]][axis[1]]
        if not symbol.is_Symbol:
            raise CoupledError(f"the size of {self.signature.names[axis[0]]} in dim {axis[1]} is fixed at {symbol}")
        others = frozenset(self.recording.sizes.axes[i][d] for i, d in alike) - {symbol}
        return RowAnalysis(self.recording, symbol, alike=others)

    @property
    def kept_whole(self) -> bool:
        """Whether the model is one block."""
        return bool(self.refusal)

    @property
    def scalars(self) -> frozenset[str]:
        """Values of the result that are 0-dim floating tensors."""
        return frozenset(n for n, spec in self.results.items() if not spec.shape and spec.dtype.is_floating_point)

    def result_stand_ins(self, shapes: Binding) -> Any:
        """Return the result's structure with uninitialised tensors of the shapes it has for these input shapes."""
        sizes = self.program.sizes

        def leaf(_path: object, value: Any) -> Any:
            if isinstance(value, Size):
                return sizes.number(value, shapes)
            if not isinstance(value, Ref):
                return value
            spec = self.results[value.name]
            return torch.empty(tuple(sizes.number(size, shapes) for size in spec.shape), dtype=spec.dtype)

        return map_leaves(leaf, self.program.result)

    def _follow(self, axis: tuple[int, int], alike: Sequence[tuple[int, int]] = ()) -> Rows:
        analysis = self.analysis(axis, alike)
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
        batch_dims: The user's word on where the rows of the batch are, see `partita.Example`.
    """

    def __init__(self, model: nn.Module, device: str, batch_dims: Mapping[str, int] | None = None) -> None:
        self.model = skeleton(model)
        self.device = device
        self.batch_dims = batch_dims
        self.name = type(model).__name__
        self.stateful: dict[str, str] = {}
        self.opaque: dict[type, str] = {}
        self.reading = 0
        self.stopped_at: dict[type, str] = {}
        self.observations: Observations | None = None

    @property
    def knowledge(self) -> tuple[Any, ...]:
        """What earlier traces have found out, for the tracer of another rank."""
        return dict(self.stateful), dict(self.opaque), self.reading, self.observations

    def learn(self, knowledge: tuple[Any, ...]) -> None:
        """Take over the `knowledge` of another rank's tracer."""
        self.stateful, self.opaque, self.reading, self.observations = knowledge

    def watch(self, traced: Traced) -> None:
        """Let a capture hold only for sizes for which eager leaves out what it leaves out."""
        if traced.foresight is not None:
            traced.program.sizes.also = functools.partial(traced.foresight.agrees, self.model)

    def _foresight(
        self, signature: Signature, tensors: tuple[torch.Tensor, ...], recording: Recording
    ) -> Foresight | None:
        if not recording.omitted:
            return None
        return Foresight(
            signature=signature,
            inputs=without_data(tensors, [t.shape for t in tensors]),
            attributes=tuple(plain_attributes(module) for module in self.model.modules()),
            omitted=recording.omitted,
            classes=frozenset(self.opaque),
            observations=self.observations,
        )

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
        live: nn.Module | None = None,
        whole: bool = True,
        known: tuple[Assumption, ...] = (),
    ) -> Traced:
        """Trace one call; keep classes whole that the trace cannot enter, and the model if that does not help.

        Args:
            signature: Its structure.
            tensors: Its tensors; only shapes, dtypes and flags matter.
            tied: Input axes that are taken to have one size.
            live: The model with real weights, for the shapes of modules that are kept whole; None if there is none.
            whole: Keep a model that cannot be traced as one block; otherwise raise.
            known: What another capture assumed about values, to assume the same.

        Returns:
            The traced call.

        Raises:
            CaptureError: If the call cannot be traced and ``whole`` is False.
        """
        shapes = tuple(tuple(t.shape) for t in tensors)
        names = tuple(f"in:{name}" for name in signature.names)
        refusals: list[CaptureError] = []
        for _ in range(MAX_OPAQUE_CLASSES + len(LEVELS)):
            reading = Reading(LEVELS[self.reading], known)
            try:
                folded, recording = self._attempt(signature, tensors, names, tied, reading)
            except CaptureError as error:
                if error.data.get("refused"):
                    raise
                refusals.append(error)
                if not self._give_up_on(error, signature, tensors, live):
                    break
            else:
                traced = Traced(
                    signature,
                    shapes,
                    folded.program,
                    recording,
                    folded,
                    tied=tied,
                    results=_result_specs(folded.program, recording, folded),
                    paths=folded.paths,
                    foresight=self._foresight(signature, tensors, recording),
                )
                self.watch(traced)
                return traced
        if not whole:
            raise refusals[0]
        return self.whole(signature, tensors, str(refusals[0]), str(refusals[0].data.get("place", "")))

    def whole(
        self, signature: Signature, tensors: tuple[torch.Tensor, ...], refusal: str, stopped_at: str = ""
    ) -> Traced:
        """Return the model as one block.

        Args:
            signature: The call's structure.
            tensors: Its tensors.
            refusal: Why it is kept whole.
            stopped_at: Where its trace stopped, as ``file:line``.
        """
        shapes = tuple(tuple(t.shape) for t in tensors)
        names = tuple(f"in:{name}" for name in signature.names)
        program = whole_program(self.model, signature, names, shapes)
        return Traced(signature, shapes, program, None, None, refusal=refusal, stopped_at=stopped_at)

    def _attempt(
        self,
        signature: Signature,
        tensors: tuple[torch.Tensor, ...],
        names: tuple[str, ...],
        tied: tuple[tuple[int, int], ...],
        reading: Reading,
    ) -> tuple[Folded, Recording]:
        check_no_global_hooks()
        with kept_whole(self.model, set(self.opaque), self.observations):
            recording = record(
                self.model, tensors, signature.call, self.device, tied=tied, stateful=self.stateful, reading=reading
            )
        changed = frozenset() if self.observations is None else self.observations.changed
        return fold(recording, self.model, names, changed), recording

    def _give_up_on(
        self, error: CaptureError, signature: Signature, tensors: tuple[torch.Tensor, ...], live: nn.Module | None
    ) -> bool:
        """Keep one more class whole: the innermost that the trace stopped in, or one around it.

        Where that would leave little to cut, the forward may read the values of the call's inputs instead.
        """
        if self.observations is None and live is not None:
            with same_chance():
                self.observations = observe(shadow(live), signature, copies(tensors))
        path = str(error.data.get("module", ""))
        if path not in dict(self.model.named_modules(remove_duplicate=False)):
            return False  # an autograd function in the glue
        while path and type(self.model.get_submodule(path)) in {*self.opaque, nn.ModuleList, nn.ModuleDict}:
            path = path.rpartition(".")[0]
        if error.data.get("final") and self._is_bulk(path) and self.reading + 1 < len(LEVELS):
            self.reading += 1
            return True
        if not path or self.observations is None:
            return False
        kept = type(self.model.get_submodule(path))
        self.opaque[kept] = str(error).splitlines()[0]
        self.stopped_at[kept] = str(error.data.get("place", ""))
        return True

    def _is_bulk(self, path: str) -> bool:
        """Whether a module holds at least half of the model's parameters."""
        own, total = (sum(p.numel() for p in m.parameters()) for m in (self.model.get_submodule(path), self.model))
        return 2 * own >= total
