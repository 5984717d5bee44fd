"""Compare the cost model with public measurements of GPUs; no device is needed.

    python benchmarks/cross_check.py --data DIRECTORY [--json [FILE]]

``--data`` (default: the environment variable PARTITA_BENCHDATA) holds the projects' tables as `public_tables` reads
them. A row shows median and 90th percentile of |predicted / measured - 1| in per cent, signed median, and the target
if there is one. Constants, calibrations and samples are chosen on one half (a model, every second size) and the errors
are those of the other. Exit status: number of targets missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import megatron
from layers import ROWS, served_layer, trained_layer
from public_tables import (
    DEFECTS,
    CollectiveTable,
    ServedRow,
    TrainedRow,
    aceso_layers,
    galvatron_collectives,
    galvatron_layers,
    sailor_layers,
    vidur_collectives,
    vidur_layers,
)

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import DEVICES, LINKS
from partita.cost.clusters import parse_cluster
from partita.cost.collectives import collective_time_s, transfer_time_s
from partita.cost.samples import Samples
from partita.ir.cluster import DeviceSpec

MEGA = 10**6
FIT_MODEL = "meta-llama/Llama-2-7b-hf"
"""The model whose products the catalogue's constants, and the calibration, were set on."""
TF32 = {"A100-40GB": 156e12, "GH200-96GB": 494e12, "RTX3090-24GB": 35.6e12}
"""Dense TF32 peaks by datasheet: what float32 products ran at in Sailor's tables."""
MODEL = AnalyticModel()


@dataclass(frozen=True, slots=True)
class Finding:
    """Errors of one group of rows; ``limits`` are the target's median (or mean) and 90th percentile (or worst)."""

    section: str
    name: str
    rows: int
    middle: float
    high: float
    bias: float
    limits: tuple[float, float] | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.limits is None else self.middle <= self.limits[0] and self.high <= self.limits[1]


def finding(section: str, name: str, errors: Iterable[float], limits=None, *, mean: bool = False) -> Finding | None:
    """Sum errors up: median and 90th percentile, or mean and worst; None without rows."""
    signed = list(errors)
    if not signed:
        return None
    sizes = sorted(abs(error) for error in signed)
    high = sizes[-1] if mean else sizes[int(0.9 * (len(sizes) - 1) + 0.5)]
    middle = sum(sizes) / len(sizes) if mean else median(sizes)
    return Finding(section, name, len(signed), 100 * middle, 100 * high, 100 * median(signed), limits)


# ---------------------------------------------------------------- collectives

CLASSES = ((0, MEGA // 8, "< 128 KB"), (MEGA // 8, MEGA, "128 KB-1 MB"), (MEGA, 8 * MEGA, "1-8 MB"))
CLASSES = (*CLASSES, (8 * MEGA, 10**12, "> 8 MB"))


def samples_of(table: CollectiveTable) -> tuple[Samples, tuple[tuple[int, float], ...]]:
    """Split a table: every second size may be a sample, the others are the test.

    A sample is the median of the three fit sizes around 2 KB x 4^k, 8 MB x 2^k above, and the largest; a short table
    gives all of its fit sizes.
    """
    fit, test = table.samples[::2], table.samples[1::2]
    if len(table.samples) < 30:
        return Samples(sizes=tuple(s for s, _ in fit), seconds=tuple(t for _, t in fit)), test
    wanted = [2048 * 4**power for power in range(7)] + [8 * MEGA * 2**power for power in range(8)]
    chosen: dict[int, float] = {}
    for size in [*(size for size in wanted if size < fit[-1][0]), fit[-1][0]]:
        near = sorted(fit, key=lambda sample: abs(sample[0] - size))[:3]
        chosen[sorted(near)[1][0]] = median(seconds for _, seconds in near)
    return Samples(sizes=tuple(sorted(chosen)), seconds=tuple(chosen[size] for size in sorted(chosen))), test


def predicted_s(table: CollectiveTable, num_bytes: int) -> float:
    """Return what the catalogue's links say, without any measurement of the device in question."""
    hosts = table.ranks // table.per_host
    cluster = parse_cluster(f"{hosts}x{table.per_host}x{table.device}")
    if "pairwise" in table.name and table.ranks > 2:  # bridges join pairs, the host's bus the rest
        pair, bus = replace(cluster.levels[0], group_size=2), LINKS["PCIe4" if "A100" in table.device else "PCIe5"]
        cluster = replace(cluster, levels=(pair, replace(cluster.levels[0], link=bus)))
    if "send_recv" in table.name:
        return transfer_time_s(num_bytes, cluster.link(0, table.per_host if hosts > 1 else 1))
    kind = "all_to_all" if "all2all" in table.name else "all_reduce"
    return collective_time_s(kind, num_bytes, range(table.ranks), cluster)


def collectives(data: Path) -> Iterable[Finding | None]:
    """Yield errors by group and size: interpolated from samples, and modelled from the catalogue."""
    pooled: dict[tuple[str, str], list[float]] = {}
    for table in [*vidur_collectives(data), *galvatron_collectives(data)]:
        samples, test = samples_of(table)
        place = "in a host" if table.ranks == table.per_host else "between hosts"
        for low, high, label in CLASSES:
            rows = [(size, seconds) for size, seconds in test if low < size <= high]
            between = [samples.at(size).value / seconds - 1 for size, seconds in rows]
            alone = [predicted_s(table, size) / seconds - 1 for size, seconds in rows]
            pooled.setdefault((f"interpolated, {place}", label), []).extend(between)
            pooled.setdefault((f"modelled, {place}", label), []).extend(alone)
            if label == "> 8 MB":
                yield finding("collectives", f"{table.name} {label}, interpolated", between)
                yield finding("collectives", f"{table.name} {label}, modelled", alone)
    for (way, label), errors in pooled.items():
        goal = (5.0, 12.0) if (way, label) == ("interpolated, in a host", "> 8 MB") else None
        yield finding("collectives", f"all, {way}, {label}", errors, goal)


# ---------------------------------------------------------------- layers that serve


@cache
def served(shape: tuple[tuple[str, int], ...]):
    """Return a layer and its graph, made once."""
    layer = served_layer(**dict(shape))
    return layer, layer.graph(ROWS)


def served_parts(row: ServedRow, device: DeviceSpec) -> dict[str, float]:
    """Return the predicted seconds of the measured operators of a layer."""
    layer, graph = served(row.shape)
    return {
        name: MODEL.items(graph, items, device, row.tokens).forward_s.value
        for name, items in layer.parts.items()
        if name in row.seconds
    }


def served_error(row: ServedRow, device: DeviceSpec) -> float:
    """Return the relative error of a layer's sum."""
    parts = served_parts(row, device)
    return sum(parts.values()) / sum(row.seconds[name] for name in parts) - 1


def product_errors(rows: Iterable[ServedRow], device: DeviceSpec) -> list[float]:
    """Return the relative errors of the products alone."""
    return [
        seconds / row.seconds[name] - 1
        for row in rows
        for name, seconds in served_parts(row, device).items()
        if "proj" in name
    ]


def calibrated(device: DeviceSpec, rows: Iterable[ServedRow]) -> DeviceSpec:
    """Scale the efficiencies of products, norms and elementwise operators to what the fit model's rows reach."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name, seconds in served_parts(row, device).items():
            kind = "matmul" if "proj" in name else "norm" if "norm" in name else "pointwise"
            ratios.setdefault(kind, []).append(seconds / row.seconds[name])
    scale = {kind: median(found) for kind, found in ratios.items()}
    scale["tile"] = scale["matmul"]
    return replace(
        device, efficiency=tuple((kind, min(1.0, value * scale.get(kind, 1.0))) for kind, value in device.efficiency)
    )


def serving(data: Path) -> Iterable[Finding | None]:
    """Yield errors of Vidur's layers by tokens: without a measurement, and with one calibration."""
    rows = vidur_layers(data)
    for name in ("A100-80GB", "H100-80GB"):
        own = [row for row in rows if row.device == name]
        fit = [row for row in own if row.model == FIT_MODEL and row.tokens >= 512]
        plain, fitted = DEVICES[name], calibrated(DEVICES[name], fit)
        for low, high, label in ((0, 63, "< 64"), (63, 511, "64-511"), (511, 10**9, ">= 512")):
            test = [row for row in own if row.model != FIT_MODEL and low < row.tokens <= high]
            for device, way, goal in (
                (plain, "no measurement", (10.0, 20.0)),
                (fitted, "one calibration", (6.0, 15.0)),
            ):
                layers = [served_error(row, device) for row in test]
                target = goal if label == ">= 512" else None
                yield finding("layers, Vidur", f"{name} {label} tokens, {way}", layers, target)
            yield finding("layers, Vidur", f"{name} {label} tokens, single products", product_errors(test, plain))
        yield finding(
            "layers, Vidur",
            f"{name} >= 512 tokens, the fit model itself",
            (served_error(row, plain) for row in fit),
        )


# ---------------------------------------------------------------- layers that train


def trained_s(row: TrainedRow, device: DeviceSpec) -> tuple[float, float]:
    """Return the predicted seconds of forward and of forward plus backward."""
    graph = trained_layer(**row.shape).graph()
    cost = MODEL.items(graph, range(len(graph.items)), device, 1)
    return cost.forward_s.value, cost.forward_s.value + cost.backward_s.value


def device_of(row: TrainedRow) -> DeviceSpec:
    """Return the device, with float32 products at TF32's rate where Sailor's were."""
    device = DEVICES[row.device]
    if row.source != "sailor" or row.device not in TF32:
        return device
    peaks = {**dict(device.peak_flops), "float32": TF32[row.device]}
    return replace(device, peak_flops=tuple(peaks.items()))


def training(data: Path) -> Iterable[Finding | None]:
    """Yield errors of whole training layers of Aceso, Galvatron and Sailor."""
    for section, rows, goal in (
        ("layers, Aceso V100", aceso_layers(data), (10.0, 20.0)),
        ("layers, Galvatron", galvatron_layers(data), (10.0, 20.0)),
        ("layers, Sailor", sailor_layers(data), None),
    ):
        groups: dict[str, list[float]] = {}
        forwards = []
        for row in rows:
            forward, both = trained_s(row, device_of(row))
            forwards.append(forward / row.forward_s - 1)
            error = both / row.both_s - 1 if row.both_s else forwards[-1]
            groups.setdefault(f"{row.model} on {row.device}", []).append(error)
        for name, errors in groups.items():
            yield finding(section, name, errors)
        whole = any(row.both_s for row in rows)
        if whole:
            yield finding(section, "forward alone", forwards)
        updates = [
            MODEL.optimizer_s(4 * row.parameters, "adam", DEVICES[row.device]).value / row.update_s - 1
            for row in rows
            if row.update_s
        ]
        yield finding(section, "update, unfused Adam", updates)
        together = [error for errors in groups.values() for error in errors]
        yield finding(section, "all, forward + backward" if whole else "all, forward", together, goal)


def steps(data: Path) -> Iterable[Finding | None]:
    """Yield errors of Megatron's measured step times and of its published memory figures."""
    errors = []
    for name, predicted, measured in megatron.step_times(data):
        errors.append(predicted / measured - 1)
        yield finding("Megatron step", f"{name}: {predicted:.2f} s, measured {measured:.2f} s", errors[-1:], mean=True)
    yield finding("Megatron step", "all eight", errors, (10.0, 15.0), mean=True)
    for label, goal, cases in megatron.memory_figures(data):
        yield finding("Megatron memory", label, (found / published - 1 for found, published in cases), goal, mean=True)


# ---------------------------------------------------------------- command line


def table_of(findings: list[Finding]) -> str:
    """Return the findings as a table in Markdown."""
    lines = ["| what | rows | median % | 90th % | bias % | target | |", "|---|---|---|---|---|---|---|"]
    for found in findings:
        goal = f"{found.limits[0]:g} / {found.limits[1]:g}" if found.limits else ""
        verdict = {None: "", True: "reached", False: "**missed**"}[found.reached]
        lines.append(
            f"| {found.section}: {found.name} | {found.rows} | {found.middle:.1f} | {found.high:.1f} "
            f"| {found.bias:+.1f} | {goal} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Compare, print, and count the targets missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("PARTITA_BENCHDATA"), help="directory of the public tables")
    parser.add_argument(
        "--json", nargs="?", const="-", help="print JSON instead of the table, or write it to this file too"
    )
    arguments = parser.parse_args()
    if not arguments.data:
        parser.error("no data: give --data, or set PARTITA_BENCHDATA to the directory of the public tables")
    data = Path(arguments.data)
    if not data.is_dir():
        parser.error(f"{data} is no directory")
    try:
        findings = [
            found for part in (collectives, serving, training, steps) for found in part(data) if found is not None
        ]
    except FileNotFoundError as error:
        parser.error(f"{data} lacks {error.filename}")
    missed = [found for found in findings if found.reached is False]
    rows = [asdict(found) | {"reached": found.reached} for found in findings]
    document = json.dumps({"findings": rows, "defects": DEFECTS, "missed": len(missed)}, indent=1) + "\n"
    if arguments.json == "-":
        sys.stdout.write(document)
        return len(missed)
    print(table_of(findings))
    print("\nLeft out or inferred:", *DEFECTS, sep="\n- ")
    print("\nMegatron rows show mean and worst instead of median and 90th percentile.")
    print(f"\ntargets: {sum(found.reached is not None for found in findings)}, missed: {len(missed)}")
    if arguments.json:
        Path(arguments.json).write_text(document, encoding="utf-8")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
