"""The table's file and curves, and the prices that follow from them."""

import json
from dataclasses import replace

import pytest

from partita.cost.catalogue import LINKS
from partita.cost.clusters import parse_cluster
from partita.cost.profile_table import Curve, ProfileTable, Spread, Timing
from partita.cost.profiled import ProfiledModel, reduction_layout
from partita.errors import CostError
from partita.ir.structure import structure_digest
from tests.plans import make_graph

GRAPH = make_graph()
ITEM = (len(GRAPH.items) - 1,)
CPU = parse_cluster("1xcpu").kinds[0]


def _spread(value):
    return Spread(value=value, low=0.9 * value, high=1.2 * value, repeats=10)


def _table(*rows, **options):
    digest = structure_digest(GRAPH, GRAPH.tensor_map(), ITEM)
    timings = {(digest, at): Timing(label="x", forward=_spread(at * 1e-3), backward=_spread(at * 2e-3)) for at in rows}
    return ProfileTable(device="cpu", environment="here", date="2026-01-01", cores=2, timings=timings, **options)


def _forward(table, rows):
    return ProfiledModel(table).items(GRAPH, ITEM, CPU, rows).forward_s


def test_what_was_measured_is_measured_with_its_range():
    found = _forward(_table(4), 4)
    assert (found.value, found.low, found.high, found.source) == (
        4e-3,
        pytest.approx(3.6e-3),
        pytest.approx(4.8e-3),
        "measured",
    )


@pytest.mark.parametrize(("rows", "expected"), [(4, 4e-3), (6, 6e-3), (16, 16e-3), (1, 1e-3)])
def test_other_rows_are_interpolated(rows, expected):
    found = _forward(_table(2, 8), rows)
    assert found.value == pytest.approx(expected)
    assert found.source == "interpolated"


def test_prices_never_fall_with_the_rows():
    values = [_forward(_table(2, 4, 8), rows).value for rows in range(1, 20)]
    assert values == sorted(values)


def test_what_was_not_measured_and_other_devices_are_modelled():
    model = ProfiledModel(_table(4))
    assert model.items(GRAPH, (0,), CPU, 4).forward_s.source == "modelled"
    assert model.items(GRAPH, ITEM, replace(CPU, name="other"), 4).forward_s.source == "modelled"


def test_ranks_that_share_cores_take_longer():
    model = ProfiledModel(_table(4))
    model.cluster(parse_cluster("4xcpu"))
    assert model.items(GRAPH, ITEM, CPU, 4).forward_s.value == pytest.approx(8e-3)
    model.cluster(parse_cluster("2xcpu"))
    assert model.items(GRAPH, ITEM, CPU, 4).forward_s.value == pytest.approx(4e-3)


def test_each_range_of_sizes_has_its_own_line():
    curve = Curve(((1000, 1e-5), (2000, 2e-5), (10_000, 2.8e-5), (20_000, 2.7e-5)))
    assert curve.seconds(1500) == pytest.approx(1.5e-5)
    assert curve.seconds(6000) == pytest.approx(2.4e-5)
    assert curve.seconds(15_000) == pytest.approx(2.8e-5)  # a measured fall is not believed
    assert curve.seconds(1) == 1e-5
    first, second, _ = curve.ranges()
    assert second.latency_s + 6000 * second.seconds_per_byte == pytest.approx(2.4e-5)
    assert first.seconds_per_byte == pytest.approx(1e-8)


def test_links_updates_and_reductions_follow_their_curves():
    line = Curve(((1, 1e-5), (2**20, 1e-3), (2**22, 2e-3)))
    model = ProfiledModel(_table(4, links={"host": line}, reductions={"2": line}, updates={"adamw": line}))
    cluster = model.cluster(parse_cluster("2xcpu"))
    link = cluster.link(0, 1)
    assert link.latency_s == 1e-5
    assert model.transfer_s(2**22, link).value == 2e-3
    assert model.transfer_s(2**22, LINKS["loopback"]).source == "modelled"
    assert model.all_reduce_s(2**20, (0, 1), cluster).value == 1e-3
    assert model.all_reduce_s(2**20, (0,), cluster).value == 0.0
    assert model.optimizer_s(2**20, "adamw", CPU).value == 1e-3
    assert model.optimizer_s(2**20, "sgd", CPU).source == "modelled"


def test_a_reduction_is_known_by_how_its_ranks_lie():
    cluster = parse_cluster("2x8xH100-80GB")
    assert reduction_layout(range(16), cluster) == "2x8"
    assert reduction_layout((0, 8), cluster) == "2x1"
    assert reduction_layout((0, 1, 2, 3), cluster) == "4"


def test_outliers_are_flagged_and_do_not_count():
    spread = Spread.of([1.0, 1.1, 1.0, 1.2, 1.1, 1.0, 1.1, 17.0])
    assert spread.value == 1.0
    assert spread.high in {1.1, 1.2}
    assert spread.outliers == 1


def test_the_file_gives_the_same_table_and_the_same_bytes(tmp_path):
    table = _table(2, 4, links={"host": Curve(((1, 1e-5), (2, 2e-5)))}, skipped={"abc": "too large"}, complete=("k",))
    path = table.save(tmp_path / "a" / "t.json")
    assert ProfileTable.load(path) == table
    assert table.save(tmp_path / "b.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=99), "not a profile of version"),
        (lambda data: data.pop("cores"), "wrong form"),
        (lambda data: next(iter(data["timings"].values()))["forward"].update(value=-1), "wrong form"),
        (lambda data: data["links"].update(host={"points": []}), "wrong form"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, change, message):
    path = _table(2).save(tmp_path / "t.json")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CostError, match=message):
        ProfileTable.load(path)


def test_a_damaged_cache_counts_as_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    table = _table(2)
    path = table.save()
    assert ProfileTable.cached("cpu", "here") == table
    path.write_text("{")
    assert not ProfileTable.cached("cpu", "here").timings
    assert not ProfileTable.cached("cpu", "elsewhere").timings


def test_tables_of_one_environment_join():
    both = _table(2).joined(_table(4))
    assert sorted(rows for _, rows in both.timings) == [2, 4]
    with pytest.raises(CostError, match="cannot join"):
        both.joined(replace(_table(1), environment="elsewhere"))
