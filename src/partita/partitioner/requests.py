"""What the user asks for, checked and in the terms of ranks and blocks."""

from __future__ import annotations

from collections.abc import Mapping

from partita.errors import InfeasibleError
from partita.ir.cluster import Cluster
from partita.ir.request import Limits
from partita.partitioner.blockgraph import BlockGraph
from partita.partitioner.configurations import Space


def memory_limits(cluster: Cluster, limits: Limits) -> tuple[int, ...]:
    """Return the bytes that each rank may use."""
    given = limits.memory_bytes
    if given is None:
        return tuple(cluster.device(rank).memory_bytes for rank in range(cluster.num_devices))
    memory = (given,) * cluster.num_devices if isinstance(given, int) else tuple(given)
    if len(memory) != cluster.num_devices:
        raise ValueError(
            f"memory_bytes has {len(memory)} entries for {cluster.num_devices} devices of {cluster.name!r}"
        )
    if any(limit < 0 for limit in memory):
        raise ValueError(f"memory_bytes must not be negative: {list(memory)}")
    return memory


def pinned_stages(blocks: BlockGraph, pins: Mapping[str, int], space: Space) -> tuple[int | None, ...]:
    """Return for each block the stage that the user pinned one of its modules to."""
    if not pins:
        return ()
    stages: list[int | None] = [None] * len(blocks.blocks)
    graph = blocks.graph
    for path, stage in pins.items():
        if not 0 <= stage < space.stages[-1]:
            raise InfeasibleError(
                f"{path!r} is pinned to stage {stage}, but there are at most {space.stages[-1]} stages",
                hint=f"use a stage from 0 to {space.stages[-1] - 1}",
            )
        inside = [
            block.id
            for block in blocks.blocks
            for item in (graph.items[number] for number in block.items)
            if any(
                name == path or name.startswith(f"{path}.") or path == ""
                for name in (item.module_path, *(op.module_path for op in graph.ops[slice(*item.ops)]))
            )
        ]
        if not inside:
            raise InfeasibleError(f"no block runs a module {path!r}", hint="pins name modules as named_modules() does")
        for block in inside:
            if stages[block] not in {None, stage}:
                raise InfeasibleError(
                    f"block {blocks.blocks[block].label!r} has the pins {stages[block]} and, by {path!r}, {stage}",
                    hint="modules that share a block go to one stage",
                )
            stages[block] = stage
    return tuple(stages)
