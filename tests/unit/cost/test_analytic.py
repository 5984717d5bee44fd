"""Rooflines by hand, what scales with the rows, and what is counted once."""

import time

import pytest

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import CPU, DEVICES, LINKS
from partita.cost.clusters import parse_cluster
from partita.errors import CostError
from partita.ir.cluster import DeviceSpec
from partita.ir.plan import ZERO
from tests.unit.cost.tensors import graph_of, tensor, weight

PLAIN = DeviceSpec(
    name="plain",
    platform="cpu",
    memory_bytes=10**9,
    peak_flops=(("float32", 1e9),),
    memory_bandwidth=1e9,
    launch_s=1e-6,
)
"""One FLOP and one byte per nanosecond, one microsecond per kernel."""


def layer(number, rows=4, width=8):
    x = tensor(f"h{number}", rows, width, batch_dim=0)
    y = tensor(f"h{number + 1}", rows, width, batch_dim=0)
    return ("linear", (x, weight(f"w{number}", width, width)), (y,), {})


def test_an_operator_takes_the_longer_of_arithmetic_and_traffic_plus_its_start():
    rows, width = 4, 8
    graph = graph_of([layer(0)])
    cost = AnalyticModel().items(graph, [0], PLAIN, 1)
    flops, traffic = 2 * rows * width * width, 4 * (2 * rows * width + width * width)
    assert cost.forward_s.value == pytest.approx(1e-6 + max(flops, traffic) * 1e-9)
    assert cost.backward_s.value == pytest.approx(2e-6 + max(2 * flops, graph.ops[0].backward_bytes) * 1e-9)
    assert cost.parameters == ("w0",)


def test_estimates_say_that_they_are_modelled_and_how_wrong_they_may_be():
    graph = graph_of([layer(0)])
    for device, error in ((PLAIN, 0.4), (DEVICES["H100-80GB"], 0.2)):
        seconds = AnalyticModel().items(graph, [0], device, 1).forward_s
        assert seconds.source == "modelled"
        assert (seconds.low, seconds.high) == pytest.approx((seconds.value * (1 - error), seconds.value * (1 + error)))


def test_a_gpu_hides_the_start_of_a_long_kernel_and_views_are_free_there():
    x, y = tensor("x", 8, 8), tensor("y", 64, storage="x")
    graph = graph_of([("view", (x,), (y,), {}), layer(0, rows=4096, width=4096)])
    model, gpu = AnalyticModel(), DEVICES["H100-80GB"]
    assert model.items(graph, [0], gpu, 1).forward_s.value == 0
    flops = 2 * 4096**3
    assert model.items(graph, [1], gpu, 1).forward_s.value == pytest.approx(flops / (67e12 * 0.75), rel=0.1)
    assert model.items(graph, [0], CPU, 1).forward_s.value == pytest.approx(CPU.launch_s)


def test_sixteen_bits_run_at_the_tensor_cores_rate():
    x, y = (tensor(name, 4096, 4096, dtype="bfloat16") for name in "xy")
    graph = graph_of([("linear", (x, weight("w", 4096, 4096, dtype="bfloat16")), (y,), {})])
    seconds = AnalyticModel().items(graph, [0], DEVICES["A100-80GB"], 1).forward_s.value
    assert seconds == pytest.approx(2 * 4096**3 / (312e12 * 0.70), rel=0.1)


def test_rows_scale_arithmetic_and_activations_but_not_the_weights():
    graph = graph_of([layer(0, rows=4, width=8)], batch_rows=4)
    model = AnalyticModel()
    weights, activations = 4 * 64, 4 * 2 * 32
    one, four, eight = (model.items(graph, [0], PLAIN, rows).forward_s.value for rows in (1, 4, 8))
    assert one == pytest.approx(1e-6 + max(512 / 4, weights + activations / 4) * 1e-9)
    assert four == pytest.approx(1e-6 + max(512, weights + activations) * 1e-9)
    assert eight == pytest.approx(1e-6 + max(1024, weights + 2 * activations) * 1e-9)


def test_an_operator_outside_the_batch_does_not_scale():
    mask, other = tensor("m", 64, 64, grad=False), tensor("n", 64, 64, grad=False)
    graph = graph_of([("neg", (mask,), (other,), {}), layer(0)], batch_rows=4)
    model = AnalyticModel()
    assert model.items(graph, [0], PLAIN, 1).forward_s == model.items(graph, [0], PLAIN, 64).forward_s


def test_saved_bytes_count_a_storage_once_and_skip_parameters_and_inputs():
    source = tensor("x", 4, 8, role="input", grad=False, batch_dim=0)
    hidden = tensor("h", 4, 8, batch_dim=0)
    flat = tensor("f", 32, storage="h", batch_dim=0)
    calls = [
        ("linear", (source, weight("w0", 8, 8)), (hidden,), {}),
        ("linear", (hidden, weight("w1", 8, 8)), (tensor("a", 4, 8, batch_dim=0),), {}),
        ("view", (hidden,), (flat,), {}),
        ("gelu", (flat,), (tensor("b", 32, batch_dim=0),), {}),
    ]
    graph = graph_of(calls, batch_rows=4)
    model = AnalyticModel()
    assert model.items(graph, [0], PLAIN, 4).saved_bytes == 0  # the input is resident, and no gradient flows to it
    assert model.items(graph, [1, 3], PLAIN, 4).saved_bytes == hidden.bytes
    assert model.items(graph, [1, 3], PLAIN, 1).saved_bytes == hidden.bytes // 4
    whole = model.items(graph, range(4), PLAIN, 4).saved_bytes
    assert whole <= sum(model.items(graph, [item], PLAIN, 4).saved_bytes for item in range(4))


def test_a_cpu_keeps_more_of_dropout_and_attention_than_a_gpu():
    q, k, v, out = (tensor(name, 2, 4, 16, 8) for name in "qkvo")
    calls = [
        ("dropout", (out,), (tensor("d", 2, 4, 16, 8),), {"p": 0.1, "train": True}),
        ("scaled_dot_product_attention", (q, k, v), (out,), {"dropout_p": 0.1}),
        ("rms_norm", (out,), (tensor("r", 2, 4, 16, 8),), {}),
    ]
    graph = graph_of(calls)
    model, gpu = AnalyticModel(), DEVICES["A100-40GB"]
    assert model.items(graph, [0], gpu, 1).saved_bytes == out.numel
    assert model.items(graph, [0], CPU, 1).saved_bytes == out.bytes
    scores = 2 * 4 * 16 * 16 * 4
    assert model.items(graph, [1], gpu, 1).saved_bytes == 4 * out.bytes + 2 * 4 * 16 * 4
    assert model.items(graph, [1], CPU, 1).saved_bytes == 4 * out.bytes + 3 * scores + 2 * out.bytes
    extra = model.items(graph, [2], CPU, 1).saved_bytes - model.items(graph, [2], gpu, 1).saved_bytes
    assert extra == out.bytes


def test_the_transient_is_the_largest_operators_gradients():
    graph = graph_of([layer(0, rows=4, width=8), layer(1, rows=4, width=8)])
    assert AnalyticModel().items(graph, [0, 1], PLAIN, 1).transient_bytes == 4 * (2 * 32 + 64)


def test_cross_entropy_has_two_gradients_of_the_scores_in_flight():
    scores, target = tensor("s", 16, 1000), tensor("t", 16, dtype="int64", grad=False)
    graph = graph_of([("cross_entropy_loss", (scores, target), (tensor("l"),), {})])
    assert AnalyticModel().items(graph, [0], PLAIN, 1).transient_bytes == pytest.approx(2 * scores.bytes, rel=0.001)


def test_an_update_moves_a_hundred_bytes_per_parameter():
    seconds = AnalyticModel().optimizer_s(4 * 10**9, "adamw", DEVICES["A100-80GB"])
    assert seconds.value == pytest.approx(100e9 / (0.8 * 2039e9), rel=0.001)
    assert AnalyticModel().optimizer_s(0, "adamw", CPU) == ZERO
    fused = AnalyticModel().optimizer_s(4 * 10**9, "adamw", DEVICES["A100-80GB"], fused=True)
    assert fused.value == pytest.approx(28e9 / (0.8 * 2039e9), rel=0.001)


def test_messages_and_reductions_are_modelled():
    model, cluster = AnalyticModel(), parse_cluster("2x4xA100-40GB")
    assert model.transfer_s(172 * 10**6, LINKS["NVLink3"]).value == pytest.approx(1e-3 + 5e-6)
    assert model.all_reduce_s(10**6, [0], cluster) == ZERO
    assert model.all_reduce_s(10**6, [0, 1], cluster).value < model.all_reduce_s(10**6, [0, 4], cluster).value


def test_a_message_is_the_less_certain_the_smaller_it_is_and_the_farther_it_goes():
    model, cluster = AnalyticModel(), parse_cluster("2x4xA100-40GB")
    near, middling, small, far = (
        model.collective_s("all_gather", size, ranks, cluster)
        for size, ranks in ((10**8, [0, 1]), (4 * 10**6, [0, 1]), (10**4, [0, 1]), (10**8, [0, 4]))
    )
    assert [found.high / found.value for found in (near, middling, small, far)] == pytest.approx([1.4, 1.8, 2.5, 4.0])
    assert {found.source for found in (small, middling, near, far)} == {"modelled"}


@pytest.mark.parametrize(("items", "rows", "message"), [([0], 0, "at least one row"), ([1], 1, "items 0 to 0, not 1")])
def test_a_question_without_sense_is_refused(items, rows, message):
    with pytest.raises(CostError, match=message):
        AnalyticModel().items(graph_of([layer(0)]), items, PLAIN, rows)


def test_models_share_nothing_and_equal_questions_have_equal_answers():
    graph = graph_of([layer(number) for number in range(5)], batch_rows=4)
    first, second = AnalyticModel(), AnalyticModel()
    assert first == second
    assert first.items(graph, [1, 2], CPU, 3) == second.items(graph, [1, 2], CPU, 3)
    assert first.items(graph, [1, 2], CPU, 3) == first.items(graph, [1, 2], CPU, 3)


def test_a_graph_of_thousands_of_operators_is_asked_about_without_delay():
    graph = graph_of([layer(number) for number in range(6000)], batch_rows=4)
    model = AnalyticModel()
    model.items(graph, [0], CPU, 4)
    begin = time.process_time()
    for first in range(0, 6000, 10):
        model.items(graph, range(first, first + 10), CPU, 4)
    assert time.process_time() - begin < 1.0  # takes about 10 ms; the limit only catches a pass over the graph
