"""Why nothing fits: the bytes missing, on which device, the biggest item, and the cheapest changes that would help.

Every change named here has been tried: the problem it leads to was solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from partita.errors import InfeasibleError
from partita.ir.cluster import Cluster, Level, Link
from partita.partitioner.configurations import Shape, Space, placements
from partita.partitioner.exact_dp import least_excess, make_tables
from partita.partitioner.pricing import Configuration, Pricer
from partita.partitioner.problem import PipelineProblem, evaluate
from partita.units import format_bytes

_MAX_TRIED = 200
"""Configurations that one question looks at, the most promising first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The least that is missing over all configurations of a space.

    Attributes:
        configuration: The configuration that comes closest to fitting.
        problem: Its problem.
        assignment: The assignment that comes closest.
        excess_bytes: What its worst stage needs beyond the limit; 0 or less if it fits.
    """

    configuration: Configuration
    problem: PipelineProblem
    assignment: tuple[int, ...]
    excess_bytes: int


def closest(pricer: Pricer, space: Space) -> Shortage | None:
    """Return the configuration and assignment with the least bytes missing, or None if pins or orders allow none.

    One replica is enough to look at where it is allowed: more replicas make no stage smaller but by their rows.
    """
    best: Shortage | None = None
    for shape in _promising(space):
        for ranks in placements(pricer.cluster, pricer.limits, shape.num_stages, shape.data_degree):
            configuration = shape.placed(ranks)
            problem = pricer.problem(configuration)
            excess, assignment = least_excess(problem, make_tables(problem))
            if assignment and (best is None or excess < best.excess_bytes):
                best = Shortage(
                    configuration=configuration, problem=problem, assignment=assignment, excess_bytes=excess
                )
            if best is not None and best.excess_bytes <= 0:
                return best
    return best


def _promising(space: Space) -> Iterator[Shape]:
    """Yield the shapes that need the least memory first: many stages, small microbatches, the lazier schedule."""
    yield from sorted(space.shapes(), key=lambda s: (-s.num_stages, s.rows, s.data_degree))[:_MAX_TRIED]


def explain_shortage(pricer: Pricer, space: Space, *, loss_outside: bool) -> InfeasibleError:
    """Return the error that says why no plan fits and what would help."""
    found = closest(pricer, space)
    if found is None:
        return InfeasibleError(
            "no assignment of blocks to stages keeps the order of the model and the pins",
            hint="pin fewer modules, or to stages in the order in which the model runs them",
        )
    stage, needed, limit = _worst(found)
    rank = min(found.configuration.ranks[stage], key=lambda rank: pricer.limits[rank])
    item, item_bytes = _biggest(pricer, found, stage)
    message = (
        f"no plan fits: in the plan that comes closest ({found.configuration}) stage {stage} needs "
        f"{format_bytes(needed)} on rank {rank}, whose limit is {format_bytes(limit)}: {format_bytes(needed - limit)} "
        f"short; the biggest item there is {item} with {format_bytes(item_bytes)}"
    )
    remedies = list(_remedies(pricer, space, found, loss_outside=loss_outside))
    return InfeasibleError(
        message,
        hint="it would fit with " + "; or with ".join(remedies),
        needed_bytes=needed,
        limit_bytes=limit,
        short_bytes=needed - limit,
        rank=rank,
        stage=stage,
        biggest_item=item,
        biggest_item_bytes=item_bytes,
    )


def _worst(found: Shortage) -> tuple[int, int, int]:
    """Return the stage with the most bytes missing, what it needs, and its limit."""
    stages = evaluate(found.problem, found.assignment).stages
    stage = max(range(len(stages)), key=lambda s: stages[s].memory_bytes - found.problem.capacities[s])
    return stage, stages[stage].memory_bytes, found.problem.capacities[stage]


def _biggest(pricer: Pricer, found: Shortage, stage: int) -> tuple[str, int]:
    """Return the biggest parameter with its gradient and state, or what a block keeps for the backward."""
    items: list[tuple[int, str]] = []
    for holding in pricer.blocks.holdings:
        if any(found.assignment[block] == stage for block in holding.readers) or (stage == 0 and not holding.readers):
            name = holding.tensor.names[0] if holding.tensor.names else holding.tensor.id
            extra = " (weights, gradients, optimizer state)" if holding.trainable else ""
            items.append((pricer.static_bytes(holding), f"parameter {name}{extra}"))
    flight = found.problem.in_flight(stage)
    for block, where in enumerate(found.assignment):
        if where == stage:
            kept = found.problem.saved_bytes[block] * flight
            items.append((kept, f"the activations of {pricer.blocks.blocks[block].label}, {flight} microbatches"))
    size, name = max(items, key=lambda item: item[0])
    return name, size


def _remedies(pricer: Pricer, space: Space, found: Shortage, *, loss_outside: bool) -> Iterator[str]:
    """Yield the changes that help, cheapest first; each has been checked by solving."""

    def fits(pricer: Pricer, space: Space) -> bool:
        answer = closest(pricer, space)
        return answer is not None and answer.excess_bytes <= 0

    free = replace(space, microbatches=None)
    if space.microbatches is not None and fits(pricer, free):
        yield "a free number of microbatches (num_microbatches=None)"
    if loss_outside and fits(pricer, replace(space, schedules=("1f1b",))):
        yield "the loss inside the step (loss_fn=...), which allows the 1F1B schedule"
    elif loss_outside and space.microbatches is not None and fits(pricer, replace(free, schedules=("1f1b",))):
        yield "the loss inside the step (loss_fn=...), for 1F1B, and a free number of microbatches"
    if pricer.optimizer != "sgd" and fits(replace(pricer, optimizer="sgd"), space):
        yield f"optimizer 'sgd' in the place of {pricer.optimizer!r}"
    stages = _first(
        range(space.num_devices + 1, len(pricer.blocks.blocks) + 1),
        lambda count: fits(*_more_devices(pricer, space, count)),
    )
    if stages is not None:
        yield f"{stages} devices like the largest one"
    yield f"a memory limit of {format_bytes(_largest_need(found))} on each device (memory_bytes={_largest_need(found)})"


def _largest_need(found: Shortage) -> int:
    """Return the bytes of the largest stage of the assignment that comes closest."""
    return max(cost.memory_bytes for cost in evaluate(found.problem, found.assignment).stages)


def _first(values: Iterable[int], good: Callable[[int], bool]) -> int | None:
    """Return the smallest value that is good, if goodness only grows: by bisection after a look at the largest."""
    values = list(values)
    if not values or not good(values[-1]):
        return None
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(values[middle]) else (middle + 1, high)
    return values[low]


def _more_devices(pricer: Pricer, space: Space, count: int) -> tuple[Pricer, Space]:
    """Return the same question for ``count`` devices like the one with the most memory, one stage each."""
    rank = max(range(pricer.cluster.num_devices), key=lambda r: pricer.limits[r])
    device = pricer.cluster.device(rank)
    # Seconds do not matter here: any link will do.
    link = pricer.cluster.levels[-1].link if pricer.cluster.levels else Link(latency_s=0.0, bandwidth=1e9)
    larger = Cluster(
        name=f"{count}x{device.name}",
        kinds=(device,),
        device_kinds=(0,) * count,
        levels=(Level(name="site", link=link, group_size=count),),
    )
    wider = replace(space, num_devices=count, stages=(count,), degrees=(1,))
    return replace(pricer, cluster=larger, limits=(pricer.limits[rank],) * count), wider
