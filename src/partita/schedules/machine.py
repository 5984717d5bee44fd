"""The pure executor of one pipeline position: completed events in, instructions out.

Theory of operation.  A `RankMachine` holds one position's list of actions and a cursor.  It does nothing itself: it
*tells* a driver what to do, and the driver *tells* it what has completed.  There is no clock, no thread and no torch
here, so that the simulator, the loopback in one process and real process groups execute one and the same code, and an
executed order can be compared with a simulated one action by action.

* Actions are passed in the listed order, whatever the order of the completions.
* A receive is *posted* when the compute action before it starts, one compute action ahead, so that its message travels
  while the position computes; receives before the first compute action are posted at the start.
* A receive is *awaited* where it stands in the list.  If it was reported as completed before, there is no `Await`.
* Sends are issued where they stand and are not awaited.  The driver keeps their handles and waits for all of them
  when the machine is done.
* Compute actions and ``REDUCE_GRAD`` run one at a time.

An answer of the machine ends with a `Run` that takes time or an `Await`, or the machine is done::

    for instruction in machine.start():           # then: in machine.completed(...)
        Post(receive)   start the receive, go on
        Run(send)       start the send, keep its handle, go on
        Run(compute)    do it, report completed(compute)
        Await(receive)  wait for the posted receive, report completed(receive)

`drive` is that loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from partita.errors import DeadlockError
from partita.ir.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, ActionKind


@dataclass(frozen=True, slots=True)
class Post:
    """Start this receive and go on."""

    action: Action


@dataclass(frozen=True, slots=True)
class Run:
    """Do this now: start a send, or do a compute or ``REDUCE_GRAD`` action and report its completion."""

    action: Action


@dataclass(frozen=True, slots=True)
class Await:
    """Report the completion of this posted receive as soon as it has arrived."""

    action: Action


Instruction = Post | Run | Await

_OTHER_END: dict[ActionKind, ActionKind] = {
    "SEND_F": "RECV_F",
    "RECV_F": "SEND_F",
    "SEND_B": "RECV_B",
    "RECV_B": "SEND_B",
}


def other_end(action: Action) -> Action:
    """Return the receive of a send, or the send of a receive: ``3RECV_F0<2`` of ``2SEND_F0>3``.

    Raises:
        ValueError: If the action is neither.
    """
    if action.peer is None or action.kind not in _OTHER_END:
        raise ValueError(f"{action} is neither a send nor a receive")
    return Action(stage=action.peer, kind=_OTHER_END[action.kind], microbatch=action.microbatch, peer=action.stage)


class RankMachine:
    """Execute one position's actions, in the listed order.

    Args:
        actions: One row of a schedule; each action at most once.

    Raises:
        ValueError: If an action is listed twice.

    Example:
        >>> from partita.ir.schedule import parse_actions
        >>> machine = RankMachine(parse_actions("1RECV_F0<0 1F0 1B0 1SEND_B0>0"))
        >>> [f"{type(step).__name__} {step.action}" for step in machine.start()]
        ['Post 1RECV_F0<0', 'Await 1RECV_F0<0']
        >>> machine.completed(machine.waiting_for)[0].action == machine.waiting_for
        True
    """

    __slots__ = ("_actions", "_ahead", "_next", "_open", "_started")

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = tuple(actions)
        if len(set(self._actions)) != len(self._actions):
            twice = next(action for action in self._actions if self._actions.count(action) > 1)
            raise ValueError(f"{twice} is listed twice for one position")
        self._started = False
        self._next = 0  # the action that is running, awaited or to be looked at next
        self._ahead = 0  # every receive before this index is posted
        self._open: set[Action] = set()  # posted receives that have not completed

    @property
    def done(self) -> bool:
        """Whether every action has been passed (sends may still be under way)."""
        return self._next == len(self._actions)

    @property
    def waiting_for(self) -> Action | None:
        """The action whose completion lets the machine go on; None before the start and when it is done."""
        return self._actions[self._next] if self._started and not self.done else None

    @property
    def passed(self) -> int:
        """The number of actions, from the first, that are behind the machine."""
        return self._next

    def start(self) -> tuple[Instruction, ...]:
        """Begin; return the first instructions.

        Raises:
            ValueError: If the machine was started before.
        """
        if self._started:
            raise ValueError("the machine was started before; a step needs a new one")
        self._started = True
        return (*self._post_ahead(), *self._advance())

    def completed(self, action: Action) -> tuple[Instruction, ...]:
        """Take note that ``action`` has completed; return what to do next.

        Args:
            action: The running compute or ``REDUCE_GRAD`` action, or any posted receive (awaited yet or not).

        Returns:
            The next instructions; nothing if the machine waits for something else.

        Raises:
            ValueError: If the action is not running or posted, or has completed before.
        """
        waiting = self.waiting_for
        if action != waiting and action not in self._open:
            state = "the machine is done" if self.done else f"the machine waits for {waiting or 'its start'}"
            raise ValueError(f"{action} cannot complete: it is neither running nor posted; {state}")
        self._open.discard(action)
        if action != waiting:
            return ()
        self._next += 1
        return self._advance()

    def _advance(self) -> tuple[Instruction, ...]:
        """Pass actions until one of them has to be waited for."""
        instructions: list[Instruction] = []
        while not self.done:
            action = self._actions[self._next]
            if action.kind in SEND_KINDS:
                instructions.append(Run(action))
            elif action.kind not in RECV_KINDS:
                if action.kind in COMPUTE_KINDS:
                    self._ahead = self._next + 1
                    instructions += self._post_ahead()
                instructions.append(Run(action))
                break
            elif action in self._open:
                instructions.append(Await(action))
                break
            self._next += 1
        return tuple(instructions)

    def _post_ahead(self) -> list[Instruction]:
        """Post the receives up to the next compute action."""
        posts: list[Instruction] = []
        while self._ahead < len(self._actions) and self._actions[self._ahead].kind not in COMPUTE_KINDS:
            action = self._actions[self._ahead]
            if action.kind in RECV_KINDS:
                self._open.add(action)
                posts.append(Post(action))
            self._ahead += 1
        return posts


def drive(
    machine: RankMachine,
    *,
    post: Callable[[Action], None],
    run: Callable[[Action], None],
    wait: Callable[[Action], None],
) -> None:
    """Run a machine to its end with blocking callbacks: the loop of a position that has a process of its own.

    Args:
        machine: A machine that has not been started.
        post: Start a receive, without blocking.
        run: Start a send without blocking, or do a compute or ``REDUCE_GRAD`` action.
        wait: Return when a posted receive has arrived.
    """
    pending = deque(machine.start())
    while pending:
        instruction = pending.popleft()
        match instruction:
            case Post(action):
                post(action)
            case Await(action):
                wait(action)
                pending.extend(machine.completed(action))
            case Run(action):
                run(action)
                if action.kind not in SEND_KINDS:
                    pending.extend(machine.completed(action))


def deadlock(machines: Iterable[RankMachine]) -> DeadlockError:
    """Return the error that names, for every position that is stuck, the action it waits for."""
    stuck = {position: machine for position, machine in enumerate(machines) if not machine.done}
    texts = (
        f"position {at} waits for {machine.waiting_for} (action {machine.passed + 1})" for at, machine in stuck.items()
    )
    return DeadlockError(
        f"the schedule cannot finish: {', '.join(texts)}",
        hint="list each send before anything that waits, directly or over other positions, for its receive",
        waiting={position: str(machine.waiting_for) for position, machine in stuck.items()},
    )
