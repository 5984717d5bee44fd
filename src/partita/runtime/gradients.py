"""Gradients of one backward: kept apart from earlier ones, summed over all holders of a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from partita.runtime.transport import Transport

BUCKET_BYTES = 2**20
"""Small gradients are summed in buckets of about this size, so that few messages are sent; one that is as large by
itself is summed where it is, without a copy.  A bucket is the only memory that a reduction needs."""


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
        """Add gradients to what the parameters have; the gradients stay as they are."""
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            added = gradient if isinstance(factor, float) and factor == 1.0 else gradient * factor
            parameter.grad = added.to(gradient.dtype) if parameter.grad is None else parameter.grad + added

    def take_over(self, gradients: dict[str, torch.Tensor], factor: torch.Tensor) -> None:
        """Add gradients times a factor to what the parameters have; they are used up, so that none is there twice."""
        while gradients:
            name, gradient = gradients.popitem()
            self.accumulate({name: gradient.mul_(factor)})

    def reduce(self, transport: Transport, rank: int) -> None:
        """Sum the present backward's gradients over every set of ranks that holds a parameter together.

        A gradient that no holder has stays None; one that some holder lacks counts as zero there.
        """
        for group in self._shared:
            if rank in group.ranks and len(group.ranks) > 1:
                for names in self._buckets(group.names):
                    self._reduce_bucket(names, group.ranks, transport)

    def _buckets(self, names: Sequence[str]) -> list[list[str]]:
        """Return the small parameters in buckets of one dtype, and every large one by itself."""
        buckets: list[list[str]] = []
        size, dtype = BUCKET_BYTES, None
        for name in sorted(
            (n for n in names if n in self._parameters and self._parameters[n].requires_grad),
            key=lambda n: (self._parameters[n].nbytes >= BUCKET_BYTES, str(self._parameters[n].dtype)),
        ):
            parameter = self._parameters[name]
            if parameter.dtype != dtype or size + parameter.nbytes > BUCKET_BYTES:
                buckets.append([])
                size, dtype = 0, parameter.dtype
            buckets[-1].append(name)
            size += parameter.nbytes
        return buckets

    def _reduce_bucket(self, names: Sequence[str], ranks: Sequence[int], transport: Transport) -> None:
        parameters = [self._parameters[n] for n in names]
        flags = torch.tensor(
            [p.grad is not None for p in parameters], dtype=parameters[0].dtype, device=parameters[0].device
        )
        if len(parameters) == 1 and parameters[0].nbytes >= BUCKET_BYTES:
            self._reduce_alone(parameters[0], flags, ranks, transport)
            return
        parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.detach().flatten() for p in parameters]
        flat = torch.cat([flags, *parts])
        del parts  # what is only here now is there once
        transport.all_reduce(flat, ranks)
        at, there = len(names), (flat[: len(names)].real if flat.is_complex() else flat[: len(names)]).tolist()
        for parameter, found in zip(parameters, there, strict=True):
            if found:
                _put(parameter, flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()

    @staticmethod
    def _reduce_alone(
        parameter: torch.nn.Parameter, flags: torch.Tensor, ranks: Sequence[int], transport: Transport
    ) -> None:
        """Sum one gradient in its own memory."""
        transport.all_reduce(flags, ranks)
        if not bool((flags.real if flags.is_complex() else flags).any()):
            return
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        dense = gradient.contiguous()
        transport.all_reduce(dense, ranks)
        _put(parameter, dense)


def _put(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Give a parameter its summed gradient, in the memory that it has for it."""
    if parameter.grad is None:
        parameter.grad = gradient.detach().clone()
    elif parameter.grad.data_ptr() != gradient.data_ptr():
        parameter.grad.detach().copy_(gradient)
