"""Passes over schedules: pure maps that add messages and reductions, or leave out the backward.

Each pass takes a schedule and returns a new one; the compute order never changes.  Messages stand as close as possible
to the compute that needs or makes them: receives directly before it, sends directly after it, each group by ascending
peer.  `add_communication` and `add_reduction` may be applied in either order with the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from partita.ir.schedule import COMPUTE_KINDS, SEND_KINDS, Action, ActionKind, Schedule

_FORWARD_KINDS: tuple[ActionKind, ...] = ("F", "SEND_F", "RECV_F")


@dataclass(slots=True)
class _Peers:
    """The other stages that one stage exchanges with, by what it does with them."""

    recv_forward: set[int] = field(default_factory=set)
    send_forward: set[int] = field(default_factory=set)
    recv_backward: set[int] = field(default_factory=set)
    send_backward: set[int] = field(default_factory=set)


def add_communication(schedule: Schedule, edges: Iterable[tuple[int, int, bool]]) -> Schedule:
    """Insert the sends and receives that carry ``edges``.

    Args:
        schedule: A schedule without messages.
        edges: Source stage, target stage, and whether a gradient flows back.  An edge may skip stages.  Given twice, it
            is one edge, with a gradient if either says so.  Stages of one position exchange nothing.

    Returns:
        The schedule with, for each microbatch ``k`` and edge ``s`` to ``t``: ``tRECV_Fk<s`` directly before ``tFk``,
        ``sSEND_Fk>t`` directly after ``sFk``, and, if a gradient flows, ``tSEND_Bk>s`` directly after ``tBk`` and
        ``sRECV_Bk<t`` directly before ``sBk`` (at ``I`` where the backward is split).  Evaluation schedules get the
        forward messages only.

    Raises:
        ValueError: If an edge does not lead from a stage to a later one, or the schedule has messages already.
    """
    if any(action.peer is not None for actions in schedule.ranks for action in actions):
        raise ValueError(f"schedule {schedule.name!r} has sends or receives already")
    peers = _peers(schedule, edges)
    ranks = tuple(
        tuple(message for action in actions for message in _with_messages(action, peers[action.stage]))
        for actions in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


def _peers(schedule: Schedule, edges: Iterable[tuple[int, int, bool]]) -> dict[int, _Peers]:
    """Check the edges and sort them by the stages at their ends."""
    position = schedule.position_of_stage()
    peers: dict[int, _Peers] = defaultdict(_Peers)
    for source, target, gradient in edges:
        if not 0 <= source < target < schedule.num_stages:
            raise ValueError(
                f"an edge leads from a stage to a later one of {schedule.num_stages}, not from {source} to {target}"
            )
        if position[source] == position[target]:
            continue
        peers[source].send_forward.add(target)
        peers[target].recv_forward.add(source)
        if gradient:
            peers[target].send_backward.add(source)
            peers[source].recv_backward.add(target)
    return peers


def _with_messages(action: Action, peers: _Peers) -> tuple[Action, ...]:
    """Return the receives that ``action`` needs, itself, and the sends of what it makes."""

    def messages(kind: ActionKind, stages: set[int]) -> list[Action]:
        return [
            Action(stage=action.stage, kind=kind, microbatch=action.microbatch, peer=peer) for peer in sorted(stages)
        ]

    if action.kind == "F":
        return (*messages("RECV_F", peers.recv_forward), action, *messages("SEND_F", peers.send_forward))
    if action.kind in {"B", "I"}:
        return (*messages("RECV_B", peers.recv_backward), action, *messages("SEND_B", peers.send_backward))
    return (action,)


def add_reduction(schedule: Schedule) -> Schedule:
    """Insert ``sREDUCE_GRAD`` after the last backward of each stage and the sends that follow it.

    Stages without a backward (evaluation) get none.

    Raises:
        ValueError: If the schedule has reductions already.
    """
    if any(action.kind == "REDUCE_GRAD" for actions in schedule.ranks for action in actions):
        raise ValueError(f"schedule {schedule.name!r} has reductions already")
    return replace(schedule, ranks=tuple(_with_reduction(actions) for actions in schedule.ranks))


def _with_reduction(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return one position's row with a reduction for each of its stages."""
    after: dict[int, int] = {}  # stage -> index of its last backward action or of a send right behind it
    for index, action in enumerate(actions):
        follows = action.kind in SEND_KINDS and after.get(action.stage) == index - 1
        if action.kind in {"B", "I", "W"} or follows:
            after[action.stage] = index
    row: list[Action] = []
    for index, action in enumerate(actions):
        row.append(action)
        if after.get(action.stage) == index:
            row.append(Action(stage=action.stage, kind="REDUCE_GRAD"))
    return tuple(row)


def forward_only(schedule: Schedule) -> Schedule:
    """Keep the forwards and their messages: the schedule of an evaluation."""
    ranks = tuple(tuple(action for action in actions if action.kind in _FORWARD_KINDS) for actions in schedule.ranks)
    return replace(schedule, ranks=ranks)


def compute_only(schedule: Schedule) -> Schedule:
    """Keep the compute actions: the inverse of `add_communication` and `add_reduction`."""
    ranks = tuple(tuple(action for action in actions if action.kind in COMPUTE_KINDS) for actions in schedule.ranks)
    return replace(schedule, ranks=ranks)
