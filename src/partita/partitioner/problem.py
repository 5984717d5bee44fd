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
many of its blocks read it, so static and pinned bytes are unions, not sums (`_stage_cost`).  T is an upper bound of the
simulated step for fill-drain and 1F1B (docs/design/0003).

Everything that searches (exact DP, CP-SAT, baselines) reports what `evaluate` says of its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    stages = tuple(_stage_cost(problem, assignment, stage) for stage in range(problem.num_stages))
    feasible = all(cost.memory_bytes <= limit for cost, limit in zip(stages, problem.capacities, strict=True))
    objective = sum(cost.time_s for cost in stages) + max(cost.bottleneck_s for cost in stages)
    return Evaluation(objective=objective if feasible else inf, stages=stages, feasible=feasible)


def _stage_cost(problem: PipelineProblem, assignment: Sequence[int], stage: int) -> StageCost:
    """Return equations (2) to (6) for one stage."""
    blocks = [block for block, where in enumerate(assignment) if where == stage]
    cut = [net for net in problem.nets if _is_cut(net, assignment, stage)]
    communication_s = sum(net.seconds for net in cut)
    time_s = sum(problem.forward_s[v] + problem.backward_s[v] for v in blocks) + communication_s
    held = [group for group in problem.parameters if any(assignment[v] == stage for v in group.readers)]
    once_s = problem.stage_s + sum(
        group.seconds + (group.split_s if any(assignment[v] != stage for v in group.readers) else 0.0) for group in held
    )
    static = sum(group.bytes for group in held) + (problem.base_bytes if stage == 0 else 0)
    saved = sum(problem.saved_bytes[v] for v in blocks) + _saved_net_bytes(problem, assignment, stage)
    received = sum(net.bytes for net in cut if assignment[net.producer] != stage)
    buffers = sum(net.bytes + net.gradient_bytes for net in cut)
    transient = max(problem.transient_bytes[v] for v in blocks)
    updates = [group.update_bytes for group in held]
    update = max(updates, default=0) if problem.update_in_turn else sum(updates)
    in_use = problem.in_flight(stage) * (saved + received) + transient
    return StageCost(
        time_s=time_s,
        communication_s=communication_s,
        once_s=once_s,
        bottleneck_s=(problem.num_microbatches - 1) * time_s + once_s,
        static_bytes=static,
        saved_bytes=saved,
        received_bytes=received,
        buffer_bytes=buffers,
        transient_bytes=transient,
        update_bytes=update,
        memory_bytes=static + buffers + max(in_use, update),
    )


def _is_cut(net: Net, assignment: Sequence[int], stage: int) -> bool:
    """Return whether ``stage`` sends the net (makes it, another stage reads it) or receives it."""
    if assignment[net.producer] == stage:
        return any(assignment[v] != stage for v in net.readers)
    return any(assignment[v] == stage for v in net.readers)


def _saved_net_bytes(problem: PipelineProblem, assignment: Sequence[int], stage: int) -> int:
    """Return the bytes of the values made on ``stage`` that a block of the same stage keeps for its backward."""
    return sum(
        net.bytes
        for net in problem.nets
        if assignment[net.producer] == stage and any(assignment[v] == stage for v in net.savers)
    )


def work_bound(problem: PipelineProblem) -> float:
    """Return a lower bound of the objective, infinity if the devices together cannot hold the model.

    ``sum_s t_s >= F = sum_v (f_v + b_v)``.  ``max_s W_s`` is at least the mean of the W_s, and at least that of any
    one block; with ``R = sum_g seconds(g)`` each parameter counts on one stage at least::

        (7)  T >= F + max( ((m-1) F + R) / S + stage_s,  max_v (m-1) (f_v + b_v) + stage_s )

    Memory: every parameter lies somewhere, every saved byte is held ``min_s k_s`` times.  If that exceeds the sum of
    the capacities there is no plan.
    """
    floor = sum(group.bytes for group in problem.parameters) + problem.base_bytes
    floor += min(map(problem.in_flight, range(problem.num_stages))) * sum(problem.saved_bytes)
    if floor > sum(problem.capacities) or problem.num_stages > problem.num_blocks:
        return inf
    work, again = sum(problem.block_s), problem.num_microbatches - 1
    once = sum(group.seconds for group in problem.parameters)
    mean = (again * work + once) / problem.num_stages
    return work + problem.stage_s + max(mean, again * max(problem.block_s))
