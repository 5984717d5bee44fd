"""Costs are monotone: more rows, more bytes, more items, more ranks or a longer way are never cheaper."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import DEVICES
from partita.cost.clusters import parse_cluster
from partita.cost.collectives import all_reduce_time_s
from partita.cost.memory import OPTIMIZERS, stage_memory
from partita.errors import CostError
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


@given(st.integers(2, 8), sizes)
def test_a_longer_way_is_never_shorter(size, num_bytes):
    cluster = parse_cluster(f"{size}x8xH100-80GB")
    inside = all_reduce_time_s(num_bytes, range(size), cluster)
    across = all_reduce_time_s(num_bytes, range(0, 8 * size, 8), cluster)
    assert inside <= across


@given(model_graphs(), st.sampled_from([*OPTIMIZERS, "8"]), sizes, st.integers(1, 8), sizes, sizes)
def test_memory_adds_up_and_never_falls(graph, optimizer, saved, in_flight, received, transient):
    def memory(**changes):
        given = {"saved_bytes": saved, "in_flight": in_flight, "received_bytes": received, "transient_bytes": transient}
        return stage_memory(parameters=graph.parameters, optimizer=optimizer, **{**given, **changes})

    found = memory()
    assert found.total >= found.weights + found.gradients + found.optimizer + found.activations + found.skips
    for name, value in (("saved_bytes", saved), ("in_flight", in_flight), ("received_bytes", received)):
        assert memory(**{name: value + 1}).total >= found.total


@given(st.text(max_size=24))
def test_any_text_is_a_cluster_or_a_clear_error(text):
    try:
        cluster = parse_cluster(text.replace(".toml", ""))
    except CostError:
        return
    assert cluster.num_devices >= 1
