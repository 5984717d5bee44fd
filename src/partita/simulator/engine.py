"""Discrete-event simulation of a schedule, with a clock in the place of devices.

Theory of operation.  Every pipeline position is a `RankMachine`, the one that the runtime executes, and this module is
its driver: it starts what the machine says and reports completions when the clock says so.

* Compute takes ``compute_s(action)`` and occupies its position.
* A message takes ``transfer_s(send)`` and occupies no position: sends and receives overlap with compute.  It starts to
  travel when its send has been issued, its receive has been posted (one compute action ahead, see `RankMachine`) and
  the link is free.  A link is one direction between two positions and carries one message at a time, in the order in
  which messages become ready.
* ``send_overhead_s`` is what issuing one send costs the sending position (a copy by the CPU, say).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from partita.errors import InvalidPlanError
from partita.ir.schedule import RECV_KINDS, SEND_KINDS, Action, Schedule
from partita.schedules.machine import Await, Instruction, Post, RankMachine, Run, deadlock, other_end
from partita.simulator.timeline import Event, Timeline


class _Simulation:
    """The state of one run: the clock's agenda, the machines, and the messages under way."""

    def __init__(
        self,
        schedule: Schedule,
        compute_s: Callable[[Action], float],
        transfer_s: Callable[[Action], float],
        send_overhead_s: float,
    ) -> None:
        self.compute_s = compute_s
        self.transfer_s = transfer_s
        self.send_overhead_s = send_overhead_s
        self.home = schedule.position_of_stage()
        self.machines = [RankMachine(actions) for actions in schedule.ranks]
        self.instructions: list[deque[Instruction]] = [deque() for _ in self.machines]
        self.order: list[list[Action]] = [[] for _ in self.machines]
        self.times: dict[Action, tuple[float, float]] = {}
        self.busy = [False] * len(self.machines)  # issuing a send
        self.sent: set[Action] = set()  # receives whose send has been issued
        self.posted: set[Action] = set()
        self.arrived: set[Action] = set()
        self.awaited: dict[Action, float] = {}  # receive -> since when
        self.link_free: dict[tuple[int, int], float] = {}
        # (time, tie breaker, position, action that completes: compute ended, send issued, or receive arrived)
        self.agenda: list[tuple[float, int, int, Action]] = []
        self.scheduled = 0

    def run(self) -> None:
        """Let the clock run until nothing happens any more.

        Raises:
            DeadlockError: If a position is not done then.
        """
        for position, machine in enumerate(self.machines):
            self.instructions[position].extend(machine.start())
            self.go_on(position, 0.0)
        while self.agenda:
            now, _, position, action = heapq.heappop(self.agenda)
            if action.kind in SEND_KINDS:
                self.busy[position] = False
                self.issue(action, now)
            elif action.kind not in RECV_KINDS:
                self.instructions[position].extend(self.machines[position].completed(action))
            else:
                self.arrived.add(action)
                if action in self.awaited:
                    self.receive(position, action, now)
            self.go_on(position, now)
        if not all(machine.done for machine in self.machines):
            raise deadlock(self.machines)

    def at(self, time: float, position: int, action: Action) -> None:
        """Put a completion on the agenda; ties are served in the order of being put there."""
        self.scheduled += 1
        heapq.heappush(self.agenda, (time, self.scheduled, position, action))

    def go_on(self, position: int, now: float) -> None:
        """Follow a position's instructions until it has to wait."""
        instructions = self.instructions[position]
        while instructions and not self.busy[position]:
            action = instructions[0].action
            match instructions.popleft():
                case Post():
                    self.posted.add(action)
                    self.travel(action, now)
                case Await():
                    self.order[position].append(action)
                    self.awaited[action] = now
                    if action in self.arrived:
                        self.receive(position, action, now)
                case Run() if action.kind in SEND_KINDS:
                    self.order[position].append(action)
                    if self.send_overhead_s > 0:
                        self.busy[position] = True
                        self.at(now + self.send_overhead_s, position, action)
                    else:
                        self.issue(action, now)
                case Run():
                    self.order[position].append(action)
                    self.times[action] = now, now + self.compute_s(action)
                    self.at(self.times[action][1], position, action)

    def issue(self, send: Action, now: float) -> None:
        """Hand a message to its link."""
        receive = other_end(send)
        self.sent.add(receive)
        self.travel(receive, now)

    def travel(self, receive: Action, now: float) -> None:
        """Let a message travel if both of its ends are ready."""
        if receive not in self.sent or receive not in self.posted:
            return
        send = other_end(receive)
        link = self.home[send.stage], self.home[receive.stage]
        start = max(now, self.link_free.get(link, 0.0))
        end = self.link_free[link] = start + self.transfer_s(send)
        self.times[send] = start, end
        self.at(end, link[1], receive)

    def receive(self, position: int, action: Action, now: float) -> None:
        """Report an awaited receive."""
        self.times[action] = self.awaited.pop(action), now
        self.instructions[position].extend(self.machines[position].completed(action))

    def events(self) -> Iterator[Event]:
        """Yield the events by position, in the order of execution.

        Raises:
            InvalidPlanError: If a message was sent that nobody receives.
        """
        for position, order in enumerate(self.order):
            for action in order:
                if action not in self.times:
                    raise InvalidPlanError(f"{action} of position {position} is never received", action=str(action))
                start, end = self.times[action]
                yield Event(position=position, action=action, start_s=start, end_s=end)


def simulate_schedule(
    schedule: Schedule,
    *,
    compute_s: Callable[[Action], float],
    transfer_s: Callable[[Action], float],
    send_overhead_s: float = 0.0,
) -> Timeline:
    """Simulate one step of a schedule.

    Args:
        schedule: A schedule with its messages.
        compute_s: Seconds of a compute or ``REDUCE_GRAD`` action.
        transfer_s: Seconds that the message of a send travels.
        send_overhead_s: Seconds for which issuing one send occupies the sender, before the message travels.

    Returns:
        The timeline; same input, same timeline.

    Raises:
        DeadlockError: If positions wait for each other; names the actions they wait for.
        InvalidPlanError: If a message is never received.

    Complexity: ``O(n log n)`` for ``n`` actions.
    """
    simulation = _Simulation(schedule, compute_s, transfer_s, send_overhead_s)
    simulation.run()
    labels = tuple(f"position {position}" for position in range(len(schedule.ranks)))
    return Timeline(events=tuple(simulation.events()), labels=labels)
