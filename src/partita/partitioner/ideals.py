"""Down-sets ("ideals") of the block graph, the states of the exact DP.

An assignment to stages is monotone along the dependencies if and only if for every s the blocks of stages 0..s form an
ideal: a set that contains with a block everything it depends on.  So a pipeline is a chain of nested ideals, and stage
s is the difference of two of them.  On a chain of n blocks the ideals are the n + 1 prefixes; k parallel branches give
a grid.  A graph with too many of them is searched along a few linear orders instead, whose prefixes are ideals too
(`linear_families`): every answer is valid, only the proof is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ideals:
    """A family of ideals, by ascending size; the first is empty, the last holds all blocks.

    Attributes:
        members: ``members[i, v]``: ideal i holds block v.
        below: ``below[j, i]``: ideal i is a proper subset of ideal j.
        covers: (ideal, the ideal without v, v) for each maximal block v whose removal stays in the family; by ascending
            ideal.
        complete: The family holds all ideals of the graph.
    """

    members: Bools
    below: Bools
    covers: tuple[tuple[int, int, int], ...]
    complete: bool

    @property
    def count(self) -> int:
        """Number of ideals."""
        return len(self.members)


def enumerate_ideals(num_blocks: int, edges: Sequence[tuple[int, int]], *, limit: int) -> Ideals | None:
    """Return all ideals of the graph, or None if there are more than ``limit``.

    Complexity: O(ideals * blocks) bit operations, and O(ideals^2 * blocks) floating point ones for ``below``.
    """
    needs = [0] * num_blocks
    readers: list[list[int]] = [[] for _ in range(num_blocks)]
    for a, b in edges:
        needs[b] |= 1 << a
        readers[a].append(b)
    layer = {0: tuple(v for v in range(num_blocks) if not needs[v])}
    found, covers = [0], []
    for _ in range(num_blocks):
        following: dict[int, tuple[int, ...]] = {}
        for ideal, ready in layer.items():
            for v in ready:
                larger = ideal | 1 << v
                covers.append((larger, ideal, v))
                if larger in following:
                    continue
                freed = {w for w in readers[v] if needs[w] & larger == needs[w]}
                following[larger] = tuple(sorted({*ready, *freed} - {v}))
                if len(found) + len(following) > limit:
                    return None
        found += following
        layer = following
    number = {ideal: index for index, ideal in enumerate(found)}
    by_number = sorted((number[larger], number[smaller], v) for larger, smaller, v in covers)
    return _family(_unpack(found, num_blocks), by_number, complete=True)


def linear_families(num_blocks: int, edges: Sequence[tuple[int, int]], weight: Sequence[float]) -> list[Ideals]:
    """Return the prefixes of a few topological orders: as numbered, depth first, light first and heavy first."""
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(num_blocks))
    orders = [list(range(num_blocks)), depth_first_order(graph)]
    orders += [greedy_order(graph, lambda v: weight[v]), greedy_order(graph, lambda v: -weight[v])]
    families = []
    for order in dict.fromkeys(map(tuple, orders)):
        members = np.zeros((num_blocks + 1, num_blocks), dtype=bool)
        for size, v in enumerate(order):
            members[size + 1 :, v] = True
        covers = [(size + 1, size, v) for size, v in enumerate(order)]
        families.append(_family(members, covers, complete=False))
    return families


def _family(members: Bools, covers: Sequence[tuple[int, int, int]], *, complete: bool) -> Ideals:
    sizes = members.sum(axis=1)
    # Ideal i lies within j iff they share |i| blocks; float32 counts small integers exactly, and multiplies fast.
    dense = members.astype(np.float32)
    below = (dense @ dense.T == sizes[None, :]) & (sizes[None, :] < sizes[:, None])
    return Ideals(members=members, below=below, covers=tuple(covers), complete=complete)


def _unpack(masks: Sequence[int], num_blocks: int) -> Bools:
    """Return bit masks as rows of booleans."""
    width = (num_blocks + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little")
    return bits[:, :num_blocks].astype(bool)


def depth_first_order(graph: nx.DiGraph) -> list[int]:
    """Return a topological order that finishes a branch before it starts the next."""
    return list(nx.dfs_postorder_nodes(graph.reverse(copy=False)))


def greedy_order(graph: nx.DiGraph, key: Callable[[int], float]) -> list[int]:
    """Return the topological order that always takes the ready block with the smallest key."""
    missing = {v: graph.in_degree(v) for v in graph}
    ready = [(key(v), v) for v in graph if not missing[v]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, v = heapq.heappop(ready)
        order.append(v)
        for w in graph.successors(v):
            missing[w] -= 1
            if not missing[w]:
                heapq.heappush(ready, (key(w), w))
    return order
