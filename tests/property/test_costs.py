"""Costs are monotone: more rows, more bytes, more items, more ranks or a longer way are never cheaper."""

from dataclasses import replace
from itertools import pairwise
from math import isclose
from typing import get_args

from hypothesis import assume, given
from hypothesis import strategies as st

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import DEVICES, LINKS
from partita.cost.clusters import parse_cluster
from partita.cost.collectives import Collective, all_reduce_time_s, collective_time_s, overlapped_s
from partita.cost.memory import OPTIMIZERS, shard_bytes, stage_memory
from partita.cost.samples import Samples
from partita.cost.tiles import Product, tiled_s
from partita.errors import CostError
from partita.ir.plan import ZERO, Source
from tests.property.strategies import clusters, devices, links, model_graphs

some_devices = st.one_of(devices(), st.sampled_from(list(DEVICES.values())))
sizes = st.integers(0, 2**40)
ROUNDING = 1 + 1e-12


def figures(cost):
    return (cost.forward_s.value, cost.backward_s.value, cost.saved_bytes, cost.transient_bytes)


def not_above(lower, upper):
    return all(low <= high * ROUNDING for low, high in zip(lower, upper, strict=True))


@given(model_graphs(), some_devices, st.integers(1, 64), st.integers(0, 64))
def test_more_rows_never_cost_less(graph, device, rows, more):
    model, items = AnalyticModel(), range(len(graph.items))
    few, many = (model.items(graph, items, device, count) for count in (rows, rows + more))
    assert not_above(figures(few), figures(many))


@given(st.data(), model_graphs(), some_devices, st.integers(1, 16))
def test_more_items_never_cost_less_and_a_union_never_saves_more_than_its_parts(data, graph, device, rows):
    model, count = AnalyticModel(), len(graph.items)
    first = data.draw(st.sets(st.integers(0, count - 1)))
    second = data.draw(st.sets(st.integers(0, count - 1)))
    one, other, both = (model.items(graph, sorted(part), device, rows) for part in (first, second, first | second))
    assert not_above(figures(one), figures(both))
    assert both.saved_bytes <= one.saved_bytes + other.saved_bytes
    assert set(both.parameters) == set(one.parameters) | set(other.parameters)


@given(model_graphs(), devices(), st.integers(1, 16))
def test_a_faster_device_never_takes_longer(graph, device, rows):
    faster = replace(
        device,
        peak_flops=tuple((dtype, 2 * peak) for dtype, peak in device.peak_flops),
        memory_bandwidth=2 * device.memory_bandwidth,
    )
    model, items = AnalyticModel(), range(len(graph.items))
    slow, fast = (model.items(graph, items, which, rows) for which in (device, faster))
    assert not_above((fast.forward_s.value, fast.backward_s.value), (slow.forward_s.value, slow.backward_s.value))


@given(model_graphs(), some_devices, st.integers(1, 16))
def test_a_range_holds_its_value(graph, device, rows):
    cost = AnalyticModel().items(graph, range(len(graph.items)), device, rows)
    for estimate in (cost.forward_s, cost.backward_s):
        assert 0 <= estimate.low <= estimate.value <= estimate.high


@given(links(), sizes, sizes)
def test_a_longer_message_never_arrives_sooner(link, num_bytes, more):
    model = AnalyticModel()
    assert model.transfer_s(num_bytes, link).value <= model.transfer_s(num_bytes + more, link).value


@given(st.data(), clusters(), sizes, sizes)
def test_a_reduction_of_more_bytes_or_over_more_ranks_never_ends_sooner(data, cluster, num_bytes, more):
    ranks = data.draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=1))
    wider = ranks | data.draw(st.sets(st.integers(0, cluster.num_devices - 1)))
    seconds = all_reduce_time_s(num_bytes, sorted(ranks), cluster)
    assert seconds <= all_reduce_time_s(num_bytes + more, sorted(ranks), cluster) * ROUNDING
    assert seconds <= all_reduce_time_s(num_bytes, sorted(wider), cluster) * ROUNDING


collectives = st.sampled_from(get_args(Collective))


@given(st.data(), collectives, clusters(), sizes, sizes)
def test_every_collective_is_monotone_in_bytes_and_ranks(data, collective, cluster, num_bytes, more):
    ranks = data.draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=1))
    wider = ranks | data.draw(st.sets(st.integers(0, cluster.num_devices - 1)))
    seconds = collective_time_s(collective, num_bytes, sorted(ranks), cluster)
    assert seconds <= collective_time_s(collective, num_bytes + more, sorted(ranks), cluster) * ROUNDING
    assert seconds <= collective_time_s(collective, num_bytes, sorted(wider), cluster) * ROUNDING


@given(collectives, st.sampled_from(sorted(set(DEVICES) - {"cpu"})), st.integers(2, 8), sizes)
def test_a_longer_way_is_never_shorter(collective, kind, size, num_bytes):
    cluster = parse_cluster(f"{size}x8x{kind}")
    inside = collective_time_s(collective, num_bytes, range(size), cluster)
    across = collective_time_s(collective, num_bytes, range(0, 8 * size, 8), cluster)
    assert inside <= across
    near, far = (AnalyticModel().transfer_s(num_bytes, cluster.link(0, rank)) for rank in (1, 8))
    assert near.value <= far.value


@given(clusters(), collectives, sizes)
def test_switches_that_add_up_never_cost(cluster, collective, num_bytes):
    plain = replace(cluster, levels=tuple(replace(level, in_network=False) for level in cluster.levels))
    ranks = range(cluster.num_devices)
    with_help, without = (collective_time_s(collective, num_bytes, ranks, which) for which in (cluster, plain))
    assert with_help <= without


@given(st.floats(0, 10), st.floats(0, 10), st.sampled_from(["cpu", "cuda"]))
def test_overlap_is_between_the_longer_and_both(compute_s, communication_s, platform):
    found = overlapped_s(compute_s, communication_s, platform)
    assert max(compute_s, communication_s) <= found <= (compute_s + communication_s) * ROUNDING


@given(*[st.integers(1, 10**5)] * 3, st.integers(1, 64), st.integers(0, 3), st.integers(1, 200), st.integers(1, 1000))
def test_a_larger_product_never_ends_sooner(rows, columns, inner, batch, longer, units, more):
    product = Product(rows, columns, inner, batch)
    dim = ("rows", "columns", "inner", "batch")[longer]
    larger = replace(product, **{dim: getattr(product, dim) + more})
    assert tiled_s(product, 1e12, units) <= tiled_s(larger, 1e12, units) * ROUNDING
    assert product.flops / 1e12 <= tiled_s(product, 1e12, units) * ROUNDING


# ---------------------------------------------------------------- sums and sources


@given(st.data(), model_graphs(), some_devices, st.integers(1, 16))
def test_the_stages_add_up_to_the_whole(data, graph, device, rows):
    model, count = AnalyticModel(), len(graph.items)
    cuts = sorted(data.draw(st.sets(st.integers(1, count))) | {0, count})
    whole = model.items(graph, range(count), device, rows)
    parts = [model.items(graph, range(first, last), device, rows) for first, last in pairwise(cuts)]
    for direction in ("forward_s", "backward_s"):
        total = sum((getattr(part, direction) for part in parts), start=ZERO)
        expected = getattr(whole, direction)
        assert total.source == expected.source
        for field in ("low", "value", "high"):
            assert isclose(getattr(total, field), getattr(expected, field), rel_tol=1e-9)
    assert set().union(*(part.parameters for part in parts)) == set(whole.parameters)
    assert max(part.transient_bytes for part in parts) == whole.transient_bytes


def is_founded(estimate):
    return estimate.source in get_args(Source) and 0 <= estimate.low <= estimate.value <= estimate.high


@given(st.data(), model_graphs(), clusters(), sizes, st.sampled_from([*OPTIMIZERS, "8"]), st.booleans())
def test_there_is_no_estimate_without_source_and_range(data, graph, cluster, num_bytes, optimizer, fused):
    model, device = AnalyticModel(), cluster.kinds[0]
    cost = model.items(graph, range(len(graph.items)), device, 2)
    ranks = data.draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=1))
    estimates = [
        cost.forward_s,
        cost.backward_s,
        model.transfer_s(num_bytes, cluster.levels[0].link),
        model.collective_s(data.draw(collectives), num_bytes, sorted(ranks), cluster),
        model.optimizer_s(num_bytes, optimizer, device, fused=fused),
    ]
    assert all(is_founded(estimate) for estimate in estimates)


def test_there_is_no_device_and_no_link_without_source():
    assert all(entry.source for entry in (*DEVICES.values(), *LINKS.values()))


@given(st.lists(st.tuples(st.integers(1, 2**40), st.floats(1e-6, 10)), min_size=1, max_size=9), st.integers(0, 2**41))
def test_measured_sizes_bound_what_lies_between(found, num_bytes):
    points = sorted(dict(found).items())
    samples = Samples(sizes=tuple(size for size, _ in points), seconds=tuple(seconds for _, seconds in points))
    estimate = samples.at(num_bytes)
    assert is_founded(estimate)
    assume(num_bytes <= points[-1][0])
    assert min(samples.seconds) / ROUNDING <= estimate.value <= max(samples.seconds) * ROUNDING
    assert estimate.source == ("measured" if num_bytes in samples.sizes else "interpolated")


@given(model_graphs(), st.sampled_from([*OPTIMIZERS, "8"]), sizes, st.integers(1, 8), sizes, sizes)
def test_memory_adds_up_and_never_falls(graph, optimizer, saved, in_flight, received, transient):
    def memory(**changes):
        given = {"saved_bytes": saved, "in_flight": in_flight, "received_bytes": received, "transient_bytes": transient}
        return stage_memory(parameters=graph.parameters, optimizer=optimizer, **{**given, **changes})

    found = memory()
    assert found.total >= found.weights + found.gradients + found.optimizer + found.activations + found.skips
    for name, value in (("saved_bytes", saved), ("in_flight", in_flight), ("received_bytes", received)):
        assert memory(**{name: value + 1}).total >= found.total


@given(model_graphs(), st.sampled_from([*OPTIMIZERS, "8"]), st.integers(1, 64), st.sampled_from([1, 2, 3]))
def test_the_parts_of_zero_make_the_whole(graph, optimizer, degree, zero):
    def memory(**changes):
        return stage_memory(
            parameters=graph.parameters, optimizer=optimizer, saved_bytes=0, in_flight=1, platform="cuda", **changes
        )

    whole, part = memory(), memory(zero=zero, data_degree=degree)
    cut = {"optimizer": 1, "gradients": 2, "weights": 3}
    for category, level in cut.items():
        total, mine = getattr(whole, category), getattr(part, category)
        if zero < level:
            assert mine == total
        else:  # exactly, but for the bytes that no equal parts have
            assert 0 <= mine * degree - total < degree
            assert mine * degree == total or total % degree
    assert part.total <= whole.total
    assert memory(zero=zero) == whole


@given(sizes, st.integers(1, 1024))
def test_equal_parts_hold_everything(num_bytes, degree):
    assert 0 <= shard_bytes(num_bytes, degree) * degree - num_bytes < degree


@given(st.text(max_size=24))
def test_any_text_is_a_cluster_or_a_clear_error(text):
    try:
        cluster = parse_cluster(text.replace(".toml", ""))
    except CostError:
        return
    assert cluster.num_devices >= 1
