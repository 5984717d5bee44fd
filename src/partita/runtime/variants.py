"""The captured calls of one model at run time: found by signature, mode and shapes, captured when they are new."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from partita.errors import ExecutionError
from partita.ir.plan import Plan
from partita.runtime.placement import Placement, holders
from partita.runtime.rows import Chunk, cut_rows
from partita.runtime.sharing import trace_together
from partita.runtime.stages import StageMap, follow_stages, lay_out
from partita.runtime.world import World
from partita.tracer.assume import holds_for
from partita.tracer.batch import find_rows
from partita.tracer.capture import Captured
from partita.tracer.decide import rows_along
from partita.tracer.program import same_steps
from partita.tracer.recorder import refs
from partita.tracer.signature import Signature, attributes_of, mode_of
from partita.tracer.sizes import Binding
from partita.tracer.traced import Rows, Traced, Tracer

logger = logging.getLogger("partita")


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One captured call laid out over the stages.

    Attributes:
        traced: The capture.
        rows: How it may be cut, or None.
        layout: Its steps over the stages.
        fused: The same with every result also at the last stage, where the loss is computed.
        number: Identifies the variant in message keys; equal on all ranks.
        state: Plain attributes of the modules whose own code is part of the capture.
    """

    traced: Traced
    rows: Rows | None
    layout: StageMap
    fused: StageMap
    number: int
    state: Hashable


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """One call, ready to run.

    Attributes:
        variant: Its program over the stages.
        tensors: Its input tensors.
        total_rows: Rows of the whole batch (1 for a call that is not cut).
        chunks: For each replica the rows of its microbatches; None stands for everything.
        key: Identifies everything that decides the form of messages; None if values decide it.
    """

    variant: Variant
    tensors: tuple[torch.Tensor, ...]
    total_rows: int
    chunks: Sequence[Sequence[Chunk | None]]
    key: Hashable | None


class Variants:
    """All captured calls of one model.

    Args:
        captured: The example's capture.
        plan: The plan made for it.
        layout: The planned program over the stages.
        placement: Where parameters live.
        live: The live module tree, for flags.
        world: The ranks, which capture together.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        stage_of: Mapping[int, int],
        placement: Placement,
        live: nn.Module,
        world: World,
    ) -> None:
        self._world = world
        self._tracer: Tracer = captured.tracer
        self._plan = plan
        self._base, self._base_rows = captured.traced, captured.rows
        self._stage_of = dict(stage_of)
        self._placement = placement
        self._live = live
        self._modules = dict(live.named_modules(remove_duplicate=False))
        self._hooks = {p: len(m._forward_hooks) + len(m._forward_pre_hooks) for p, m in self._modules.items()}
        self._known: dict[Hashable, list[Variant]] = {}
        self._refused: set[tuple[int, Binding]] = set()
        self._ahead = captured.ahead
        self._tried: set[Hashable] = {(captured.traced.signature.key, mode_of(live))} if captured.tried else set()
        self._tried |= {(ahead.traced.signature.key, ahead.mode) for ahead in captured.ahead if ahead.tried}
        self._mode = mode_of(live)
        self.base = self._lay_out(captured.traced, captured.rows, self._stage_of)
        self._known[captured.traced.signature.key, self._mode] = [self.base]

    def _lay_out(self, traced: Traced, rows: Rows | None, stage_of: Mapping[int, int]) -> Variant:
        num_stages = len(self._plan.stages)
        plain = lay_out(traced.program, stage_of, num_stages)
        fused = lay_out(traced.program, stage_of, num_stages, last_reads=refs(traced.program.result))
        number = sum(len(v) for v in self._known.values())
        return Variant(traced, rows, plain, fused, number, self._state(traced))

    def _state(self, traced: Traced) -> Hashable:
        """Return the plain attributes of the modules whose own code is part of a capture."""
        if traced.kept_whole:
            return ()
        self._check_hooks(traced.paths)
        return attributes_of(self._modules, traced.paths)

    def _check_hooks(self, paths: frozenset[str]) -> None:
        """Refuse hooks that would not run: on modules whose own code was cut open, registered after the capture."""
        for path in sorted(paths - {""}):
            module = self._modules.get(path)
            count = 0 if module is None else len(module._forward_hooks) + len(module._forward_pre_hooks)
            if count > self._hooks.get(path, 0):
                raise ExecutionError(
                    f"a hook was registered on {path!r} after auto_parallelize, but that module was cut open",
                    hint="register it before, or on one of the module's children",
                )

    def prepare(self, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> PreparedCall:
        """Find or capture the program of a call, and cut its rows; all ranks do so together.

        Args:
            signature: The call's structure.
            tensors: Its tensors.

        Raises:
            CaptureError: If the call needs a capture of its own that fails.
            ExecutionError: If its program cannot be laid over the planned stages.
        """
        shapes = tuple(tuple(t.shape) for t in tensors)
        mode = mode_of(self._live)
        known = self._known.setdefault((signature.key, mode), [])
        variant = next(
            (
                v
                for v in known
                if v.traced.program.sizes.holds(shapes)
                and v.state == self._state(v.traced)
                and holds_for(v.traced.program, tensors)
            ),
            None,
        )
        if variant is None:
            variant = self._find_or_capture(signature, tensors)
            known.append(variant)
        return self._cut(variant, tensors, shapes)

    def _find_or_capture(self, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> Variant:
        """Lay out a call that was captured ahead, or capture it now."""
        mode = mode_of(self._live)
        for ahead in self._ahead:
            if ahead.fits(signature, tensors, mode) and ahead.state == self._state(ahead.traced):
                return self._follow(ahead.traced, ahead.rows)
        return self._capture(signature, tensors)

    def _capture(self, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> Variant:
        logger.info("capturing %s for shapes %s", self._tracer.name, [tuple(t.shape) for t in tensors])
        traced, rows, reason = trace_together(
            self._world, self._tracer, signature, lambda: self._trace(signature, tensors)
        )
        if rows is None and self._base_rows is not None:
            logger.warning("this call of %s is not cut: %s", self._tracer.name, reason)
        return self._follow(traced, rows)

    def _follow(self, traced: Traced, rows: Rows | None) -> Variant:
        """Lay a further call over the planned stages."""
        holding = holders(traced.program, self._placement)
        stage_of = follow_stages(traced.program, self._base.program, self._stage_of, holding, len(self._plan.stages))
        return self._lay_out(traced, rows, stage_of)

    def _trace(self, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> tuple[Traced, Rows | None, str]:
        """Trace a new call; return its rows or None, and why there are none."""
        self._tracer.follow(self._live)
        if self._base.kept_whole:  # whatever was wrong with the example's capture may be wrong with others
            return self._tracer.whole(signature, tensors, self._base.refusal), None, self._base.refusal
        familiar = signature.key == self._base.signature.key
        alone = len(self._plan.stages) == 1
        traced = self._tracer.trace(signature, tensors, tied=self._base.tied if familiar else (), whole=alone)
        if not familiar and self._base_rows is not None:
            return find_rows(self._tracer, traced, tensors, None)
        rows, reason = rows_along(traced, None if self._base_rows is None else self._base_rows.axis, tensors, None)
        return traced, rows, reason

    def untried(self, call: PreparedCall) -> bool:
        """Whether a call is cut on the word of its structure alone."""
        several = sum(len(chunks) for chunks in call.chunks) > 1
        return several and (call.variant.traced.signature.key, mode_of(self._live)) not in self._tried

    def uncut(self, call: PreparedCall) -> PreparedCall:
        """Return the same call on the whole batch."""
        variant = replace(call.variant, rows=None)
        chunks: list[list[Chunk | None]] = [[None], *([] for _ in range(self._plan.data_degree - 1))]
        key = None if call.key is None else ("uncut", call.key)
        return PreparedCall(variant, call.tensors, 1, chunks, key)

    def settle(self, call: PreparedCall, problem: str) -> PreparedCall:
        """Take note of a trial; return the call to run.

        Args:
            call: The tried call.
            problem: Why it must not be cut ("" if it may be).
        """
        key = (call.variant.traced.signature.key, mode_of(self._live))
        self._tried.add(key)
        if not problem:
            return call
        logger.warning("this call of %s is not cut: %s", self._tracer.name, problem)
        known = self._known[key]
        uncut = self.uncut(call)
        known[known.index(call.variant)] = uncut.variant
        return uncut

    # -- rows ----------------------------------------------------------------------------------------------------------
    def _cut(self, variant: Variant, tensors: tuple[torch.Tensor, ...], shapes: Binding) -> PreparedCall:
        degree, wanted = self._plan.data_degree, self._plan.num_microbatches
        rows = variant.rows
        total = 1 if rows is None else rows.count(shapes)
        chunks: list[list[Chunk | None]] = [[None], *([] for _ in range(degree - 1))]
        if rows is not None:
            for number in range(wanted, 0, -1):
                cut = cut_rows(total, degree, number)
                if all(
                    self._holds(variant, tensors, rows, chunk)
                    for chunk in {c[1] - c[0]: c for part in cut for c in part}.values()
                ):
                    chunks = [list(part) for part in cut]
                    break
        parts = tuple(tuple(part) for part in chunks)
        key = None if variant.traced.program.dynamic else (variant.number, shapes, parts)
        return PreparedCall(variant, tensors, total, chunks, key)

    def _holds(self, variant: Variant, tensors: tuple[torch.Tensor, ...], rows: Rows, chunk: Chunk) -> bool:
        """Whether the variant's program is valid for a chunk of this size."""
        part = tuple(
            t if d is None else t.narrow(d, chunk[0], chunk[1] - chunk[0])
            for t, d in zip(tensors, rows.dims, strict=True)
        )
        shapes = tuple(tuple(t.shape) for t in part)
        program = variant.traced.program
        if program.sizes.holds(shapes):
            return True
        if (variant.number, shapes) in self._refused:
            return False
        if self._world.agree(lambda: self._does_the_same(variant, part, shapes)):
            return program.sizes.waive(shapes)
        self._refused.add((variant.number, shapes))
        return False

    def _does_the_same(self, variant: Variant, part: tuple[torch.Tensor, ...], shapes: Binding) -> bool:
        """Whether the model takes the same path for a part of the batch."""
        program = variant.traced.program
        self._tracer.follow(self._live)
        other = self._tracer.trace(variant.traced.signature, part, known=program.assumptions)
        return not other.kept_whole and same_steps(program, other.program, shapes)
