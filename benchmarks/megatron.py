"""Megatron's published steps and memory (Korthikanti et al., 2022, arXiv 2205.05198), predicted from layers.

The paper's figures stand here; how each was run stands in calculon's validation files. The step::

    T = m * (stage + messages) + (p - 1) / v * (stage + messages) + m * head + update

with the last stage, which also computes the scores of the vocabulary, the slowest. Tensor parallel layers reduce twice
in the forward and twice in the backward, and twice more where the whole forward runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layers import Layer, trained_layer
from public_tables import megatron_cases

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import DEVICES
from partita.cost.clusters import parse_cluster
from partita.cost.memory import stage_memory
from tests.unit.cost.tensors import weight

VOCABULARY = 51200
MEASURED_S = {
    ("megatron-22B", "full"): 1.42,
    ("megatron-22B", "seqsel"): 1.10,
    ("gpt3-175B", "full"): 18.13,
    ("gpt3-175B", "seqsel"): 13.75,
    ("turing-530B", "full"): 49.05,
    ("turing-530B", "seqsel"): 37.83,
    ("megatron-1T", "full"): 94.42,
    ("megatron-1T", "seqsel"): 71.49,
}
"""Table 5: seconds per step on A100-80GB."""
ACTIVATIONS_GIB = {
    ("megatron-22B", "none"): 59.25,
    ("megatron-22B", "seqsel"): 9.5625,
    ("gpt3-175B", "none"): 66.84375,
    ("gpt3-175B", "seqsel"): 12.3515625,
    ("turing-530B", "none"): 114.0234375,
    ("turing-530B", "seqsel"): 23.076171875,
    ("megatron-1T", "none"): 131.25,
    ("megatron-1T", "seqsel"): 26.5625,
}
"""Figure 1."""
STATE_GIB = {
    "megatron-22B": 45.5625,
    "gpt3-175B": 45.5625,
    "turing-530B": 31.640625,
    "megatron-1T": 32.958984375,
}
"""Figure 1: parameters, gradients and optimizer."""
SHARES = {
    "megatron-22B": {"seq": 66.84, "sel": 49.42, "seqsel": 16.18, "full": 7.64},
    "gpt3-175B": {"seq": 62.04, "sel": 56.53, "seqsel": 18.49, "full": 8.71},
    "turing-530B": {"seq": 58.31, "sel": 62.04, "seqsel": 20.27, "full": 9.42},
    "megatron-1T": {"seq": 58.31, "sel": 62.04, "seqsel": 20.27, "full": 9.42},
}
"""Figure 7: activations in per cent of those without any saving."""
DEVICE = DEVICES["A100-80GB"]
MODEL = AnalyticModel()


def step_times(data: Path) -> Iterator[tuple[str, float, float]]:
    """Yield (name, predicted seconds, measured seconds) of the eight measured steps."""
    for model, mode, sizes, run in megatron_cases(data, "tab5"):
        yield f"{model} {mode}", _step_s(sizes, run), MEASURED_S[model, mode]


def _step_s(sizes: dict[str, int], run: dict[str, Any]) -> float:
    degree, stages, chunks = run["tensor_par"], run["pipeline_par"], run["pipeline_interleaving"]
    rows, length, width = run["microbatch_size"], sizes["seq_size"], sizes["hidden"]
    microbatches = run["batch_size"] // run["data_par"] // rows
    full = run["activation_recompute"] == "full"
    layer = trained_layer(
        width=width,
        hidden=sizes["feedforward"],
        heads=sizes["attn_heads"],
        rows=rows,
        length=length,
        degree=degree,
        sequence_parallel=run["tensor_par_comm_type"] == "rs_ag",
    )
    layers = sizes["num_blocks"] / stages
    cluster = parse_cluster(f"{max(2, stages)}x8xA100-80GB")
    message = 2 * rows * length * width
    reduce_s = MODEL.all_reduce_s(message, range(degree), cluster).value
    stage_s = layers * (_layer_s(layer, full=full) + (6 if full else 4) * reduce_s)
    send_s = 2 * chunks * MODEL.transfer_s(message // degree, cluster.levels[1].link).value if stages > 1 else 0.0
    passes = microbatches + (stages - 1) / chunks
    parameters = int(12 * width**2 * layers / degree)
    update_s = MODEL.optimizer_s(4 * parameters, "adam", DEVICE, fused=True).value
    return passes * (stage_s + send_s) + microbatches * _head_s(rows, length, width, degree) + update_s


def _layer_s(layer: Layer, *, full: bool) -> float:
    """Return forward and backward of a layer, with the forward again (or its attention's core alone)."""
    graph = layer.graph()
    whole = MODEL.items(graph, range(len(graph.items)), DEVICE, 1)
    again = whole if full else MODEL.items(graph, layer.parts["attention_core"], DEVICE, 1)
    return whole.forward_s.value + whole.backward_s.value + again.forward_s.value


def _head_s(rows: int, length: int, width: int, degree: int) -> float:
    """Return forward and backward of the product with the vocabulary."""
    head = Layer("float16", trainable=True)
    head.linear("head", head.value(rows, length, width), VOCABULARY // degree)
    cost = MODEL.items(head.graph(), [0], DEVICE, 1)
    return cost.forward_s.value + cost.backward_s.value


Figures = list[tuple[float, float]]


def memory_figures(data: Path) -> Iterator[tuple[str, tuple[float, float] | None, Figures]]:
    """Yield (what, target in per cent, (found, published) pairs): closed forms, and what operators count."""
    gib = 2.0**30
    exact = (0.2, 0.2)
    closed: Figures = []
    counted: Figures = []
    for model, mode, sizes, run in megatron_cases(data, "fig1"):
        published = ACTIVATIONS_GIB[model, mode] * gib
        closed.append((closed_bytes(sizes, run, mode), published))
        counted.append((counted_bytes(sizes, run, mode), published))
    yield "figure 1, activations, closed form", exact, closed
    yield "figure 1, activations, counted from the operators", None, counted
    shares: Figures = []
    for model, mode, sizes, run in megatron_cases(data, "fig7"):
        if mode != "none":
            share = 100 * closed_bytes(sizes, run, mode) / closed_bytes(sizes, run, "none")
            shares.append((100 + share - SHARES[model][mode], 100.0))
    yield "figure 7, shares in points, closed form", exact, shares
    states: Figures = []
    ours: Figures = []
    for model, mode, sizes, run in megatron_cases(data, "fig1"):
        if mode == "none":
            parameters = 12 * sizes["hidden"] ** 2 * sizes["num_blocks"] // run["tensor_par"] // run["pipeline_par"]
            states.append((18.0 * parameters, STATE_GIB[model] * gib))
            ours.append((_state_bytes(parameters), STATE_GIB[model] * gib))
    yield "figure 1, parameters and state, 18 bytes per parameter", exact, states
    yield "the same by stage_memory (16 bytes: gradients in 16 bits, Megatron's in 32)", None, ours


def closed_bytes(sizes: dict[str, int], run: dict[str, Any], mode: str) -> float:
    """Return the paper's closed form for the first stage: equations 1 to 6, float16, with dropout."""
    length, rows, width, heads = sizes["seq_size"], run["microbatch_size"], sizes["hidden"], sizes["attn_heads"]
    degree = run["tensor_par"]
    scores = 5 * heads * length / (width * degree)
    by_mode = {
        "none": 10 + 24 / degree + scores,
        "seq": 34 / degree + scores,
        "sel": 10 + 24 / degree,
        "seqsel": 34 / degree,
        "full": 2,
    }
    return length * rows * width * by_mode[mode] * _layers_in_flight(sizes, run)


def counted_bytes(sizes: dict[str, int], run: dict[str, Any], mode: str) -> float:
    """Return what the operators' formulas say that a layer keeps, times the layers in flight."""
    layer = trained_layer(
        width=sizes["hidden"],
        hidden=sizes["feedforward"],
        heads=sizes["attn_heads"],
        rows=run["microbatch_size"],
        length=sizes["seq_size"],
        degree=run["tensor_par"],
        sequence_parallel=mode == "seqsel",
    )
    graph = layer.graph()
    again = set(layer.parts["attention_core"]) if mode == "seqsel" else set()
    kept = [item for item in range(len(graph.items)) if item not in again]
    saved = MODEL.items(graph, kept, DEVICE, 1).saved_bytes
    saved -= sum(value.bytes - value.bytes // run["tensor_par"] for value in layer.gathered)
    if again:  # query, key and value stay, to compute the core again
        operands = graph.ops[layer.parts["attention_core"][0]].reads
        tensors = graph.tensor_map()
        saved += sum(tensors[name].bytes for name in operands) + tensors[operands[0]].bytes
    return saved * _layers_in_flight(sizes, run)


def _layers_in_flight(sizes: dict[str, int], run: dict[str, Any]) -> float:
    """Return how many layers' activations the first stage holds: as many as there are, more if interleaved."""
    stages, chunks = run["pipeline_par"], run["pipeline_interleaving"]
    return sizes["num_blocks"] * (1 + (stages - 1) / (stages * chunks)) if chunks > 1 else float(sizes["num_blocks"])


def _state_bytes(parameters: int) -> float:
    memory = stage_memory(
        parameters=[weight("w", parameters, dtype="float16")],
        optimizer="adam",
        precision="fp16",
        saved_bytes=0,
        in_flight=1,
        platform="cuda",
    )
    return float(memory.weights + memory.gradients + memory.optimizer)
