"""Gradients that reach the results beside a model's own loss.

A model that returns its loss has had its backward when the call returns.  A term of the user's on another result (an
auxiliary loss on the hidden states, a distillation term on the logits) asks for more.  Gradients add up, so what such a
term contributes is computed apart: the same forward once more, with the same random numbers and buffers, and its
backward from this term alone.  It costs a forward and a backward, and only where it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from partita.errors import ExecutionError
from partita.runtime.engine import Engine, Forward, Results
from partita.runtime.gradients import GradientBook
from partita.runtime.variants import PreparedCall


class Repeat:
    """What it takes to run a call again: its random numbers, and the buffers as they were before it.

    Args:
        engine: Executes calls on this rank.
        book: This rank's gradients.
        call: The call, before it runs.
    """

    def __init__(self, engine: Engine, book: GradientBook, call: PreparedCall) -> None:
        self._engine, self._book = engine, book
        self._state: Forward | None = None
        program = call.variant.traced.program
        names = [name for value in sorted(program.changed) for name in program.tensors[value]]
        places = [_place(engine.root, name) for name in names]
        self._before = [(m, leaf, b.clone()) for m, leaf in places if (b := _buffer(m, leaf)) is not None]
        self._versions = self._changes()

    def of(self, state: Forward) -> Repeat:
        """Take over the call's state once it has run."""
        self._state = state
        return self

    def _changes(self) -> list[int]:
        """Return how often each local parameter was changed in place."""
        return [parameter._version for parameter in self._engine.root.parameters()]

    @contextlib.contextmanager
    def _buffers_before(self) -> Iterator[None]:
        """Show the modules the buffers as they were before the call."""
        now = [(module, leaf, module._buffers[leaf]) for module, leaf, _ in self._before]
        for module, leaf, before in self._before:
            module._buffers[leaf] = before.clone()
        try:
            yield
        finally:
            for module, leaf, buffer in now:
                module._buffers[leaf] = buffer

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Run the call again and its backward from the results beside the loss; accumulate the gradients.

        Args:
            gradients: For each tensor of these results the gradient, the same on every rank.

        Returns:
            Gradients of the call's inputs.

        Raises:
            ExecutionError: If the parameters have changed since the call.
        """
        assert self._state is not None
        if self._changes() != self._versions:
            raise ExecutionError(
                "a gradient reached a result beside the loss after the parameters had changed",
                hint="add your own terms to the loss and call backward before the optimizer's step",
            )
        given, beside = iter(gradients), {name for name, _, _ in self._state.pieces}
        with self._buffers_before():
            with torch.enable_grad():
                again, _ = self._engine.forward(self._state.call, like=self._state)
            complete = [next(given) if n in beside else None for n, _, count in again.pieces for _ in range(count)]
            fresh, inputs = self._engine.backward(again, complete)
        self._book.accumulate(fresh)
        return inputs


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    return root.get_submodule(path), leaf


def _buffer(module: nn.Module, leaf: str) -> torch.Tensor | None:
    """Return a buffer that is on this rank."""
    buffer = module._buffers.get(leaf)
    return None if buffer is None or buffer.is_meta else buffer


class Beside(torch.autograd.Function):
    """Connects the results beside a loss with a repetition of the call."""

    @staticmethod
    def forward(
        ctx: Any, again: Repeat, results: Results, _anchor: torch.Tensor, *_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the results' tensors."""
        ctx.again = again
        ctx.set_materialize_grads(False)
        found = tuple(t.view_as(t) for t in results.tensors)
        ctx.mark_non_differentiable(*(t for t, wants in zip(found, results.requires_grad, strict=True) if not wants))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the call again, for the gradients that have come."""
        return (None, None, None, *ctx.again.backward(gradients))
