"""What others do, from their published descriptions, scored like everything else by `evaluate`.

All of them use the first class of devices only, and know neither processors nor unequal devices.  None but ``rannc``
and ``pipedream`` looks at memory.  The device-placement DP over down-sets, by which Piper and dnn-partitioning are
known, is the method ``dp`` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

import networkx as nx
import numpy as np

from partita.partitioner.maxload.line_dp import Floats, Line, best_chain, interval_loads
from partita.partitioner.maxload.reduction import Reduced

RANNC_BLOCKS = 32
"""Blocks that RaNNC merges its atomic components to before it searches (IPDPS 2021, section III-B)."""


def solve_equal_count(reduced: Reduced) -> Line:
    """Give every device the same number of items, in order."""
    return _by_share(reduced, np.ones(reduced.num_items))


def solve_equal_parameters(reduced: Reduced) -> Line:
    """Give every device the same bytes, in order."""
    return _by_share(reduced, np.array(reduced.sizes, dtype=np.float64))


def solve_cumulative_time(reduced: Reduced) -> Line:
    """Cut where the cumulative time passes a device's share."""
    return _by_share(reduced, _finite(reduced))


def solve_greedy(reduced: Reduced) -> Line:
    """Fill device after device as long as its load, traffic included, is within an equal share of the time left."""
    loads = interval_loads(reduced, range(reduced.num_items))[0]
    times, k = _finite(reduced), reduced.problem.classes[0].count
    cuts, start = [0], 0
    for device in range(k - 1):
        share = times[start:].sum() / (k - device)
        end = start
        while end < reduced.num_items and (end == start or loads[end + 1, start] <= share):
            end += 1
        start = end
        cuts.append(start)
    return _by_cuts(reduced, [*cuts, reduced.num_items])


def solve_block_partition(reduced: Reduced) -> Line:
    """Balance the times of a sequence, blind to traffic, as torchgpipe does (Bárány and Grinberg 2015)."""
    work = np.concatenate([[0.0], np.cumsum(_finite(reduced))])
    n = reduced.num_items
    return _chain(reduced, np.where(np.tri(n + 1, dtype=bool), work[:, None] - work[None, :], inf), range(n + 1))


def solve_rannc(reduced: Reduced) -> Line:
    """Merge the order into blocks of about equal time, then cut between them by dynamic programming, as RaNNC does."""
    work = np.concatenate([[0.0], np.cumsum(_finite(reduced))])
    marks = np.linspace(0.0, work[-1], min(RANNC_BLOCKS, reduced.num_items) + 1)
    ends = sorted({0, *np.abs(work[:, None] - marks[None, :]).argmin(axis=0).tolist(), reduced.num_items})
    loads = interval_loads(reduced, range(reduced.num_items))[0]
    return _chain(reduced, loads[np.ix_(ends, ends)], ends)


def solve_pipedream(reduced: Reduced) -> Line:
    """Cut a linearised graph so that neither a stage's compute nor a link's transfer is slow, as PipeDream does.

    PipeDream lets transfers run beside compute, so a stage counts the larger of its time and its traffic; replication,
    the other half of its search, is not part of this problem (SOSP 2019, section 3.1).
    """
    loads = interval_loads(reduced, range(reduced.num_items))[0]
    work = np.concatenate([[0.0], np.cumsum(_finite(reduced))])
    compute = work[:, None] - work[None, :]
    traffic = np.where(np.isfinite(loads), np.maximum(loads, compute) - compute, inf)
    return _chain(reduced, np.maximum(compute, traffic), range(reduced.num_items + 1))


def solve_kway(reduced: Reduced) -> Line:
    """Bisect recursively for a small cut by Kernighan and Lin, as multilevel partitioners do; blind to the order."""
    graph = nx.Graph()
    graph.add_nodes_from(range(reduced.num_items))
    for cost, items in reduced.nets:
        for v in items[1:]:
            known = graph.get_edge_data(items[0], v, {"weight": 0.0})["weight"]
            graph.add_edge(items[0], v, weight=known + cost)
    parts = [set(range(reduced.num_items))]
    while len(parts) < reduced.problem.classes[0].count and max(map(len, parts)) > 1:
        heaviest = max(parts, key=lambda part: (len(part) > 1, sum(_finite(reduced)[v] for v in part)))
        parts.remove(heaviest)
        parts += nx.community.kernighan_lin_bisection(graph.subgraph(sorted(heaviest)), weight="weight", seed=0)
    return Line(objective=inf, stages=tuple((0, tuple(sorted(part))) for part in parts))


def _finite(reduced: Reduced) -> Floats:
    return np.where(np.isfinite(reduced.times[0]), reduced.times[0], 0.0)


def _by_share(reduced: Reduced, weight: Floats) -> Line:
    """Put an item where the middle of its weight falls among equal shares."""
    k, total = reduced.problem.classes[0].count, float(weight.sum())
    middle = np.cumsum(weight) - weight / 2
    device = np.minimum((middle / total * k).astype(int), k - 1) if total > 0 else np.zeros(len(weight), dtype=int)
    return _by_cuts(reduced, [*np.searchsorted(device, range(k)).tolist(), reduced.num_items])


def _chain(reduced: Reduced, loads: Floats, ends: Sequence[int]) -> Line:
    _, steps = best_chain(loads[None], [reduced.problem.classes[0].count])
    return _by_cuts(reduced, [0, *(ends[j] for _, _, j in steps)]) if steps else Line(objective=inf)


def _by_cuts(reduced: Reduced, cuts: Sequence[int]) -> Line:
    stages = [(0, tuple(range(i, j))) for i, j in pairwise(cuts) if i < j]
    return Line(objective=inf, stages=tuple(stages)) if reduced.problem.classes[0].count else Line(objective=inf)


BASELINES: dict[str, Callable[[Reduced], Line]] = {
    "uniform": solve_equal_count,
    "equal_parameters": solve_equal_parameters,
    "cumulative_time": solve_cumulative_time,
    "greedy": solve_greedy,
    "torchgpipe": solve_block_partition,
    "rannc": solve_rannc,
    "pipedream": solve_pipedream,
    "kway": solve_kway,
}
"""The baselines by name."""
