"""Messages and reductions over the topology: alpha-beta terms by level.

Theory of operation. A message of ``n`` bytes over a link takes ``latency + n / bandwidth``. A ring all-reduce over
``k`` devices makes ``2 (k - 1)`` steps, each of which moves ``n / k`` bytes over every link of the ring at once::

    T = 2 (k - 1) / k * n / bandwidth + 2 (k - 1) * latency                                    (1)

Ranks that span several groups of a level reduce hierarchically: (1) inside the groups, then (1) between them::

    T = sum over levels of (1) with k_level = the most parts that one group of the level joins  (2)

The part between groups is charged with *all* ``n`` bytes, because the devices of a group share what leaves it: of
2 x 8 A100 each sees a bus of 7 GB/s, of 2 x 1 it sees 6. Both are monotone in bytes, in ranks and in levels.
Source: Thakur et al., 2005 (ring); the constants are in `partita.cost.catalogue`.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.errors import CostError
from partita.ir.cluster import Cluster, Link

FLOOR_S = 30e-6
"""Seconds that no collective is below: framework and launch (Vidur's A100 and H100 tables: 15-45 us)."""


def transfer_time_s(num_bytes: int, link: Link) -> float:
    """Return the seconds of one message of ``num_bytes`` bytes."""
    return link.latency_s + num_bytes / link.bandwidth


def ring_s(num_bytes: int, num_parts: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce, equation (1); 0 for fewer than two parts."""
    if num_parts < 2:
        return 0.0
    steps = 2 * (num_parts - 1)
    return steps / num_parts * num_bytes / link.bandwidth + steps * link.latency_s


def all_reduce_time_s(num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of an all-reduce, equation (2).

    Args:
        num_bytes: Bytes that each rank contributes.
        ranks: The ranks; repeated ones count once.
        cluster: The topology.

    Returns:
        Seconds; 0 for fewer than two ranks.

    Raises:
        CostError: A rank is not in the cluster, or no level connects the ranks.
    """
    groups = set(ranks)
    unknown = sorted(rank for rank in groups if not 0 <= rank < cluster.num_devices)
    if unknown:
        raise CostError(
            f"rank {unknown[0]} is not in cluster {cluster.name!r}, which has {cluster.num_devices} devices",
            rank=unknown[0],
        )
    if len(groups) < 2:
        return 0.0
    total_s, inner_size = 0.0, 1
    for level in cluster.levels:
        outer = [group * inner_size // level.group_size for group in groups]
        total_s += ring_s(num_bytes, max(outer.count(group) for group in set(outer)), level.link)
        groups, inner_size = set(outer), level.group_size
        if len(groups) == 1:
            return max(FLOOR_S, total_s)
    raise CostError(f"no level of cluster {cluster.name!r} connects ranks {sorted(set(ranks))}")
