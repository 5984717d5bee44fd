"""A plan in words: what limits it, where it is cut and why there, what came second, and how sure the figures are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from partita.ir.plan import Edge, Plan, StagePlan
from partita.ir.summary import counted, fullest_rank, headline
from partita.units import format_bandwidth, format_bytes, format_seconds

FULL = 0.9
"""Share of its limit from which a rank's memory is said to be tight."""


def explain(plan: Plan) -> str:
    """Say in words why the plan is as it is.

    Args:
        plan: A plan that keeps the rules of `partita.ir.verify`.

    Returns:
        Paragraphs with headings, no line break at the end.
    """
    parts = [
        ("What limits it", _limits(plan)),
        ("Balance", _balance(plan)),
        ("Cuts", _cuts(plan)),
        ("Considered and not chosen", _runner_ups(plan)),
        ("How sure the figures are", _certainty(plan)),
        ("Notes", iter(plan.notes)),
    ]
    text = [headline(plan)]
    for title, lines in parts:
        block = [f"  {line}" for line in lines]
        if block:
            text.append("\n".join(["", title, *block]))
    return "\n".join(text)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"


def _limits(plan: Plan) -> Iterator[str]:
    if plan.solve.binding:
        yield f"The search names as binding: {plan.solve.binding}."
    rank = fullest_rank(plan)
    peak, limit = plan.predicted.peak_bytes[rank], plan.memory_limits[rank]
    verdict = "memory is tight" if peak > FULL * limit else "memory is not what binds"
    share = _percent(peak, limit)
    yield f"Memory: rank {rank} is the fullest with {format_bytes(peak)} of {format_bytes(limit)} ({share}); {verdict}."
    yield (
        f"Bubble: the pipeline leaves the devices idle for {_percent(plan.predicted.bubble_fraction, 1)} of the step "
        f"({counted(len(plan.stages), 'stage')}, {counted(plan.num_microbatches, 'microbatch', 'microbatches')})."
    )


def _slowest(plan: Plan) -> StagePlan:
    return max(plan.stages, key=lambda stage: (stage.time_s, -stage.index))


def _balance(plan: Plan) -> Iterator[str]:
    slowest, total = _slowest(plan), sum(stage.time_s for stage in plan.stages)
    for stage in plan.stages:
        per_step = stage.reduction_s.value + stage.optimizer_s.value
        yield (
            f"stage {stage.index}: {format_seconds(stage.time_s)} of forward and backward per microbatch "
            f"({_percent(stage.time_s, total)} of the model), {format_seconds(stage.communication_s.value)} sending, "
            f"{format_seconds(per_step)} reduction and update per step"
        )
    if len(plan.stages) > 1:
        mean = total / len(plan.stages)
        over = _percent(slowest.time_s - mean, mean)
        yield f"Stage {slowest.index} is the slowest, {over} above an even split ({format_seconds(mean)})."


def _cuts(plan: Plan) -> Iterator[str]:
    if len(plan.stages) == 1:
        yield "None: the model is in one stage."
        return
    for edge in plan.edges:
        yield _edge(plan, edge)
    if not plan.edges:
        yield "Nothing crosses between the stages."
    blocks = [list(stage.blocks) for stage in plan.stages]
    if all(blocks) and [block for stage in blocks for block in stage] == list(range(len(plan.blocks))):
        for one, other in pairwise(plan.stages):
            yield from _neighbours(plan, one, other)


def _edge(plan: Plan, edge: Edge) -> str:
    source, target = plan.stages[edge.source], plan.stages[edge.target]
    link = plan.cluster.link(source.ranks[0], target.ranks[0])
    per_step = (edge.bytes + edge.backward_bytes) * plan.num_microbatches * plan.data_degree
    names = ", ".join(edge.tensors[:3]) + (f" and {len(edge.tensors) - 3} more" if len(edge.tensors) > 3 else "")
    seconds = 2 * link.latency_s + (edge.bytes + edge.backward_bytes) / link.bandwidth
    forward, back = format_bytes(edge.bytes), format_bytes(edge.backward_bytes)
    return (
        f"stage {edge.source} to {edge.target}: {forward} forward and {back} back per microbatch ({names}), "
        f"{format_bytes(per_step)} per step; about {format_seconds(seconds)} per microbatch "
        f"at {format_bandwidth(link.bandwidth)}"
    )


def _neighbours(plan: Plan, one: StagePlan, other: StagePlan) -> Iterator[str]:
    """Price the cut one block earlier and one block later by the slowest stage that it would make."""
    slowest = _slowest(plan).time_s
    for giver, taker, block, where in (
        (one, other, plan.blocks[one.blocks[-1]], "earlier"),
        (other, one, plan.blocks[other.blocks[0]], "later"),
    ):
        if len(giver.blocks) == 1:
            continue
        moved = block.forward_s.value + block.backward_s.value
        times = {stage.index: stage.time_s for stage in plan.stages}
        times[giver.index] -= moved
        times[taker.index] += moved
        after = max(times.values())
        step = (after - slowest) * (plan.num_microbatches - 1)  # the rest of a step is the sum over the stages
        if step > 0:
            price = f"{format_seconds(step)} more per step"
        else:
            price = "no slower by compute; sending, reduction, update or memory decide"
        weights = format_bytes(block.parameter_bytes)
        yield (
            f"cut {one.index}|{other.index} one block {where} ({block.label!r} with {weights} of parameters "
            f"to stage {taker.index}): the slowest stage would take {format_seconds(after)} instead of "
            f"{format_seconds(slowest)} per microbatch, {price}"
        )


def _runner_ups(plan: Plan) -> Iterator[str]:
    step = plan.predicted.step_time_s
    for runner_up in plan.runner_ups:
        if runner_up.step_time_s == float("inf"):
            yield f"{runner_up.description}: does not fit; {runner_up.reason}"
            continue
        more = runner_up.step_time_s - step
        sign = "-" if more < 0 else "+"
        yield (
            f"{runner_up.description}: {format_seconds(runner_up.step_time_s)}, "
            f"{sign}{format_seconds(abs(more))} ({sign}{_percent(abs(more), step)}); {runner_up.reason}"
        )


def _certainty(plan: Plan) -> Iterator[str]:
    predicted, solve = plan.predicted, plan.solve
    low, high = format_seconds(predicted.step_time.low), format_seconds(predicted.step_time.high)
    yield f"The step is between {low} and {high}; {_percent(predicted.measured_share, 1)} of it rests on measurements."
    names = {
        "forward_s": "forward",
        "backward_s": "backward",
        "communication_s": "communication",
        "reduction_s": "reduction",
        "optimizer_s": "update",
    }
    by_source: dict[str, list[str]] = {}
    for field, name in names.items():
        for source in sorted(
            {getattr(stage, field).source for stage in plan.stages if getattr(stage, field).value > 0}
        ):
            by_source.setdefault(source, []).append(name)
    for source in ("measured", "interpolated", "modelled"):
        if source in by_source:
            yield f"{source}: {', '.join(by_source[source])}"
    bound = format_seconds(solve.bound)
    if solve.status == "optimal":
        yield f"Proved by {solve.method}: no plan of the searched space takes less than {bound} under the cost model."
    else:
        ended = f"; ended by {solve.limit}" if solve.limit else ""
        yield f"No plan of the searched space is below {bound}: the gap is {100 * solve.gap:.1f} %{ended}."
    if solve.space:
        yield f"Searched: {solve.space}."
