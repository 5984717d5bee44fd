"""Messages and collectives over the topology: alpha-beta terms by algorithm and by level.

Theory of operation. A message of ``n`` bytes over a link takes ``latency + n / bandwidth``. Among ``k`` devices that a
link connects, with ``L`` its latency and ``B`` its bandwidth::

    all_reduce      ring        2 (k - 1) / k * n / B + 2 (k - 1) L                                (1)
                    tree        2 n / B + 2 ceil(log2 k) L      (two pipelined binary trees)
                    in network  n / B + 2 L                     (the switch adds up)
    all_gather, reduce_scatter  ring  (k - 1) / k * n / B + (k - 1) L
                    in network  (k - 1) / k * n / B + L
    broadcast       tree        n / B + ceil(log2 k) L
    all_to_all      pairs       (k - 1) / k * g n / B + (k - 1) L

``n`` is what a device holds when all is gathered (`all_gather`, ``reduce_scatter``), or what each contributes. Where
several algorithms apply the fastest is taken. Ranks that span several groups of a level work hierarchically::

    T = sum over levels of the level's term, with k_level = the most parts that one group of the level joins   (2)

The part between groups is charged with *all* ``n`` bytes (an all-to-all: with those of the ``g`` ranks of a group),
because the devices of a group share what leaves it: of 2 x 8 A100 each sees a bus of 7 GB/s, of 2 x 1 it sees 6. Every
term is monotone in bytes, in ranks and in levels.
Source: Thakur et al., 2005 (ring, pairs); Sanders et al., 2009 (two trees); the constants: `partita.cost.catalogue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from partita.errors import CostError
from partita.ir.cluster import Cluster, Link

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
Algorithm = Literal["ring", "tree", "in_network", "pairs"]

FLOOR_S = 30e-6
"""Seconds that no collective is below: framework and launch (Vidur's A100 and H100 tables: 15-45 us)."""

OVERLAP_SLOWDOWN: dict[str, float] = {"cuda": 1.126, "cpu": 2.0}
"""How much longer computing and communicating take while both run, by platform.

CUDA: Galvatron's measured coefficient on 8 A100 (both share multiprocessors and memory). CPU: 2, nothing is gained,
because a process that sends uses the core that computes.
"""

_ALGORITHMS: dict[Collective, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "tree"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("tree",),
    "all_to_all": ("pairs",),
}
_SUMS_IN_NETWORK: frozenset[Collective] = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


def transfer_time_s(num_bytes: int, link: Link) -> float:
    """Return the seconds of one message of ``num_bytes`` bytes."""
    return link.latency_s + num_bytes / link.bandwidth


def overlapped_s(compute_s: float, communication_s: float, platform: Literal["cpu", "cuda"]) -> float:
    """Return the seconds of computing and communicating that do not wait for each other.

    While both run each is slower by `OVERLAP_SLOWDOWN`: the longer one, plus the slow-down of the shorter.

    Example:
        >>> round(overlapped_s(1.0, 0.5, "cuda"), 3), overlapped_s(1.0, 0.5, "cpu")
        (1.063, 1.5)
    """
    longer, shorter = max(compute_s, communication_s), min(compute_s, communication_s)
    return longer + (OVERLAP_SLOWDOWN[platform] - 1.0) * shorter


def ring_s(num_bytes: int, num_parts: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce, equation (1); 0 for fewer than two parts."""
    return algorithm_s("all_reduce", "ring", num_bytes, num_parts, link)


def algorithm_s(
    collective: Collective, algorithm: Algorithm, num_bytes: int, num_parts: int, link: Link, sharing: int = 1
) -> float:
    """Return the seconds of one collective among ``num_parts`` devices that one link connects.

    Args:
        collective: What is done.
        algorithm: How; see the table above.
        num_bytes: Bytes that each part contributes, or holds when all is gathered.
        num_parts: Devices, or groups of devices.
        link: What connects them.
        sharing: Ranks of one part that share its link; they matter for an all-to-all only.

    Returns:
        Seconds; 0 for fewer than two parts.

    Raises:
        CostError: The algorithm is none for the collective.
    """
    inside = algorithm == "in_network" and collective in _SUMS_IN_NETWORK
    if algorithm not in _ALGORITHMS[collective] and not inside:
        raise CostError(f"{algorithm!r} is no algorithm for {collective!r}; known: {_ALGORITHMS[collective]}")
    if num_parts < 2:
        return 0.0
    others = num_parts - 1
    share, doublings = others / num_parts, others.bit_length()
    both_ways = 2 if collective == "all_reduce" else 1
    if algorithm == "ring":
        volume, hops = both_ways * share, both_ways * others
    elif algorithm == "tree":
        volume, hops = float(both_ways), both_ways * doublings
    elif algorithm == "in_network":
        volume, hops = (1.0 if collective == "all_reduce" else share), both_ways
    else:
        volume, hops = share * sharing, others
    return volume * num_bytes / link.bandwidth + hops * link.latency_s


def all_reduce_time_s(num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of an all-reduce, see `collective_time_s`."""
    return collective_time_s("all_reduce", num_bytes, ranks, cluster)


def collective_time_s(collective: Collective, num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of a collective over the topology, equation (2).

    Args:
        collective: What is done.
        num_bytes: Bytes that each rank contributes, or holds when all is gathered.
        ranks: The ranks; repeated ones count once.
        cluster: The topology.

    Returns:
        Seconds; 0 for fewer than two ranks.

    Raises:
        CostError: A rank is not in the cluster, or no level connects the ranks.
    """
    members = Counter(dict.fromkeys(ranks, 1))
    unknown = sorted(rank for rank in members if not 0 <= rank < cluster.num_devices)
    if unknown:
        raise CostError(
            f"rank {unknown[0]} is not in cluster {cluster.name!r}, which has {cluster.num_devices} devices",
            rank=unknown[0],
        )
    if len(members) < 2:
        return 0.0
    total_s, inner_size = 0.0, 1
    for level in cluster.levels:
        parent = {group: group * inner_size // level.group_size for group in members}
        parts = Counter(parent.values())
        outer: Counter[int] = Counter()
        for group, count in members.items():
            outer[parent[group]] += count
        sharing = max(members.values())
        algorithms = _ALGORITHMS[collective]
        if level.in_network and collective in _SUMS_IN_NETWORK:
            algorithms = (*algorithms, "in_network")
        total_s += max(
            min(
                algorithm_s(collective, algorithm, num_bytes, count, level.link_of(group), sharing)
                for algorithm in algorithms
            )
            for group, count in parts.items()
        )
        members, inner_size = outer, level.group_size
        if len(members) == 1:
            return max(FLOOR_S, total_s)
    raise CostError(f"no level of cluster {cluster.name!r} connects ranks {sorted(set(ranks))}")
