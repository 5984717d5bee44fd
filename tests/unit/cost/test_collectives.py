"""Rings by hand, levels added, and the bounds that every all-reduce keeps."""

import pytest

from partita.cost.clusters import parse_cluster
from partita.cost.collectives import FLOOR_S, all_reduce_time_s, ring_s, transfer_time_s
from partita.errors import CostError
from partita.ir.cluster import Link

LINK = Link(latency_s=1e-5, bandwidth=1e9)


def test_a_message_is_latency_and_bytes():
    assert transfer_time_s(10**6, LINK) == pytest.approx(1e-5 + 1e-3)


def test_a_ring_by_hand():
    assert ring_s(8 * 10**6, 4, LINK) == pytest.approx(2 * 3 / 4 * 8e-3 + 6 * 1e-5)
    assert ring_s(8 * 10**6, 1, LINK) == 0


def test_one_rank_needs_no_reduction_and_no_reduction_is_below_the_floor():
    cluster = parse_cluster("8xH100-80GB")
    assert all_reduce_time_s(10**9, [3], cluster) == 0
    assert all_reduce_time_s(10**9, [3, 3], cluster) == 0
    assert all_reduce_time_s(0, [0, 1], cluster) == FLOOR_S


def test_a_large_reduction_in_a_host_runs_at_the_bus_bandwidth():
    cluster = parse_cluster("8xH100-80GB")
    assert all_reduce_time_s(10**9, range(8), cluster) == pytest.approx(2 * 7 / 8 * 1e9 / 347e9, rel=0.05)


def test_ranks_on_two_hosts_reduce_inside_and_then_between():
    cluster = parse_cluster("2x8xH100-80GB")
    host, site = (level.link for level in cluster.levels)
    assert all_reduce_time_s(10**8, range(16), cluster) == pytest.approx(
        ring_s(10**8, 8, host) + ring_s(10**8, 2, site)
    )
    assert all_reduce_time_s(10**8, [0, 8], cluster) == pytest.approx(ring_s(10**8, 2, site))
    assert all_reduce_time_s(10**8, [0, 1, 8], cluster) == pytest.approx(
        ring_s(10**8, 2, host) + ring_s(10**8, 2, site)
    )


def test_a_rank_outside_the_cluster_is_refused():
    with pytest.raises(CostError, match="rank 8 is not in cluster '8xH100-80GB'"):
        all_reduce_time_s(1, [0, 8], parse_cluster("8xH100-80GB"))
