"""Which parameters and buffers this rank holds, and the live module tree that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from partita.ir.plan import Plan
from partita.runtime.gradients import Shared
from partita.runtime.stages import StageMap
from partita.tracer.program import Program
from partita.tracer.skeleton import copy_model, named_tensors


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Where every parameter and buffer lives.

    Attributes:
        stages: Canonical name to the stages that hold the tensor.
        ranks: Canonical name to the ranks that hold it, the owner first.
    """

    stages: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, tuple[int, ...]]

    def local(self, rank: int) -> frozenset[str]:
        """Return the canonical names of what a rank holds."""
        return frozenset(name for name, ranks in self.ranks.items() if rank in ranks)

    def shared(self, names: list[str]) -> list[Shared]:
        """Group parameters by the set of ranks that hold them, in an order that every rank shares."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            groups.setdefault(tuple(sorted(self.ranks[name])), []).append(name)
        return [Shared(ranks, tuple(members)) for ranks, members in sorted(groups.items())]


def place(layout: StageMap, plan: Plan, model: nn.Module) -> Placement:
    """Read the placement of every registered tensor off the plan.

    Args:
        layout: The planned program over the stages.
        plan: Says where the parameters live; buffers live where they are read, unread ones on the first stage.
        model: The module tree, for the tensors' names.
    """
    values = {name: value for value, names in layout.program.tensors.items() for name in names}
    reading = [layout.tensors_of(stage) for stage in range(layout.num_stages)]
    by_parameter = {n: p for p in plan.parameter_plans for n in p.names}
    stages: dict[str, tuple[int, ...]] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, tensor, is_parameter in named_tensors(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        held = {s for s, names in enumerate(reading) if values.get(name) in names}
        if is_parameter and name in by_parameter:
            held |= set(by_parameter[name].stages)
        stages[name] = tuple(sorted(held)) or (0,)
        ranks[name] = tuple(rank for stage in stages[name] for rank in plan.stages[stage].ranks)
    return Placement(stages, ranks)


def holders(program: Program, placement: Placement) -> dict[str, tuple[int, ...]]:
    """Return for each parameter and buffer value of a program the stages that hold it."""
    return {
        value: placement.stages[next(n for n in names if n in placement.stages)]
        for value, names in program.tensors.items()
    }


def live_model(model: nn.Module, placement: Placement, rank: int, device: torch.device) -> nn.Module:
    """Copy the model with the local tensors on ``device`` and every other one on meta.

    Args:
        model: The user's model; it stays as it is.
        placement: Who holds what.
        rank: This rank.
        device: Where it computes.

    Returns:
        The live module tree; local tensors of a meta model are uninitialised memory.
    """
    local = placement.local(rank)

    def data(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in local:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.is_meta:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return tensor.detach().to(device, copy=True)

    return copy_model(model, data)
