r"""The pipeline problem of one configuration, and the one function that says what an assignment costs.

A configuration fixes the number of stages S, the microbatches m, the schedule and the devices.  What is left is which
stage runs which block: a map ``stage(v)`` that never decreases along a dependency and uses every stage.  With
``D_s = {v : stage(v) = s}`` the sets of blocks, the cost of an assignment is (`evaluate`)::

    (1)  T   = sum_s t_s + max_s W_s                       seconds per step
    (2)  t_s = sum_{v in D_s} (f_v + b_v) + c_s            one microbatch on stage s
    (3)  c_s = sum_{nets cut at s} seconds(net)            charged to the sender once and to every reading stage
    (4)  W_s = (m - 1) t_s + r_s                           the steady phase, then what happens once per step
    (5)  r_s = stage_s + sum_{parameters g read in D_s} (seconds(g) + [g is read elsewhere too] split_s(g))
    (6)  M_s = static_s + buffers_s + max( k_s pinned_s + max_{v in D_s} transient_v,  update_s )  <=  capacity_s

The two cases of (6) are the backward, and the optimiser's update, when activations are gone.  ``k_s`` is the number of
microbatches in flight (`PipelineProblem.in_flight`).  A stage holds each parameter and pins each value once, however
many of its blocks read it, so static and pinned bytes are unions, not sums (`_add_nets`, `_add_parameters`).
Without r, T is an upper bound of the simulated step of fill-drain and 1F1B; with it, the simulation may end up to
``max r`` later, if the slowest stage is not the one with the longest reduction (docs/design/0003).

Everything that searches (exact DP, CP-SAT, baselines) reports what `evaluate` says of its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from partita.schedules.makers import in_flight

SolutionStatus = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Values that one block makes and the same other blocks read: they cross together or not at all.

    Attributes:
        producer: The block that makes them.
        readers: The other blocks that read them, ascending; all depend on the producer.
        bytes: Forward bytes of one microbatch.
        gradient_bytes: Bytes of the gradients that come back (0: none).
        seconds: Forward and backward message of one microbatch.
        savers: The blocks, producer included, whose backward keeps the values.
    """

    producer: int
    readers: tuple[int, ...]
    bytes: int
    gradient_bytes: int = 0
    seconds: float = 0.0
    savers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that the same blocks read.

    Attributes:
        readers: Blocks that read them, ascending, at least one.
        bytes: Static bytes on each stage that reads them: weights, gradients, optimiser state.
        seconds: Once per step on each such stage: their reduction over the replicas and their update.
        split_s: More seconds on each such stage if there are several: the reduction between stages.
        update_bytes: The optimiser's temporaries: of its largest parameter if the update goes one by one, else of all.
    """

    readers: tuple[int, ...]
    bytes: int
    seconds: float = 0.0
    split_s: float = 0.0
    update_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProblem:
    """Which stage runs which block, in one configuration.

    Blocks are numbered in a topological order: an edge leads from a lower to a higher number.

    Attributes:
        num_stages: Number of stages S.
        num_microbatches: Microbatches m per step and replica.
        schedule: Name of the schedule, a key of `partita.schedules.makers.SCHEDULES`.
        capacities: Bytes that a device of each stage may use.
        forward_s: Seconds of one microbatch's forward, by block.
        backward_s: The same for the backward.
        saved_bytes: Bytes that a block keeps for its backward, values of `nets` excluded, by block and microbatch.
        transient_bytes: Largest short-lived need of a block.
        edges: Dependencies between blocks (producer, reader).
        nets: The values on them.
        parameters: Parameter groups.
        base_bytes: Bytes that stage 0 holds whatever it runs (parameters that no block reads).
        stage_s: Seconds once per step on every stage whatever it runs (the latency of a reduction).
        update_in_turn: The optimiser updates parameters one by one: its temporaries are the largest, not the sum.
        pins: For each block the stage it must be on, or None; empty if no block is pinned.
    """

    num_stages: int
    num_microbatches: int
    schedule: str
    capacities: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...] = ()
    nets: tuple[Net, ...] = ()
    parameters: tuple[ParameterGroup, ...] = ()
    base_bytes: int = 0
    stage_s: float = 0.0
    update_in_turn: bool = True
    pins: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.forward_s)
        if any(len(values) != n for values in (self.backward_s, self.saved_bytes, self.transient_bytes)):
            raise ValueError("forward_s, backward_s, saved_bytes and transient_bytes must have one entry per block")
        if len(self.capacities) != self.num_stages:
            raise ValueError(f"{len(self.capacities)} capacities for {self.num_stages} stages")
        if self.pins and len(self.pins) != n:
            raise ValueError(f"{len(self.pins)} pins for {n} blocks")
        if any(not 0 <= a < b < n for a, b in self.edges):
            raise ValueError("an edge must lead from a lower to a higher block number")

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.forward_s)

    @property
    def block_s(self) -> tuple[float, ...]:
        """Seconds of one microbatch's forward and backward, by block."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    def in_flight(self, stage: int) -> int:
        """Return the microbatches whose saved values ``stage`` holds at once."""
        return in_flight(self.schedule, self.num_stages, self.num_microbatches, stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What `evaluate` says of one stage.

    Attributes:
        time_s: t of equation (2).
        communication_s: c of equation (3).
        once_s: r of equation (5).
        bottleneck_s: W of equation (4).
        static_bytes: Bytes of the parameters held.
        saved_bytes: Bytes kept for one microbatch's backward, received values excluded.
        received_bytes: Bytes of the received values of one microbatch.
        buffer_bytes: Bytes of messages under way.
        transient_bytes: Largest short-lived need of a block.
        update_bytes: Temporaries of the optimiser.
        memory_bytes: M of equation (6).
    """

    time_s: float
    communication_s: float
    once_s: float
    bottleneck_s: float
    static_bytes: int
    saved_bytes: int
    received_bytes: int
    buffer_bytes: int
    transient_bytes: int
    update_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an assignment costs.

    Attributes:
        objective: T of equation (1); infinity if the assignment is not feasible.
        stages: By stage; empty if the assignment breaks an order, leaves a stage empty or ignores a pin.
        feasible: Monotone, every stage used, pins kept, and every stage within its capacity.
    """

    objective: float
    stages: tuple[StageCost, ...]
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """What a partitioner answers.

    Attributes:
        assignment: Stage of each block; empty without a solution.
        objective: `evaluate`'s figure for it; infinity without a solution.
        bound: No assignment is below it; infinity if none exists.
        status: ``optimal``, ``feasible`` (a solution, not proved best), ``infeasible`` (proved) or ``unknown``.
        method: Who answered.
        limit: Which limit ended the search, or "".
    """

    assignment: tuple[int, ...]
    objective: float
    bound: float
    status: SolutionStatus
    method: str
    limit: str = ""


def is_ordered(problem: PipelineProblem, assignment: Sequence[int]) -> bool:
    """Return whether the stages are numbered 0..S-1, all used, monotone along dependencies, and the pins kept."""
    if len(assignment) != problem.num_blocks or set(assignment) != set(range(problem.num_stages)):
        return False
    if any(pin is not None and stage != pin for pin, stage in zip(problem.pins, assignment, strict=False)):
        return False
    return all(assignment[a] <= assignment[b] for a, b in problem.edges)


def evaluate(problem: PipelineProblem, assignment: Sequence[int]) -> Evaluation:
    """Say what an assignment costs: equations (1) to (6).

    Args:
        problem: The configuration.
        assignment: Stage of each block.

    Returns:
        The objective and every stage's part; ``feasible`` is False if a rule is broken or a stage does not fit.
    """
    if not is_ordered(problem, assignment):
        return Evaluation(objective=inf, stages=(), feasible=False)
    parts = [_Account() for _ in range(problem.num_stages)]
    _add_blocks(problem, assignment, parts)
    _add_nets(problem, assignment, parts)
    _add_parameters(problem, assignment, parts)
    stages = tuple(_stage_cost(problem, stage, part) for stage, part in enumerate(parts))
    feasible = all(cost.memory_bytes <= limit for cost, limit in zip(stages, problem.capacities, strict=True))
    objective = sum(cost.time_s for cost in stages) + max(cost.bottleneck_s for cost in stages)
    return Evaluation(objective=objective if feasible else inf, stages=stages, feasible=feasible)


@dataclass(slots=True)
class _Account:
    """What one stage has been charged so far."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    once_s: float = 0.0
    static_bytes: int = 0
    saved_bytes: int = 0
    received_bytes: int = 0
    buffer_bytes: int = 0
    transient_bytes: int = 0
    updates: list[int] = field(default_factory=list)


def _add_blocks(problem: PipelineProblem, assignment: Sequence[int], parts: Sequence[_Account]) -> None:
    """Charge compute, saved and transient bytes of every block to its stage."""
    for block, stage in enumerate(assignment):
        part = parts[stage]
        part.compute_s += problem.forward_s[block] + problem.backward_s[block]
        part.saved_bytes += problem.saved_bytes[block]
        part.transient_bytes = max(part.transient_bytes, problem.transient_bytes[block])


def _add_nets(problem: PipelineProblem, assignment: Sequence[int], parts: Sequence[_Account]) -> None:
    """Charge every cut net to its sender once and to every stage that reads it; pin saved and received values."""
    for net in problem.nets:
        home = assignment[net.producer]
        others = {assignment[v] for v in net.readers} - {home}
        for stage in {home, *others} if others else ():
            parts[stage].communication_s += net.seconds
            parts[stage].buffer_bytes += net.bytes + net.gradient_bytes
        for stage in others:
            parts[stage].received_bytes += net.bytes
        if any(assignment[v] == home for v in net.savers):
            parts[home].saved_bytes += net.bytes


def _add_parameters(problem: PipelineProblem, assignment: Sequence[int], parts: Sequence[_Account]) -> None:
    """Charge every parameter group to each stage that reads it."""
    parts[0].static_bytes += problem.base_bytes
    for group in problem.parameters:
        homes = {assignment[v] for v in group.readers}
        for stage in homes:
            parts[stage].static_bytes += group.bytes
            parts[stage].once_s += group.seconds + (group.split_s if len(homes) > 1 else 0.0)
            parts[stage].updates.append(group.update_bytes)


def _stage_cost(problem: PipelineProblem, stage: int, part: _Account) -> StageCost:
    """Close the account of one stage: equations (2), (4), (5) and (6)."""
    time_s = part.compute_s + part.communication_s
    once_s = problem.stage_s + part.once_s
    update = max(part.updates, default=0) if problem.update_in_turn else sum(part.updates)
    in_use = problem.in_flight(stage) * (part.saved_bytes + part.received_bytes) + part.transient_bytes
    return StageCost(
        time_s=time_s,
        communication_s=part.communication_s,
        once_s=once_s,
        bottleneck_s=(problem.num_microbatches - 1) * time_s + once_s,
        static_bytes=part.static_bytes,
        saved_bytes=part.saved_bytes,
        received_bytes=part.received_bytes,
        buffer_bytes=part.buffer_bytes,
        transient_bytes=part.transient_bytes,
        update_bytes=update,
        memory_bytes=part.static_bytes + part.buffer_bytes + max(in_use, update),
    )
