"""Hypothesis strategies for the nouns: what every feature's property tests draw from.

Each strategy draws valid objects only and shrinks towards the smallest: one stage, one microbatch, a chain, one device.
Times are multiples of 1/64 s, so that sums of them are exact in floating point and comparisons need no tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from partita.ir.cluster import Cluster, DeviceSpec, Level, Link
from partita.ir.graph import Item, ModelGraph, Op, TensorSpec
from partita.ir.layout import Layout, Replicate
from partita.ir.plan import (
    BlockPlan,
    Edge,
    Estimate,
    Memory,
    ParameterPlan,
    Plan,
    Prediction,
    SolveReport,
    StagePlan,
)
from partita.ir.schedule import Action, Schedule
from partita.schedules.makers import SCHEDULES, in_flight, make_schedule
from partita.schedules.passes import add_communication, add_reduction

TICK_S = 1 / 64

# ---------------------------------------------------------------- schedules


def actions(max_stage: int = 12, max_microbatch: int = 120) -> st.SearchStrategy[Action]:
    """Any action that the text grammar can say."""
    stage = st.integers(0, max_stage)
    microbatch = st.integers(0, max_microbatch)
    return st.one_of(
        st.builds(Action, stage=stage, kind=st.sampled_from(["F", "B", "I", "W"]), microbatch=microbatch),
        st.builds(
            Action,
            stage=stage,
            kind=st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]),
            microbatch=microbatch,
            peer=stage,
        ),
        st.builds(Action, stage=stage, kind=st.just("REDUCE_GRAD")),
    )


@st.composite
def stage_edges(draw: st.DrawFn, num_stages: int) -> tuple[tuple[int, int, bool], ...]:
    """Edges between stages: each stage feeds the next, any may skip ahead, with or without a gradient."""
    chain = [(stage, stage + 1) for stage in range(num_stages - 1)]
    skips = [(a, b) for a in range(num_stages) for b in range(a + 2, num_stages)]
    chosen = draw(st.lists(st.sampled_from(skips), unique=True, max_size=4)) if skips else []
    return tuple((source, target, draw(st.booleans())) for source, target in sorted(chain + chosen))


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 7) -> Schedule:
    """A complete training schedule: compute, messages and reductions."""
    num_stages = draw(st.integers(1, max_stages))
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    schedule = make_schedule(name, num_stages, draw(st.integers(1, max_microbatches)))
    return add_reduction(add_communication(schedule, draw(stage_edges(num_stages))))


@dataclass(frozen=True)
class Pipeline:
    """Costs of a pipeline: seconds by stage, and seconds by edge, each way the same.

    Attributes:
        forward_s: By stage, one microbatch.
        backward_s: By stage, one microbatch.
        message_s: By (source, target): one forward message, and one gradient.
        num_microbatches: Microbatches per step.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    message_s: dict[tuple[int, int], float]
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    @property
    def time_s(self) -> tuple[float, ...]:
        """By stage: forward and backward of one microbatch."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))

    def compute_s(self, action: Action) -> float:
        """Price a compute action; reductions are free."""
        return {"F": self.forward_s, "B": self.backward_s}[action.kind][action.stage] if action.kind in "FB" else 0.0

    def transfer_s(self, action: Action) -> float:
        """Price a send."""
        assert action.peer is not None
        return self.message_s[min(action.stage, action.peer), max(action.stage, action.peer)]

    def schedule(self, name: str) -> Schedule:
        """Return the named schedule over these edges, all with gradients."""
        edges = [(source, target, True) for source, target in self.message_s]
        return add_communication(make_schedule(name, self.num_stages, self.num_microbatches), edges)


def ticks(max_ticks: int = 64) -> st.SearchStrategy[float]:
    """Seconds, exact in floating point."""
    return st.integers(0, max_ticks).map(lambda count: count * TICK_S)


@st.composite
def pipelines(
    draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 10, max_message_ticks: int = 0, *, skips: bool = False
) -> Pipeline:
    """A pipeline with uneven stages, free messages unless ``max_message_ticks`` is given, chained or with skips."""
    num_stages = draw(st.integers(1, max_stages))
    edges = [edge[:2] for edge in draw(stage_edges(num_stages))]
    return Pipeline(
        forward_s=tuple(draw(ticks()) for _ in range(num_stages)),
        backward_s=tuple(draw(ticks()) for _ in range(num_stages)),
        message_s={edge: draw(ticks(max_message_ticks)) for edge in edges if skips or edge[1] == edge[0] + 1},
        num_microbatches=draw(st.integers(1, max_microbatches)),
    )


# ---------------------------------------------------------------- clusters


def links() -> st.SearchStrategy[Link]:
    """Links from slow to fast."""
    return st.builds(
        Link,
        latency_s=st.sampled_from([0.0, 1e-6, 1e-4]),
        bandwidth=st.sampled_from([1e8, 1e9, 25e9, 300e9]),
        source=st.just("drawn"),
    )


@st.composite
def devices(draw: st.DrawFn, name: str = "toy") -> DeviceSpec:
    """One kind of device, with or without known tiles."""
    units = draw(st.sampled_from([0, 0, 4, 108]))
    return DeviceSpec(
        name=name,
        platform=draw(st.sampled_from(["cpu", "cuda"])),
        memory_bytes=draw(st.integers(1, 64)) * 2**20,
        peak_flops=(("float32", draw(st.sampled_from([1e9, 1e12]))),),
        memory_bandwidth=draw(st.sampled_from([1e9, 1e11])),
        launch_s=draw(st.sampled_from([0.0, 1e-5])),
        efficiency=(("matmul", 0.7), ("tile", 0.9)) if units else (),
        source="drawn",
        units=units,
    )


@st.composite
def clusters(draw: st.DrawFn, max_devices: int = 8, max_kinds: int = 2) -> Cluster:
    """Up to ``max_devices`` devices of one or two kinds, in equal hosts of one site, whose links may differ."""
    hosts = draw(st.integers(1, 2 if max_devices > 1 else 1))
    per_host = draw(st.integers(1, max_devices // hosts))
    num_kinds = draw(st.integers(1, max_kinds))
    kinds = tuple(draw(devices(name=f"toy{kind}")) for kind in range(num_kinds))
    own = draw(st.lists(links(), min_size=hosts, max_size=hosts)) if draw(st.booleans()) else []
    link = min(own, key=lambda link: link.bandwidth) if own else draw(links())
    levels = [
        Level(name="host", link=link, group_size=per_host, group_links=tuple(own), in_network=draw(st.booleans()))
    ]
    if hosts > 1:
        levels.append(
            Level(name="site", link=draw(links()), group_size=hosts * per_host, in_network=draw(st.booleans()))
        )
    return Cluster(
        name=f"{hosts}x{per_host}xtoy",
        kinds=kinds,
        device_kinds=tuple(draw(st.integers(0, num_kinds - 1)) for _ in range(hosts * per_host)),
        levels=tuple(levels),
    )


# ---------------------------------------------------------------- model graphs


@st.composite
def model_graphs(draw: st.DrawFn, max_items: int = 7, *, skips: bool = True, ties: bool = True) -> ModelGraph:
    """A small model of linear layers: a chain, or with values that skip layers and are added, or with tied weights.

    Every item is a call of one layer: ``linear(x, w)``, or ``linear(x + y, w)`` where a value skips to it.
    """
    rows = draw(st.sampled_from([2, 4, 8]))
    width = draw(st.sampled_from([4, 16]))
    num_items = draw(st.integers(1, max_items))
    owners = [draw(st.sampled_from([None, *range(layer)])) if ties else None for layer in range(num_items)]
    # The layer whose weight each one reads: its own, or that of an earlier layer.
    weights = [layer if owner is None else owner for layer, owner in enumerate(owners)]
    weights = [weights[weight] for weight in weights]
    skip_to = {layer: draw(st.integers(0, layer - 2)) for layer in range(2, num_items) if skips and draw(st.booleans())}
    tensors = [_activation("x", rows, width, role="input", names=("x",))]
    for layer in sorted(set(weights)):
        names = tuple(f"layers.{tied}.weight" for tied in range(num_items) if weights[tied] == layer)
        weight = TensorSpec(
            id=f"w{layer}",
            shape=(width, width),
            dtype="float32",
            role="parameter",
            names=names,
            requires_grad=True,
            storage=f"w{layer}",
        )
        tensors.append(weight)
    ops: list[Op] = []
    items: list[Item] = []
    for layer in range(num_items):
        begin = len(ops)
        value = f"h{layer - 1}" if layer else "x"
        reads = [value, f"w{weights[layer]}"]
        if layer in skip_to:
            other, total = f"h{skip_to[layer]}", f"s{layer}"
            ops.append(_op(begin, layer, "aten.add.Tensor", (value, other), total, rows * width, saved=()))
            tensors.append(_activation(total, rows, width))
            value = total
            reads.append(other)
        flops = 2 * rows * width * width
        linear_reads = (value, f"w{weights[layer]}")
        ops.append(_op(len(ops), layer, "aten.linear.default", linear_reads, f"h{layer}", flops, saved=(value,)))
        tensors.append(_activation(f"h{layer}", rows, width))
        items.append(
            Item(
                id=layer,
                kind="call",
                name=f"layers.{layer}#0",
                module_path=f"layers.{layer}",
                ops=(begin, len(ops)),
                reads=tuple(reads),
                writes=(f"h{layer}",),
            )
        )
    return ModelGraph(
        name="Toy",
        tensors=tuple(tensors),
        ops=tuple(ops),
        items=tuple(items),
        outputs=(f"h{num_items - 1}",),
        batch_rows=rows,
        fingerprint=f"toy-{rows}-{width}-{weights}-{sorted(skip_to.items())}",
    )


def _activation(name: str, rows: int, width: int, role: str = "activation", names: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec(
        id=name,
        shape=(rows, width),
        dtype="float32",
        role=role,
        names=names,
        batch_dim=0,
        requires_grad=role == "activation",
        storage=name,
    )


def _op(
    number: int, layer: int, target: str, reads: tuple[str, ...], write: str, flops: int, *, saved: tuple[str, ...]
) -> Op:
    linear = target == "aten.linear.default"
    return Op(
        id=number,
        name=f"{'linear' if linear else 'add'}_{number}",
        target=target,
        module_path=f"layers.{layer}",
        kind="matmul" if linear else "pointwise",
        reads=reads,
        writes=(write,),
        flops=flops,
        backward_flops=2 * flops if linear else 0,
        bytes=4 * flops,
        backward_bytes=8 * flops,
        saved=saved,
    )


# ---------------------------------------------------------------- plans


def exact(value: float) -> Estimate:
    """An estimate without a range."""
    return Estimate(value=value, low=value, high=value, source="modelled")


@st.composite
def plans(draw: st.DrawFn, max_stages: int = 4, max_degree: int = 2) -> Plan:
    """A consistent plan without a graph behind it: one block, one item and one parameter for each stage."""
    num_stages = draw(st.integers(1, max_stages))
    degree = draw(st.integers(1, max_degree))
    num_microbatches = draw(st.integers(1, 6))
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    edges = draw(stage_edges(num_stages))
    schedule = add_reduction(add_communication(make_schedule(name, num_stages, num_microbatches), edges))
    device = draw(devices())
    num_devices = num_stages * degree
    level = Level(name="host", link=draw(links()), group_size=num_devices)
    stages = tuple(
        draw(_stage(stage, degree, in_flight(name, num_stages, num_microbatches, stage))) for stage in range(num_stages)
    )
    return Plan(
        model="Toy",
        graph_fingerprint="toy",
        cluster=Cluster(name=f"{num_devices}xtoy", kinds=(device,), device_kinds=(0,) * num_devices, levels=(level,)),
        memory_limits=(2**30,) * num_devices,
        global_batch=2 * num_microbatches * degree,
        data_degree=degree,
        schedule=schedule,
        blocks=tuple(_block(stage) for stage in stages),
        stages=stages,
        edges=tuple(
            Edge(source=a, target=b, tensors=(f"h{a}",), bytes=size, backward_bytes=size if gradient else 0)
            for (a, b, gradient), size in zip(edges, draw(_sizes(len(edges))), strict=True)
        ),
        parameter_plans=tuple(_parameter(stage) for stage in stages),
        optimizer="adamw",
        precision="fp32",
        loss="fused",
        predicted=Prediction(
            step_time=exact(1.0),
            peak_bytes=tuple(stages[rank // degree].memory.total for rank in range(num_devices)),
            bubble_fraction=0.0,
            measured_share=0.0,
        ),
        solve=SolveReport(method="dp", status="given", objective=1.0, bound=0.0),
    )


def _sizes(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 2**20), min_size=count, max_size=count)


@st.composite
def _stage(draw: st.DrawFn, stage: int, degree: int, alive: int) -> StagePlan:
    size = st.integers(0, 2**16)
    return StagePlan(
        index=stage,
        blocks=(stage,),
        items=(stage,),
        ranks=tuple(range(stage * degree, (stage + 1) * degree)),
        forward_s=exact(draw(ticks())),
        backward_s=exact(draw(ticks())),
        communication_s=exact(0.0),
        reduction_s=exact(draw(ticks(8)) if degree > 1 else 0.0),
        optimizer_s=exact(draw(ticks(8))),
        memory=Memory(
            weights=4096,
            gradients=4096,
            optimizer=8192,
            activations=alive * draw(size),
            skips=alive * draw(size),
            buffers=draw(size),
            transient=draw(size),
        ),
        in_flight=alive,
        schedule_position=stage,
    )


def _block(stage: StagePlan) -> BlockPlan:
    return BlockPlan(
        id=stage.index,
        label=f"layers.{stage.index}",
        items=stage.items,
        repeat_of=None,
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        parameter_bytes=stage.memory.weights,
    )


def _parameter(stage: StagePlan) -> ParameterPlan:
    name = f"layers.{stage.index}.weight"
    return ParameterPlan(
        name=name,
        names=(name,),
        shape=(32, 32),
        dtype="float32",
        requires_grad=True,
        stages=(stage.index,),
        ranks=stage.ranks,
        layout=Layout(axes=("dp",), placements=(Replicate(),)),
        bytes_per_rank=4096,
    )
