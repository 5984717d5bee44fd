"""Put the results of microbatches and replicas together, and give every rank the whole."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from partita.runtime.rows import Chunk
from partita.runtime.transport import Form
from partita.runtime.world import World
from partita.tracer.joins import join_parts
from partita.tracer.rows import WHOLE, Join
from partita.tracer.signature import Slot
from partita.tracer.tree import leaves, map_leaves


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One replica's share of one result.

    Attributes:
        template: The result's structure with `Slot` for its tensors.
        tensors: The tensors, joined over the replica's microbatches.
        weight: The share's weight in a weighted join.
        requires_grad: For each tensor whether a gradient flows into it.
    """

    template: Any
    tensors: tuple[torch.Tensor, ...]
    weight: float
    requires_grad: tuple[bool, ...]


def flatten(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a result into its structure and its tensors."""
    tensors: list[torch.Tensor] = []

    def leaf(_path: object, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        tensors.append(item)
        return Slot(len(tensors) - 1)

    return map_leaves(leaf, value), tensors


def unflatten(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors back into a structure."""
    return map_leaves(lambda _p, leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, template)


def join_chunks(values: Sequence[Any], join: Join, weights: Sequence[float]) -> Part:
    """Join one result over the microbatches of a replica.

    Args:
        values: The result of each microbatch.
        join: How parts are put together.
        weights: Weight of each microbatch; only weighted joins use them.
    """
    flat = [flatten(value) for value in values]
    template, firsts = flat[0]
    flags = tuple(any(f[1][i].requires_grad for f in flat) for i in range(len(firsts)))
    joined = [join_parts([f[1][i].detach() for f in flat], join, weights) for i in range(len(firsts))]
    return Part(template, tuple(joined), sum(weights), flags)


def finish_join(parts: Sequence[Part], join: Join) -> tuple[list[torch.Tensor], float]:
    """Join one result over the replicas; return its tensors and the sum of the weights."""
    if join.how == "rows":
        columns = zip(*(p.tensors for p in parts), strict=True)
        return [c[0] if len(c) == 1 else torch.cat(list(c), join.dim) for c in columns], 1.0
    if join.how == "whole":
        return list(parts[0].tensors), 1.0
    total = sum(p.weight for p in parts) if join.how in {"mean", "count"} else 1.0
    sums = [sum(c[1:], start=c[0]) for c in zip(*(p.tensors for p in parts), strict=True)]
    return [s / total if total != 1.0 else s for s in sums], total


class Publisher:
    """Gives every rank the parts that only their owners have.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[Hashable, list[tuple[Any, list[Form], tuple[bool, ...]]]] = {}

    def share(self, mine: Sequence[Part] | None, owner: int, key: Hashable | None) -> list[Part]:
        """Broadcast an owner's parts.

        Args:
            mine: The parts on the owner, None elsewhere.
            owner: The rank that has them.
            key: Parts of one non-None key always have one form.

        Returns:
            The parts, on every rank.
        """
        if self._world.size == 1:
            assert mine is not None
            return list(mine)
        described = self._known.get((owner, key)) if key is not None else None
        if described is None:
            box: list[Any] = [
                None if mine is None else [(p.template, [Form.of(t) for t in p.tensors], p.requires_grad) for p in mine]
            ]
            with self._world.talking():
                dist.broadcast_object_list(box, src=owner)
            described = box[0]
            if key is not None:
                self._known[owner, key] = described
        weights = torch.tensor(
            [p.weight for p in mine] if mine is not None else [0.0] * len(described),
            dtype=torch.float64,
            device=self._world.device,
        )
        self._world.broadcast(weights, owner)
        found = []
        for i, (template, forms, flags) in enumerate(described):
            tensors = (
                [f.empty(self._world.device) for f in forms]
                if mine is None
                else [t.contiguous() for t in mine[i].tensors]
            )
            for tensor in tensors:
                if tensor.numel():
                    self._world.broadcast(tensor, owner)
            found.append(Part(template, tuple(tensors), float(weights[i]), flags))
        return found


def chunk_gradient(
    gradient: torch.Tensor | None, join: Join, chunk: Chunk | None, rows: int, weight: float, total: float, first: bool
) -> torch.Tensor | None:
    """Return the part of a result's gradient that belongs to one microbatch.

    Args:
        gradient: Gradient of the whole result.
        join: How the result was put together.
        chunk: The microbatch's rows; None for a call that is not cut.
        rows: Rows of the whole call.
        weight: The microbatch's weight in a weighted join.
        total: Sum of all weights.
        first: Whether it is the very first microbatch of all replicas.
    """
    if gradient is None or chunk is None:
        return gradient
    if join.how == "rows":
        ratio = gradient.shape[join.dim] // rows
        return gradient.narrow(join.dim, chunk[0] * ratio, (chunk[1] - chunk[0]) * ratio)
    if join.how == "whole":
        return gradient if first else None
    if join.how == "sum":
        return gradient
    return gradient * (weight / total) if weight else None


def joins_for(names: Sequence[str], joins: Mapping[str, Join] | None) -> dict[str, Join]:
    """Return the joins of results; a call that is not cut has one part of each."""
    return {name: WHOLE if joins is None else joins[name] for name in names}


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return a tree's tensors in leaf order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
