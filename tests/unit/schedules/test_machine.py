import pytest

from partita.ir.schedule import parse_action, parse_actions
from partita.schedules.machine import RankMachine, deadlock, drive, other_end

LINE = "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_F1<0 1F1 1SEND_F1>2 1RECV_B0<2 1B0 1SEND_B0>0 1RECV_B1<2 1B1 1REDUCE_GRAD"


def texts(instructions):
    return [f"{type(step).__name__} {step.action}" for step in instructions]


def complete(machine, text):
    return texts(machine.completed(parse_action(text)))


def test_a_whole_position_receives_one_compute_action_ahead():
    machine = RankMachine(parse_actions(LINE))
    assert machine.waiting_for is None
    assert texts(machine.start()) == ["Post 1RECV_F0<0", "Await 1RECV_F0<0"]
    assert complete(machine, "1RECV_F0<0") == ["Post 1RECV_F1<0", "Run 1F0"]
    assert complete(machine, "1F0") == ["Run 1SEND_F0>2", "Await 1RECV_F1<0"]
    assert complete(machine, "1RECV_F1<0") == ["Post 1RECV_B0<2", "Run 1F1"]
    assert str(machine.waiting_for) == "1F1"
    assert complete(machine, "1F1") == ["Run 1SEND_F1>2", "Await 1RECV_B0<2"]
    assert complete(machine, "1RECV_B0<2") == ["Post 1RECV_B1<2", "Run 1B0"]
    assert complete(machine, "1B0") == ["Run 1SEND_B0>0", "Await 1RECV_B1<2"]
    assert complete(machine, "1RECV_B1<2") == ["Run 1B1"]
    assert complete(machine, "1B1") == ["Run 1REDUCE_GRAD"]
    assert not machine.done
    assert complete(machine, "1REDUCE_GRAD") == []
    assert machine.done
    assert machine.waiting_for is None


def test_a_receive_that_came_early_is_not_awaited():
    machine = RankMachine(parse_actions("1RECV_F0<0 1F0 1RECV_F1<0 1F1"))
    machine.start()
    complete(machine, "1RECV_F0<0")
    assert complete(machine, "1RECV_F1<0") == []
    assert complete(machine, "1F0") == ["Run 1F1"]


def test_receives_of_several_sources_complete_in_any_order():
    machine = RankMachine(parse_actions("3RECV_F0<0 3RECV_F0<2 3F0"))
    assert texts(machine.start()) == ["Post 3RECV_F0<0", "Post 3RECV_F0<2", "Await 3RECV_F0<0"]
    assert complete(machine, "3RECV_F0<2") == []
    assert complete(machine, "3RECV_F0<0") == ["Run 3F0"]


def test_a_reduction_is_no_compute_action_so_receives_behind_it_are_posted_before_it():
    machine = RankMachine(parse_actions("0F0 0REDUCE_GRAD 1RECV_B0<2 1B0"))
    assert texts(machine.start()) == ["Post 1RECV_B0<2", "Run 0F0"]
    assert complete(machine, "0F0") == ["Run 0REDUCE_GRAD"]


def test_a_row_without_actions_is_done_at_once():
    machine = RankMachine(())
    assert machine.start() == ()
    assert machine.done


def test_a_row_of_sends_is_done_as_soon_as_they_are_issued():
    machine = RankMachine(parse_actions("0SEND_F0>1"))
    assert texts(machine.start()) == ["Run 0SEND_F0>1"]
    assert machine.done


@pytest.mark.parametrize("text", ["1F1", "1RECV_F1<0", "1SEND_F0>2", "1B0", "2F0"])
def test_completing_what_was_not_asked_for_is_refused(text):
    machine = RankMachine(parse_actions(LINE))
    machine.start()
    with pytest.raises(ValueError, match=rf"{text} cannot complete: .* the machine waits for 1RECV_F0<0"):
        complete(machine, text)


def test_completing_twice_before_the_start_or_after_the_end_is_refused():
    machine = RankMachine(parse_actions("0F0"))
    with pytest.raises(ValueError, match="the machine waits for its start"):
        complete(machine, "0F0")
    machine.start()
    complete(machine, "0F0")
    with pytest.raises(ValueError, match=r"0F0 cannot complete: .* the machine is done"):
        complete(machine, "0F0")


def test_completing_an_early_receive_twice_is_refused():
    machine = RankMachine(parse_actions("1RECV_F0<0 1RECV_F0<2 1F0"))
    machine.start()
    complete(machine, "1RECV_F0<2")
    with pytest.raises(ValueError, match="1RECV_F0<2 cannot complete"):
        complete(machine, "1RECV_F0<2")


def test_a_refused_event_changes_nothing():
    machine = RankMachine(parse_actions("0F0 0F1"))
    machine.start()
    with pytest.raises(ValueError, match="0F1 cannot complete"):
        complete(machine, "0F1")
    assert complete(machine, "0F0") == ["Run 0F1"]


def test_a_machine_starts_once_and_lists_each_action_once():
    machine = RankMachine(parse_actions("0F0"))
    machine.start()
    with pytest.raises(ValueError, match="started before"):
        machine.start()
    with pytest.raises(ValueError, match="0F0 is listed twice"):
        RankMachine(parse_actions("0F0 0B0 0F0"))


def test_drive_runs_a_position_with_blocking_callbacks():
    log = []
    machine = RankMachine(parse_actions("1RECV_F0<0 1F0 1RECV_F1<0 1F1 1SEND_F1>2"))
    drive(
        machine,
        post=lambda action: log.append(f"post {action}"),
        run=lambda action: log.append(f"run {action}"),
        wait=lambda action: log.append(f"wait {action}"),
    )
    assert machine.done
    assert log == [
        "post 1RECV_F0<0",
        "wait 1RECV_F0<0",
        "post 1RECV_F1<0",
        "run 1F0",
        "wait 1RECV_F1<0",
        "run 1F1",
        "run 1SEND_F1>2",
    ]


@pytest.mark.parametrize(("text", "twin"), [("2SEND_F7>3", "3RECV_F7<2"), ("3SEND_B7>2", "2RECV_B7<3")])
def test_the_other_end_of_a_message(text, twin):
    assert str(other_end(parse_action(text))) == twin
    assert str(other_end(parse_action(twin))) == text


def test_compute_has_no_other_end():
    with pytest.raises(ValueError, match="2F0 is neither a send nor a receive"):
        other_end(parse_action("2F0"))


def test_a_deadlock_names_every_waiting_position_and_action():
    machines = [RankMachine(parse_actions(line)) for line in ("0F0", "1RECV_F0<0 1F0")]
    machines[1].start()
    machines[0].start()
    machines[0].completed(parse_action("0F0"))
    error = deadlock(machines)
    assert "position 1 waits for 1RECV_F0<0 (action 1)" in str(error)
    assert error.waiting == {1: "1RECV_F0<0"}
