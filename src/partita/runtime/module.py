"""The module that the user holds in place of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from partita.errors import ExecutionError
from partita.ir.plan import Plan
from partita.runtime import norms
from partita.runtime.agreement import BatchGuard
from partita.runtime.beside import Beside, Repeat
from partita.runtime.engine import Engine, Forward, Ran, Results, model_loss
from partita.runtime.loss import AdditiveLoss, LossBook, total_loss
from partita.runtime.measured import Replan, StepReport, measure_module, outside_loss
from partita.runtime.results import joins_for, tensor_leaves
from partita.runtime.state import StateKeeper
from partita.runtime.variants import PreparedCall, Variants
from partita.runtime.worker import LossPart
from partita.runtime.world import World
from partita.tracer.capture import loss_value
from partita.tracer.compare import within_rounding
from partita.tracer.program import Environment
from partita.tracer.recorder import refs
from partita.tracer.signature import signature_of
from partita.tracer.verify import no_chance, same_chance, trial_inputs


class _Outputs(torch.autograd.Function):
    """Connects the results of a forward with the backward of all stages."""

    @staticmethod
    def forward(
        ctx: Any, owner: Any, state: Forward, results: Results, _anchor: torch.Tensor, *_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.state = owner, state
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, wants in zip(results.tensors, results.requires_grad, strict=True) if not wants)
        )
        return results.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ExecutionError(
                "a backward with create_graph=True cannot go through a parallel model",
                hint="compute second derivatives inside one of the model's own modules, which then is kept whole",
            )
        fresh, inputs = ctx.owner.engine.backward(ctx.state, gradients)
        ctx.owner.book.accumulate(fresh)
        return (None, None, None, None, *inputs)


class _Loss(torch.autograd.Function):
    """A loss whose backward has run: it only scales and accumulates the gradients."""

    @staticmethod
    def forward(ctx: Any, owner: Any, ran: Ran, _anchor: torch.Tensor, *_inputs: torch.Tensor) -> torch.Tensor:
        ctx.owner, ctx.gradients, ctx.inputs = owner, dict(ran.gradients), ran.inputs
        return ran.loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the backward of this call has run already; call the model again")
        if torch._C._autograd._get_current_graph_task_keep_graph():  # backward(retain_graph=True)
            ctx.owner.book.accumulate(ctx.gradients, gradient)
        else:
            # The user may hold the loss, and with it this object, until the next step: it must not hold gradients.
            gradients, ctx.gradients = ctx.gradients, None
            ctx.owner.book.take_over(gradients, gradient)
        return (None, None, None, *(None if g is None else g * gradient for g in ctx.inputs))


class ParallelModule(nn.Module):
    """A planned model: called, trained, saved and inspected like the user's own.

    Names, shapes and types are those of the user's model on every rank.  Parameters that live elsewhere are on the meta
    device and have no gradient.

    Attributes:
        plan: What runs where.
        optimizer: The optimizer that ``auto_parallelize`` made, or None.
        data_rank: Which part of the data this rank works on.
        data_degree: Into how many parts the data is divided.
    """

    def __init__(
        self,
        *,
        root: nn.Module,
        plan: Plan,
        world: World,
        engine: Engine,
        variants: Variants,
        keeper: StateKeeper,
        loss_fn: Callable[[Any, Any], Any] | None,
        show: Callable[[Plan], str] = Plan.explain,
        redundant: bool = False,
    ) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(root, table)  # the tree *is* the user's tree: names without a prefix
        self.training = root.training
        object.__setattr__(self, "_engine", engine)
        self._variants, self._keeper, self._world = variants, keeper, world
        self._show, self._redundant = show, redundant
        self._losses = None if loss_fn is None else LossBook(loss_fn, world.device)
        self._guard = BatchGuard(world)
        self._anchor = torch.zeros((), requires_grad=True)
        self.plan = plan
        self.optimizer: torch.optim.Optimizer | None = None
        self._example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._replan: Replan | None = None
        self.data_degree = plan.data_degree
        self.data_rank = 0 if engine.seat is None else engine.seat.replica
        if world.size > 1:
            norms.watch(self)
        object.__setattr__(self, "_root", root)  # last: from here on new attributes are the user's

    # -- the module protocol -------------------------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """Executes calls on this rank."""
        return self._engine  # type: ignore[no-any-return]

    @property
    def book(self) -> Any:
        """This rank's gradients."""
        return self.engine.book

    def __getattr__(self, name: str) -> Any:
        """Look attributes and methods of the user's class up on the module tree."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = self.__dict__.get("_root")
            if root is None:
                raise
            return getattr(root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the user's class on the module tree."""
        root = self.__dict__.get("_root")
        if root is not None and name not in self.__dict__ and not hasattr(type(self), name):
            setattr(root, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> ParallelModule:
        """Set training mode in every stage."""
        self._root.train(mode)
        self.training = mode
        return self

    # -- calls ---------------------------------------------------------------------------------------------------------
    @property
    def _alone(self) -> bool:
        """This rank runs the whole model by itself: there is one rank with one microbatch, or all do the same."""
        small = len(self.plan.stages) == 1 and self.plan.num_microbatches == 1
        return self._redundant or (self._world.size == 1 and small)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the whole batch; every rank passes the same and gets the same."""
        self._keeper.check_loaded()
        if self._alone:
            return self._root(*args, **kwargs)
        call = self._prepare(args, kwargs)
        if self.training and torch.is_grad_enabled():
            name = loss_value(call.variant.traced.program)
            if name is not None and self._is_loss(call, name):
                return self._call_with_loss(call, name)
        return self._forward_outside(call)

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> PreparedCall:
        """Find the program of a call; try a cut that only the structure speaks for."""
        signature, tensors = signature_of(args, kwargs)
        self._guard.check(signature.names, tensors, tensor_leaves(target))
        call = self._variants.prepare(signature, tensors)
        if self._variants.untried(call):
            call = self._variants.settle(call, self._trial(call))
        return call

    def _trial(self, call: PreparedCall) -> str:
        """Run a call whole and cut, without gradients and chance; say what differs ("" if nothing does)."""
        assert call.variant.rows is not None
        varied = trial_inputs(call.tensors, call.variant.rows.dims)
        if varied is None:
            return "its rows are all alike, so nothing could be tried"
        with same_chance(), torch.no_grad(), no_chance():
            cut = replace(call, tensors=varied)
            _, parts = self.engine.forward(cut)
            _, whole = self.engine.forward(self._variants.uncut(cut))
        pairs = zip(whole.tensors, parts.tensors, strict=True)
        good = all(a.shape == b.shape and within_rounding(a, b) for a, b in pairs)
        return "" if good else "its parts do not give what the whole batch gives"

    def _is_loss(self, call: PreparedCall, name: str) -> bool:
        """Whether a result is a differentiable scalar whose parts can be put together."""
        traced = call.variant.traced
        return name in traced.program.differentiable and name in traced.scalars

    def _call_with_loss(self, call: PreparedCall, name: str) -> Any:
        layout = call.variant.layout
        if layout.home[name] != layout.num_stages - 1:
            layout = call.variant.fused
        beside = frozenset(layout.result_names) - {name}
        again = Repeat(self.engine, self.book, call) if beside else None
        ran = self.engine.run_schedule(
            call,
            layout,
            model_loss(call, name),
            seeds=frozenset({name}),
            wanted=beside,
        )
        state = ran.state
        loss = _Loss.apply(self, ran, self._anchor, *call.tensors)  # type: ignore[no-untyped-call]
        del ran  # the gradients are the loss' alone now
        results = self.engine.publish(state, skip=frozenset({name}))
        tensors: Sequence[torch.Tensor] = results.tensors
        if again is not None and any(results.requires_grad):
            tensors = Beside.apply(again.of(state), results, self._anchor, *call.tensors)  # type: ignore[no-untyped-call]
        return self.engine.assemble(state, tensors, {name: loss})

    def train_step(
        self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> torch.Tensor:
        """Run one forward and backward of the whole batch; gradients accumulate in ``.grad``.

        Args:
            args: Positional arguments of the model.
            kwargs: Keyword arguments of the model.
            target: Second argument of ``loss_fn``; unused if the model returns its loss.

        Returns:
            The detached loss, equal on every rank.

        Raises:
            ExecutionError: If there is neither a ``loss_fn`` nor a loss in the model.
        """
        kwargs = dict(kwargs or {})
        if self._losses is None:
            loss = self._own_loss(self(*args, **kwargs))
            loss.backward()
            return loss.detach()
        self._keeper.check_loaded()
        if self._alone:
            loss = self._losses.whole(self._root(*args, **kwargs), target)
            if loss.requires_grad:
                loss.backward()
            return loss.detach()
        call = self._prepare(args, kwargs, target)
        additive = self._additive(call, target)
        if additive is None:
            loss = self._losses.whole(self._forward_outside(call), target)
            if loss.requires_grad:
                loss.backward()
            return loss.detach()
        program, losses = call.variant.traced.program, self._losses

        def part(env: Environment, chunk: Any) -> LossPart:
            return losses.part(additive, env.fill(program.result), target, chunk, call.total_rows)

        ran = self.engine.run_schedule(
            call, call.variant.fused, part, seeds=frozenset(additive.used(refs(program.result)))
        )
        self.book.accumulate(ran.gradients)
        for tensor, gradient in zip(call.tensors, ran.inputs, strict=True):
            if gradient is not None:
                tensor.backward(gradient)
        return ran.loss

    def _forward_outside(self, call: PreparedCall) -> Any:
        state, results = self.engine.forward(call)
        if not torch.is_grad_enabled() or not any(results.requires_grad):
            return self.engine.assemble(state, results.tensors)
        outputs = _Outputs.apply(self, state, results, self._anchor, *call.tensors)  # type: ignore[no-untyped-call]
        return self.engine.assemble(state, outputs)

    def _additive(self, call: PreparedCall, target: Any) -> AdditiveLoss | None:
        assert self._losses is not None
        traced, rows = call.variant.traced, call.variant.rows
        if traced.kept_whole or rows is None:
            return None
        output = traced.result_stand_ins(tuple(tuple(t.shape) for t in call.tensors))
        names = refs(traced.program.result)
        joins = joins_for(names, rows.joins)
        if len(tensor_leaves(output)) != len(names):
            return None
        return self._losses.additive(output, [joins[n] for n in names], target, self._world.agree)

    @staticmethod
    def _own_loss(result: Any) -> torch.Tensor:
        found = getattr(result, "loss", result)
        if isinstance(result, dict) and "loss" in result:
            found = result["loss"]
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise ExecutionError(
                "train_step needs a loss", hint="pass loss_fn to auto_parallelize, or let the model return its loss"
            )
        return total_loss(found)

    def remember(self, example: tuple[tuple[Any, ...], Mapping[str, Any]], replan: Replan | None) -> None:
        """Keep what `measure` runs by default, and how to plan again."""
        self._example, self._replan = example, replan

    def measure(
        self,
        steps: int = 5,
        *,
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> StepReport:
        """Run a few steps and compare them with the prediction (a collective call); nothing is changed.

        Args:
            steps: Steps to time; one more runs before for the memory. The fastest counts.
            args: Positional arguments of the model; by default the example's.
            kwargs: Keyword arguments likewise.
            target: For ``loss_fn``; without one the loss is the model's own, or the mean of its results.

        Returns:
            Time by stage and term, memory by rank, and whether another plan would win with the measured costs.

        Raises:
            ExecutionError: If there is neither an example nor arguments.
        """
        if args is None and kwargs is None:
            if self._example is None:
                raise ExecutionError("there is no batch to measure with", hint="pass args=(...) or kwargs={...}")
            args, kwargs = self._example
        given, named = args or (), dict(kwargs or {})

        def run() -> None:
            if self._losses is not None and target is not None:
                self.train_step(given, named, target)
                return
            result = self(*given, **named)
            try:
                loss = self._own_loss(result)
            except ExecutionError:
                loss = outside_loss(result)
            loss.backward()

        return measure_module(self, run, steps, self._replan)

    # -- gradients -----------------------------------------------------------------------------------------------------
    def full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return every parameter's gradient, whole and on the CPU, on every rank (a collective call)."""
        return self._keeper.full_grads()

    def gradient_norm(
        self, norm_type: float = 2.0, *, gradients: list[torch.Tensor] | None = None, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Return the norm of the whole model's gradient, equal on every rank (a collective call).

        Args:
            norm_type: Order of the norm; may be infinity.
            gradients: Only these local gradients count; all by default.
            error_if_nonfinite: Raise if the norm is not finite.

        Raises:
            RuntimeError: If the norm is not finite and ``error_if_nonfinite`` is set; on every rank.
        """
        chosen = None if gradients is None else {id(g) for g in gradients}
        owned = [g for g in self._keeper.owned_gradients() if chosen is None or id(g) in chosen]
        norm = norms.global_norm(owned, norm_type, self._world)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the gradient norm of order {norm_type} is {float(norm)}, so gradients cannot be clipped"
            )
        wide = any(p.dtype in {torch.float64, torch.complex128} for p in self.parameters())
        return norm.to(torch.float64 if wide else torch.float32)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that the whole model's norm is at most ``max_norm``; return the norm before.

        A collective call: every rank gets the same norm and the same factor.
        """
        norm = self.gradient_norm(float(norm_type), error_if_nonfinite=error_if_nonfinite)
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return norm

    # -- state ---------------------------------------------------------------------------------------------------------
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Return the plain model's state_dict on the CPU (a collective call).

        Args:
            rank0_only: Other ranks get an empty dict.
        """
        return self._keeper.full_state_dict(rank0_only=rank0_only)

    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a plain model's state_dict; a tied parameter is satisfied by any of its names.

        Raises:
            RuntimeError: As the plain model's ``load_state_dict`` would.
        """
        self._keeper.load_full_state_dict(state, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict with the original keys; entries of parameters that live elsewhere are ignored here."""
        del assign
        return self._keeper.load_full_state_dict(state_dict, strict=strict)

    def describe(self) -> str:
        """Return the plan as text, for people."""
        return self._show(self.plan)
