"""Gradients of one backward: kept apart from earlier ones, summed over all holders of a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from partita.runtime.transport import Transport

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in buckets of about this size, the usual compromise between latency and extra memory."""


@dataclass(frozen=True, eq=False, slots=True)
class Shared:
    """The parameters that one set of ranks holds together.

    Attributes:
        ranks: Their holders.
        names: The parameters, in an order that every holder knows.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]


class GradientBook:
    """Keeps the gradients of one backward apart from those that have accumulated before.

    Args:
        parameters: The local parameters by canonical name; those that take gradients at the time count.
        shared: What is held by several ranks, in an order that all ranks share.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], shared: Sequence[Shared]) -> None:
        self._parameters = parameters
        self._shared = shared
        self._earlier: dict[str, torch.Tensor | None] = {}

    def open(self) -> None:
        """Set earlier gradients aside."""
        self._earlier = {name: p.grad for name, p in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Return this backward's gradients, scaled, and put the earlier ones back."""
        fresh = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name, parameter in self._parameters.items():
            parameter.grad = self._earlier[name]
        self._earlier = {}
        if scale != 1.0:
            for gradient in fresh.values():
                gradient.mul_(scale)
        return fresh

    def accumulate(self, gradients: Mapping[str, torch.Tensor], factor: torch.Tensor | float = 1.0) -> None:
        """Add gradients to what the parameters have."""
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            added = gradient if isinstance(factor, float) and factor == 1.0 else gradient * factor
            parameter.grad = added.to(gradient.dtype) if parameter.grad is None else parameter.grad + added

    def reduce(self, transport: Transport, rank: int) -> None:
        """Sum the present backward's gradients over every set of ranks that holds a parameter together.

        A gradient that no holder has stays None; one that some holder lacks counts as zero there.
        """
        for group in self._shared:
            if rank in group.ranks and len(group.ranks) > 1:
                for names in self._buckets(group.names):
                    self._reduce_bucket(names, group.ranks, transport)

    def _buckets(self, names: Sequence[str]) -> list[list[str]]:
        buckets: list[list[str]] = []
        size, dtype = 0, None
        for name in sorted(
            (n for n in names if n in self._parameters and self._parameters[n].requires_grad),
            key=lambda n: str(self._parameters[n].dtype),
        ):
            parameter = self._parameters[name]
            if not buckets or parameter.dtype != dtype or size > BUCKET_BYTES:
                buckets.append([])
                size, dtype = 0, parameter.dtype
            buckets[-1].append(name)
            size += parameter.numel() * parameter.element_size()
        return buckets

    def _reduce_bucket(self, names: Sequence[str], ranks: Sequence[int], transport: Transport) -> None:
        parameters = [self._parameters[n] for n in names]
        present = [p.grad is not None for p in parameters]
        flags = torch.tensor(present, dtype=parameters[0].dtype, device=parameters[0].device)
        parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.detach().flatten() for p in parameters]
        flat = torch.cat([flags, *parts])
        transport.all_reduce(flat, ranks)
        at = len(names)
        for parameter, part, found in zip(
            parameters,
            parts,
            flat[: len(names)].real.tolist() if flat.is_complex() else flat[: len(names)].tolist(),
            strict=True,
        ):
            if found:
                parameter.grad = flat[at : at + part.numel()].view_as(parameter).clone()
            at += part.numel()
