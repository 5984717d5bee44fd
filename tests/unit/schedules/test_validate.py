import pytest

from partita.errors import DeadlockError, InvalidPlanError
from partita.ir.schedule import Action, Schedule, parse_actions
from partita.schedules.makers import SCHEDULES, make_schedule
from partita.schedules.passes import add_communication, add_reduction, forward_only
from partita.schedules.validate import run_untimed, validate


def schedule_of(*lines, num_stages=None, num_microbatches=1):
    ranks = tuple(parse_actions(line) for line in lines)
    return Schedule(name="text", num_stages=num_stages or len(lines), num_microbatches=num_microbatches, ranks=ranks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_makers_and_passes_give_is_valid(name):
    compute = make_schedule(name, 4, 5)
    messages = add_communication(compute, [(0, 1, True), (1, 2, False), (2, 3, True), (0, 3, True)])
    for schedule in (compute, messages, add_reduction(messages), forward_only(messages)):
        validate(schedule)


def test_a_split_backward_and_several_stages_on_a_position_are_valid():
    validate(schedule_of("0F0 2F0 2I0 2W0 0I0 0W0", "1F0 1B0", num_stages=3))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # Rule 1.
        (("2F0",), "2F0, action 1 of position 0: there is no stage 2; stages are 0 to 0"),
        (("0F1",), "0F1, action 1 of position 0: there is no microbatch 1; microbatches are 0 to 0"),
        (("0F0 0SEND_F0>7 0B0",), "0SEND_F0>7, action 2 of position 0: there is no stage 7"),
        # Rule 2.
        (("0F0 0B0", "0F0 1F0 1B0"), "0F0, action 1 of position 1: it is listed before, as action 1 of position 0"),
        (("0F0", "0B0 1F0 1B0"), "0B0, action 1 of position 1: stage 0 runs on position 0 too"),
        # Rule 3.
        (("0F0 0F0 0B0",), "0F0, action 2 of position 0: it is listed before, as action 1 of position 0"),
        # Rule 4.
        (("0F0 0B0", "1B0"), "stage 1 needs F B or F I W of microbatch 0; the schedule has 1B0"),
        (("0F0 0I0",), "stage 0 needs F B or F I W of microbatch 0; the schedule has 0F0 0I0"),
        (("0F0 0B0 0I0 0W0",), "the schedule has 0F0 0B0 0I0 0W0"),
        (("0F0 0B0", ""), "stage 1 needs F B or F I W of microbatch 0; the schedule has nothing"),
        (("0F0 0REDUCE_GRAD",), "stage 0 needs F B or F I W of microbatch 0; the schedule has 0F0"),
        # Rule 5.
        (("0B0 0F0",), "0B0, action 1 of position 0: it stands before 0F0"),
        (("0F0 0W0 0I0",), "0W0, action 2 of position 0: it stands before 0I0"),
        # Rule 6.
        (
            ("0RECV_F0<1 0F0 0B0", "1F0 1SEND_F0>0 1B0"),
            "0RECV_F0<1, action 1 of position 0: values go to a later stage",
        ),
        (
            ("0F0 0B0 0SEND_B0>1", "1F0 1RECV_B0<0 1B0"),
            "0SEND_B0>1, action 3 of position 0: values go to a later stage",
        ),
        (("0F0 0SEND_F0>0 0RECV_F0<0 0B0",), "0SEND_F0>0, action 2 of position 0: values go to a later stage"),
        # Rule 7.
        (("0F0 0SEND_F0>1 0B0", "1F0 1B0"), "0SEND_F0>1, action 2 of position 0: its other end 1RECV_F0<0 is missing"),
        (("0F0 0B0", "1RECV_F0<0 1F0 1B0"), "1RECV_F0<0, action 1 of position 1: its other end 0SEND_F0>1 is missing"),
        # Rule 8.
        (("0F0 0RECV_B0<1 0B0", "1F0 1B0 1SEND_B0>0"), "stage 1 sends a gradient to stage 0, which sends it no values"),
        # Rule 9.
        (("0SEND_F0>1 0F0 0B0", "1RECV_F0<0 1F0 1B0"), "0SEND_F0>1, action 1 of position 0: it stands before 0F0"),
        (("0F0 0SEND_F0>1 0B0", "1F0 1RECV_F0<0 1B0"), "1RECV_F0<0, action 2 of position 1: it stands after 1F0"),
        (
            ("0F0 0SEND_F0>1 0I0 0RECV_B0<1 0W0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0"),
            "0RECV_B0<1, action 4 of position 0: it stands after 0I0",
        ),
        # Rule 10.
        (("0F0 0REDUCE_GRAD 0B0",), "0B0, action 3 of position 0: it stands after 0REDUCE_GRAD"),
        (("0F0 0B0 0REDUCE_GRAD", "1F0 1B0"), "stage 0 reduces its gradients, but 1REDUCE_GRAD is missing"),
    ],
)
def test_a_broken_rule_is_named_with_the_action_and_its_place(lines, message):
    with pytest.raises(InvalidPlanError) as caught:
        validate(schedule_of(*lines))
    assert message in str(caught.value)


def test_stages_of_one_position_send_each_other_nothing():
    schedule = schedule_of("0F0 0SEND_F0>1 1RECV_F0<0 1F0 1B0 0B0", num_stages=2)
    with pytest.raises(InvalidPlanError, match="stages 0 and 1 share position 0 and need no message"):
        validate(schedule)


def test_an_edge_carries_every_microbatch():
    schedule = schedule_of("0F0 0SEND_F0>1 0F1 0B0 0B1", "1RECV_F0<0 1F0 1F1 1B0 1B1", num_microbatches=2)
    with pytest.raises(InvalidPlanError, match="not for every microbatch: 0SEND_F1>1 is missing"):
        validate(schedule)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(stage=0, kind="F"), "names a microbatch"),
        (Action(stage=0, kind="REDUCE_GRAD", microbatch=0), "names a microbatch"),
        (Action(stage=0, kind="F", microbatch=0, peer=1), "only they, name another stage"),
        (Action(stage=0, kind="SEND_F", microbatch=0), "only they, name another stage"),
    ],
)
def test_actions_that_no_text_can_say_are_refused(action, message):
    with pytest.raises(InvalidPlanError, match=message):
        validate(Schedule(name="made", num_stages=2, num_microbatches=1, ranks=((action,), ())))


def test_an_invalid_plan_error_carries_the_place_for_programs():
    with pytest.raises(InvalidPlanError) as caught:
        validate(schedule_of("0B0 0F0"))
    assert (caught.value.action, caught.value.position, caught.value.index) == ("0B0", 0, 0)


CROSSED = (
    "0F0 0SEND_F0>1 0F1 0RECV_B1<1 0B1 0SEND_F1>1 0RECV_B0<1 0B0",
    "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1B0 1SEND_B0>0",
)


def test_a_deadlock_names_the_waiting_action_of_every_position():
    with pytest.raises(DeadlockError) as caught:
        validate(schedule_of(*CROSSED, num_microbatches=2))
    assert "position 0 waits for 0RECV_B1<1 (action 4), position 1 waits for 1RECV_F1<0 (action 3)" in str(caught.value)
    assert caught.value.waiting == {0: "0RECV_B1<1", 1: "1RECV_F1<0"}


def test_an_untimed_run_executes_every_row_as_listed():
    schedule = add_reduction(add_communication(make_schedule("1f1b", 3, 4), [(0, 1, True), (0, 2, True), (1, 2, True)]))
    assert run_untimed(schedule) == schedule.ranks
