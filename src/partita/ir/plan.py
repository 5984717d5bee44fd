"""The plan: the decision as a verified, versioned, human-readable artefact.

It holds everything that a reader or a runtime needs to act on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from partita.ir.cluster import Cluster
from partita.ir.frozen import dataclass, field
from partita.ir.layout import Layout
from partita.ir.schedule import Schedule

if TYPE_CHECKING:
    from pathlib import Path

Source = Literal["measured", "interpolated", "modelled"]
LossPlace = Literal["outside", "model", "fused"]
SolveStatus = Literal["optimal", "feasible", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A cost with its uncertainty.

    Attributes:
        value: Best single figure, in the unit of the field that holds it.
        low: Lower end of the credible range.
        high: Upper end of the credible range.
        source: Whether it was measured, interpolated between measurements, or modelled.
    """

    value: float
    low: float
    high: float
    source: Source

    def __add__(self, other: Estimate) -> Estimate:
        """Add two costs; the sum is as well founded as its weaker part."""
        order: tuple[Source, ...] = ("measured", "interpolated", "modelled")
        source = max(self.source, other.source, key=order.index)
        return Estimate(
            value=self.value + other.value, low=self.low + other.low, high=self.high + other.high, source=source
        )

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate times ``factor`` (at least 0)."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor, source=self.source)


ZERO = Estimate(value=0.0, low=0.0, high=0.0, source="measured")
"""The exact cost of nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that one device needs, by category; the categories add up to the peak.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients of trainable parameters.
        optimizer: Optimiser state (and master weights).
        activations: Saved for the backward, all microbatches in flight.
        skips: Received values that stay pinned for a later use, all microbatches in flight.
        buffers: Communication buffers.
        transient: The largest short-lived need on top (an operator's workspace, the optimiser's temporaries).
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    skips: int = 0
    buffers: int = 0
    transient: int = 0

    @property
    def total(self) -> int:
        """Peak bytes."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.skips
            + self.buffers
            + self.transient
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """A block as the plan's reader sees it.

    Attributes:
        id: Position in execution order.
        label: Short text.
        items: Item ids in the captured graph.
        repeat_of: First block of the same structure, if any.
        forward_s: One microbatch's forward on the stage's device.
        backward_s: One microbatch's backward.
        parameter_bytes: Bytes of the parameters that it reads.
    """

    id: int
    label: str
    items: tuple[int, ...]
    repeat_of: int | None
    forward_s: Estimate
    backward_s: Estimate
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        index: Position in the pipeline.
        blocks: Block ids, ascending.
        items: Item ids in the captured graph, ascending, including the replicable ones that it recomputes for itself.
        ranks: Its devices, one per data-parallel replica, in the order of the replicas' rows.
        tensor_degree: Devices that share one replica.
        recompute: ``"none"`` or ``"full"``.
        forward_s: One microbatch's forward, without communication.
        backward_s: One microbatch's backward, without communication.
        communication_s: Sends and receives of one microbatch, forward and backward.
        reduction_s: Gradient reduction once per step.
        optimizer_s: Optimiser update once per step.
        memory: Peak bytes of each of its devices.
        in_flight: Microbatches whose activations are alive at the peak.
        schedule_position: Pipeline position (row of the schedule).
    """

    index: int
    blocks: tuple[int, ...]
    items: tuple[int, ...]
    ranks: tuple[int, ...]
    tensor_degree: int = 1
    recompute: Literal["none", "full"] = "none"
    forward_s: Estimate = ZERO
    backward_s: Estimate = ZERO
    communication_s: Estimate = ZERO
    reduction_s: Estimate = ZERO
    optimizer_s: Estimate = ZERO
    memory: Memory = field(default_factory=Memory)
    in_flight: int = 1
    schedule_position: int = 0

    @property
    def time_s(self) -> float:
        """Seconds of one microbatch's forward and backward."""
        return self.forward_s.value + self.backward_s.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What one stage sends to another for each microbatch.

    Attributes:
        source: Sending stage.
        target: Reading stage.
        tensors: Tensor ids, in the order of the message.
        bytes: Forward bytes of one microbatch.
        backward_bytes: Gradient bytes of one microbatch on the way back (0: no gradient flows).
    """

    source: int
    target: int
    tensors: tuple[str, ...]
    bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """Where one parameter lives.

    Attributes:
        name: Canonical qualified name.
        names: Every name (ties).
        shape: Full shape.
        dtype: Dtype name.
        requires_grad: Trainable.
        stages: Stages that read it.
        ranks: Devices that hold it.
        layout: How it lies on them.
        bytes_per_rank: Bytes on each of these devices.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    layout: Layout
    bytes_per_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveReport:
    """What the solver can say for its answer.

    Attributes:
        method: Solver name (``"dp"``, ``"ilp"``).
        status: ``optimal`` if the bound meets the objective, ``feasible`` if a limit ended the search, ``given`` for a
            plan by hand.
        objective: Seconds per step under the planner's cost model.
        bound: No plan of the searched space is below this many seconds.
        space: What was searched, and what it leaves out.
        binding: What limits the plan ("memory of rank 2", "stage 1's time").
        seed: Seed of the search.
        limit: Which limit ended it, or "".
        wall_s: Seconds the search took; not part of the saved plan, so that the same search gives the same bytes.
    """

    method: str
    status: SolveStatus
    objective: float
    bound: float
    space: str = ""
    binding: str = ""
    seed: int = 0
    limit: str = ""
    wall_s: float = field(default=0.0, compare=False, metadata={"volatile": True})

    @property
    def gap(self) -> float:
        """Return ``(objective - bound) / objective``; 0 is proven optimal."""
        return max(0.0, (self.objective - self.bound) / self.objective) if self.objective > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator expects of one step.

    Attributes:
        step_time: Seconds per optimiser step.
        peak_bytes: Peak bytes by rank of the cluster; 0 for an unused one.
        bubble_fraction: Share of the devices' time that the pipeline leaves them idle.
        measured_share: Share of the predicted time that rests on measurements.
    """

    step_time: Estimate
    peak_bytes: tuple[int, ...]
    bubble_fraction: float
    measured_share: float

    @property
    def step_time_s(self) -> float:
        """Seconds per optimiser step."""
        return self.step_time.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that was considered and not chosen.

    Attributes:
        description: Degrees, microbatches and schedule in one line.
        step_time_s: Its predicted step time; infinity if it does not fit.
        reason: Why it was not chosen.
    """

    description: str
    step_time_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A hybrid-parallel plan.

    Attributes:
        model: The model's class name.
        graph_fingerprint: Fingerprint of the graph it was made for.
        cluster: The devices.
        memory_limits: Bytes that each rank may use.
        global_batch: Rows per step.
        data_degree: Replicas of every stage.
        schedule: Ordered actions, sends, receives and reductions included.
        blocks: Every block with its cost.
        stages: The stages, in pipeline order.
        edges: What crosses between stages.
        parameter_plans: Where every parameter lives.
        optimizer: Optimiser name, or bytes of state per parameter as text.
        precision: Precision the costs assume.
        loss: Where the loss is computed: in the user's loop, in the model, or by ``train_step``.
        predicted: What one step should take.
        solve: What the solver can prove.
        runner_ups: Considered and not chosen, best first.
        notes: Sentences for people.
    """

    model: str
    graph_fingerprint: str
    cluster: Cluster
    memory_limits: tuple[int, ...]
    global_batch: int
    data_degree: int
    schedule: Schedule
    blocks: tuple[BlockPlan, ...]
    stages: tuple[StagePlan, ...]
    edges: tuple[Edge, ...]
    parameter_plans: tuple[ParameterPlan, ...]
    optimizer: str
    precision: str
    loss: LossPlace
    predicted: Prediction
    solve: SolveReport
    runner_ups: tuple[RunnerUp, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the cluster, used or not."""
        return self.cluster.num_devices

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and replica."""
        return self.schedule.num_microbatches

    @property
    def parameters(self) -> Mapping[str, ParameterPlan]:
        """Where every parameter lives, by canonical name."""
        return {parameter.name: parameter for parameter in self.parameter_plans}

    def explain(self) -> str:
        """Say in words why the plan is as it is."""
        from partita.ir.explain import explain

        return explain(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as canonical JSON: the same plan gives the same bytes."""
        from partita.ir.serde import write

        write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by `save`.

        Raises:
            InvalidPlanError: If the file is not a plan, is of an unknown version, or breaks a rule of `verify`.
        """
        from partita.ir.serde import read
        from partita.ir.verify import check

        plan = read(cls, path)
        check(plan)
        return plan
