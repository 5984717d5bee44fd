"""Schedules hold for any number of stages and microbatches, any edges, any costs and any order of completions."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from partita.ir.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, parse_action
from partita.schedules.machine import Post, RankMachine, Run, other_end
from partita.schedules.makers import SCHEDULES, in_flight, make_schedule, peak_in_flight
from partita.schedules.passes import add_communication, add_reduction, compute_only, forward_only
from partita.schedules.validate import run_untimed, validate
from partita.simulator import simulate_plan, simulate_schedule
from tests.property.strategies import actions, pipelines, plans, schedules, stage_edges

names = st.sampled_from(sorted(SCHEDULES))


def simulate(pipeline, name):
    return simulate_schedule(pipeline.schedule(name), compute_s=pipeline.compute_s, transfer_s=pipeline.transfer_s)


@given(actions())
def test_the_text_of_an_action_reads_back(action):
    assert parse_action(str(action)) == action


@given(schedules())
def test_schedules_and_their_evaluation_are_valid(schedule):
    validate(schedule)
    validate(forward_only(schedule))


@given(names, st.integers(1, 8), st.integers(1, 12))
def test_in_flight_agrees_with_counting(name, num_stages, num_microbatches):
    schedule = make_schedule(name, num_stages, num_microbatches)
    for stage in range(num_stages):
        assert in_flight(name, num_stages, num_microbatches, stage) == peak_in_flight(schedule, stage)


@given(names, st.integers(1, 5), st.integers(1, 6), st.data())
def test_the_passes_commute_and_keep_the_compute_order(name, num_stages, num_microbatches, data):
    edges = data.draw(stage_edges(num_stages))
    compute = make_schedule(name, num_stages, num_microbatches)
    complete = add_reduction(add_communication(compute, edges))
    assert complete == add_communication(add_reduction(compute), edges)
    assert complete == add_reduction(add_communication(compute, reversed(edges)))
    assert compute_only(complete) == compute


@given(schedules())
def test_every_message_has_two_ends(schedule):
    messages = Counter(action for row in schedule.ranks for action in row if action.peer is not None)
    assert set(messages.values()) <= {1}
    assert all(other_end(action) in messages for action in messages)


@given(schedules(), st.randoms(use_true_random=False))
def test_any_order_of_completions_gives_the_order_of_the_rows(schedule, random):
    """Drive all machines, completing at each step any one of the things that may complete."""
    machines = [RankMachine(row) for row in schedule.ranks]
    run = [[] for _ in machines]
    posted, completed, sent, may_complete = set(), set(), set(), {}

    def follow(position, instructions):
        row = schedule.ranks[position]
        for instruction in instructions:
            action = instruction.action
            before = row[: row.index(action)]
            if isinstance(instruction, Post):
                assert action not in posted
                posted.add(action)
                computes = sum(other.kind in COMPUTE_KINDS for other in before)
                assert sum(other.kind in COMPUTE_KINDS for other in run[position]) == max(0, computes - 1)
            elif isinstance(instruction, Run):
                assert all(other in completed for other in before if other.kind not in SEND_KINDS)
                run[position].append(action)
                if action.kind in SEND_KINDS:
                    sent.add(other_end(action))
                else:
                    may_complete[action] = position
            else:
                assert action in posted
                assert action not in completed
        arrived = {action: machine for action, machine in home.items() if action in sent & posted - completed}
        may_complete.update(arrived)

    home = {action: position for position, row in enumerate(schedule.ranks) for action in row}
    for position, machine in enumerate(machines):
        follow(position, machine.start())
    while may_complete:
        action = random.choice(sorted(may_complete, key=str))
        position = may_complete.pop(action)
        completed.add(action)
        follow(position, machines[position].completed(action))
    assert all(machine.done for machine in machines)
    for row, order in zip(schedule.ranks, run, strict=True):
        assert order == [action for action in row if action.kind not in RECV_KINDS]


@given(schedules())
def test_an_untimed_run_executes_the_rows_as_listed(schedule):
    assert run_untimed(schedule) == schedule.ranks


# ---------------------------------------------------------------- simulated time


@given(names, pipelines(max_message_ticks=64, skips=True))
def test_the_executed_order_is_the_listed_one_whatever_the_costs(name, pipeline):
    schedule = pipeline.schedule(name)
    timeline = simulate(pipeline, name)
    assert tuple(timeline.order(position) for position in range(pipeline.num_stages)) == schedule.ranks


@given(names, pipelines(max_message_ticks=64, skips=True))
def test_no_schedule_beats_the_critical_path(name, pipeline):
    """The bound (9) of the master problem: reach a stage, do all its work, and drain."""
    time_s, num_microbatches = pipeline.time_s, pipeline.num_microbatches
    bound = max(sum(time_s[:stage]) + num_microbatches * time_s[stage] for stage in range(pipeline.num_stages))
    assert simulate(pipeline, name).step_time_s >= bound


@given(names, pipelines())
def test_the_closed_form_is_an_upper_bound_if_one_stage_is_slowest_both_ways(name, pipeline):
    proportional = replace(pipeline, backward_s=tuple(2 * forward for forward in pipeline.forward_s))
    time_s = proportional.time_s
    bound = sum(time_s) + (proportional.num_microbatches - 1) * max(time_s)
    assert simulate(proportional, name).step_time_s <= bound


@given(names, pipelines(max_message_ticks=64, skips=True))
def test_the_closed_form_by_direction_is_an_upper_bound_with_messages_charged_to_both_stages(name, pipeline):
    """Where different stages are slowest forward and backward, their maxima add up."""
    forward_s, backward_s = list(pipeline.forward_s), list(pipeline.backward_s)
    for edge, seconds in pipeline.message_s.items():
        for stage in edge:
            forward_s[stage] += seconds
            backward_s[stage] += seconds
    bound = sum(forward_s) + sum(backward_s)
    bound += (pipeline.num_microbatches - 1) * (max(forward_s) + max(backward_s))
    assert simulate(pipeline, name).step_time_s <= bound


@given(names, pipelines(max_message_ticks=16, skips=True), st.sampled_from([0.25, 0.5, 2.0]))
def test_time_scales_with_its_unit(name, pipeline, factor):
    scaled = replace(
        pipeline,
        forward_s=tuple(factor * seconds for seconds in pipeline.forward_s),
        backward_s=tuple(factor * seconds for seconds in pipeline.backward_s),
        message_s={edge: factor * seconds for edge, seconds in pipeline.message_s.items()},
    )
    assert simulate(scaled, name).step_time_s == factor * simulate(pipeline, name).step_time_s


@given(names, pipelines(max_message_ticks=64, skips=True))
def test_one_thing_at_a_time_on_a_position_and_on_a_link(name, pipeline):
    rows = defaultdict(list)
    for event in simulate(pipeline, name).events:
        if event.action.kind in SEND_KINDS:
            rows[event.action.stage, event.action.peer].append((event.start_s, event.end_s))
        elif event.occupies:
            rows[event.position].append((event.start_s, event.end_s))
    for spans in rows.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@given(names, pipelines(max_message_ticks=64, skips=True))
def test_nothing_starts_before_what_it_needs(name, pipeline):
    timeline = simulate(pipeline, name)
    times = {event.action: event for event in timeline.events}
    for action, event in times.items():
        if action.kind in SEND_KINDS:
            maker = Action(stage=action.stage, kind=action.kind[-1], microbatch=action.microbatch)
            needer = Action(stage=action.peer, kind=action.kind[-1], microbatch=action.microbatch)
            assert times[maker].end_s <= event.start_s
            assert event.end_s <= times[other_end(action)].end_s <= times[needer].start_s


@given(plans())
def test_a_plan_needs_the_memory_that_it_states(plan):
    timeline = simulate_plan(plan)
    assert [timeline.peak_bytes(stage.index) for stage in plan.stages] == [s.memory.total for s in plan.stages]
    for curve in timeline.memory:
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)
        assert curve[-1] == (curve[-1][0], curve[0][1]), "what a step takes it gives back"


@given(plans())
def test_a_plan_is_at_least_as_long_as_the_work_of_each_stage(plan):
    timeline = simulate_plan(plan)
    assert timeline == simulate_plan(plan)
    for stage in plan.stages:
        work = plan.num_microbatches * stage.time_s + stage.reduction_s.value + stage.optimizer_s.value
        assert timeline.step_time_s >= work
    assert 0 <= timeline.bubble_fraction <= 1
