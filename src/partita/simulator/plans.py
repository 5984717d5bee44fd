"""The simulation of a plan: its costs and links in, the expected step out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.errors import InvalidPlanError
from partita.ir.plan import Plan, StagePlan
from partita.ir.schedule import Action
from partita.simulator.engine import simulate_schedule
from partita.simulator.timeline import Event, MemoryCurve, Timeline


def simulate_plan(plan: Plan, *, send_overhead_s: float = 0.0) -> Timeline:
    """Simulate one step of a plan: its costs, its links, its reductions, and the optimiser update at the end.

    A message takes the slowest of the links between the replicas of its two stages, which are paired in order.  A
    position updates when all its actions are done and its messages have arrived.  The halves of a split backward (``I``
    and ``W``) take half of the backward each.

    Args:
        plan: A plan with a complete schedule.
        send_overhead_s: As in `simulate_schedule`.

    Raises:
        DeadlockError: If positions wait for each other.
        InvalidPlanError: If the schedule sends where the plan has no edge.
    """
    message_s: dict[tuple[int, int | None], float] = {}
    for edge in plan.edges:
        message_s[edge.source, edge.target] = _message_s(plan, edge.source, edge.target, edge.bytes)
        message_s[edge.target, edge.source] = _message_s(plan, edge.target, edge.source, edge.backward_bytes)

    def compute_s(action: Action) -> float:
        stage = plan.stages[action.stage]
        if action.kind == "REDUCE_GRAD":
            return stage.reduction_s.value
        return {"F": stage.forward_s.value, "B": stage.backward_s.value}.get(action.kind, stage.backward_s.value / 2)

    def transfer_s(send: Action) -> float:
        if (send.stage, send.peer) not in message_s:
            raise InvalidPlanError(f"{send} is scheduled, but the plan has no such edge", action=str(send))
        return message_s[send.stage, send.peer]

    step = simulate_schedule(plan.schedule, compute_s=compute_s, transfer_s=transfer_s, send_overhead_s=send_overhead_s)
    events: list[Event] = []
    labels: list[str] = []
    curves: list[MemoryCurve] = []
    home = plan.schedule.position_of_stage()
    for position in range(len(plan.schedule.ranks)):
        own = [event for event in step.events if event.position == position]
        stages = [stage for stage in plan.stages if home[stage.index] == position]
        end = max((event.end_s for event in own), default=0.0)
        update = sum(stage.optimizer_s.value for stage in stages)
        own.append(Event(position=position, action=None, start_s=end, end_s=end + update))
        events += own
        labels.append(" ".join(f"stage {stage.index} on ranks {', '.join(map(str, stage.ranks))}" for stage in stages))
        curves.append(tuple(_memory_curve(own, stages)))
    return Timeline(events=tuple(events), labels=tuple(labels), memory=tuple(curves))


def _message_s(plan: Plan, source: int, target: int, size: int) -> float:
    """Return the seconds of one message of ``size`` bytes: the slowest among the replicas."""
    senders, receivers = plan.stages[source].ranks, plan.stages[target].ranks
    pairs = max(len(senders), len(receivers))
    links = [plan.cluster.link(senders[k % len(senders)], receivers[k % len(receivers)]) for k in range(pairs)]
    return max(link.latency_s + size / link.bandwidth for link in links)


def _memory_curve(events: list[Event], stages: Sequence[StagePlan]) -> Iterator[tuple[float, int]]:
    """Yield the bytes alive on a device of one position over time.

    What a microbatch saves is its share of the stage's activations and pinned values; it appears with the forward's
    start and goes with the backward's end.  Transient bytes are there while something runs.
    """
    alive = {stage.index: 0 for stage in stages}

    def size() -> int:
        return sum(
            stage.memory.total
            - stage.memory.transient
            - (stage.memory.activations + stage.memory.skips)
            * (stage.in_flight - alive[stage.index])
            // stage.in_flight
            for stage in stages
        )

    transient = {stage.index: stage.memory.transient for stage in stages}
    yield 0.0, size()
    for event in events:
        if not event.occupies:
            continue
        action = event.action
        if action is not None and action.kind == "F":
            alive[action.stage] += 1
        yield (
            event.start_s,
            size() + (max(transient.values(), default=0) if action is None else transient[action.stage]),
        )
        if action is not None and action.kind in {"B", "W"}:
            alive[action.stage] -= 1
        yield event.end_s, size()
