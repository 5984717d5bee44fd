"""Every rule: a noun that breaks just this one, and the list is complete."""

from dataclasses import replace

import pytest
from hypothesis import given

from partita.errors import InvalidPlanError
from partita.ir.cluster import Cluster, Level
from partita.ir.graph import ModelGraph
from partita.ir.layout import Layout, Replicate, Shard
from partita.ir.plan import Estimate, Plan
from partita.ir.schedule import Action, Schedule, parse_actions
from partita.ir.verify import TABLES, check, rules_of, verify
from tests.plans import make_cluster, make_device, make_graph, make_plan, make_schedule
from tests.property.strategies import clusters, model_graphs, plans, schedules

NOUNS = {Cluster: make_cluster(), ModelGraph: make_graph(), Schedule: make_schedule(), Plan: make_plan()}
G, C, S, P = NOUNS[ModelGraph], NOUNS[Cluster], NOUNS[Schedule], NOUNS[Plan]


def at(noun, field, index, /, **changes):
    """Return the noun with one element of a tuple field changed."""
    entries = list(getattr(noun, field))
    entries[index] = replace(entries[index], **changes)
    return replace(noun, **{field: tuple(entries)})


def device(**changes):
    return replace(C, kinds=(make_device(**changes),))


def link(**changes):
    return at(C, "levels", 0, link=replace(C.levels[0].link, **changes))


def lines(*texts):
    return replace(S, ranks=tuple(parse_actions(text) for text in texts))


def first_action(**changes):
    actions = (replace(S.ranks[0][0], **changes), *S.ranks[0][1:])
    return replace(S, ranks=(actions, S.ranks[1]))


def stage(index, /, **changes):
    return at(P, "stages", index, **changes)


def solve(**changes):
    return replace(P, solve=replace(P.solve, **changes))


def predicted(**changes):
    return replace(P, predicted=replace(P.predicted, **changes))


LINE_0, LINE_1 = S.lines()
FIRST_HOME = {"stages": (0,), "ranks": (0, 1)}
BROKEN = [
    ("C001", replace(C, device_kinds=())),
    ("C002", replace(C, device_kinds=(0, 0, 0, 0, 1))),
    ("C003", replace(C, kinds=(make_device(), make_device()))),
    ("C004", device(memory_bytes=0)),
    ("C004", device(peak_flops=(("float32", -1.0),))),
    ("C004", device(launch_s=-1e-6)),
    ("C004", device(memory_bandwidth=float("nan"))),
    ("C005", device(efficiency=(("matmul", 1.5),))),
    ("C006", link(bandwidth=0.0)),
    ("C006", link(latency_s=-1.0)),
    ("C007", at(C, "levels", 0, group_size=4)),
    ("C007", at(C, "levels", 0, group_size=0)),
    ("C007", replace(C, levels=(*C.levels, Level(name="site", link=C.levels[0].link, group_size=6)))),
    ("C008", replace(C, levels=C.levels[:1])),
    ("C009", at(C, "levels", 0, group_links=(C.levels[0].link,))),
    ("C008", replace(C, levels=())),
    ("S001", replace(S, num_microbatches=0, ranks=((), ()))),
    ("S002", first_action(stage=2)),
    ("S003", first_action(microbatch=2)),
    ("S003", first_action(microbatch=None)),
    ("S003", replace(S, ranks=((*S.ranks[0][:-1], replace(S.ranks[0][-1], microbatch=0)), S.ranks[1]))),
    ("S004", first_action(peer=1)),
    ("S004", lines(LINE_0.replace("0SEND_F0>1", "0SEND_F0>0"), LINE_1)),
    ("S005", lines(LINE_0.removesuffix(" 0REDUCE_GRAD"), f"{LINE_1} 0REDUCE_GRAD")),
    ("S006", lines(f"{LINE_0} 0REDUCE_GRAD", LINE_1)),
    ("S007", lines(LINE_0, LINE_1.replace(" 1B0", ""))),
    ("S007", lines(LINE_0, LINE_1.replace(" 1B0", " 1I0"))),
    ("S007", lines(LINE_0, LINE_1.replace(" 1B0", " 1B0 1W0"))),
    ("S008", lines(LINE_0, LINE_1.replace("1F0 1B0", "1B0 1F0"))),
    ("S008", lines(LINE_0.replace("0F0 0SEND_F0>1", "0SEND_F0>1 0F0"), LINE_1)),
    ("S008", lines(LINE_0, LINE_1.replace("1RECV_F0<0 1F0", "1F0 1RECV_F0<0"))),
    ("S008", lines(LINE_0.replace("0RECV_B0<1 0B0", "0B0 0RECV_B0<1"), LINE_1)),
    ("S008", lines(LINE_0, LINE_1.replace("1B0 1SEND_B0>0", "1SEND_B0>0 1B0"))),
    ("S009", lines(LINE_0, LINE_1.replace("1RECV_F0<0 ", ""))),
    ("S009", lines(LINE_0.replace("0SEND_F0>1 ", ""), LINE_1)),
    ("S010", lines(LINE_0.replace("0B1 0REDUCE_GRAD", "0REDUCE_GRAD 0B1"), LINE_1)),
    ("G001", replace(G, tensors=(*G.tensors, G.tensors[0]))),
    ("G002", at(G, "ops", 6, id=7)),
    ("G003", at(G, "items", 5, id=7)),
    ("G004", replace(G, outputs=("nothing",))),
    ("G004", at(G, "ops", 5, saved=("nothing",))),
    ("G005", at(G, "items", 5, ops=(4, 7))),
    ("G005", at(G, "items", 5, ops=(5, 8))),
    ("G005", at(G, "items", 4, ops=(5, 4))),
    ("G006", at(G, "tensors", 4, dtype="float7")),
    ("G006", at(G, "tensors", 4, shape=(8, -1))),
    ("G007", at(G, "ops", 5, reads=("s", "p_embed", "y_flat"))),
    ("G008", at(G, "ops", 5, writes=("y", "h1"))),
    ("G008", at(G, "ops", 0, writes=("mask", "x"))),
    ("G009", at(G, "items", 0, reads=("x", "h1"))),
    ("G010", at(G, "items", 5, writes=("y_flat", "s"))),
    ("G011", at(G, "items", 2, reads=("e", "p_w0"))),
    ("G010", at(G, "items", 5, ops=(5, 6))),
    ("G012", replace(G, outputs=("y",))),
    ("G013", at(G, "tensors", 4, batch_dim=2)),
    ("G013", replace(G, batch_rows=None)),
    ("G014", replace(G, batch_rows=-1)),
    ("G015", at(G, "tensors", 9, storage="nowhere")),
    ("G015", at(G, "tensors", 9, storage="s")),
    ("G016", at(G, "tensors", 3, names=())),
    ("G016", at(G, "tensors", 3, names=("head.weight",))),
    ("G017", at(G, "ops", 3, flops=-1)),
    ("G018", replace(G, colocated=((4, 5), (5,)))),
    ("G018", replace(G, colocated=((6,),))),
    ("G019", at(G, "items", 0, random=True)),
    ("G019", at(G, "items", 4, replicable=True)),
    ("G019", at(G, "items", 0, reads=("x", "p_w0"))),
    ("G020", at(G, "ops", 3, random=True)),
    ("G021", at(G, "ops", 3, kind="unknown")),
    ("G021", replace(G, unknown_ops=("aten.add.Tensor",))),
    ("G022", replace(G, scalar_loss=True)),
    ("P001", at(P, "blocks", 3, id=4)),
    ("P002", stage(1, index=2)),
    ("P003", stage(1, ranks=())),
    ("P003", stage(1, ranks=(2, 2))),
    ("P003", stage(1, ranks=(2, 5))),
    ("P004", replace(P, memory_limits=P.memory_limits[1:])),
    ("P004", predicted(peak_bytes=P.predicted.peak_bytes[1:])),
    ("P005", stage(1, blocks=(2, 3, 4))),
    ("P006", replace(P, schedule=replace(P.schedule, num_stages=3))),
    ("P007", at(P, "edges", 0, target=2)),
    ("P007", at(P, "parameter_plans", 0, stages=(0, 2))),
    ("P008", stage(1, blocks=(2,), items=(0, 3))),
    ("P008", stage(1, blocks=(3, 2))),
    ("P009", at(P, "blocks", 3, items=(3, 4, 5))),
    ("P010", stage(0, items=(0, 1, 2, 3))),
    ("P010", stage(0, items=(0, 1))),
    ("P010", stage(0, items=(1, 2, 0))),
    ("P011", at(P, "blocks", 2, repeat_of=3)),
    ("P011", at(at(P, "blocks", 1, repeat_of=0), "blocks", 2, repeat_of=1)),
    ("P012", replace(
        at(at(stage(1, ranks=(1, 3), memory=P.stages[0].memory), "parameter_plans", 0, ranks=(0, 1, 3)),
           "parameter_plans", 2, ranks=(1, 3)),
        predicted=replace(P.predicted, peak_bytes=(2**24, 2**24, 0, 2**24, 0)))),
    ("P013", replace(P, data_degree=1)),
    ("P013", stage(0, tensor_degree=2)),
    ("P014", at(P, "edges", 0, tensors=())),
    ("P014", replace(P, edges=P.edges * 2)),
    ("P015", replace(P, schedule=replace(P.schedule, ranks=P.schedule.ranks[::-1]))),
    ("P016", replace(P, edges=())),
    ("P016", at(P, "edges", 0, backward_bytes=0)),
    ("P016", replace(P, schedule=lines("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))),
    ("P017", replace(P, memory_limits=(2**20, *P.memory_limits[1:]))),
    ("P018", stage(0, memory=replace(P.stages[0].memory, weights=0))),
    ("P018", predicted(peak_bytes=(*P.predicted.peak_bytes[:4], 1))),
    ("P019", stage(0, memory=replace(P.stages[0].memory, skips=-(2**20), weights=3 * 2**20))),
    ("P020", stage(0, in_flight=3)),
    ("P020", stage(0, in_flight=0)),
    ("P021", at(P, "parameter_plans", 1, ranks=(0,))),
    ("P021", at(P, "parameter_plans", 1, ranks=())),
    ("P021", at(P, "parameter_plans", 1, stages=(), ranks=(7,))),
    ("P022", at(P, "parameter_plans", 1, names=("other", "layers.0.weight"))),
    ("P022", at(P, "parameter_plans", 1, names=("layers.0.weight", "head.weight"))),
    ("P023", at(P, "parameter_plans", 1, layout=Layout(axes=("dp",), placements=(Shard(dim=2),)))),
    ("P023", at(P, "parameter_plans", 1, layout=Layout(axes=("dp", "tp"), placements=(Replicate(),)))),
    ("P023", at(P, "parameter_plans", 1, bytes_per_rank=2**20)),
    ("P024", stage(0, forward_s=Estimate(value=3.0, low=1.0, high=2.0, source="modelled"))),
    ("P024", at(P, "blocks", 0, backward_s=Estimate(value=-1.0, low=-1.0, high=2.0, source="modelled"))),
    ("P024", predicted(step_time=Estimate(value=1.0, low=1.0, high=float("inf"), source="modelled"))),
    ("P025", predicted(bubble_fraction=1.5)),
    ("P025", predicted(measured_share=-0.1)),
    ("P026", solve(bound=0.05)),
    ("P026", solve(bound=float("nan"))),
    ("P026", solve(status="optimal")),
    ("P027", replace(P, global_batch=3)),
    ("P028", replace(P, runner_ups=P.runner_ups[::-1])),
    ("P029", at(P, "edges", 0, bytes=-1)),
    ("P029", at(P, "blocks", 0, parameter_bytes=-1)),
]  # fmt: skip


@pytest.mark.parametrize("noun", NOUNS.values(), ids=[cls.__name__ for cls in NOUNS])
def test_the_hand_made_nouns_keep_every_rule(noun):
    assert verify(noun) == ()
    check(noun)


@pytest.mark.parametrize(("code", "noun"), BROKEN, ids=[f"{code}-{index}" for index, (code, _) in enumerate(BROKEN)])
def test_a_rule_is_broken_alone(code, noun):
    assert {violation.code for violation in verify(noun)} == {code}


def test_every_rule_has_a_test_and_a_number_of_its_own():
    rules = [rule for cls in NOUNS for group in rules_of(cls) for rule in group]
    codes = [rule.code for rule in rules]
    assert len(set(codes)) == len(codes)
    assert set(codes) == {code for code, _ in BROKEN}
    for cls in NOUNS:
        numbers = [rule.code for group in rules_of(cls) for rule in group]
        letter = {"ModelGraph": "G", "Cluster": "C", "Schedule": "S", "Plan": "P"}[cls.__name__]
        assert numbers == [f"{letter}{number:03}" for number in range(1, len(numbers) + 1)]


def test_the_sentences_differ_and_end_without_a_full_stop():
    sentences = [rule.sentence for cls in NOUNS for group in rules_of(cls) for rule in group]
    assert len(set(sentences)) == len(sentences)
    assert not [sentence for sentence in sentences if sentence.endswith(".")]
    assert set(TABLES) == {cls.__name__ for cls in NOUNS}


@given(plans())
def test_drawn_plans_keep_every_rule(plan):
    assert verify(plan) == ()


@given(model_graphs())
def test_drawn_graphs_keep_every_rule(graph):
    assert verify(graph) == ()


@given(clusters())
def test_drawn_clusters_keep_every_rule(cluster):
    assert verify(cluster) == ()


@given(schedules())
def test_drawn_schedules_keep_every_rule(schedule):
    assert verify(schedule) == ()


def test_a_plans_cluster_and_schedule_are_checked_with_it():
    found = verify(replace(P, cluster=device(memory_bytes=0), schedule=replace(P.schedule, num_microbatches=3)))
    assert {violation.code: violation.place for violation in found}["C004"] == "cluster.kinds[0].memory_bytes"
    assert "S007" in {violation.code for violation in found}


def test_meaning_is_asked_only_of_a_sound_structure():
    broken = replace(stage(1, ranks=(2, 9)), global_batch=1)
    assert {violation.code for violation in verify(broken)} == {"P003"}


def test_the_error_lists_what_is_wrong():
    with pytest.raises(InvalidPlanError) as caught:
        check(replace(P, global_batch=1, data_degree=1))
    assert "P027 global_batch: 1 rows for 1 replicas of 2 microbatches" in str(caught.value)
    assert "3 places" in caught.value.message
    assert [violation.code for violation in caught.value.violations] == ["P013", "P013", "P027"]


def test_a_long_list_is_cut():
    many = replace(G, ops=tuple(replace(op, flops=-1, bytes=-1) for op in G.ops))
    with pytest.raises(InvalidPlanError, match="and 6 more"):
        check(many)


def test_other_objects_have_no_rules():
    with pytest.raises(TypeError, match="there are rules for ModelGraph"):
        verify(Action(stage=0, kind="F", microbatch=0))
