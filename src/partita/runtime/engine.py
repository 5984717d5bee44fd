"""Run calls of the planned model on this rank.

A call whose loss is computed outside runs forward at once and backward when the gradients of its results arrive
(fill-drain); a call that contains its loss runs the plan's whole schedule, forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partita.ir.plan import Plan
from partita.ir.schedule import Action
from partita.runtime import chance
from partita.runtime.executor import Log, execute
from partita.runtime.gradients import GradientBook
from partita.runtime.loss import loss_part
from partita.runtime.results import Part, Publisher, chunk_gradient, finish_join, join_chunks, joins_for, unflatten
from partita.runtime.rows import Chunk
from partita.runtime.stages import StageMap
from partita.runtime.transport import Transport
from partita.runtime.variants import PreparedCall
from partita.runtime.veil import Veil
from partita.runtime.worker import CallInputs, LossFunction, LossPart, StageWorker
from partita.runtime.world import World
from partita.schedules.makers import make_schedule
from partita.schedules.passes import add_communication, add_reduction
from partita.tracer.program import Environment
from partita.tracer.recorder import refs
from partita.tracer.rows import WHOLE, Join

FORWARD = ("F", "SEND_F", "RECV_F")


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place in the plan.

    Attributes:
        stage: Its stage.
        replica: Which replica of it.
    """

    stage: int
    replica: int


@dataclass(eq=False, slots=True)
class Forward:
    """A forward that may still be followed by its backward.

    Attributes:
        call: The call.
        worker: This rank's worker with the kept microbatches, or None on an idle rank.
        layout: The program over the stages.
        pieces: For each result its value name, structure, and number of tensors.
        weights: For each result the weight of each of this replica's microbatches, and the total.
        seed: The call's number for random draws; None if it draws none.
    """

    call: PreparedCall
    worker: StageWorker | None
    layout: StageMap
    seed: int | None = None
    pieces: list[tuple[str, Any, int]] = field(default_factory=list)
    weights: dict[str, tuple[list[float], float]] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Results:
    """The tensors of a call's result, on every rank.

    Attributes:
        tensors: Whole tensors without gradient history.
        requires_grad: For each whether a gradient flows into it.
    """

    tensors: tuple[torch.Tensor, ...]
    requires_grad: tuple[bool, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Ran:
    """A call whose backward has run.

    Attributes:
        loss: The whole batch's loss, equal on every rank.
        gradients: Reduced gradients of the local parameters.
        inputs: Gradients of the call's inputs; None for those that want none.
        state: The forward, for its other results.
    """

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    inputs: Sequence[torch.Tensor | None]
    state: Forward


class Engine:
    """Executes calls on this rank.

    Args:
        plan: The plan.
        world: The ranks.
        seat: This rank's place, or None if the plan does not use it.
        transport: This rank's messages.
        root: The live module tree.
        tensors: Live tensor by qualified name.
        book: This rank's gradients.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        seat: Seat | None,
        transport: Transport,
        root: nn.Module,
        tensors: Callable[[str], torch.Tensor],
        book: GradientBook,
    ) -> None:
        self.plan, self.world, self.seat, self.transport = plan, world, seat, transport
        self.root, self.tensors, self.book = root, tensors, book
        self.publisher = Publisher(world)
        self.veil = Veil(root)
        self.log: Log | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self._rows: dict[Hashable, tuple[Action, ...]] = {}

    # -- schedules -----------------------------------------------------------------------------------------------------
    def actions(self, layout: StageMap, name: str, num_microbatches: int) -> tuple[Action, ...]:
        """Return this position's actions for a number of microbatches."""
        assert self.seat is not None
        different = layout.program.differentiable
        edges = tuple((a, b, any(n in different for n in names)) for (a, b), names in sorted(layout.edges.items()))
        key = (name, num_microbatches, edges)
        if key not in self._rows:
            bare = make_schedule(name, layout.num_stages, num_microbatches)
            self._rows[key] = add_reduction(add_communication(bare, edges)).ranks[self.seat.stage]
        return self._rows[key]

    @staticmethod
    def draw(layout: StageMap) -> int | None:
        """Return the number that a call's random draws follow from; every rank draws it."""
        return chance.draw() if layout.program.random else None

    def worker(
        self, call: PreparedCall, layout: StageMap, seed: int | None, *, grad: bool, loss: LossFunction | None = None
    ) -> StageWorker | None:
        """Return the worker of one call on this rank."""
        self.veil.hide(layout.program.stored)
        if self.seat is None:
            return None
        rows = call.variant.rows
        dims = (None,) * len(call.tensors) if rows is None else rows.dims
        inputs = CallInputs(tuple(t.to(self.world.device) for t in call.tensors), dims, call.chunks[self.seat.replica])
        return StageWorker(
            layout=layout,
            root=self.root,
            tensors=self.tensors,
            inputs=inputs,
            replica=self.seat.replica,
            device=self.world.device,
            seed=seed,
            key=call.key,
            grad=grad,
            joins=None if rows is None else rows.joins,
            loss=loss,
        )

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self, call: PreparedCall, like: Forward | None = None) -> tuple[Forward, Results]:
        """Run every microbatch forward and give every rank the joined results.

        Args:
            call: The call.
            like: Draw the random numbers of this earlier forward again.

        Returns:
            The forward, for a later backward, and the results.
        """
        layout = call.variant.layout
        seed = self.draw(layout) if like is None else like.seed
        worker = self.worker(call, layout, seed, grad=torch.is_grad_enabled())
        if worker is not None and worker.inputs.chunks:
            actions = self.actions(layout, "gpipe", len(worker.inputs.chunks))
            self._execute([a for a in actions if a.kind in FORWARD], worker)
        state = Forward(call, worker, layout, seed)
        return state, self.publish(state)

    def publish(self, state: Forward, skip: frozenset[str] = frozenset()) -> Results:
        """Give every rank the joined results, except the values in ``skip``."""
        call, layout = state.call, state.layout
        names = [n for n in dict.fromkeys(refs(layout.program.result)) if n in layout.home and n not in skip]
        joins = joins_for(names, None if call.variant.rows is None else call.variant.rows.joins)
        tensors: list[torch.Tensor] = []
        flags: list[bool] = []
        by_home: dict[int, list[str]] = {}
        for name in names:
            by_home.setdefault(layout.home[name], []).append(name)
        found: dict[str, list[Part]] = {name: [] for name in names}
        for home, group in sorted(by_home.items()):
            for replica, chunks in enumerate(call.chunks):
                if not chunks:
                    continue
                owner = self.plan.stages[home].ranks[replica]
                mine = self._own_parts(state, group, joins) if owner == self.world.rank else None
                key = None if call.key is None else (call.key, home, torch.is_grad_enabled(), tuple(group))
                for name, part in zip(group, self.publisher.share(mine, owner, key), strict=True):
                    found[name].append(part)
        for name in names:
            whole, total = finish_join(found[name], joins[name])
            mine_weights = state.weights.get(name, ([], 1.0))[0]
            state.weights[name] = (mine_weights, total)
            state.pieces.append((name, found[name][0].template, len(whole)))
            flags += [any(p.requires_grad[i] for p in found[name]) for i in range(len(whole))]
            tensors += whole
        return Results(tuple(tensors), tuple(flags))

    def _own_parts(self, state: Forward, names: Sequence[str], joins: Mapping[str, Join]) -> list[Part]:
        """Join this replica's microbatches of the results that this rank owns."""
        worker = state.worker
        assert worker is not None and self.seat is not None
        stage, chunks = self.seat.stage, worker.inputs.chunks
        parts = []
        for name in names:
            weights = [worker.weights[name, m] for m in range(len(chunks))]
            state.weights[name] = (weights, 1.0)
            parts.append(join_chunks([worker.value(stage, m, name) for m in range(len(chunks))], joins[name], weights))
        return parts

    def assemble(
        self, state: Forward, tensors: Sequence[torch.Tensor], replaced: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the call's result in the model's own structure.

        Args:
            state: The forward.
            tensors: The results' tensors, in the order that `forward` returned them.
            replaced: Values to use instead, by name.
        """
        values: dict[str, Any] = dict(replaced or {})
        at = 0
        for name, template, count in state.pieces:
            values[name] = unflatten(template, tensors[at : at + count])
            at += count
        program = state.layout.program
        shapes = tuple(tuple(t.shape) for t in state.call.tensors)
        given = dict(zip(program.inputs, state.call.tensors, strict=True))
        env = Environment(program, self.root.get_submodule, self.tensors, shapes, given | values)
        return env.fill(program.result)

    # -- backward ------------------------------------------------------------------------------------------------------
    def backward(
        self, state: Forward, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None]]:
        """Run every microbatch backward.

        Args:
            state: Its forward.
            gradients: For each of the results' tensors the gradient of the loss, the same on every rank.

        Returns:
            This backward's reduced gradients of the local parameters, and those of the call's inputs.
        """
        if state.done:
            raise RuntimeError("the backward of this call has run already; call the model again")
        state.done = True
        self.book.open()
        worker = state.worker
        if worker is not None and self.seat is not None:
            worker.active = state.layout.active(self._seeded(state, gradients))
            self._seed(state, gradients)
            worker.on_reduce = lambda _stage: self.book.reduce(self.transport, self.world.rank)
            if worker.inputs.chunks:
                actions = self.actions(state.layout, "gpipe", len(worker.inputs.chunks))
                self._execute([a for a in actions if a.kind not in FORWARD], worker)
            else:
                self.book.reduce(self.transport, self.world.rank)
        return self.book.close(), self._input_gradients(state)

    def _execute(self, actions: Sequence[Action], worker: StageWorker) -> None:
        """Execute this position's actions; an error here ends the job for all ranks instead of leaving them waiting."""
        try:
            with self.veil.lifted():
                execute(actions, worker, self.transport, self.log, self.clock)
        except BaseException as error:
            self.world.fail(error)
            raise

    @staticmethod
    def _seeded(state: Forward, gradients: Sequence[torch.Tensor | None]) -> frozenset[str]:
        """Return the results that a gradient has reached; the same on every rank."""
        at, found = 0, set()
        for name, _template, count in state.pieces:
            if any(g is not None for g in gradients[at : at + count]):
                found.add(name)
            at += count
        return frozenset(found)

    def _seed(self, state: Forward, gradients: Sequence[torch.Tensor | None]) -> None:
        """Hand every microbatch of the owning stages its part of the results' gradients."""
        worker, seat, call = state.worker, self.seat, state.call
        assert worker is not None and seat is not None
        rows = call.variant.rows
        at = 0
        for name, _template, count in state.pieces:
            given = list(gradients[at : at + count])
            at += count
            if state.layout.home[name] != seat.stage:
                continue
            join = WHOLE if rows is None else rows.joins[name]
            weights, total = state.weights[name]
            for m, chunk in enumerate(worker.inputs.chunks):
                first = chunk is not None and chunk[0] == 0
                parts = [
                    chunk_gradient(g, join, chunk, call.total_rows, weights[m] if weights else 1.0, total, first)
                    for g in given
                ]
                kept = worker.kept[seat.stage, m]
                if isinstance(kept.values[name], torch.Tensor):
                    if parts[0] is not None:
                        kept.seeds[name] = parts[0]
                elif any(p is not None for p in parts):
                    kept.seeds[name] = parts  # type: ignore[assignment]

    def _input_gradients(self, state: Forward) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs that want one, summed over stages and replicas."""
        call, worker = state.call, state.worker
        found: list[torch.Tensor | None] = []
        for i, tensor in enumerate(call.tensors):
            if not tensor.requires_grad:
                found.append(None)
                continue
            total = torch.zeros_like(tensor, device=self.world.device)
            dim = None if call.variant.rows is None else call.variant.rows.dims[i]
            for (m, index), gradient in worker.input_grads.items() if worker is not None else ():
                chunk = worker.inputs.chunks[m] if worker is not None else None
                if index == i:
                    (total if chunk is None or dim is None else total.narrow(dim, chunk[0], chunk[1] - chunk[0])).add_(
                        gradient
                    )
            self.world.all_reduce(total)
            found.append(total.to(tensor.device))
        return found

    # -- the loss inside -----------------------------------------------------------------------------------------------
    def run_schedule(
        self,
        call: PreparedCall,
        layout: StageMap,
        loss: LossFunction,
        *,
        seeds: frozenset[str],
        wanted: frozenset[str] = frozenset(),
    ) -> Ran:
        """Run forwards and backwards of all microbatches under the plan's schedule.

        Args:
            call: The call.
            layout: Its program over the stages.
            loss: Gives each microbatch's loss and weight on the last stage.
            seeds: Results that the loss depends on.
            wanted: Results that are published afterwards.

        Returns:
            The loss and all gradients.
        """
        seed = self.draw(layout)
        worker = self.worker(call, layout, seed, grad=True, loss=loss)
        self.book.open()
        if worker is not None:
            worker.wanted = wanted
            worker.active = layout.active(seeds)
            worker.on_reduce = lambda _stage: self.book.reduce(self.transport, self.world.rank)
            if worker.inputs.chunks:
                self._execute(self.actions(layout, self.plan.schedule.name, len(worker.inputs.chunks)), worker)
            else:
                self.book.reduce(self.transport, self.world.rank)
        value, total = self._total(worker)
        scale = 1.0 if total in {0.0, 1.0} else 1.0 / total
        state = Forward(call, worker, layout, seed)
        inputs = [None if g is None else g * scale for g in self._input_gradients(state)]
        return Ran(loss=value, gradients=self.book.close(scale), inputs=inputs, state=state)

    def _total(self, worker: StageWorker | None) -> tuple[torch.Tensor, float]:
        """Return the weighted mean of all microbatches' losses and the sum of their shares, on every rank."""
        last = self.seat is not None and worker is not None and self.seat.stage == worker.layout.num_stages - 1
        parts = list(worker.losses.values()) if last and worker is not None else []
        weighted = sum(float(p.value.detach()) * p.weight for p in parts if p.weight)
        dtype = _LOSS_DTYPES.index(parts[0].value.dtype) if parts else 0
        numbers = torch.tensor(
            [weighted, sum(p.share for p in parts), dtype, bool(parts)], dtype=torch.float64, device=self.world.device
        )
        self.world.all_reduce(numbers)
        value, total, dtypes, owners = numbers.tolist()
        total = 1.0 if abs(total - 1.0) < 1e-9 else total
        mean = value / total if total else float("nan")
        return torch.tensor(mean, dtype=_LOSS_DTYPES[round(dtypes / max(owners, 1.0))], device=self.world.device), total


_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def model_loss(call: PreparedCall, name: str) -> LossFunction:
    """Return the loss function of a model that returns its own loss as the value ``name``."""
    rows = call.variant.rows
    join = WHOLE if rows is None else rows.joins[name]

    def loss(env: Environment, chunk: Chunk | None) -> LossPart:
        return loss_part(env.value(name), join, env, chunk, call.total_rows)

    return loss
