import json
from dataclasses import replace
from itertools import pairwise

import pytest

from partita.errors import DeadlockError, InvalidPlanError
from partita.ir.cluster import Cluster, DeviceSpec, Level, Link
from partita.ir.plan import Edge, Estimate, Memory, Plan, Prediction, SolveReport, StagePlan
from partita.ir.schedule import Schedule, parse_action, parse_actions
from partita.schedules.makers import in_flight, make_schedule
from partita.schedules.passes import add_communication, add_reduction
from partita.simulator import Timeline, simulate_plan, simulate_schedule


def schedule_of(*lines, num_microbatches=1):
    ranks = tuple(parse_actions(line) for line in lines)
    return Schedule(name="text", num_stages=len(lines), num_microbatches=num_microbatches, ranks=ranks)


def simulate(schedule, *, forward=1.0, backward=2.0, message=0.0, reduction=0.0, **options):
    costs = {"F": forward, "B": backward, "REDUCE_GRAD": reduction}
    return simulate_schedule(
        schedule, compute_s=lambda action: costs[action.kind], transfer_s=lambda _: message, **options
    )


def spans(timeline):
    """Return the times of every event by its text."""
    return {str(event.action): (event.start_s, event.end_s) for event in timeline.events}


def chain(name, num_stages, num_microbatches):
    edges = [(stage, stage + 1, True) for stage in range(num_stages - 1)]
    return add_communication(make_schedule(name, num_stages, num_microbatches), edges)


def test_one_microbatch_runs_through_and_back():
    timeline = simulate(chain("gpipe", 2, 1), message=0.25)
    assert spans(timeline) == {
        "0F0": (0.0, 1.0),
        "0SEND_F0>1": (1.0, 1.25),
        "1RECV_F0<0": (0.0, 1.25),
        "1F0": (1.25, 2.25),
        "1B0": (2.25, 4.25),
        "1SEND_B0>0": (4.25, 4.5),
        "0RECV_B0<1": (1.0, 4.5),
        "0B0": (4.5, 6.5),
    }
    assert timeline.step_time_s == 6.5


def test_messages_travel_while_positions_compute():
    schedule = schedule_of("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1", num_microbatches=2)
    times = spans(simulate(schedule, message=0.5))
    assert times["0F1"] == (1.0, 2.0)
    assert times["0SEND_F1>1"] == (2.0, 2.5)
    assert times["1F1"] == (2.5, 3.5)
    assert times["1RECV_F1<0"] == (2.5, 2.5), "the message arrived just when it was needed"


def test_one_direction_of_a_link_carries_one_message_at_a_time():
    schedule = schedule_of("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1RECV_F1<0 1F0 1F1", num_microbatches=2)
    times = spans(simulate(schedule, message=3.0))
    assert times["0SEND_F0>1"] == (1.0, 4.0)
    assert times["0SEND_F1>1"] == (4.0, 7.0)


def test_both_directions_and_different_links_carry_messages_at_once():
    edges = [(0, 1, True), (0, 2, True)]
    schedule = add_communication(make_schedule("gpipe", 3, 1), edges)
    times = spans(simulate(schedule, message=2.0))
    assert times["0SEND_F0>1"] == times["0SEND_F0>2"] == (1.0, 3.0)
    assert times["1SEND_B0>0"] == times["2SEND_B0>0"] == (6.0, 8.0)


def test_a_message_waits_until_its_receive_is_posted_one_compute_action_ahead():
    schedule = schedule_of(
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1RECV_F2<0 1F2",
        num_microbatches=3,
    )
    prices = {"0": 1.0, "1": 5.0}
    timeline = simulate_schedule(schedule, compute_s=lambda action: prices[str(action.stage)], transfer_s=lambda _: 0.5)
    times = spans(timeline)
    assert times["0SEND_F1>1"] == (2.0, 2.5), "posted when 1F0 started, at 1.5"
    assert times["1F1"] == (6.5, 11.5)
    assert times["0SEND_F2>1"] == (6.5, 7.0), "issued at 3, posted when 1F1 started"


def test_the_overhead_of_a_send_occupies_the_sender_before_the_message_travels():
    schedule = schedule_of("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1", num_microbatches=2)
    times = spans(simulate(schedule, message=0.5, send_overhead_s=0.25))
    assert times["0SEND_F0>1"] == (1.25, 1.75)
    assert times["0F1"] == (1.25, 2.25)
    assert times["0SEND_F1>1"] == (2.5, 3.0)


def test_reductions_run_after_the_last_backward_and_count_as_work():
    timeline = simulate(add_reduction(make_schedule("gpipe", 1, 2)), reduction=4.0)
    assert spans(timeline)["0REDUCE_GRAD"] == (6.0, 10.0)
    assert timeline.bubble_fraction == 0.0


def test_the_order_of_a_position_is_its_row():
    schedule = add_reduction(chain("1f1b", 3, 4))
    timeline = simulate(schedule, message=0.3)
    assert tuple(timeline.order(position) for position in range(3)) == schedule.ranks


def test_the_bubble_is_the_idle_share():
    assert simulate(chain("1f1b", 4, 8)).bubble_fraction == pytest.approx(3 / 11)
    assert simulate(schedule_of("0F0"), forward=0.0).bubble_fraction == 0.0
    assert Timeline(events=(), labels=()).step_time_s == 0.0


def test_a_deadlock_names_the_waiting_action():
    schedule = schedule_of("0F0 0RECV_B0<1 0B0 0SEND_F0>1", "1RECV_F0<0 1F0 1B0 1SEND_B0>0")
    with pytest.raises(DeadlockError, match=r"position 0 waits for 0RECV_B0<1 .* position 1 waits for 1RECV_F0<0"):
        simulate(schedule)


def test_a_message_that_nobody_receives_is_refused():
    with pytest.raises(InvalidPlanError, match="0SEND_F0>1 of position 0 is never received"):
        simulate(schedule_of("0F0 0SEND_F0>1", "1F0"))


# ---------------------------------------------------------------- plans


def seconds(value):
    return Estimate(value=value, low=value, high=value, source="modelled")


def plan_of(num_microbatches=4, degree=1, name="1f1b", **stage_options):
    """Two stages with forwards of 1 s and 2 s, backwards of 2 s and 4 s, and messages of 0.5 s and 0.25 s."""
    device = DeviceSpec(
        name="toy", platform="cpu", memory_bytes=2**30, peak_flops=(), memory_bandwidth=1e9, launch_s=0.0
    )
    levels = (
        Level(name="host", link=Link(latency_s=0.0, bandwidth=1e3), group_size=2),
        Level(name="site", link=Link(latency_s=0.125, bandwidth=1e3), group_size=2 * degree),
    )
    stages = tuple(
        StagePlan(
            index=stage,
            blocks=(stage,),
            items=(stage,),
            ranks=tuple(range(stage, 2 * degree, 2)),
            forward_s=seconds(1.0 + stage),
            backward_s=seconds(2.0 + 2 * stage),
            in_flight=in_flight(name, 2, num_microbatches, stage),
            schedule_position=stage,
            **stage_options,
        )
        for stage in range(2)
    )
    schedule = add_reduction(chain(name, 2, num_microbatches))
    return Plan(
        model="Toy",
        graph_fingerprint="",
        cluster=Cluster(name="toy", kinds=(device,), device_kinds=(0,) * (2 * degree), levels=levels),
        memory_limits=(2**30,) * (2 * degree),
        global_batch=num_microbatches,
        data_degree=degree,
        schedule=schedule,
        blocks=(),
        stages=stages,
        edges=(Edge(source=0, target=1, tensors=("h",), bytes=500, backward_bytes=250),),
        parameter_plans=(),
        optimizer="sgd",
        precision="fp32",
        loss="fused",
        predicted=Prediction(step_time=seconds(1.0), peak_bytes=(0, 0), bubble_fraction=0.0, measured_share=0.0),
        solve=SolveReport(method="dp", status="given", objective=1.0, bound=0.0),
    )


def test_a_plan_is_simulated_with_its_own_costs_and_links():
    times = spans(simulate_plan(plan_of(num_microbatches=1)))
    assert times["0F0"] == (0.0, 1.0)
    assert times["0SEND_F0>1"] == (1.0, 1.5)
    assert times["1F0"] == (1.5, 3.5)
    assert times["1B0"] == (3.5, 7.5)
    assert times["1SEND_B0>0"] == (7.5, 7.75)
    assert times["0B0"] == (7.75, 9.75)


def test_every_position_ends_with_its_reduction_and_its_update():
    plan = plan_of(num_microbatches=1, reduction_s=seconds(0.5), optimizer_s=seconds(0.25))
    timeline = simulate_plan(plan)
    assert spans(timeline)["0REDUCE_GRAD"] == (9.75, 10.25)
    updates = [(event.position, event.start_s, event.end_s) for event in timeline.events if event.action is None]
    assert updates == [(0, 10.25, 10.5), (1, 8.0, 8.25)]
    assert timeline.step_time_s == 10.5


def test_a_message_takes_the_slowest_of_the_links_between_the_replicas():
    plan = plan_of(num_microbatches=1, degree=2)
    crossed = replace(plan, stages=(replace(plan.stages[0], ranks=(0, 2)), replace(plan.stages[1], ranks=(1, 0))))
    assert spans(simulate_plan(plan))["0SEND_F0>1"] == (1.0, 1.5)
    assert spans(simulate_plan(crossed))["0SEND_F0>1"] == (1.0, 1.625), "ranks 2 and 0 are on different hosts"


def test_halves_of_a_split_backward_take_half_of_it_each():
    plan = plan_of(num_microbatches=1)
    split = schedule_of("0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0", "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0")
    times = spans(simulate_plan(replace(plan, schedule=split)))
    assert (times["1I0"], times["1W0"], times["0I0"]) == ((3.5, 5.5), (5.5, 7.5), (5.75, 6.75))


def test_a_message_without_an_edge_is_refused():
    with pytest.raises(InvalidPlanError, match="0SEND_F0>1 is scheduled, but the plan has no such edge"):
        simulate_plan(replace(plan_of(), edges=()))


def test_memory_grows_with_each_forward_and_shrinks_with_each_backward():
    memory = Memory(weights=100, gradients=100, optimizer=200, activations=40, skips=20, buffers=8, transient=3)
    timeline = simulate_plan(plan_of(num_microbatches=2, memory=memory))
    assert timeline.memory[1] == (
        (0.0, 408),
        (1.5, 471),  # 1F0: all activations (one microbatch in flight) and the transient bytes
        (3.5, 468),
        (3.5, 471),  # 1B0
        (7.5, 408),
        (7.5, 471),
        (9.5, 468),
        (9.5, 471),
        (13.5, 408),
        (13.5, 411),  # the reduction and the update
        (13.5, 408),
        (13.75, 411),
        (13.75, 408),
    )
    assert [timeline.peak_bytes(position) for position in range(2)] == [memory.total, memory.total]
    assert timeline.memory[0][1:5] == ((0.0, 441), (1.0, 438), (1.0, 471), (2.0, 468)), "half of the activations each"


def test_the_labels_name_stages_and_ranks():
    assert simulate_plan(plan_of(degree=2)).labels == ("stage 0 on ranks 0, 2", "stage 1 on ranks 1, 3")


# ---------------------------------------------------------------- traces


def test_a_trace_has_a_row_per_position_and_per_link_direction_in_microseconds(tmp_path):
    path = tmp_path / "trace.json"
    simulate_plan(plan_of(num_microbatches=1, optimizer_s=seconds(0.25))).save_trace(path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {
        (0, 0): "stage 0 on ranks 0",
        (0, 1): "stage 1 on ranks 1",
        (1, 1): "stage 0 on ranks 0 to stage 1 on ranks 1",
        (1, 2): "stage 1 on ranks 1 to stage 0 on ranks 0",
    }
    slices = {e["name"]: (e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert slices["1F0"] == (0, 1, 1.5e6, 2e6)
    assert slices["0SEND_F0>1"] == (1, 1, 1e6, 0.5e6)
    assert slices["wait 1RECV_F0<0"] == (0, 1, 0.0, 1.5e6)
    assert slices["optimizer"][3] == 0.25e6
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"memory of position 0", "memory of position 1"}


def test_slices_of_a_row_do_not_overlap(tmp_path):
    path = tmp_path / "trace.json"
    simulate_plan(plan_of(num_microbatches=6)).save_trace(path)
    rows = {}
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 4
    for slices in rows.values():
        ordered = sorted(slices)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))


def test_a_trace_is_the_same_bytes_each_time(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        simulate_plan(plan_of()).save_trace(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_zero_length_actions_stay_in_the_order():
    schedule = schedule_of("0F0 0B0")
    timeline = simulate(schedule, forward=0.0, backward=0.0)
    assert timeline.order(0) == (parse_action("0F0"), parse_action("0B0"))
