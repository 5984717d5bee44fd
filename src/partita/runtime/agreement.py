"""Guards against ranks that were not given the same: weights of shared parameters, and the batch of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from partita.errors import ExecutionError
from partita.runtime.placement import Placement
from partita.runtime.world import World
from partita.tracer.skeleton import named_tensors

CHECKED_CALLS = 3
"""Calls whose batch is compared over the ranks; a data loader that differs by rank shows at once."""


def align(root: nn.Module, placement: Placement, world: World) -> None:
    """Give every tensor that several ranks hold the owner's values.

    Args:
        root: The live module tree.
        placement: Who holds what, owners first.
        world: The ranks.
    """
    seen: set[int] = set()
    for name, tensor, _ in named_tensors(root):
        ranks = placement.ranks.get(name, ())
        if id(tensor) in seen or len(set(ranks)) < 2:
            continue
        seen.add(id(tensor))
        group = world.group(ranks)
        if world.rank in ranks and tensor.numel():
            data = tensor.detach()
            dense = data if data.is_contiguous() else data.contiguous()
            world.broadcast(dense, ranks[0], group)
            if dense is not data:
                data.copy_(dense)


def _digest(tensor: torch.Tensor) -> list[float]:
    """Return a few numbers that two different tensors hardly share."""
    if tensor.numel() == 0:
        return [float(tensor.ndim), 0.0]
    flat = torch.view_as_real(tensor.detach()).flatten() if tensor.is_complex() else tensor.detach().flatten()
    numbers = torch.nan_to_num(flat.to(torch.float64))
    ramp = torch.arange(1, numbers.numel() + 1, dtype=torch.float64, device=numbers.device)
    return [float(numbers.sum()), float((numbers * ramp).sum())]


class BatchGuard:
    """Compares the first calls' inputs over the ranks.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._left = CHECKED_CALLS if world.size > 1 else 0

    def check(self, names: Sequence[str], tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        """Compare a call's tensors with those of the other ranks.

        Args:
            names: The tensors' places in the call.
            tensors: The call's tensors.
            others: More tensors that belong to the call (targets).

        Raises:
            ExecutionError: On every rank, naming the first argument and rank that differ from rank 0.
        """
        if not self._left:
            return
        self._left -= 1
        labels = [*names, *(f"target {i}" for i in range(len(others)))]
        mine = [(label, tuple(t.shape), _digest(t)) for label, t in zip(labels, [*tensors, *others], strict=True)]
        everybody = self._world.gather(mine)
        first = everybody[0]
        for rank, theirs in enumerate(everybody):
            wrong = next((a[0] for a, b in zip(theirs, first, strict=False) if a != b), None)
            if wrong is not None or len(theirs) != len(first):
                raise ExecutionError(
                    f"rank {rank} was given another {wrong or 'call'} than rank 0",
                    hint="pass the same whole batch on every rank; the plan decides which rows a rank works on",
                    rank=rank,
                )
