"""A graph whose nodes are merged step by step, never making a cycle.

Theory of operation.  The clusters stand in a topological order.  Merging the ends of an edge u -> v makes a cycle if
and only if another path leads from u to v, and every such path stays between their positions.  So one search from u
inside that window answers the question, and what it found (the descendants of u in the window) is also what has to
move behind the merged cluster to keep the order topological.  Windows are short where neighbours are close, which they
are in programs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence


class Contraction:
    """Clusters of nodes, their weighted edges, and their topological order.

    Args:
        groups: The clusters to begin with, in a topological order; each node once.
        weights: Weight of each edge between nodes; edges inside a cluster do not count.

    Raises:
        ValueError: If an edge leads backwards in the order of the groups.
    """

    def __init__(self, groups: Sequence[Sequence[int]], weights: Mapping[tuple[int, int], int]) -> None:
        self.members: dict[int, list[int]] = {cluster: list(group) for cluster, group in enumerate(groups)}
        self.readers: dict[int, dict[int, int]] = {cluster: {} for cluster in self.members}
        self.producers: dict[int, dict[int, int]] = {cluster: {} for cluster in self.members}
        self._order: list[int | None] = list(self.members)
        self._position = {cluster: cluster for cluster in self.members}
        self._cluster = {node: cluster for cluster, group in enumerate(groups) for node in group}
        for (node, reader), weight in weights.items():
            u, v = self._cluster[node], self._cluster[reader]
            if u > v:
                raise ValueError(f"the edge {node} -> {reader} leads backwards")
            if u != v:
                self._connect(u, v, weight)

    def position(self, cluster: int) -> int:
        """Return a number that grows along every edge."""
        return self._position[cluster]

    def cluster_of(self, node: int) -> int:
        """Return the cluster that holds a node."""
        return self._cluster[node]

    def merge(self, u: int, v: int) -> int | None:
        """Merge the ends of the edge u -> v.

        Returns:
            The merged cluster, or None if another path leads from u to v: nothing has changed then.
        """
        behind = self._behind(u, v)
        if behind is None:
            return None
        start, end = self._position[u], self._position[v]
        window = [cluster for cluster in self._order[start : end + 1] if cluster not in {None, u, v}]
        moved = [cluster for cluster in window if cluster not in behind]
        moved += [u, *(cluster for cluster in window if cluster in behind)]
        self._order[start : end + 1] = [*moved, *[None] * (end + 1 - start - len(moved))]
        for position, cluster in enumerate(moved, start):
            if cluster is not None:
                self._position[cluster] = position
        self._join(u, v)
        return u

    def _behind(self, u: int, v: int) -> set[int] | None:
        """Return what u leads to before v in the order, or None if one of it leads to v."""
        end, found = self._position[v], set[int]()
        stack = [w for w in self.readers[u] if w != v]
        while stack:
            w = stack.pop()
            if w == v:
                return None
            if w not in found and self._position[w] < end:
                found.add(w)
                stack.extend(self.readers[w])
        return found

    def _join(self, u: int, v: int) -> None:
        del self.readers[u][v], self.producers[v][u]
        for w, weight in self.readers.pop(v).items():
            del self.producers[w][v]
            self._connect(u, w, weight)
        for w, weight in self.producers.pop(v).items():
            del self.readers[w][v]
            self._connect(w, u, weight)
        nodes = self.members.pop(v)
        self.members[u] += nodes
        self._cluster.update(dict.fromkeys(nodes, u))
        del self._position[v]

    def _connect(self, u: int, v: int, weight: int) -> None:
        self.readers[u][v] = self.readers[u].get(v, 0) + weight
        self.producers[v][u] = self.producers[v].get(u, 0) + weight

    def sorted_members(self) -> list[tuple[int, ...]]:
        """Return the clusters in the topological order that follows the smallest nodes, each ascending."""
        missing = {cluster: len(producers) for cluster, producers in self.producers.items()}
        first = {cluster: min(nodes) for cluster, nodes in self.members.items()}
        ready = [(first[cluster], cluster) for cluster, count in missing.items() if not count]
        heapq.heapify(ready)
        result = []
        while ready:
            _, cluster = heapq.heappop(ready)
            result.append(tuple(sorted(self.members[cluster])))
            for reader in self.readers[cluster]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (first[reader], reader))
        return result


def merge_overlapping(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of closed ranges as disjoint ones, ascending."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result
