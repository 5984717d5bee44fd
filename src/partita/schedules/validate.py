"""The rules that every schedule keeps before anything is simulated or launched.

1.  Every action is well formed: stages and microbatches exist, a compute action names a microbatch and no peer, a
    message names both, ``REDUCE_GRAD`` neither.
2.  Every stage runs on exactly one position.
3.  No action is listed twice.
4.  Every (stage, microbatch) has exactly one ``F``, and exactly one ``B`` or exactly one ``I`` and one ``W``.  A
    schedule with no backward work at all is an evaluation and needs none.
5.  On its position ``F`` stands before ``B`` and ``I``, and ``I`` before ``W``.
6.  Forward messages lead to a later stage, gradients to an earlier one, and both to another position.
7.  Every send has its receive, and every receive its send.
8.  An edge carries every microbatch or none, and gradients flow back only where values flow forward.
9.  A send stands after the compute that makes its message (``F``; ``B`` or ``I``), a receive before the compute that
    needs it.
10. A stage has at most one ``REDUCE_GRAD``, after all its backward work; if one stage has it, every stage has it.
11. No deadlock: the machines of all positions, with messages that take no time, run to their ends.

Rules 1 to 10 raise `InvalidPlanError`, rule 11 `DeadlockError`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

from partita.errors import InvalidPlanError
from partita.ir.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, ActionKind, Schedule
from partita.schedules.machine import Await, Instruction, RankMachine, Run, deadlock, other_end

_Place = tuple[int, int]  # position, index in its row


def validate(schedule: Schedule) -> None:
    """Check the rules above.

    Args:
        schedule: A training or evaluation schedule, with or without messages.

    Raises:
        InvalidPlanError: With the rule, the action's text and its place (position, and number in the row from 1).
        DeadlockError: Naming for every stuck position the action it waits for.

    Complexity: linear in the number of actions.
    """
    places: dict[Action, _Place] = {}
    for position, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            _check_form(schedule, action, (position, index))
            if action in places:
                raise _error(action, (position, index), f"it is listed before, as {_text(places[action])}")
            places[action] = (position, index)
    _check_positions(places)
    _check_work(schedule, places)
    for action, place in places.items():
        if action.peer is not None:
            _check_message(action, place, places)
    _check_edges(schedule, places)
    _check_reductions(schedule, places)
    run_untimed(schedule)


def run_untimed(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Run the machines of all positions in one thread, with messages that take no time.

    Returns:
        For each position the actions in the order in which they were run or awaited.

    Raises:
        DeadlockError: If they do not run to their ends.
    """
    machines = [RankMachine(actions) for actions in schedule.ranks]
    orders: list[list[Action]] = [[] for _ in machines]
    sent: set[Action] = set()  # receives whose message is there
    awaited: dict[Action, int] = {}  # receives that a position waits for
    pending: deque[tuple[int, Instruction]] = deque()
    for position, machine in enumerate(machines):
        pending.extend((position, instruction) for instruction in machine.start())
    while pending:
        position, instruction = pending.popleft()
        action = instruction.action
        finished: tuple[int, Action] | None = None
        if isinstance(instruction, Run):
            orders[position].append(action)
            if action.kind in SEND_KINDS:
                receive = other_end(action)
                sent.add(receive)
                finished = (awaited.pop(receive), receive) if receive in awaited else None
            else:
                finished = (position, action)
        elif isinstance(instruction, Await):
            orders[position].append(action)
            awaited[action] = position
            if action in sent:
                finished = (awaited.pop(action), action)
        if finished is not None:
            at, done = finished
            pending.extend((at, following) for following in machines[at].completed(done))
    if not all(machine.done for machine in machines):
        raise deadlock(machines)
    return tuple(tuple(order) for order in orders)


def _check_form(schedule: Schedule, action: Action, place: _Place) -> None:
    """Rule 1."""
    is_message = action.kind in SEND_KINDS or action.kind in RECV_KINDS
    if not 0 <= action.stage < schedule.num_stages:
        raise _error(action, place, f"there is no stage {action.stage}; stages are 0 to {schedule.num_stages - 1}")
    if (action.microbatch is None) != (action.kind == "REDUCE_GRAD"):
        raise _error(action, place, "every action but REDUCE_GRAD names a microbatch")
    if action.microbatch is not None and not 0 <= action.microbatch < schedule.num_microbatches:
        highest = schedule.num_microbatches - 1
        raise _error(action, place, f"there is no microbatch {action.microbatch}; microbatches are 0 to {highest}")
    if (action.peer is not None) != is_message:
        raise _error(action, place, "sends and receives, and only they, name another stage")
    if action.peer is not None and not 0 <= action.peer < schedule.num_stages:
        raise _error(action, place, f"there is no stage {action.peer}; stages are 0 to {schedule.num_stages - 1}")


def _check_positions(places: Mapping[Action, _Place]) -> None:
    """Rule 2."""
    first: dict[int, _Place] = {}
    for action, place in places.items():
        home = first.setdefault(action.stage, place)
        if home[0] != place[0]:
            raise _error(action, place, f"stage {action.stage} runs on position {home[0]} too")


def _check_work(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    """Rules 4 and 5 (no action is there twice, so "exactly one" is "one")."""
    evaluation = all(action.kind in {"F", "SEND_F", "RECV_F"} for action in places)
    wanted: tuple[tuple[ActionKind, ...], ...] = (("F",),) if evaluation else (("F", "B"), ("F", "I", "W"))
    needs = " or ".join(" ".join(kinds) for kinds in wanted)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            work = [Action(stage=stage, kind=kind, microbatch=microbatch) for kind in COMPUTE_KINDS]
            found = [action for action in work if action in places]
            if tuple(action.kind for action in found) not in wanted:
                raise InvalidPlanError(
                    f"stage {stage} needs {needs} of microbatch {microbatch}; "
                    f"the schedule has {' '.join(map(str, found)) or 'nothing'}",
                    stage=stage,
                    microbatch=microbatch,
                )
            for before, after in pairwise(found):
                if places[before] > places[after]:
                    raise _error(after, places[after], f"it stands before {before}")


def _check_message(action: Action, place: _Place, places: Mapping[Action, _Place]) -> None:
    """Rules 6, 7 and 9 for one send or receive."""
    peer = -1 if action.peer is None else action.peer
    outwards = action.kind in {"SEND_F", "RECV_B"}  # the other stage reads this one's values
    if peer == action.stage or (peer > action.stage) != outwards:
        raise _error(action, place, "values go to a later stage and gradients to an earlier one")
    twin = other_end(action)
    if twin not in places:
        raise _error(action, place, f"its other end {twin} is missing")
    if places[twin][0] == place[0]:
        raise _error(action, place, f"stages {action.stage} and {peer} share position {place[0]} and need no message")
    kinds: tuple[ActionKind, ...] = ("F",) if action.kind.endswith("F") else ("B", "I")
    computes = (Action(stage=action.stage, kind=kind, microbatch=action.microbatch) for kind in kinds)
    compute = next(compute for compute in computes if compute in places)
    if action.kind in SEND_KINDS and place < places[compute]:
        raise _error(action, place, f"it stands before {compute}, which makes its message")
    if action.kind in RECV_KINDS and place > places[compute]:
        raise _error(action, place, f"it stands after {compute}, which needs its message")


def _check_edges(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    """Rule 8."""
    carried: dict[tuple[ActionKind, int, int], set[int]] = {}
    for action in places:
        if action.kind in SEND_KINDS and action.peer is not None and action.microbatch is not None:
            carried.setdefault((action.kind, action.stage, action.peer), set()).add(action.microbatch)
    for (kind, source, target), microbatches in carried.items():
        missing = set(range(schedule.num_microbatches)) - microbatches
        if missing:
            absent = Action(stage=source, kind=kind, microbatch=min(missing), peer=target)
            raise InvalidPlanError(
                f"stage {source} sends to stage {target}, but not for every microbatch: {absent} is missing",
                stage=source,
                peer=target,
            )
        if kind == "SEND_B" and ("SEND_F", target, source) not in carried:
            raise InvalidPlanError(
                f"stage {source} sends a gradient to stage {target}, which sends it no values",
                stage=source,
                peer=target,
            )


def _check_reductions(schedule: Schedule, places: Mapping[Action, _Place]) -> None:
    """Rule 10."""
    reductions = {action.stage: place for action, place in places.items() if action.kind == "REDUCE_GRAD"}
    for action, place in places.items():
        if action.kind in {"B", "I", "W"} and place > reductions.get(action.stage, place):
            raise _error(action, place, f"it stands after {action.stage}REDUCE_GRAD")
    missing = sorted(set(range(schedule.num_stages)) - set(reductions))
    if reductions and missing:
        raise InvalidPlanError(
            f"stage {min(reductions)} reduces its gradients, but {missing[0]}REDUCE_GRAD is missing", stage=missing[0]
        )


def _text(place: _Place) -> str:
    return f"action {place[1] + 1} of position {place[0]}"


def _error(action: Action, place: _Place, reason: str) -> InvalidPlanError:
    """Return the error for one action at its place."""
    return InvalidPlanError(
        f"{action}, {_text(place)}: {reason}", action=str(action), position=place[0], index=place[1]
    )
