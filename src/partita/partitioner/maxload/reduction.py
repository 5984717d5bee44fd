"""The problem with everything that stays together merged, in topological order, with the way back.

Two reductions, both without loss: colocated nodes become one item; in the contiguous problem the strongly connected
parts of what remains do too, since a circle cannot be spread over a line.  Nets with the same items are then one net
with their costs added, and nets inside one item are gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import networkx as nx
import numpy as np
import numpy.typing as npt

from partita.partitioner.maxload.problem import PartitionProblem

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """A partition problem over items.

    Attributes:
        problem: The original.
        members: Nodes of each item; items are numbered in a topological order of ``order``.
        times: ``times[c, v]``: time of item v on class c.
        sizes: Bytes of each item.
        nets: (cost, items), each of two items at least.
        order: (before, after), transitively reduced; empty unless contiguous.
        contiguous: Whether devices form a line.
    """

    problem: PartitionProblem
    members: tuple[tuple[int, ...], ...]
    times: Floats
    sizes: tuple[int, ...]
    nets: tuple[tuple[float, tuple[int, ...]], ...]
    order: tuple[tuple[int, int], ...]
    contiguous: bool

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.members)

    def expand(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment of nodes for one of items."""
        assignment = [0] * len(self.problem.nodes)
        for nodes, device in zip(self.members, devices, strict=True):
            for v in nodes:
                assignment[v] = device
        return tuple(assignment)

    def seat(self, line: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
        """Return the assignment of nodes for a line of (class, items); each class's devices are taken in turn."""
        first, devices = [0], [0] * self.num_items
        for c in self.problem.classes:
            first.append(first[-1] + c.count)
        for kind, items in line:
            for v in items:
                devices[v] = first[kind]
            first[kind] += 1
        return self.expand(devices)


def reduce_problem(problem: PartitionProblem, *, contiguous: bool) -> Reduced:
    """Merge what stays together."""
    together = nx.Graph()
    together.add_nodes_from(range(len(problem.nodes)))
    for group in problem.colocated:
        nx.add_path(together, group)
    parts = [sorted(part) for part in nx.connected_components(together)]
    if contiguous:
        parts = _merge_circles(problem, parts)
    part_of = {v: index for index, part in enumerate(parts) for v in part}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(parts)))
    order = problem.order if contiguous else _acyclic(problem, part_of)
    graph.add_edges_from((part_of[u], part_of[v]) for u, v in order if part_of[u] != part_of[v])
    ranked = list(nx.lexicographical_topological_sort(graph, key=lambda p: parts[p][0]))
    number = {part: index for index, part in enumerate(ranked)}
    merged: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for cost, nodes in problem.nets:
        items = tuple(sorted({number[part_of[v]] for v in nodes}))
        if len(items) > 1:
            merged[items] += cost
    members = tuple(tuple(parts[p]) for p in ranked)
    times = np.array([[sum(c.times[v] for v in part) for part in members] for c in problem.classes])
    edges = nx.transitive_reduction(graph).edges if contiguous else ()
    return Reduced(
        problem=problem,
        members=members,
        times=times,
        sizes=tuple(sum(problem.sizes[v] for v in part) for part in members),
        nets=tuple((cost, items) for items, cost in sorted(merged.items())),
        order=tuple(sorted((number[a], number[b]) for a, b in edges)),
        contiguous=contiguous,
    )


def _merge_circles(problem: PartitionProblem, parts: list[list[int]]) -> list[list[int]]:
    part_of = {v: index for index, part in enumerate(parts) for v in part}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(parts)))
    graph.add_edges_from((part_of[u], part_of[v]) for u, v in problem.order if part_of[u] != part_of[v])
    return [sorted(v for p in circle for v in parts[p]) for circle in nx.strongly_connected_components(graph)]


def _acyclic(problem: PartitionProblem, part_of: dict[int, int]) -> list[tuple[int, int]]:
    """Return the order without the edges inside circles: enough to number items along the graph."""
    graph = nx.DiGraph((part_of[u], part_of[v]) for u, v in problem.order)
    circle = {p: index for index, c in enumerate(nx.strongly_connected_components(graph)) for p in c}
    return [(u, v) for u, v in problem.order if circle[part_of[u]] != circle[part_of[v]]]


def work_bound(reduced: Reduced) -> float:
    """Return a lower bound on the largest load: every device class by class at its best.

    The heaviest item needs its fastest class; and if a device of class c does the share it is best at, the load L of
    all devices together covers the work: ``1 <= L * sum_c count_c * max_v share_c(v)`` in the unit of the cheapest
    class per item, which is ``L >= sum_v min_c time / sum_c count`` since a class is never faster than the fastest.
    """
    best = reduced.times.min(axis=0)
    if not np.isfinite(best).all():
        return inf
    return max(float(best.max(initial=0.0)), float(best.sum()) / reduced.problem.num_devices)


def highest_load(reduced: Reduced) -> float:
    """Return a load that no device of an allowed assignment exceeds."""
    worst = np.where(np.isfinite(reduced.times), reduced.times, 0.0).max(axis=0)
    return float(worst.sum()) + sum(cost for cost, _ in reduced.nets)
