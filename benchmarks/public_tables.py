"""Read the public tables that costs are compared with, in seconds and bytes; known defects are left out and named.

Every reader takes the directory that holds the projects' data (``vidur``, ``aceso-superscaler``, ``galvatron``,
``sailor``, ``calculon``) and returns rows; times in the files are in milliseconds or microseconds.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

DEFECTS = (
    "vidur: send_recv.csv of a100_pairwise_nvlink and h100_pairwise_nvlink are one file; neither is used",
    "vidur: attention.csv is missing, so attention's core is not compared there",
    "sailor: GPT-Neo-2.7/GH-96 is a copy of OPT-350's file; not used",
    "sailor: A100-40 of LLAMA-3-8 and OPT-30 runs 5 times slower than its OPT-350 implies; not used",
    "sailor: neither precision (TF32 from Ampere on) nor eager attention is written down; both are inferred",
    "sailor: what it calls LLAMA-3-8 has layers of 268 M parameters by its own llm_info.json; taken as such",
    "galvatron: tables with negative layer times (llama_fa and others) are measuring errors; not used",
    "galvatron: the device is not named; A100 is inferred",
    "calculon: its memory figures are values of a formula, not measurements; its eight step times are measured",
)
"""What is wrong with the public tables, and what is done about it."""


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """What a collective took over one group of ranks; samples are (bytes, seconds), sizes rising."""

    name: str
    device: str
    ranks: int
    per_host: int
    samples: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ServedRow:
    """Seconds of the operators of one layer at some number of tokens."""

    device: str
    model: str
    tokens: int
    shape: tuple[tuple[str, int], ...]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """Seconds of one layer's forward and of forward plus backward (0 if not measured); ``shape`` as in `layers`."""

    source: str
    device: str
    model: str
    shape: dict[str, object]
    forward_s: float
    both_s: float = 0.0
    update_s: float = 0.0
    parameters: int = 0


def vidur_collectives(data: Path) -> list[CollectiveTable]:
    """Return all-reduce and send/recv tables, one per group of ranks; medians of equal sizes."""
    tables = []
    for folder, device in (
        ("a100_dgx", "A100-80GB"),
        ("h100_dgx", "H100-80GB"),
        ("a100_pairwise_nvlink", "A100-80GB"),
        ("h100_pairwise_nvlink", "H100-80GB"),
    ):
        for kind in ("all_reduce",) if "pairwise" in folder else ("all_reduce", "send_recv"):
            groups: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
            for row in _rows(data / "vidur/data/profiling/network" / folder / f"{kind}.csv"):
                key = int(row["num_workers"]), int(row["devices_per_node"])
                groups[key][int(row["size"])].append(float(row[f"time_stats.{kind}.median"]) * 1e-3)
            for (ranks, per_host), sizes in sorted(groups.items()):
                samples = tuple((size, sorted(times)[len(times) // 2]) for size, times in sorted(sizes.items()))
                tables.append(CollectiveTable(f"{folder} {kind} {ranks}/{per_host}", device, ranks, per_host, samples))
    return tables


def vidur_layers(data: Path) -> list[ServedRow]:
    """Return every row of ``mlp.csv`` of A100 and H100."""
    found = []
    for folder, device in (("a100", "A100-80GB"), ("h100", "H100-80GB")):
        root = data / "vidur/data/profiling/compute" / folder
        for path in sorted(root.rglob("mlp.csv")):
            model = str(path.parent.relative_to(root))
            for row in _rows(path):
                columns = [name for name in row if name.endswith(".median") and row[name]]
                names = [name.removeprefix("time_stats.").removesuffix(".median") for name in columns]
                seconds = {name: float(row[column]) * 1e-3 for name, column in zip(names, columns, strict=True)}
                shape = (
                    ("width", int(row["n_embd"])),
                    ("hidden", int(row["n_expanded_embd"])),
                    ("heads", int(row["n_head"])),
                    ("kv_heads", int(row["n_kv_head"])),
                    ("degree", int(row["num_tensor_parallel_workers"])),
                    ("gated", int(row["use_gated_mlp"] == "True")),
                )
                found.append(ServedRow(device, model, int(row["num_tokens"]), shape, seconds))
    return found


def aceso_layers(data: Path) -> list[TrainedRow]:
    """Return the GPT layers on one V100 (float16, eager attention, 2048 tokens), sums of their operators."""
    found = []
    for path in sorted((data / "aceso-superscaler/profiler/profiled-time-eurosys").glob("gpt_*_tp1_algo0.csv")):
        rows = {row["op_name"]: row for row in _rows(path) if row["op_name"].startswith("enc-")}
        model, batch = path.stem.removesuffix("_tp1_algo0").rsplit("_mbs", 1)
        length, half = 2048, 2
        weights = float(rows["enc-attention-qkv"]["weights"]) * 2**20
        width = round((weights / half / 3) ** 0.5 / 64) * 64
        scores = float(rows["enc-attention-softmax"]["activations"]) * 2**20
        heads = round(scores / half / length**2 / int(batch))
        times = {
            name: (float(row["forward-compute"]) * 1e-6, float(row["backward-compute"]) * 1e-6)
            for name, row in rows.items()
        }
        forward = sum(first for first, _ in times.values())
        shape = {"width": width, "hidden": 4 * width, "heads": heads, "rows": int(batch), "length": length}
        both = forward + sum(second for _, second in times.values())
        found.append(TrainedRow("aceso", "V100-32GB", model, shape, forward, both))
    return found


def galvatron_layers(data: Path) -> list[TrainedRow]:
    """Return the forwards of 7 B layers by microbatch (bfloat16, fused attention)."""
    found = []
    for model, name, gated, hidden in (
        ("llama_hf", "computation_profiling_bf16_llama-7b_all.json", True, 11008),
        ("gpt_hf", "computation_profiling_bf16_hidden4096_head32_seqlen2048.json", False, 16384),
    ):
        table = json.loads((data / "galvatron/data/galvatron/models" / model / "configs" / name).read_text())
        for rows in range(1, 17):
            value = table.get(f"layertype_0_bsz{rows}_seq2048", table.get(f"layertype_0_bsz{rows}"))
            if value is None:
                continue
            shape = {"width": 4096, "hidden": hidden, "heads": 32, "rows": rows, "length": 2048, "gated": gated}
            shape |= {"dtype": "bfloat16", "flash": True, "dropout": False}
            shape |= {"norm": "rms_norm" if gated else "layer_norm"}
            found.append(TrainedRow("galvatron", "A100-80GB", f"{model} 7B", shape, value * 1e-3 * rows))
    return found


def galvatron_collectives(data: Path) -> list[CollectiveTable]:
    """Return the all-reduce and all-to-all times of 2, 4 and 8 GPUs of one host, 1 MB to 1 GB."""
    name = "galvatron/data/galvatron/profile_hardware/hardware_configs/sp_time_1nodes_8gpus_per_node.json"
    groups: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for key, value in json.loads((data / name).read_text()).items():
        kind, _, ranks, size, _ = key.split("_")
        groups[kind, int(ranks)].append((int(size.removesuffix("MB")) * 2**20, value * 1e-3))
    return [
        CollectiveTable(f"galvatron {kind} {ranks}/{ranks}", "A100-80GB", ranks, ranks, tuple(sorted(samples)))
        for (kind, ranks), samples in sorted(groups.items())
    ]


def sailor_layers(data: Path) -> list[TrainedRow]:
    """Return middle layers of Llama-3-8B and OPT-350M on one device (float32 or TF32, eager attention)."""
    # By the project's own llm_info.json this layer has 268 M parameters: 16384 inside, and no shared heads.
    llama = {"width": 4096, "hidden": 16384, "heads": 32, "gated": True, "length": 8192}
    llama |= {"norm": "rms_norm", "dropout": False}
    opt = {"width": 1024, "hidden": 4096, "heads": 16, "length": 2048, "dropout": True}
    found = []
    for model, folder, device, base, parameters in (
        ("LLAMA-3-8", "GH-96", "GH200-96GB", llama, 268_496_896),
        ("OPT-350", "A100-40", "A100-40GB", opt, 12_596_224),
        ("OPT-350", "GH-96", "GH200-96GB", opt, 12_596_224),
        ("OPT-350", "V100-16", "V100-16GB", opt, 12_596_224),
        ("OPT-350", "RTX-3090", "RTX3090-24GB", opt, 12_596_224),
    ):
        path = data / "sailor/sailor/Planner/sailor_planner/profiles" / model / folder / "profile.json"
        for batch, by_degree in sorted(json.loads(path.read_text()).items(), key=lambda entry: int(entry[0])):
            if "1" in by_degree:
                forward, backward, update = by_degree["1"]["2"]
                shape = {**base, "rows": int(batch), "dtype": "float32"}
                found.append(
                    TrainedRow("sailor", device, model, shape, forward, forward + backward, update, parameters)
                )
    return found


def megatron_cases(data: Path, figure: str) -> list[tuple[str, str, dict[str, int], dict[str, object]]]:
    """Return (model, mode, model's sizes, execution) of calculon's validation ``tab5``, ``fig1`` or ``fig7``."""
    found = []
    for path in sorted((data / "calculon/validation/seqsel" / figure).glob("*.json")):
        model, mode = path.stem.rsplit("_", 1)
        sizes = json.loads((data / "calculon/models" / f"{model}.json").read_text())
        found.append((model, mode, sizes, json.loads(path.read_text())))
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
