import subprocess
import sys
from dataclasses import replace

import pytest

from partita.cost.analytic import AnalyticModel
from partita.errors import InfeasibleError, SolverLimitError
from partita.ir.cluster import Cluster, DeviceSpec, Level, Link
from partita.ir.plan import Plan
from partita.ir.request import Limits, Search
from partita.ir.serde import to_json
from partita.ir.verify import verify
from partita.planner import make_plan
from partita.simulator import simulate_plan
from tests.unit.partitioner.model_graphs import chain_graph, transformer_graph

KIB, MIB = 2**10, 2**20
FAST = Link(latency_s=1e-6, bandwidth=1e10)
SLOW = Link(latency_s=1e-4, bandwidth=1e8)


def device(**changes):
    base = DeviceSpec(
        name="chip",
        platform="cpu",
        memory_bytes=64 * MIB,
        peak_flops=(("float32", 1e9),),
        memory_bandwidth=1e10,
        launch_s=1e-6,
        source="made up",
    )
    return replace(base, **changes)


def cluster(count, *, link=FAST, hosts=1, kinds=None, device_kinds=None):
    levels = [Level(name="host", link=link, group_size=count // hosts)]
    if hosts > 1:
        levels.append(Level(name="rack", link=SLOW, group_size=count))
    return Cluster(
        name=f"{count}xchip",
        kinds=kinds or (device(),),
        device_kinds=device_kinds or (0,) * count,
        levels=tuple(levels),
    )


def plan_for(graph, count=4, **arguments):
    plan = make_plan(graph, arguments.pop("cluster", None) or cluster(count), **arguments)
    assert verify(plan) == ()
    return plan


def degrees(plan):
    return len(plan.stages), plan.data_degree


def test_replicas_when_the_model_is_small_and_the_work_is_not():
    graph = transformer_graph(layers=2, width=16, vocabulary=16, tokens=256, rows=8)
    assert degrees(plan_for(graph, 4, loss="model", optimizer="sgd")) == (1, 4)


def test_a_pipeline_when_memory_is_tight():
    graph = transformer_graph(layers=8, width=64, vocabulary=64)
    roomy = plan_for(graph, 4, loss="model", search=Search(dp=(1, 4)), limits=Limits(memory_bytes=64 * MIB))
    tight = plan_for(graph, 4, loss="model", search=Search(dp=(1, 4)), limits=Limits(memory_bytes=1_600 * KIB))
    assert max(tight.predicted.peak_bytes) <= 1_600 * KIB < sum(tight.predicted.peak_bytes)
    assert len(tight.stages) > 1
    assert tight.predicted.step_time_s >= roomy.predicted.step_time_s * (1 - 1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum", "adamw", "adafactor", "8"])
@pytest.mark.parametrize("loss", ["outside", "model"])
def test_every_parameter_has_a_home_and_every_rank_its_limit(optimizer, loss):
    graph = transformer_graph(layers=4)
    limits = Limits(memory_bytes=4 * MIB)
    plan = plan_for(graph, 4, optimizer=optimizer, loss=loss, limits=limits)
    assert set(plan.parameters) == {tensor.id for tensor in graph.parameters}
    assert all(peak <= 4 * MIB for peak in plan.predicted.peak_bytes)
    assert plan.parameters["unread.weight"].stages == ()
    assert plan.parameters["unread.weight"].ranks == plan.stages[0].ranks
    assert any("unread.weight" in note for note in plan.notes)
    assert sorted(block for stage in plan.stages for block in stage.blocks) == [b.id for b in plan.blocks]
    assert plan.solve.bound <= plan.solve.objective
    assert plan.schedule.name == {"outside": "gpipe", "model": "1f1b"}[loss]


def test_a_tied_parameter_lives_on_both_stages_and_is_reduced_between_them():
    plan = plan_for(transformer_graph(layers=4), 2, search=Search(pp=2, dp=1, pins={"embed": 0, "head": 1}))
    assert plan.parameters["embed.weight"].stages == (0, 1)
    assert all(stage.reduction_s.value > 0 for stage in plan.stages)
    assert plan.stages[1].items[0] == 0, "the mask is recomputed on the stage that needs it"


@pytest.mark.parametrize("loss", ["outside", "model"])
@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 2), (4, 1), (1, 4)])
def test_the_step_is_the_simulated_one_and_follows_the_equation(loss, pp, dp):
    plan = plan_for(transformer_graph(), 4, loss=loss, search=Search(pp=pp, dp=dp))
    assert plan.predicted.step_time_s == simulate_plan(plan).step_time_s
    times = [stage.time_s + stage.communication_s.value for stage in plan.stages]
    last = max(stage.reduction_s.value + stage.optimizer_s.value for stage in plan.stages)
    assert plan.predicted.step_time_s <= (sum(times) + (plan.num_microbatches - 1) * max(times) + last) * (1 + 1e-9)


def test_the_same_inputs_give_the_same_bytes():
    graph, limits = transformer_graph(), Limits(memory_bytes=3 * MIB)
    first, second = (to_json(plan_for(graph, 4, loss="model", limits=limits)) for _ in range(2))
    assert first == second


def test_a_plan_survives_saving(tmp_path):
    plan = plan_for(transformer_graph(), 4, loss="model")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_unequal_memory_and_an_excluded_device():
    graph = chain_graph([64] * 9)
    limits = (170 * KIB, 170 * KIB, 0, 60 * KIB)
    plan = plan_for(graph, 4, optimizer="sgd", limits=Limits(memory_bytes=limits))
    assert plan.predicted.peak_bytes[2] == 0
    assert all(2 not in parameter.ranks for parameter in plan.parameter_plans)
    assert all(peak <= limit for peak, limit in zip(plan.predicted.peak_bytes, limits, strict=True))
    assert any("Rank 2 may use no memory" in note for note in plan.notes)


@pytest.mark.parametrize("small", range(3))
def test_the_small_device_gets_the_small_stage_wherever_it_stands(small):
    # Two wide layers with narrow ones in between: only the middle stage fits into the small device.
    graph = chain_graph([8, 128, 8, 8, 8, 128, 8])
    limits = tuple(12 * KIB if rank == small else 80 * KIB for rank in range(3))
    plan = plan_for(graph, 3, optimizer="sgd", limits=Limits(memory_bytes=limits), search=Search(pp=3, dp=1))
    assert plan.stages[1].ranks == (small,)


def test_replicas_stay_inside_a_host_when_the_network_is_slow():
    graph = chain_graph([256] * 9)
    plan = plan_for(graph, cluster=cluster(4, hosts=2), loss="model", search=Search(pp=2, dp=2))
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]


def test_stages_stay_inside_a_host_when_messages_are_what_costs():
    graph = chain_graph([32] * 9, rows=4096)
    plan = plan_for(graph, cluster=cluster(4, hosts=2), loss="model", search=Search(pp=2, dp=2))
    assert [stage.ranks for stage in plan.stages] == [(0, 2), (1, 3)]


def test_unlike_devices_are_priced_on_the_slowest():
    kinds = (device(), device(name="slow", peak_flops=(("float32", 5e8),)))
    mixed = cluster(2, kinds=kinds, device_kinds=(0, 1))
    plan = plan_for(chain_graph([64] * 5), cluster=mixed, loss="model", search=Search(pp=2))
    alone = plan_for(chain_graph([64] * 5), 2, loss="model", search=Search(pp=2))
    assert plan.predicted.step_time_s > alone.predicted.step_time_s
    assert any("priced on the slowest" in note for note in plan.notes)


def test_without_a_batch_axis_there_is_one_replica_and_one_microbatch():
    plan = plan_for(chain_graph([64] * 5, rows=None), 4, loss="model")
    assert (plan.data_degree, plan.num_microbatches) == (1, 1)


@pytest.mark.parametrize(("wanted", "degree", "expected"), [(4, 1, 4), (100, 1, 8), (8, 2, 4), (8, 3, 2)])
def test_microbatches_are_clamped_to_the_rows_of_a_replica(wanted, degree, expected):
    plan = plan_for(chain_graph([64] * 5), 4, limits=Limits(num_microbatches=wanted), search=Search(pp=1, dp=degree))
    assert plan.num_microbatches == expected
    assert plan.data_degree == degree


def test_pins_are_kept():
    plan = plan_for(chain_graph([64] * 7), 3, search=Search(pp=3, dp=1, pins={"layers.1": 0, "layers.3": 2}))
    where = {plan.blocks[block].label: stage.index for stage in plan.stages for block in stage.blocks}
    assert (where["layers.0#0"], where["layers.1#0"], where["layers.2#0"], where["layers.3#0"]) == (0, 0, 1, 2)


def test_both_exact_methods_agree():
    graph = transformer_graph(layers=3)
    by_dp, by_ilp = (
        plan_for(graph, 3, loss="model", search=Search(pp=3, dp=1), method=method) for method in ("dp", "ilp")
    )
    assert by_ilp.solve.method == "ilp"
    assert by_ilp.solve.objective == pytest.approx(by_dp.solve.objective, rel=1e-6)


def test_runner_ups_are_sorted_and_name_the_plain_cuts():
    plan = plan_for(transformer_graph(layers=5), 4, loss="model", search=Search(pp=4))
    assert [r.step_time_s for r in plan.runner_ups] == sorted(r.step_time_s for r in plan.runner_ups)
    assert any("uniform cuts" in r.description for r in plan.runner_ups)
    assert all(r.step_time_s >= plan.predicted.step_time_s * (1 - 1e-9) for r in plan.runner_ups)


@pytest.mark.parametrize(
    ("search", "loss", "message"),
    [
        ({"tp": 2}, "model", "tensor parallel degree 2 is not available in this version; use tp=1"),
        ({"cp": 2}, "model", "use cp=1"),
        ({"ep": (2, 4)}, "model", "use ep=1"),
        ({"zero": 3}, "model", "use zero=0"),
        ({"recompute": "full"}, "model", "use recompute='none'"),
        ({"pp": 9}, "model", "the model has 4 blocks and 4 devices"),
        ({"dp": 16}, "model", "use dp from 1 to 4"),
        ({"schedule": "1f1b"}, "outside", "give loss_fn, or use schedule='gpipe'"),
        ({"schedule": "magic"}, "model", "unknown schedule 'magic'"),
        ({"pp": 4, "dp": 4}, "model", "pp=4 with dp=4 needs 16 devices, 4 may be used"),
        ({"pins": {"nowhere": 0}}, "model", "no block runs a module 'nowhere'"),
        ({"pins": {"layers.0": 7}}, "model", "at most 4 stages"),
        ({"pins": {"layers.0": 1, "layers.1": 0}}, "model", "pin"),
    ],
)
def test_a_restriction_that_cannot_be_met_says_what_could(search, loss, message):
    with pytest.raises(InfeasibleError) as caught:
        make_plan(chain_graph([64] * 5), cluster(4), loss=loss, search=Search(**search))
    assert message in str(caught.value)


def test_restrictions_that_include_what_is_available_are_met():
    search = Search(pp=(2, 3), dp=1, tp=(1, 2), zero=(0, 1), recompute=("none", "full"), schedule=("gpipe",))
    plan = plan_for(chain_graph([64] * 5), 4, loss="model", search=search)
    assert len(plan.stages) in {2, 3}
    assert plan.schedule.name == "gpipe"


def test_what_does_not_fit_says_how_much_is_missing_where_and_what_would_help():
    graph = transformer_graph(layers=4, width=64, vocabulary=2048)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(graph, cluster(2), optimizer="adam", limits=Limits(memory_bytes=MIB, num_microbatches=1))
    error, text = caught.value, str(caught.value)
    assert error.biggest_item.startswith("parameter embed.weight")
    assert error.needed_bytes - error.limit_bytes == error.short_bytes > 0
    assert "1.00 MiB" in text
    assert "rank" in text
    # The last remedy holds.
    needed = int(text.rpartition("memory_bytes=")[2].split(")")[0])
    limits = Limits(memory_bytes=needed, num_microbatches=1)
    assert max(plan_for(graph, 2, optimizer="adam", limits=limits).predicted.peak_bytes) <= needed
    with pytest.raises(InfeasibleError):
        make_plan(graph, cluster(2), optimizer="adam", limits=replace(limits, memory_bytes=needed - 1))


def test_remedies_have_been_tried():
    graph = chain_graph([64] * 9, rows=512)
    tight = Limits(memory_bytes=420 * KIB, num_microbatches=1)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(graph, cluster(2), optimizer="adam", limits=tight, loss="model")
    assert "a free number of microbatches" in caught.value.hint
    free = replace(tight, num_microbatches=None)
    plan_for(graph, 2, optimizer="adam", limits=free, loss="model")
    with pytest.raises(InfeasibleError) as caught:
        make_plan(graph, cluster(2), optimizer="adam", limits=free)
    assert "loss_fn" in caught.value.hint


def test_no_memory_at_all():
    with pytest.raises(InfeasibleError, match="0 bytes"):
        make_plan(chain_graph([8] * 3), cluster(2), limits=Limits(memory_bytes=0))


def test_when_time_is_over_the_plain_cuts_of_the_next_configurations_remain():
    plan = plan_for(transformer_graph(), 4, limits=Limits(solve_s=0.0), loss="model", search=Search(pp=3))
    assert (plan.solve.status, plan.solve.limit) == ("feasible", "solve_s")
    assert plan.solve.bound < plan.solve.objective


def test_no_time_and_no_plain_cut_that_fits_is_no_proof():
    limits = Limits(solve_s=0.0, memory_bytes=1400 * KIB)
    with pytest.raises(SolverLimitError) as caught:
        make_plan(transformer_graph(), cluster(4), limits=limits, search=Search(pp=4), loss="model")
    assert "solve_s" in caught.value.hint
    plan_for(transformer_graph(), 4, limits=replace(limits, solve_s=30.0), search=Search(pp=4), loss="model")


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "magic"},
        {"precision": "fp12"},
        {"limits": Limits(memory_bytes=(1, 2))},
        {"limits": Limits(memory_bytes=-1)},
        {"limits": Limits(num_microbatches=0)},
        {"limits": Limits(global_batch=0)},
    ],
)
def test_wrong_arguments_are_value_errors(arguments):
    with pytest.raises(ValueError, match=r"unknown|entries|negative|at least 1"):
        make_plan(chain_graph([8] * 3), cluster(4), **arguments)


def test_the_bound_holds_for_every_configuration_by_itself():
    graph = transformer_graph(layers=3)
    whole = plan_for(graph, 4, loss="model")
    for stages in (1, 2, 3, 4):
        for degree in range(1, 4 // stages + 1):
            one = plan_for(graph, 4, loss="model", search=Search(pp=stages, dp=degree))
            assert one.solve.objective >= whole.solve.bound * (1 - 1e-9)


def test_another_cost_model_is_used():
    class Doubled(AnalyticModel):
        def transfer_s(self, num_bytes, link):
            return super().transfer_s(num_bytes, link).scaled(2.0)

    search = Search(pp=3, dp=1)
    plain = plan_for(chain_graph([64] * 9), 3, search=search)
    doubled = plan_for(chain_graph([64] * 9), 3, search=search, cost=Doubled())
    assert doubled.solve.objective > plain.solve.objective


def test_planning_imports_neither_torch_nor_or_tools():
    code = "import sys, partita.planner; sys.exit(bool({'torch', 'ortools'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
