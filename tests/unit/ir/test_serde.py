"""Documents: round trip to the byte, strict reading, and places in messages."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import InvalidPlanError
from partita.ir.cluster import Cluster
from partita.ir.graph import ModelGraph
from partita.ir.layout import Layout, Partial, Shard
from partita.ir.plan import Plan
from partita.ir.schedule import Schedule
from partita.ir.serde import LINE, from_json, to_json
from tests.plans import make_cluster, make_graph, make_plan, make_schedule
from tests.property.strategies import clusters, model_graphs, plans, schedules

MAKERS = {Plan: make_plan, ModelGraph: make_graph, Cluster: make_cluster, Schedule: make_schedule}


def reread(noun):
    text = to_json(noun)
    again = from_json(type(noun), text)
    assert again == noun
    assert to_json(again) == text
    return text


@pytest.mark.parametrize("cls", MAKERS)
def test_round_trip_by_hand(cls):
    text = reread(MAKERS[cls]())
    assert text.endswith("}\n")
    assert max(map(len, text.splitlines())) <= LINE + 1
    assert list(json.loads(text))[:2] == ["schema", "version"]


@given(st.one_of(plans(), model_graphs(), clusters(), schedules()))
def test_round_trip_of_any_noun(noun):
    reread(noun)


@given(st.floats(allow_nan=False), st.text(), st.integers())
def test_round_trip_of_any_value(number, text, whole):
    plan = make_plan(model=text, global_batch=whole)
    plan = replace(plan, runner_ups=(replace(plan.runner_ups[0], step_time_s=number, reason=text),))
    reread(plan)


def test_infinities_are_text_so_that_the_document_is_strict_json():
    def no_constant(name):
        raise AssertionError(name)

    document = json.loads(to_json(make_plan()), parse_constant=no_constant)
    assert document["runner_ups"][-1]["step_time_s"] == "inf"


def test_the_wall_time_is_not_written():
    plan = make_plan()
    slower = replace(plan, solve=replace(plan.solve, wall_s=99.0))
    assert to_json(slower) == to_json(plan)
    assert from_json(Plan, to_json(slower)).solve.wall_s == 0.0


def test_a_whole_number_in_a_float_field_is_written_as_a_float():
    plan = make_plan()
    text = to_json(replace(plan, predicted=replace(plan.predicted, bubble_fraction=0)))
    assert '"bubble_fraction": 0.0' in text


def test_placements_are_readable():
    parameter = make_plan().parameter_plans[0]
    layout = Layout(axes=("dp", "tp", "cp"), placements=(*parameter.layout.placements, Shard(dim=1), Partial()))
    text = reread(make_plan(parameter_plans=(replace(parameter, layout=layout),)))
    assert '"placements": ["replicate", {"shard": 1}, "partial"]' in text


def test_schedules_are_lines_of_the_grammar():
    assert json.loads(to_json(make_schedule()))["ranks"] == list(make_schedule().lines())
    reread(Schedule(name="empty", num_stages=1, num_microbatches=1, ranks=((), ())))


def change(path, value, cls=Plan):
    """Return the hand-made noun's document with one entry changed; the value ``...`` removes it."""
    document = json.loads(to_json(MAKERS[cls]()))
    entry = document
    for step in path[:-1]:
        entry = entry[step]
    if value is ...:
        del entry[path[-1]]
    else:
        entry[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "place", "says"),
    [
        (["stages", 1, "ranks", 0], "2", "$.stages[1].ranks[0]", "expected a whole number, found text ('2')"),
        (["stages", 1, "ranks"], 2, "$.stages[1].ranks", "expected an array, found a number (2)"),
        (["stages", 1, "ranks"], ..., "$.stages[1]", "missing key 'ranks'"),
        (["stages", 1, "rank"], [0], "$.stages[1]", "unknown key 'rank'"),
        (["stages", 0, "recompute"], "half", "$.stages[0].recompute", "expected one of none, full; found text"),
        (["stages", 0], [], "$.stages[0]", "expected an object (StagePlan), found an array"),
        (["blocks", 0, "forward_s", "value"], "fast", "$.blocks[0].forward_s.value", "expected a number"),
        (["blocks", 0, "forward_s", "value"], True, "$.blocks[0].forward_s.value", "expected a number"),
        (["blocks", 0, "repeat_of"], 1.5, "$.blocks[0].repeat_of", "expected a whole number, found a number (1.5)"),
        (["global_batch"], True, "$.global_batch", "expected a whole number, found a truth value (True)"),
        (["model"], None, "$.model", "expected text, found null"),
        (["parameter_plans", 0, "requires_grad"], 1, "$.parameter_plans[0].requires_grad", "expected true or false"),
        (["parameter_plans", 0, "layout", "placements", 0], "R",
         "$.parameter_plans[0].layout.placements[0]", 'expected {"shard": DIM}'),
        (["parameter_plans", 0, "layout", "placements", 0], {"shard": "0"},
         "$.parameter_plans[0].layout.placements[0]", "expected a whole number"),
        (["cluster", "kinds", 0, "peak_flops", 0], ["float32"], "$.cluster.kinds[0].peak_flops[0]", "array of 2"),
        (["cluster", "kinds", 0, "peak_flops", 1, 1], None, "$.cluster.kinds[0].peak_flops[1][1]", "expected a number"),
        (["schedule", "ranks", 1], "1F0 1G0", "$.schedule.ranks[1]", "unknown action 'G0'"),
        (["schedule", "ranks", 1], "1F0  1B0", "$.schedule.ranks[1]", "expected a stage number"),
        (["schedule", "ranks", 0], 7, "$.schedule.ranks[0]", "expected a line of actions"),
        (["solve", "wall_s"], 1.0, "$.solve", "unknown key 'wall_s'"),
        (["schema"], "partita.graph", "$.schema", "expected 'partita.plan', found 'partita.graph'"),
        (["schema"], ..., "$.schema", "found None"),
        (["version"], 2, "$.version", "expected 1, found 2"),
        (["version"], True, "$.version", "expected 1, found True"),
        (["version"], ..., "$.version", "expected 1, found None"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_place(path, value, place, says):
    with pytest.raises(InvalidPlanError) as caught:
        from_json(Plan, change(path, value))
    assert caught.value.path == place
    assert caught.value.message.startswith(f"{place}: ")
    assert says in caught.value.message
    assert caught.value.hint


def test_a_misspelt_key_gets_a_suggestion():
    document = json.loads(to_json(make_plan()))
    document["stages"][0]["ranke"] = document["stages"][0].pop("ranks")
    with pytest.raises(InvalidPlanError, match="did you mean 'ranks'"):
        from_json(Plan, json.dumps(document))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"schema": "partita.plan", "version": 1,', "not JSON.*line 1"),
        ("[]", "expected an object, found an array"),
        ('{"schema": "partita.plan", "schema": "partita.plan"}', "'schema' occurs twice"),
        ('{"schema": NaN}', "NaN is not JSON"),
        ('{"schema": -Infinity}', "-Infinity is not JSON"),
        ("[" * 100_000, "not a partita.plan document"),
        ('{"schema": ' + "1" * 5000 + "}", "not a partita.plan document"),
    ],
)
def test_what_is_no_document_is_refused(text, says):
    with pytest.raises(InvalidPlanError, match=says):
        from_json(Plan, text)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_a_number_beyond_floats_is_refused(number):
    text = to_json(make_plan()).replace('"bubble_fraction": 0.09', f'"bubble_fraction": {number}')
    with pytest.raises(InvalidPlanError, match="too large for a float"):
        from_json(Plan, text)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("global_batch", 8.0, r"\$\.global_batch: expected a whole number"),
        ("memory_limits", [1, 2], r"\$\.memory_limits: expected a tuple"),
        ("model", None, r"\$\.model: expected text"),
        ("cluster", None, r"\$\.cluster: expected a Cluster"),
        ("loss", "somewhere", r"\$\.loss: expected one of"),
    ],
)
def test_a_wrong_field_is_not_written(field, value, says):
    with pytest.raises(InvalidPlanError, match=says):
        to_json(make_plan(**{field: value}))


def test_nan_is_not_written():
    plan = make_plan()
    with pytest.raises(InvalidPlanError, match=r"\$\.predicted\.bubble_fraction: NaN"):
        to_json(replace(plan, predicted=replace(plan.predicted, bubble_fraction=float("nan"))))


def test_only_documents_have_a_schema():
    with pytest.raises(TypeError, match="a document holds one of ModelGraph, Cluster, Schedule, Plan"):
        to_json(make_plan().stages[0])
    with pytest.raises(TypeError, match="not int"):
        from_json(int, "{}")


def test_files_are_equal_to_the_byte(tmp_path):
    plan = make_plan()
    plan.save(tmp_path / "a.json")
    Plan.load(tmp_path / "a.json").save(str(tmp_path / "b.json"))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes() == to_json(plan).encode()
    graph = make_graph()
    graph.save(tmp_path / "graph.json")
    assert ModelGraph.load(tmp_path / "graph.json") == graph


def test_errors_of_files_name_the_file(tmp_path):
    make_graph().save(tmp_path / "graph.json")
    with pytest.raises(InvalidPlanError, match=r"graph\.json: .*schema") as caught:
        Plan.load(tmp_path / "graph.json")
    assert caught.value.path == "$.schema"
    (tmp_path / "latin.json").write_bytes(b'{"schema": "\xe9"}')
    with pytest.raises(InvalidPlanError, match="not UTF-8"):
        Plan.load(tmp_path / "latin.json")


def test_loading_checks_the_rules(tmp_path):
    plan = make_plan(global_batch=1)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(InvalidPlanError, match="P027"):
        Plan.load(tmp_path / "plan.json")


def test_a_large_graph_is_read_in_a_second(tmp_path):
    graph = make_graph()
    big = replace(graph, ops=graph.ops * 860, tensors=graph.tensors * 600, items=graph.items * 400)
    text = to_json(big)
    start = time.perf_counter()
    assert len(from_json(ModelGraph, text).ops) == 6020
    assert time.perf_counter() - start < 1.0
