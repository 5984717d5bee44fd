"""The length of schedules against their closed form, and their order against torch's own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from partita.ir.schedule import parse_action
from partita.schedules.makers import SCHEDULES, make_schedule
from partita.schedules.passes import add_communication
from partita.simulator import simulate_schedule


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_microbatches", range(1, 11))
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1.0, 2.0), (1.0, 1.0), (3.0, 0.5), (1.0, 0.0)])
def test_equal_stages_with_free_messages_take_the_closed_form(
    name, num_stages, num_microbatches, forward_s, backward_s
):
    edges = [(stage, stage + 1, True) for stage in range(num_stages - 1)]
    timeline = simulate_schedule(
        add_communication(make_schedule(name, num_stages, num_microbatches), edges),
        compute_s=lambda action: forward_s if action.kind == "F" else backward_s,
        transfer_s=lambda _: 0.0,
    )
    assert timeline.step_time_s == (num_microbatches + num_stages - 1) * (forward_s + backward_s)
    assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


def torch_order(schedule_class, num_stages, num_microbatches):
    """Return torch's compute order by rank, as actions of ours.

    The method is private and needs nothing of the schedule object but its sizes.  Torch 2.13 counts the last rank's
    1F1B forwards from 1 instead of 0 there (its executor does not), which is put right here.
    """
    sizes = SimpleNamespace(_num_stages=num_stages, _n_microbatches=num_microbatches)
    rows = []
    for torch_row in schedule_class._get_pipeline_order(sizes).values():
        row = [parse_action(str(action)) for action in torch_row if action is not None and "REDUCE" not in str(action)]
        first = min(action.microbatch for action in row if action.kind == "F")
        shift = {"F": first, "B": 0}
        rows.append(tuple(replace(action, microbatch=action.microbatch - shift[action.kind]) for action in row))
    return tuple(rows)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
@pytest.mark.parametrize("extra", [0, 1, 4])
@pytest.mark.parametrize(("name", "torch_name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_the_compute_order_is_torchs_own(name, torch_name, num_stages, extra):
    from torch.distributed.pipelining import schedules as torch_schedules

    schedule = make_schedule(name, num_stages, num_stages + extra)
    assert schedule.ranks == torch_order(getattr(torch_schedules, torch_name), num_stages, num_stages + extra)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_our_text(name):
    from torch.distributed.pipelining import schedules as torch_schedules

    for row in make_schedule(name, 3, 4).ranks:
        for action in row:
            assert str(torch_schedules._Action.from_str(str(action))) == str(action)
