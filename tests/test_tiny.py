"""The whole way once, in seconds: capture, plan, save, simulate, inspect, run on two ranks, take the state back."""

import pytest

import partita
from tests.training import CLIP, differences, loop_a, loop_c, reference, train
from tests.zoo import CASES

CASE = CASES["tied_words"]


def make_plan():
    """Plan for a described cluster: two stages on two CPUs."""
    graph = partita.capture(CASE.build(), CASE.example().args)
    return graph, partita.plan(
        graph,
        cluster="2xcpu",
        optimizer="sgd_momentum",
        search=partita.Search(pp=2, dp=1),
        limits=partita.Limits(num_microbatches=3),
    )


def train_as_planned(path):
    """Run a saved plan on this rank."""
    module = partita.auto_parallelize(CASE.build(), CASE.example().args, loss_fn=CASE.loss, plan=path)
    return str(module.plan.schedule.name), train(module, CASE, loop_c, clip=lambda pm: pm.clip_grad_norm_(CLIP))


@pytest.fixture(scope="module")
def planned():
    return make_plan()


def test_the_graph_tells_what_the_model_is(planned, tmp_path):
    graph, _ = planned
    assert [item.name for item in graph.items if item.module_path.startswith("blocks")] == [
        "blocks.0#0",
        "blocks.1#0",
        "blocks.2#0",
    ]
    assert graph.batch_rows == 8
    tied = next(tensor for tensor in graph.parameters if "embed.weight" in tensor.names)
    assert tied.names == ("embed.weight", "head.weight")
    graph.save(tmp_path / "graph.json")
    assert partita.ModelGraph.load(tmp_path / "graph.json") == graph


def test_the_plan_is_stable_as_text_and_says_the_same_after_loading(planned, tmp_path):
    _, plan = planned
    plan.save(tmp_path / "first.json")
    loaded = partita.Plan.load(tmp_path / "first.json")
    loaded.save(tmp_path / "second.json")
    assert loaded == plan
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    again = make_plan()[1]
    assert again.graph_fingerprint == plan.graph_fingerprint
    assert [stage.items for stage in again.stages] == [stage.items for stage in plan.stages]
    assert len(plan.stages) == 2
    assert plan.parameters["embed.weight"].ranks == (0, 1)


def test_the_simulated_step_is_the_predicted_one(planned, tmp_path):
    _, plan = planned
    timeline = partita.simulate(plan)
    assert timeline.step_time_s == pytest.approx(plan.predicted.step_time_s)
    timeline.save_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 1000


def test_the_report_shows_the_plan(planned):
    text = str(partita.inspect(planned[1]))
    for expected in ("TiedWords", "1f1b", "blocks.0#0", "F0 B0 F1 B1 F2 B2"):
        assert expected in text


def test_two_ranks_train_like_one_and_the_plain_model_takes_their_state(planned, pool, tmp_path):
    _, plan = planned
    plan.save(tmp_path / "plan.json")
    expected = reference("tied_words", "A")
    for schedule, record in pool.run(train_as_planned, 2, tmp_path / "plan.json"):
        assert schedule == plan.schedule.name == "1f1b"
        assert differences(record, expected) == []
    plain = CASE.build()
    plain.load_state_dict(record.state)
    assert loop_a(plain, CASE.step(9), CASE.loss).isfinite()
