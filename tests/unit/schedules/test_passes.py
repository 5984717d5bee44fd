from dataclasses import replace

import pytest

from partita.ir.schedule import Schedule, parse_actions
from partita.schedules.makers import SCHEDULES, make_schedule
from partita.schedules.passes import add_communication, add_reduction, compute_only, forward_only


def schedule_of(*lines, num_microbatches=1, num_stages=None):
    ranks = tuple(parse_actions(line) for line in lines)
    return Schedule(name="text", num_stages=num_stages or len(lines), num_microbatches=num_microbatches, ranks=ranks)


def test_messages_stand_directly_around_the_compute_that_needs_or_makes_them():
    schedule = add_communication(make_schedule("1f1b", 2, 2), [(0, 1, True)])
    assert schedule.lines() == (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0",
    )


def test_edges_skip_stages_and_messages_of_one_action_stand_by_ascending_peer():
    edges = [(0, 3, True), (2, 3, True), (1, 3, True), (0, 2, False), (0, 1, True)]
    assert add_communication(make_schedule("gpipe", 4, 1), edges).lines() == (
        "0F0 0SEND_F0>1 0SEND_F0>2 0SEND_F0>3 0RECV_B0<1 0RECV_B0<3 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>3 1RECV_B0<3 1B0 1SEND_B0>0",
        "2RECV_F0<0 2F0 2SEND_F0>3 2RECV_B0<3 2B0",
        "3RECV_F0<0 3RECV_F0<1 3RECV_F0<2 3F0 3B0 3SEND_B0>0 3SEND_B0>1 3SEND_B0>2",
    )


def test_an_edge_without_gradient_has_no_way_back():
    schedule = add_communication(make_schedule("gpipe", 2, 1), [(0, 1, False)])
    assert schedule.lines() == ("0F0 0SEND_F0>1 0B0", "1RECV_F0<0 1F0 1B0")


def test_an_edge_given_twice_is_one_edge_with_a_gradient_if_either_has_one():
    compute = make_schedule("gpipe", 2, 2)
    assert add_communication(compute, [(0, 1, False), (0, 1, True)]) == add_communication(compute, [(0, 1, True)])


def test_a_split_backward_exchanges_gradients_at_its_input_half():
    schedule = add_communication(schedule_of("0F0 0I0 0W0", "1F0 1I0 1W0"), [(0, 1, True)])
    assert schedule.lines() == ("0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0", "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0")


def test_stages_of_one_position_exchange_nothing():
    schedule = schedule_of("0F0 1F0 1B0 0B0", num_stages=2)
    assert add_communication(schedule, [(0, 1, True)]) == schedule


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 3), (-1, 1)])
def test_an_edge_that_leads_nowhere_later_is_refused(edge):
    with pytest.raises(ValueError, match=f"not from {edge[0]} to {edge[1]}"):
        add_communication(make_schedule("gpipe", 3, 1), [(*edge, True)])


def test_messages_and_reductions_are_added_once():
    complete = add_reduction(add_communication(make_schedule("gpipe", 2, 1), [(0, 1, True)]))
    with pytest.raises(ValueError, match="sends or receives already"):
        add_communication(complete, [(0, 1, True)])
    with pytest.raises(ValueError, match="reductions already"):
        add_reduction(complete)


def test_the_reduction_follows_the_last_backward_and_its_sends():
    schedule = add_reduction(add_communication(make_schedule("1f1b", 2, 1), [(0, 1, True)]))
    assert schedule.lines() == (
        "0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE_GRAD",
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE_GRAD",
    )


def test_the_reduction_waits_for_the_weight_half():
    assert add_reduction(schedule_of("0F0 0I0 0W0")).lines() == ("0F0 0I0 0W0 0REDUCE_GRAD",)


def test_each_stage_of_a_position_reduces_as_soon_as_it_can():
    schedule = schedule_of("0F0 1F0 1B0 0B0", num_stages=2)
    assert add_reduction(schedule).lines() == ("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD",)


def test_evaluation_keeps_forwards_and_their_messages():
    complete = add_reduction(add_communication(make_schedule("1f1b", 2, 2), [(0, 1, True)]))
    assert forward_only(complete).lines() == (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1F1",
    )
    assert add_reduction(forward_only(complete)) == forward_only(complete)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_schedules_are_one_in_evaluation_and_leaving_out_commutes_with_adding(name):
    edges = [(0, 1, True), (1, 2, False), (0, 2, True)]
    compute = make_schedule(name, 3, 4)
    evaluation = forward_only(add_communication(compute, edges))
    assert evaluation == add_communication(forward_only(compute), edges)
    assert replace(evaluation, name="any") == replace(
        forward_only(add_communication(make_schedule("gpipe", 3, 4), edges)), name="any"
    )


def test_compute_only_undoes_the_other_passes():
    compute = make_schedule("1f1b", 3, 4)
    assert compute_only(add_reduction(add_communication(compute, [(0, 2, True)]))) == compute
