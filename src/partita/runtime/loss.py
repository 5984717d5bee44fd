"""The user's loss function in the fused loop: proved additive over microbatches, or evaluated on the whole batch.

The function is traced like a model whose inputs are the outputs and the target.  If its result is a mean, a counted
mean or a sum over the rows of the batch (and linear from there), the microbatches' losses may be computed apart and
weighted exactly.  Otherwise the outputs of the whole batch are gathered first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.runtime.results import flatten, tensor_leaves, unflatten
from partita.runtime.rows import Chunk, rows_of
from partita.runtime.worker import LossPart
from partita.tracer.joins import part_weight
from partita.tracer.program import Environment
from partita.tracer.recorder import refs
from partita.tracer.rows import WHOLE, Join
from partita.tracer.signature import signature_of
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.verify import environment, rows_apart

logger = logging.getLogger("partita")


def total_loss(loss: Any) -> torch.Tensor:
    """Return a loss function's result as one scalar: a tensor, or the sum of a dict's tensors.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(loss, dict):
        loss = sum(loss.values())
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(f"loss_fn must return a scalar tensor or a dict of them, not {type(loss).__name__}")
    return loss


class _LossModule(nn.Module):
    """The loss function in the shape of a model."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> torch.Tensor:
        return total_loss(self.function(output, target))


@dataclass(frozen=True, eq=False, slots=True)
class AdditiveLoss:
    """A loss that may be computed per microbatch.

    Attributes:
        traced: The traced function of (output, target).
        rows: Which of its inputs carry the rows.
        join: How the microbatches' losses are put together.
        num_outputs: How many of its inputs are outputs of the model; the rest belong to the target.
    """

    traced: Traced
    rows: Rows
    join: Join
    num_outputs: int

    def used(self, names: Sequence[str]) -> list[str]:
        """Return which of the model's results the loss reads."""
        program = self.traced.program
        read = {r for step in program.steps for r in step.reads}
        return [name for name, value in zip(names, program.inputs, strict=False) if value in read]

    def target_part(self, target: Any, chunk: Chunk | None) -> Any:
        """Return the target's rows of one microbatch."""
        if chunk is None:
            return target
        template, tensors = flatten(target)
        dims = self.rows.dims[self.num_outputs :]
        parts = [
            t if d is None else t.narrow(d, chunk[0], chunk[1] - chunk[0]) for t, d in zip(tensors, dims, strict=True)
        ]
        return unflatten(template, parts)


def loss_part(value: torch.Tensor, join: Join, env: Environment, chunk: Chunk | None, total_rows: int) -> LossPart:
    """Return a microbatch's loss with its weight and its share of the normaliser.

    Rows are normalised beforehand.  Counted means are relative to as many targets as there can be, so that the
    gradients keep the loss' magnitude until the total is known.

    Args:
        value: The microbatch's loss.
        join: How losses are put together.
        env: Where the counted targets are.
        chunk: The microbatch's rows; None for a call that is not cut.
        total_rows: Rows of the whole batch.
    """
    if chunk is None:
        return LossPart(value, 1.0, 1.0)
    fraction = (chunk[1] - chunk[0]) / total_rows
    if join.how == "sum":
        return LossPart(value, 1.0, fraction)
    if join.how == "whole":
        return LossPart(value, float(chunk[0] == 0), float(chunk[0] == 0))
    if join.how == "mean":
        return LossPart(value, fraction, fraction)
    weight = part_weight(join, env, rows_of(chunk)) / max(env.value(join.targets).numel(), 1) * fraction
    return LossPart(value, weight, weight)


class LossBook:
    """Decides once per structure whether a loss function is additive.

    Args:
        function: The user's loss function of (output, target).
        device: Where it will run.
    """

    def __init__(self, function: Callable[[Any, Any], Any], device: torch.device) -> None:
        self.function = function
        self._device = device
        self._known: dict[Hashable, AdditiveLoss | None] = {}
        self._module = _LossModule(function)

    def whole(self, output: Any, target: Any) -> torch.Tensor:
        """Evaluate the loss as written."""
        return total_loss(self.function(output, target))

    def additive(
        self, output: Any, joins: Sequence[Join], target: Any, agree: Callable[[Callable[[], bool]], bool]
    ) -> AdditiveLoss | None:
        """Return the loss as a sum over microbatches, or None if it must see the whole batch.

        Args:
            output: Stand-ins of the model's whole output (shapes and dtypes matter).
            joins: How each of its tensors is put together.
            target: The target of the whole batch.
            agree: Lets rank 0 decide for all ranks.
        """
        signature, tensors = signature_of((output, target), {})
        key = (signature.key, tuple(tuple(t.shape) for t in tensors))
        if key not in self._known:
            self._known[key] = self._decide(output, joins, target, agree)
        return self._known[key]

    def _decide(
        self, output: Any, joins: Sequence[Join], target: Any, agree: Callable[[Callable[[], bool]], bool]
    ) -> AdditiveLoss | None:
        outputs, targets = tensor_leaves(output), tensor_leaves(target)
        signature, _ = signature_of((output, target), {})
        axis = next(((i, j.dim) for i, j in enumerate(joins) if j.how == "rows"), None)
        if axis is None or any(j.how not in {"rows", "whole"} for j in joins):
            return None
        total = outputs[axis[0]].shape[axis[1]]
        own = [(i, j.dim) for i, j in enumerate(joins) if j.how == "rows" and outputs[i].shape[j.dim] == total]
        matching = [(len(outputs) + i, 0) for i, t in enumerate(targets) if t.ndim and t.shape[0] == total]
        tensors = tuple(_stand_in(t) for t in outputs) + tuple(targets)
        tracer = Tracer(self._module, str(self._device))
        try:
            traced = tracer.trace(signature, tensors, tied=(*own, *matching), whole=False)
            rows = traced.rows(axis)
        except Exception as error:  # noqa: BLE001  (any loss function may be untraceable; it is then evaluated on the whole batch)
            logger.info("the loss is evaluated on the whole batch: %s", error)
            return None
        if traced.program.assumptions:  # what was traced are stand-ins: their values say nothing
            logger.info("the loss is evaluated on the whole batch: it decides by values of the outputs")
            return None
        apart = agree(lambda: self._apart(traced, tensors, rows))
        name = refs(traced.program.result)[0]
        if not apart or any(d != j.dim for d, j in zip(rows.dims, joins, strict=False) if j.how == "rows"):
            return None
        return AdditiveLoss(traced, rows, rows.joins.get(name, WHOLE), len(outputs))

    def _apart(self, traced: Traced, tensors: tuple[torch.Tensor, ...], rows: Rows) -> bool:
        problem = rows_apart(self._module, traced.program, tensors, rows.dims, rows.joins)
        if problem:
            logger.info("the loss is evaluated on the whole batch: %s", problem)
        return not problem

    def part(self, loss: AdditiveLoss, output: Any, target: Any, chunk: Chunk | None, total_rows: int) -> LossPart:
        """Evaluate one microbatch's loss."""
        piece = loss.target_part(target, chunk)
        value = self.whole(output, piece)
        env = environment(
            loss.traced.program, self._module, (*(t.detach() for t in tensor_leaves(output)), *tensor_leaves(piece))
        )
        if loss.join.how == "count":
            env.run(_needed_for(loss, env))
        return loss_part(value, loss.join, env, chunk, total_rows)


def _needed_for(loss: AdditiveLoss, env: Environment) -> list[Any]:
    """Return the steps that the counted targets rest on."""
    wanted, steps = {loss.join.targets}, []
    for step in reversed(env.program.steps):
        if wanted & set(step.writes):
            steps.append(step)
            wanted |= set(step.reads)
    return steps[::-1]


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return values of a tensor's shape for tracing and trying, the same on every rank."""
    generator = torch.Generator().manual_seed(tensor.numel())
    if tensor.dtype.is_floating_point:
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
