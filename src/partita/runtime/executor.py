"""Execute schedules: the pure machine of `partita.schedules.machine`, driven by a worker and a transport.

A `Worker` knows what the actions mean (run a stage, sleep for its time); a `Transport` carries the messages.  The
order of the actions is the machine's alone, so a simulated, an emulated, a loopback and a real execution of one
schedule have one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from partita.ir.schedule import SEND_KINDS, Action
from partita.runtime.transport import Expected, LoopbackTransport, Outgoing, Received, Transport
from partita.schedules.machine import Await, Post, RankMachine, Run, deadlock, drive

Log = list[tuple[Action, float, float]]
"""Executed actions with start and end in seconds of a clock, the monotonic one unless another is given."""


class Worker(Protocol):
    """Gives the actions of one position their meaning."""

    def compute(self, action: Action) -> None:
        """Run a forward or backward."""
        ...

    def outgoing(self, action: Action) -> Outgoing:
        """Return the message of a send."""
        ...

    def expected(self, action: Action) -> Expected:
        """Return what is known of the message of a receive."""
        ...

    def incoming(self, action: Action, message: Received) -> None:
        """Take an arrived message."""
        ...

    def reduce(self, action: Action) -> None:
        """Sum the stage's gradients."""
        ...


def _do(action: Action, worker: Worker, transport: Transport) -> None:
    if action.kind in SEND_KINDS:
        transport.send(action, worker.outgoing(action))
    elif action.kind == "REDUCE_GRAD":
        worker.reduce(action)
    else:
        worker.compute(action)


def execute(
    actions: Sequence[Action],
    worker: Worker,
    transport: Transport,
    log: Log | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Execute one position's actions to the end.

    Args:
        actions: The position's row of a schedule.
        worker: What the actions mean.
        transport: How messages travel.
        log: Where to note the executed actions, or None.
        clock: Gives the log's times; the thread's own time leaves out what other processes took.
    """

    def timed(action: Action, function: Callable[[], None]) -> None:
        start = clock()
        function()
        if log is not None:
            log.append((action, start, clock()))

    drive(
        RankMachine(actions),
        post=lambda action: transport.post(action, worker.expected(action)),
        run=lambda action: timed(action, lambda: _do(action, worker, transport)),
        wait=lambda action: timed(action, lambda: worker.incoming(action, transport.wait(action))),
    )
    transport.finish()


def execute_together(
    rows: Sequence[Sequence[Action]],
    workers: Sequence[Worker],
    transports: Sequence[LoopbackTransport],
    logs: Sequence[Log] | None = None,
) -> None:
    """Execute all positions of a schedule in one process, by turns.

    Args:
        rows: Every position's actions.
        workers: One per position.
        transports: One per position, on one mailbox.
        logs: One per position, or None.

    Raises:
        DeadlockError: If every position waits for a message that nobody sends.
    """
    machines = [RankMachine(row) for row in rows]
    queues = [list(machine.start()) for machine in machines]
    while not all(machine.done and not queue for machine, queue in zip(machines, queues, strict=True)):
        moved = False
        for position, machine in enumerate(machines):
            while queues[position] and _ready(queues[position][0], transports[position]):
                instruction = queues[position].pop(0)
                moved = True
                queues[position] += _step(
                    instruction, machine, workers[position], transports[position], logs[position] if logs else None
                )
        if not moved:
            raise deadlock(machines)


def _ready(instruction: Post | Run | Await, transport: LoopbackTransport) -> bool:
    return not isinstance(instruction, Await) or transport.arrived(instruction.action)


def _step(
    instruction: Post | Run | Await, machine: RankMachine, worker: Worker, transport: LoopbackTransport, log: Log | None
) -> list[Post | Run | Await]:
    action = instruction.action
    if isinstance(instruction, Post):
        transport.post(action, worker.expected(action))
        return []
    start = time.perf_counter()
    if isinstance(instruction, Await):
        worker.incoming(action, transport.wait(action))
    else:
        _do(action, worker, transport)
    if log is not None:
        log.append((action, start, time.perf_counter()))
    return [] if action.kind in SEND_KINDS else list(machine.completed(action))
