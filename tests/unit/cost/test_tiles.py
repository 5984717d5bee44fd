"""Waves of tiles by hand, and what they add to a device's price."""

from dataclasses import replace

import pytest

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import DEVICES
from partita.cost.tiles import EDGE, FILL_S, Product, product_of, tiled_s
from tests.unit.cost.tensors import graph_of, tensor, weight

A100 = DEVICES["A100-80GB"]


def half(name, *shape):
    return tensor(name, *shape, dtype="bfloat16", batch_dim=0)


def test_a_wave_by_hand_and_one_tile_more_takes_another():
    full = Product(rows=256 * 108, columns=128, inner=4096)
    flops = 2 * full.rows * full.columns * full.inner
    assert tiled_s(full, 1e12, 108) == pytest.approx(flops * (1 + EDGE / 256 + EDGE / 128) / 1e12)
    more = tiled_s(replace(full, rows=full.rows + 1), 1e12, 108)
    assert more > 1.3 * tiled_s(full, 1e12, 108)


@pytest.mark.parametrize(
    ("name", "left", "right", "result", "expected"),
    [
        ("linear", (4, 32, 8), (16, 8), (4, 32, 16), Product(128, 16, 8)),
        ("bmm", (4, 32, 8), (4, 8, 16), (4, 32, 16), Product(32, 16, 8, 4)),
        ("matmul", (4, 2, 32, 8), (4, 2, 8, 16), (4, 2, 32, 16), Product(32, 16, 8, 8)),
        ("mm", (32, 8), (8, 16), (32, 16), Product(32, 16, 8)),
    ],
)
def test_shapes_of_products(name, left, right, result, expected):
    x, y, z = half("x", *left), half("y", *right), half("z", *result)
    graph = graph_of([(name, (x, y), (z,), {})])
    assert product_of(graph.ops[0], graph.tensor_map()) == expected


def test_what_is_no_product_has_no_shape():
    graph = graph_of([("gelu", (half("x", 4, 4),), (half("y", 4, 4),), {})])
    assert product_of(graph.ops[0], graph.tensor_map()) is None


def test_a_product_takes_its_waves_or_its_traffic_and_its_fill():
    x, y = half("x", 16384, 4096), half("y", 16384, 4096)
    graph = graph_of([("linear", (x, weight("w", 4096, 4096, dtype="bfloat16")), (y,), {})], batch_rows=16384)
    model, largest = AnalyticModel(), 312e12 * 0.70

    def seconds(product):
        return max(tiled_s(product, 312e12 * 0.92, 108), product.flops / largest)

    for rows in (640, 1024, 16384):
        cost = model.items(graph, [0], A100, rows)
        forward, weights = Product(rows, 4096, 4096), Product(4096, 4096, rows)
        assert cost.forward_s.value == pytest.approx(FILL_S + seconds(forward))
        assert cost.backward_s.value == pytest.approx(2 * FILL_S + seconds(forward) + seconds(weights))
        flat = model.items(graph, [0], replace(A100, units=0), rows)
        assert flat.forward_s.value == pytest.approx(forward.flops / largest)
    short = Product(300, 1024, 4096)  # 48 tiles of 64 x 128 for 108 multiprocessors
    assert seconds(short) > 1.2 * short.flops / largest
    traffic = (4096**2 + 2 * 4096 * 8) * 2 / (2039e9 * 0.8)
    assert model.items(graph, [0], A100, 8).forward_s.value == pytest.approx(FILL_S + traffic)
