"""Rings by hand, levels added, and the bounds that every all-reduce keeps."""

from dataclasses import replace

import pytest

from partita.cost.clusters import parse_cluster
from partita.cost.collectives import (
    FLOOR_S,
    OVERLAP_SLOWDOWN,
    algorithm_s,
    all_reduce_time_s,
    collective_time_s,
    overlapped_s,
    ring_s,
    transfer_time_s,
)
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


def test_algorithms_by_hand():
    byte_s, hop_s = 8e-3, 1e-5
    for collective, algorithm, volume, hops in (
        ("all_reduce", "tree", 2, 4),
        ("all_reduce", "in_network", 1, 2),
        ("all_gather", "ring", 3 / 4, 3),
        ("reduce_scatter", "in_network", 3 / 4, 1),
        ("broadcast", "tree", 1, 2),
        ("all_to_all", "pairs", 3 / 4, 3),
    ):
        found = algorithm_s(collective, algorithm, 8 * 10**6, 4, LINK)
        assert found == pytest.approx(volume * byte_s + hops * hop_s)
    with pytest.raises(CostError, match="is no algorithm"):
        algorithm_s("broadcast", "ring", 1, 2, LINK)


def test_many_ranks_add_small_things_up_in_a_tree_and_large_ones_in_a_ring():
    cluster = parse_cluster("64x1xA100-40GB")
    link = cluster.levels[0].link
    for size, algorithm in ((10**5, "tree"), (10**10, "ring")):
        assert all_reduce_time_s(size, range(64), cluster) == algorithm_s("all_reduce", algorithm, size, 64, link)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    cluster = parse_cluster("8xH100-80GB")
    parts = [collective_time_s(name, 10**9, range(8), cluster) for name in ("reduce_scatter", "all_gather")]
    assert sum(parts) == pytest.approx(all_reduce_time_s(10**9, range(8), cluster))


def test_switches_that_add_up_save_half_and_never_cost():
    plain = parse_cluster("8xH100-80GB")
    summing = replace(plain, levels=(replace(plain.levels[0], in_network=True),))
    before, after = (all_reduce_time_s(10**9, range(8), cluster) for cluster in (plain, summing))
    assert after == pytest.approx(before * 4 / 7, rel=0.02)
    assert collective_time_s("all_to_all", 10**9, range(8), summing) == collective_time_s(
        "all_to_all", 10**9, range(8), plain
    )


def test_the_ranks_of_a_host_share_its_way_out_in_an_all_to_all():
    cluster = parse_cluster("2x8xH100-80GB")
    alone = collective_time_s("all_to_all", 10**9, [0, 8], cluster)
    assert collective_time_s("all_to_all", 10**9, range(16), cluster) > 7 * alone


def test_a_level_of_unlike_links_waits_for_its_slowest_group():
    cluster = parse_cluster("8xA100-40GB+8xV100-16GB")
    fast, slow = (all_reduce_time_s(10**9, ranks, cluster) for ranks in (range(8), range(8, 16)))
    assert slow > 2 * fast
    site = cluster.levels[1].link
    assert all_reduce_time_s(10**9, range(16), cluster) == pytest.approx(slow + ring_s(10**9, 2, site))


def test_what_overlaps_takes_more_than_the_longer_and_at_most_both():
    for platform in OVERLAP_SLOWDOWN:
        assert 2.0 < overlapped_s(2.0, 1.0, platform) <= 3.0
        assert overlapped_s(2.0, 0.0, platform) == 2.0
