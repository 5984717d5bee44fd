"""Items to blocks: the smallest units that the partitioner moves.

1. Items that may be recomputed anywhere (``replicable``) belong to no block, unless they make an output of the model:
   whoever reads one depends on what it reads (`Reads`).
2. A colocated group becomes one cluster together with everything between its items in execution order; a contiguous
   run is convex, so no cycle can arise.
3. Cheap items without parameters join the neighbour with which they share the most bytes, producers first, unless that
   would close a cycle (`partita.partitioner.contraction`).  Independent branches stay apart.
4. If there are still too many, the lightest clusters join in the same way.

Blocks are numbered in a topological order that follows the execution order, and a block whose operators, shapes and
dtypes repeat an earlier one's says so, whatever its name and the period of the repetition (`partita.ir.structure`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from partita.ir.graph import Block, ModelGraph
from partita.ir.structure import structure
from partita.partitioner.contraction import Contraction, merge_overlapping

MAX_BLOCKS = 1_000
"""Default of the most blocks: the exact DP solves that many in about a second."""
GLUE_SHARE = 0.05
"""Share of the mean work of the items with parameters below which an item without parameters counts as glue."""


class Reads:
    """What items read once the replicable ones are recomputed where they are needed.

    Args:
        graph: The captured graph.

    Attributes:
        ordinary: Ids of the items that belong to a block, ascending.
    """

    def __init__(self, graph: ModelGraph) -> None:
        outputs = set(graph.outputs)
        ordinary = tuple(item.id for item in graph.items if not item.replicable or outputs & set(item.writes))
        self.ordinary = ordinary or tuple(item.id for item in graph.items)
        kept = set(self.ordinary)
        self._items = graph.items
        self._recomputed = {tensor: item.id for item in graph.items if item.id not in kept for tensor in item.writes}
        self._leaves: dict[int, tuple[str, ...]] = {}
        for item in graph.items:
            # Items stand in execution order, so what an item reads has been looked at before.
            found = dict.fromkeys(
                leaf
                for tensor in item.reads
                for leaf in (self._leaves[self._recomputed[tensor]] if tensor in self._recomputed else (tensor,))
            )
            self._leaves[item.id] = tuple(found)

    def of(self, item: int) -> tuple[str, ...]:
        """Return the tensors that an item needs, directly or through replicable items, each once."""
        return self._leaves[item]

    def recomputed_for(self, items: Iterable[int]) -> tuple[int, ...]:
        """Return the replicable items that must run beside these, ascending."""
        stack, found = list(items), set[int]()
        while stack:
            for tensor in self._items[stack.pop()].reads:
                maker = self._recomputed.get(tensor)
                if maker is not None and maker not in found:
                    found.add(maker)
                    stack.append(maker)
        return tuple(sorted(found))


def coarsen(graph: ModelGraph, *, max_blocks: int = MAX_BLOCKS) -> tuple[Block, ...]:
    """Group the items of a graph into blocks.

    Args:
        graph: The captured graph.
        max_blocks: The most blocks wanted; more remain only if every further merge would make a cycle.

    Returns:
        Blocks in a topological order; every item that is not recomputed is in exactly one.
    """
    reads = Reads(graph)
    clusters = Contraction(_colocated(graph, reads.ordinary), _weights(graph, reads))
    work = [sum(op.flops + op.backward_flops for op in graph.ops[slice(*item.ops)]) for item in graph.items]
    tensors = graph.tensor_map()
    heavy = {item.id for item in graph.items if any(tensors[name].role == "parameter" for name in reads.of(item.id))}
    _join_glue(clusters, reads.ordinary, work, heavy)
    _join_lightest(clusters, work, max_blocks)
    groups = clusters.sorted_members()
    first: dict[Hashable, int] = {}
    blocks = []
    for number, items in enumerate(groups):
        repeated = first.setdefault(structure(graph, tensors, items), number)
        blocks.append(
            Block(
                id=number,
                label=_label(graph, items, work, heavy),
                items=items,
                repeat_of=None if repeated == number else repeated,
            )
        )
    return tuple(blocks)


def _colocated(graph: ModelGraph, ordinary: Sequence[int]) -> list[list[int]]:
    """Return the items as singletons, colocated ones with everything between them as one group."""
    ranges = merge_overlapping((min(group), max(group)) for group in graph.colocated if group)
    groups: list[list[int]] = []
    current: tuple[int, int] | None = None
    for item in ordinary:
        inside = next((bounds for bounds in ranges if bounds[0] <= item <= bounds[1]), None)
        if inside is not None and inside == current:
            groups[-1].append(item)
        else:
            groups.append([item])
        current = inside
    return groups


def _weights(graph: ModelGraph, reads: Reads) -> dict[tuple[int, int], int]:
    """Return the bytes that pass directly between two items."""
    producers, tensors, kept = graph.producers(), graph.tensor_map(), set(reads.ordinary)
    weights: dict[tuple[int, int], int] = {}
    for item in reads.ordinary:
        for tensor in reads.of(item):
            producer = producers.get(tensor)
            if producer is not None and producer != item and producer in kept:
                weights[producer, item] = weights.get((producer, item), 0) + tensors[tensor].bytes
    return weights


def _join_glue(clusters: Contraction, ordinary: Sequence[int], work: Sequence[int], heavy: set[int]) -> None:
    """Merge every cluster of cheap items without parameters into a neighbour."""
    reference = [work[item] for item in ordinary if item in heavy] or [work[item] for item in ordinary]
    tiny = GLUE_SHARE * sum(reference) / max(1, len(reference))
    for item in ordinary:
        nodes = clusters.members[clusters.cluster_of(item)]
        if not heavy.intersection(nodes) and sum(work[node] for node in nodes) <= tiny:
            _absorb(clusters, clusters.cluster_of(item))


def _join_lightest(clusters: Contraction, work: Sequence[int], max_blocks: int) -> None:
    """Merge the lightest clusters until there are few enough."""
    while len(clusters.members) > max_blocks:
        lightest = sorted(clusters.members, key=lambda c: (sum(work[node] for node in clusters.members[c]), c))
        before = len(clusters.members)
        for cluster in lightest[: max(1, before - max_blocks)]:
            if cluster in clusters.members and len(clusters.members) > max_blocks:
                _absorb(clusters, cluster)
        if len(clusters.members) == before and not any(_absorb(clusters, cluster) for cluster in lightest):
            return


def _absorb(clusters: Contraction, cluster: int) -> bool:
    """Merge a cluster into the neighbour that shares the most bytes with it and closes no cycle."""
    # Of equals the nearest producer comes first: the last of the values that an addition joins.
    near = [(-weight, 0, -clusters.position(u), u) for u, weight in clusters.producers[cluster].items()]
    near += [(-weight, 1, clusters.position(v), v) for v, weight in clusters.readers[cluster].items()]
    for _, is_reader, _, other in sorted(near):
        first, second = (cluster, other) if is_reader else (other, cluster)
        if clusters.merge(first, second) is not None:
            return True
    return False


def _label(graph: ModelGraph, items: Sequence[int], work: Sequence[int], heavy: set[int]) -> str:
    """Name a block after its most important item."""
    chief = max(items, key=lambda item: (item in heavy, work[item], -item))
    more = len(items) - 1
    return graph.items[chief].name + (f" +{more}" if more else "")
