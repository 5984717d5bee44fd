"""Run the stages of one position for one call: forwards, backwards, and what crosses between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partita.errors import ExecutionError
from partita.ir.schedule import Action
from partita.runtime import chance
from partita.runtime.rows import Chunk, rows_of
from partita.runtime.stages import StageMap
from partita.runtime.transport import Expected, Form, Outgoing, Received
from partita.tracer.joins import part_weight
from partita.tracer.program import Environment
from partita.tracer.rows import Join
from partita.tracer.tree import leaves


@dataclass(frozen=True, eq=False, slots=True)
class LossPart:
    """One microbatch's loss.

    Attributes:
        value: The loss as the model or the user's function gives it.
        weight: Its factor in the whole batch's loss, before division by the sum of the shares.
        share: Its share of the normaliser.
    """

    value: torch.Tensor
    weight: float
    share: float


LossFunction = Callable[[Environment, Chunk | None], LossPart]
"""Gives a microbatch's loss from the last stage's environment and the microbatch's rows."""


@dataclass(frozen=True, eq=False, slots=True)
class CallInputs:
    """The tensors of one call and how they are cut.

    Attributes:
        tensors: Input tensors of the whole call, in the program's order.
        dims: For each the dim that carries the rows, or None.
        chunks: Rows of each microbatch of this replica; None for a call that is not cut.
    """

    tensors: tuple[torch.Tensor, ...]
    dims: tuple[int | None, ...]
    chunks: Sequence[Chunk | None]

    def part(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Return one microbatch's tensors; those that need a gradient are leaves of their own."""
        chunk = self.chunks[microbatch]
        parts = [
            t if chunk is None or d is None else t.narrow(d, chunk[0], chunk[1] - chunk[0])
            for t, d in zip(self.tensors, self.dims, strict=True)
        ]
        return tuple(p.detach().requires_grad_() if p.requires_grad else p for p in parts)


@dataclass(eq=False, slots=True)
class _Kept:
    """What a stage keeps of one microbatch between forward and backward."""

    values: dict[str, Any]
    leaves: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None = None
    seeds: dict[str, torch.Tensor] = field(default_factory=dict)


class StageWorker:
    """Executes the actions of one position for one call.

    Args:
        layout: The program over the stages.
        root: The live module tree.
        tensors: Live parameter or buffer by qualified name.
        inputs: The call's tensors.
        replica: This position's replica.
        device: Where it computes.
        seed: The call's number for random draws, or None if nothing is random.
        key: Identifies the call's structure; None makes every message carry its form.
        grad: Whether a backward may follow.
        joins: How the results' parts are put together, or None for a call that is not cut.
        loss: Computes the loss of a microbatch on the last stage, or None.
    """

    def __init__(
        self,
        *,
        layout: StageMap,
        root: nn.Module,
        tensors: Callable[[str], torch.Tensor],
        inputs: CallInputs,
        replica: int,
        device: torch.device,
        seed: int | None,
        key: Hashable | None,
        grad: bool,
        joins: Mapping[str, Join] | None = None,
        loss: LossFunction | None = None,
    ) -> None:
        self.layout, self.root, self.tensors, self.inputs = layout, root, tensors, inputs
        self.replica, self.device, self.seed, self.key = replica, device, seed, key
        self.grad, self.joins, self.loss = grad, joins, loss
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.losses: dict[int, LossPart] = {}
        self.weights: dict[tuple[str, int], float] = {}
        self.wanted: frozenset[str] = frozenset()
        self.finished: dict[tuple[int, int], dict[str, Any]] = {}
        self.active: frozenset[str] = frozenset()
        self.input_grads: dict[tuple[int, int], torch.Tensor] = {}
        self.on_reduce: Callable[[int], None] = lambda _stage: None
        self._arrived: dict[tuple[int, int], dict[str, Any]] = {}
        self._gradients: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._sent_gradients: dict[tuple[int, int, int], list[torch.Tensor | None]] = {}

    # -- messages ------------------------------------------------------------------------------------------------------
    def _names(self, action: Action) -> tuple[str, ...]:
        assert action.peer is not None
        forward = action.kind.endswith("_F")
        down = forward == action.kind.startswith("SEND")  # the acting stage is the source of the edge
        edge = (action.stage, action.peer) if down else (action.peer, action.stage)
        return self.layout.edges[edge]

    def _form_key(self, action: Action) -> Hashable | None:
        if self.key is None or action.microbatch is None:
            return None
        chunk = self.inputs.chunks[action.microbatch]
        # The names are part of it: with the loss in the last stage one program sends more than without.
        return (self.key, self.grad, None if chunk is None else chunk[1] - chunk[0], self._names(action))

    def outgoing(self, action: Action) -> Outgoing:
        """Return the values, or the gradients of received values, that another stage waits for."""
        assert action.microbatch is not None and action.peer is not None
        if action.kind == "SEND_F":
            values = self.kept[action.stage, action.microbatch].values
            return Outgoing([values[name] for name in self._names(action)], self._form_key(action))
        return Outgoing(
            self._sent_gradients.pop((action.stage, action.microbatch, action.peer)),
            None,
            announced=self.key is not None,
        )

    def expected(self, action: Action) -> Expected:
        """Return how many values a receive has, and what is known of their form.

        A gradient has the form of its value, and which values have one follows from the steps; only where values decide
        the path does every message say it.
        """
        names = self._names(action)
        if action.kind == "RECV_F" or self.key is None or action.microbatch is None:
            return Expected(len(names), self._form_key(action) if action.kind == "RECV_F" else None)
        place = (action.stage, action.microbatch)
        return Expected(len(names), None, lambda: self._gradient_forms(place, names))

    def _gradient_forms(self, place: tuple[int, int], names: Sequence[str]) -> tuple[Form, ...] | None:
        """Return the forms of the gradients that come back for sent values; None before the forward has run."""
        if place not in self.kept:
            return None
        values = self.kept[place].values
        return tuple(Form.of(values[n]) if self._flows(n, values[n]) else Form.of(None) for n in names)

    def _flows(self, name: str, value: Any) -> bool:
        """Whether a gradient of a value comes back."""
        return name in self.active and isinstance(value, torch.Tensor) and value.requires_grad

    def incoming(self, action: Action, message: Received) -> None:
        """Keep received values for the forward, or add received gradients for the backward."""
        assert action.microbatch is not None
        place = (action.stage, action.microbatch)
        if action.kind == "RECV_F":
            self._arrived.setdefault(place, {}).update(self._as_leaves(action, message))
            return
        total = self._gradients.setdefault(place, {})
        for name, gradient in zip(self._names(action), message.values, strict=True):
            if isinstance(gradient, torch.Tensor):
                total[name] = gradient if name not in total else total[name] + gradient

    def _as_leaves(self, action: Action, message: Received) -> dict[str, Any]:
        values = {}
        for name, value, wants in zip(self._names(action), message.values, message.requires_grad, strict=True):
            if wants and name not in self.layout.program.differentiable:
                raise ExecutionError(
                    f"the value {name!r} needs a gradient that the capture did not foresee",
                    hint="please report this model; until then plan it with Search(pp=1)",
                )
            values[name] = value.requires_grad_() if wants and self.grad and isinstance(value, torch.Tensor) else value
        return values

    # -- compute -------------------------------------------------------------------------------------------------------
    def compute(self, action: Action) -> None:
        """Run a forward or a backward."""
        assert action.microbatch is not None
        if action.kind == "F":
            self.forward(action.stage, action.microbatch)
        else:
            self.backward(action.stage, action.microbatch)

    def _chance(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        seed = None if self.seed is None else chance.fold(self.seed, stage, self.replica, microbatch)
        return chance.seeded(seed, self.device)

    def forward(self, stage: int, microbatch: int) -> None:
        """Run a stage's steps on one microbatch; keep what is sent, returned or needed for the backward."""
        tensors = self.inputs.part(microbatch)
        received = self._arrived.pop((stage, microbatch), {})
        program = self.layout.program
        values = dict(zip(program.inputs, tensors, strict=True)) | received
        for name in self.layout.copied[stage]:
            if isinstance(values.get(name), torch.Tensor):
                values[name] = values[name].clone()
        env = Environment(
            program=program,
            modules=self.root.get_submodule,
            tensors=self.tensors,
            shapes=tuple(tuple(t.shape) for t in tensors),
            values=values,
        )
        last = stage == self.layout.num_stages - 1
        with self._chance(stage, microbatch), torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            env.run(self.layout.steps[stage])
            loss = self._loss(env, microbatch) if last and self.loss is not None else None
        self._write_buffers(env, stage)
        sent = {name for (source, _), names in self.layout.edges.items() if source == stage for name in names}
        results = {name for name in self.layout.result_names if self.layout.home[name] == stage}
        for name in results:
            join = None if self.joins is None else self.joins[name]
            self.weights[name, microbatch] = part_weight(join, env, rows_of(self.inputs.chunks[microbatch]))
        self.kept[stage, microbatch] = _Kept(
            values={name: env.value(name) for name in results | sent},
            leaves={n: v for n, v in received.items() if isinstance(v, torch.Tensor) and v.requires_grad},
            inputs={n: t for n, t in zip(program.inputs, tensors, strict=True) if t.requires_grad},
            loss=loss,
        )

    def _loss(self, env: Environment, microbatch: int) -> torch.Tensor | None:
        assert self.loss is not None
        part = self.loss(env, self.inputs.chunks[microbatch])
        self.losses[microbatch] = part
        return part.value * part.weight if part.weight else None

    def _write_buffers(self, env: Environment, stage: int) -> None:
        for name, value in env.program.buffer_writes.items():
            if self.layout.home.get(value) == stage:
                path, _, leaf = name.rpartition(".")
                self.root.get_submodule(path)._buffers[leaf] = env.value(value).detach()

    def backward(self, stage: int, microbatch: int) -> None:
        """Run a stage's backward on one microbatch; leave the gradients of received values for sending."""
        kept = self.kept.pop((stage, microbatch))
        self.finished[stage, microbatch] = {n: v for n, v in kept.values.items() if n in self.wanted}
        roots, seeds = self._roots(kept, self._gradients.pop((stage, microbatch), {}))
        if roots:
            with self._chance(stage, microbatch):
                torch.autograd.backward(roots, seeds)
        for (source, target), names in self.layout.edges.items():
            if target == stage:
                self._sent_gradients[stage, microbatch, source] = [self._gradient(n, kept.leaves.get(n)) for n in names]
        for name, tensor in kept.inputs.items():
            if tensor.grad is not None:
                place = (microbatch, self.layout.program.inputs.index(name))
                known = self.input_grads.get(place)
                self.input_grads[place] = tensor.grad if known is None else known + tensor.grad

    def _gradient(self, name: str, leaf: torch.Tensor | None) -> torch.Tensor | None:
        """Return what goes back for a received value: its gradient, or zeros where the other end waits for one."""
        if leaf is None or self.key is None:
            return None if leaf is None else leaf.grad
        if name not in self.active:
            assert leaf.grad is None, f"a gradient reached {name}, which the steps do not connect with the loss"
            return None
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    @staticmethod
    def _roots(
        kept: _Kept, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        if kept.loss is not None and kept.loss.requires_grad:
            pairs.append((kept.loss, None))
        for name in [*gradients, *(n for n in kept.seeds if n not in gradients)]:
            tensor = kept.values.get(name)
            parts = [g for g in (gradients.get(name), kept.seeds.get(name)) if g is not None]
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and parts:
                pairs.append((tensor, parts[0] if len(parts) == 1 else parts[0] + parts[1]))
            elif not isinstance(tensor, torch.Tensor) and name in kept.seeds:
                pairs += _tree_pairs(tensor, kept.seeds[name])
        return [t for t, _ in pairs], [g for _, g in pairs]

    def value(self, stage: int, microbatch: int, name: str) -> Any:
        """Return a result of one microbatch, before or after its backward."""
        kept = self.kept.get((stage, microbatch))
        return self.finished[stage, microbatch][name] if kept is None else kept.values[name]

    def reduce(self, action: Action) -> None:
        """Sum the stage's gradients over its replicas."""
        self.on_reduce(action.stage)


def _tree_pairs(tree: Any, seeds: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Pair the tensors of a result that is a tree with the gradients by position."""
    tensors = [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(t, g) for t, g in zip(tensors, seeds, strict=True) if g is not None and t.requires_grad]
