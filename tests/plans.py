"""Small valid clusters, graphs, schedules and plans, built by hand.

The model is a two-layer language model with tied embeddings: a mask that every stage may recompute, a skip from the
embedding to the head, and one parameter that two stages read::

    x ──▶ embed ──▶ layers.0 ──▶ layers.1 ──▶ head ──▶ y
            └────────────── skip ─────────────▶┘
    x ──▶ mask (replicable) ──▶ both layers

The plan runs it on 4 of 5 CPUs: stage 0 (embed, layers.0) on ranks 0 and 1, stage 1 (layers.1, head) on ranks 2 and 3.
"""

from __future__ import annotations

from dataclasses import replace

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
    RunnerUp,
    SolveReport,
    StagePlan,
)
from partita.ir.report import CaptureReport
from partita.ir.schedule import Schedule, parse_actions

MIB = 2**20


def make_device(**changes) -> DeviceSpec:
    base = DeviceSpec(
        name="cpu",
        platform="cpu",
        memory_bytes=64 * MIB,
        peak_flops=(("float32", 5e10), ("bfloat16", 2e10)),
        memory_bandwidth=1e10,
        launch_s=5e-6,
        efficiency=(("matmul", 0.8), ("pointwise", 0.5)),
        source="made up for tests",
    )
    return replace(base, **changes)


def make_cluster(**changes) -> Cluster:
    levels = (
        Level(name="host", link=Link(latency_s=2e-5, bandwidth=4e9, source="made up"), group_size=2),
        Level(name="rack", link=Link(latency_s=1e-4, bandwidth=1e9, source="made up"), group_size=6),
    )
    return replace(Cluster(name="5xcpu", kinds=(make_device(),), device_kinds=(0,) * 5, levels=levels), **changes)


def make_graph(**changes) -> ModelGraph:
    grad = {"dtype": "float32", "batch_dim": 0, "requires_grad": True, "role": "activation"}
    weight = {"dtype": "float32", "role": "parameter", "requires_grad": True}
    tensors = (
        TensorSpec(id="x", shape=(8, 16), dtype="int64", role="input", names=("args[0]",), batch_dim=0),
        TensorSpec(id="p_embed", shape=(100, 32), names=("embed.weight", "head.weight"), **weight),
        TensorSpec(id="p_w0", shape=(32, 32), names=("layers.0.weight",), **weight),
        TensorSpec(id="p_w1", shape=(32, 32), names=("layers.1.weight",), **weight),
        TensorSpec(id="mask", shape=(8, 16), dtype="bool", role="activation", batch_dim=0),
        TensorSpec(id="e", shape=(8, 16, 32), **grad),
        TensorSpec(id="h0", shape=(8, 16, 32), **grad),
        TensorSpec(id="h1", shape=(8, 16, 32), **grad),
        TensorSpec(id="s", shape=(8, 16, 32), **grad),
        TensorSpec(id="y", shape=(8, 16, 100), **grad),
        TensorSpec(id="y_flat", shape=(128, 100), storage="y", **grad),
    )
    matmul = {"target": "aten.linear.default", "kind": "matmul", "flops": 262144, "backward_flops": 524288}

    def op(id_: int, name: str, reads: str, writes: str, **others) -> Op:
        return Op(id=id_, name=name, reads=tuple(reads.split()), writes=(writes,), **others)

    def layer(id_: int, name: str, path: str, reads: str, writes: str) -> Op:
        return op(id_, name, reads, writes, module_path=path, saved=(reads.partition(" ")[0],), **matmul)

    def item(id_: int, name: str, ops: tuple[int, int], reads: str, writes: str, **others) -> Item:
        path, call, _ = name.partition("#")
        kind = {"kind": "call", "module_path": path} if call else {"kind": "op", "module_path": ""}
        return Item(id=id_, name=name, ops=ops, reads=tuple(reads.split()), writes=(writes,), **kind, **others)

    embedding = {"target": "aten.embedding.default", "kind": "embedding", "module_path": "embed", "saved": ("x",)}
    ops = (
        op(0, "ne", "x", "mask", target="aten.ne.Scalar", kind="pointwise", bytes=1152),
        op(1, "embedding", "p_embed x", "e", source="model.py:12", bytes=30208, backward_bytes=30208, **embedding),
        layer(2, "linear", "layers.0", "e p_w0 mask", "h0"),
        layer(3, "linear_1", "layers.1", "h0 p_w1 mask", "h1"),
        op(4, "add", "h1 e", "s", target="aten.add.Tensor", kind="pointwise", flops=4096),
        layer(5, "linear_2", "head", "s p_embed", "y"),
        op(6, "view", "y", "y_flat", target="aten.view.default", kind="view"),
    )
    items = (
        item(0, "ne", (0, 1), "x", "mask", replicable=True),
        item(1, "embed#0", (1, 2), "x p_embed", "e"),
        item(2, "layers.0#0", (2, 3), "e mask p_w0", "h0"),
        item(3, "layers.1#0", (3, 4), "h0 mask p_w1", "h1"),
        item(4, "add", (4, 5), "h1 e", "s"),
        item(5, "head#0", (5, 7), "s p_embed", "y_flat"),
    )
    base = ModelGraph(
        name="TinyLM",
        tensors=tensors,
        ops=ops,
        items=items,
        outputs=("y_flat",),
        batch_rows=8,
        colocated=((4, 5),),
        report=CaptureReport(remarks=("The mask is recomputed where it is needed.",)),
        fingerprint="0123456789abcdef",
    )
    return replace(base, **changes)


def make_schedule(**changes) -> Schedule:
    first = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0REDUCE_GRAD"
    second = "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE_GRAD"
    ranks = (parse_actions(first), parse_actions(second))
    return replace(Schedule(name="1f1b", num_stages=2, num_microbatches=2, ranks=ranks), **changes)


def estimate(value: float, spread: float = 0.1, source="modelled") -> Estimate:
    return Estimate(value=value, low=value * (1 - spread), high=value * (1 + spread), source=source)


def make_plan(**changes) -> Plan:
    def block(id_: int, label: str, items: tuple[int, ...], forward_s: float, parameter_bytes: int, repeat_of=None):
        forward, backward = estimate(forward_s, source="measured"), estimate(2 * forward_s)
        return BlockPlan(id=id_, label=label, items=items, repeat_of=repeat_of, forward_s=forward, backward_s=backward,
                         parameter_bytes=parameter_bytes)  # fmt: skip

    def stage(index: int, blocks, items, ranks, forward_s: float, memory: Memory, in_flight: int):
        return StagePlan(
            index=index, blocks=blocks, items=items, ranks=ranks, in_flight=in_flight, schedule_position=index,
            forward_s=estimate(forward_s, source="measured"), backward_s=estimate(2 * forward_s), memory=memory,
            communication_s=estimate(1e-4), reduction_s=estimate(5e-4), optimizer_s=estimate(2e-4),
        )  # fmt: skip

    def parameter(name: str, names, shape, stages, ranks, num_bytes: int):
        return ParameterPlan(
            name=name, names=names, shape=shape, dtype="float32", requires_grad=True, stages=stages, ranks=ranks,
            layout=Layout(axes=("dp",), placements=(Replicate(),)), bytes_per_rank=num_bytes,
        )  # fmt: skip

    memory = (
        Memory(weights=2 * MIB, gradients=2 * MIB, optimizer=4 * MIB, activations=6 * MIB, buffers=MIB, transient=MIB),
        Memory(weights=3 * MIB, gradients=3 * MIB, optimizer=6 * MIB, activations=9 * MIB, skips=MIB, buffers=MIB,
               transient=MIB),
    )  # fmt: skip
    base = Plan(
        model="TinyLM",
        graph_fingerprint="0123456789abcdef",
        cluster=make_cluster(),
        memory_limits=(32 * MIB,) * 5,
        global_batch=8,
        data_degree=2,
        schedule=make_schedule(),
        blocks=(
            block(0, "embed", (1,), 0.001, 12800),
            block(1, "layers.0", (2,), 0.003, 4096),
            block(2, "layers.1", (3,), 0.003, 4096, repeat_of=1),
            block(3, "add … head", (4, 5), 0.002, 12800),
        ),
        stages=(
            stage(0, (0, 1), (0, 1, 2), (0, 1), 0.004, memory[0], 2),
            stage(1, (2, 3), (0, 3, 4, 5), (2, 3), 0.005, memory[1], 1),
        ),
        edges=(Edge(source=0, target=1, tensors=("h0", "e"), bytes=8192, backward_bytes=8192),),
        parameter_plans=(
            parameter("embed.weight", ("embed.weight", "head.weight"), (100, 32), (0, 1), (0, 1, 2, 3), 12800),
            parameter("layers.0.weight", ("layers.0.weight",), (32, 32), (0,), (0, 1), 4096),
            parameter("layers.1.weight", ("layers.1.weight",), (32, 32), (1,), (2, 3), 4096),
        ),
        optimizer="adamw",
        precision="fp32",
        loss="fused",
        predicted=Prediction(
            step_time=Estimate(value=0.0412, low=0.0387, high=0.0455, source="modelled"),
            peak_bytes=(16 * MIB, 16 * MIB, 24 * MIB, 24 * MIB, 0),
            bubble_fraction=0.09,
            measured_share=0.63,
        ),
        solve=SolveReport(
            method="dp",
            status="feasible",
            objective=0.0412,
            bound=0.0403,
            space="pp 1-5, dp 1-5, microbatches 1-8, schedules gpipe 1f1b; no tensor parallelism",
            binding="stage 1's time",
            limit="solve_s=30",
            wall_s=1.25,
        ),
        runner_ups=(
            RunnerUp(description="pp=1 dp=4 m=1", step_time_s=0.0464, reason="sums all gradients over the rack link"),
            RunnerUp(description="pp=4 dp=1 m=8 1f1b", step_time_s=0.0523, reason="bubble 27 %"),
            RunnerUp(description="pp=1 dp=1 m=1", step_time_s=float("inf"), reason="needs 96.0 MiB of 32.0 MiB"),
        ),
        notes=("Rank 4 is not used: no plan with 5 devices is faster.",),
    )  # fmt: skip
    return replace(base, **changes)
