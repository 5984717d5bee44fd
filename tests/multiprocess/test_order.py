"""What is executed is what was simulated: the same actions in the same order, on every transport."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import partita
from partita.errors import DeadlockError
from partita.ir.schedule import RECV_KINDS, SEND_KINDS, parse_actions
from partita.runtime.executor import execute, execute_together
from partita.runtime.transport import (
    Expected,
    LoopbackTransport,
    Mailbox,
    Outgoing,
    ProcessGroupTransport,
)
from partita.schedules.machine import other_end
from partita.schedules.makers import make_schedule
from partita.schedules.passes import add_communication, add_reduction
from partita.simulator import simulate_plan
from partita.simulator.engine import simulate_schedule
from tests.property.strategies import schedules
from tests.training import Setup, loop_a, loop_c, parallelize
from tests.zoo import CASES, Inside

SKIPPING = ((0, 1, True), (1, 2, True), (0, 2, True), (0, 2, False))


class Postman:
    """A worker that computes nothing; each message holds the text of the action that sends it."""

    def __init__(self):
        self.reduced = []

    def compute(self, action):
        assert action.kind in "FB"

    def outgoing(self, action):
        return Outgoing([letter(action), None, 7], key="letters")

    def expected(self, action):
        return Expected(3, key="letters")

    def incoming(self, action, message):
        text = bytes(message.values[0].tolist()).decode().strip()
        assert text == str(other_end(action)), f"{action} got the message of {text}"
        assert message.values[1:] == (None, 7)

    def reduce(self, action):
        self.reduced.append(action.stage)


def letter(action):
    return torch.tensor(list(str(action).ljust(20).encode()), dtype=torch.uint8)


def simulated(schedule, draw_s=lambda action: 1.0):
    """Return every position's order in the simulation."""
    timeline = simulate_schedule(schedule, compute_s=draw_s, transfer_s=lambda send: draw_s(send) / 3)
    return [list(timeline.order(position)) for position in range(len(schedule.ranks))]


# ---------------------------------------------------------------- loopback


@given(schedules(), st.integers(1, 9))
def test_loopback_executes_in_the_simulated_order(schedule, unevenness):
    mailbox = Mailbox()
    logs = [[] for _ in schedule.ranks]
    workers = [Postman() for _ in schedule.ranks]
    execute_together(schedule.ranks, workers, [LoopbackTransport(mailbox) for _ in schedule.ranks], logs)
    executed = [[action for action, _, _ in log] for log in logs]
    assert executed == simulated(schedule, lambda action: 1 + action.stage % unevenness)
    assert executed == [list(row) for row in schedule.ranks]
    assert not mailbox.messages, "messages were left behind"
    assert [worker.reduced for worker in workers] == [[stage] for stage in range(schedule.num_stages)]


def test_loopback_names_a_deadlock():
    rows = [parse_actions("0F0 0RECV_B0<1 0B0 0SEND_F0>1"), parse_actions("1RECV_F0<0 1F0 1B0 1SEND_B0>0")]
    mailbox = Mailbox()
    with pytest.raises(DeadlockError, match=r"position 0 waits for 0RECV_B0<1.*position 1 waits for 1RECV_F0<0"):
        execute_together(rows, [Postman()] * 2, [LoopbackTransport(mailbox)] * 2)


# ---------------------------------------------------------------- process groups


def deliver(schedule, steps):
    """Execute this rank's row several times; return the executed orders."""
    rank = dist.get_rank()
    transport = ProcessGroupTransport(range(dist.get_world_size()), {}, torch.device("cpu"))
    orders = []
    for _ in range(steps):
        log = []
        execute(schedule.ranks[rank], Postman(), transport, log)
        assert all(start <= end for _, start, end in log)
        orders.append([action for action, _, _ in log])
    return orders


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_process_groups_execute_in_the_simulated_order(pool, name):
    schedule = add_reduction(add_communication(make_schedule(name, 3, 5), SKIPPING))
    ranks = pool.run(deliver, 3, schedule, 2, seconds=20)
    expected = simulated(schedule)
    for position, orders in enumerate(ranks):
        assert orders == [expected[position]] * 2
    kinds = {action.kind for action in ranks[1][0]}
    assert kinds == {"F", "B", "REDUCE_GRAD", *SEND_KINDS, *RECV_KINDS}


# ---------------------------------------------------------------- a planned model


def train_logged(loop, name, setup):
    """Run one step of a planned model; return the plan and this rank's executed order."""
    case = CASES[name]
    model = Inside(case.build(), case.loss) if loop == "B" else case.build()
    module = parallelize(model, case.example(), setup, inside=loop == "B", loss_fn=case.loss if loop == "C" else None)
    batch = case.example()
    module.engine.log = []
    if loop == "C":
        loop_c(module, batch, case.loss)
    elif loop == "B":
        module(*batch.args, target=batch.target).backward()
    else:
        loop_a(module, batch, case.loss)
    return module.plan, [action for action, _, _ in module.engine.log]


@pytest.mark.parametrize(
    ("loop", "schedule", "name", "setup"),
    [
        ("A", "gpipe", "skips", Setup(pp=3, dp=1, microbatches=4)),
        ("B", "1f1b", "skips", Setup(pp=3, dp=1, microbatches=4)),
        ("C", "1f1b", "skips", Setup(pp=2, dp=2, microbatches=2)),
        ("C", "1f1b", "structured", Setup(pp=3, dp=1, microbatches=2)),
    ],
)
def test_a_planned_model_runs_its_planned_rows(pool, loop, schedule, name, setup):
    ranks = pool.run(train_logged, setup.ranks, loop, name, setup, seconds=20)
    plan = ranks[0][0]
    assert plan.schedule.name == schedule
    assert plan.num_microbatches == setup.microbatches
    timeline = simulate_plan(plan)
    for stage in plan.stages:
        for rank in stage.ranks:
            executed = ranks[rank][1]
            assert executed == list(plan.schedule.ranks[stage.index])
            assert executed == list(timeline.order(stage.index))
    assert partita.simulate(plan).order(0) == timeline.order(0)
