import pytest

from partita.schedules import makers
from partita.schedules.makers import SCHEDULES, in_flight, make_schedule, peak_in_flight


def test_gpipe_fills_then_drains_in_ascending_order():
    assert make_schedule("gpipe", 2, 3).lines() == ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")


def test_1f1b_warms_up_alternates_and_drains():
    assert make_schedule("1f1b", 3, 4).lines() == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_1f1b_with_fewer_microbatches_than_stages_warms_up_with_all_of_them():
    assert make_schedule("1f1b", 4, 2).lines() == (
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_and_one_microbatch(name):
    assert make_schedule(name, 1, 1).lines() == ("0F0 0B0",)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_knows_its_name_and_sizes(name):
    schedule = make_schedule(name, 3, 5)
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == (name, 3, 5)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 6, 11])
def test_in_flight_in_closed_form_is_what_counting_gives(name, num_stages, num_microbatches):
    schedule = make_schedule(name, num_stages, num_microbatches)
    counted = [peak_in_flight(schedule, stage) for stage in range(num_stages)]
    assert [in_flight(name, num_stages, num_microbatches, stage) for stage in range(num_stages)] == counted


def test_in_flight_of_a_schedule_without_closed_form_is_counted(monkeypatch):
    monkeypatch.setitem(makers.SCHEDULES, "mine", makers.one_f_one_b)
    assert in_flight("mine", 4, 8, 1) == 3


def test_a_name_that_nobody_made_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown schedule 'zigzag'; known are 1f1b, gpipe"):
        make_schedule("zigzag", 2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match="at least one stage, not 0"):
        make_schedule(name, 0, 4)
    with pytest.raises(ValueError, match="at least one microbatch, not 0"):
        make_schedule(name, 4, 0)


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="stage 4 is not one of 4 stages"):
        in_flight("gpipe", 4, 8, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_golden_schedules(name, golden):
    golden(f"schedules/{name}_4x8.txt", grid(make_schedule(name, 4, 8)))


def grid(schedule):
    """Draw a schedule whose actions all take one slot: a row per position, a column per slot."""
    from partita.schedules.passes import add_communication
    from partita.simulator import simulate_schedule

    edges = [(stage, stage + 1, True) for stage in range(schedule.num_stages - 1)]
    timeline = simulate_schedule(add_communication(schedule, edges), compute_s=lambda _: 1.0, transfer_s=lambda _: 0.0)
    rows = [["."] * int(timeline.step_time_s) for _ in schedule.ranks]
    for event in timeline.events:
        if event.occupies:
            rows[event.position][int(event.start_s)] = str(event.action)
    lines = [f"{schedule.name}, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"]
    lines += [f"{position} | " + " ".join(f"{cell:>3}" for cell in row) for position, row in enumerate(rows)]
    return "\n".join(lines) + "\n"
