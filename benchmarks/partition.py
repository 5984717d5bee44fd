"""Partition public graphs with all methods under one cost model, and print a table.

    python benchmarks/partition.py --data DIR [--suite contiguous ...] [--method ilp ...] [--seconds 60] [--json OUT]

DIR (or the environment variable PARTITA_BENCHDATA) holds clones or copies of the public inputs, each below a folder of
its name: ``dnn-partitioning`` (github.com/msr-fiddle/dnn-partitioning), ``pipedream`` (msr-fiddle/pipedream) and
``piper`` (msr-fiddle/piper).  Nothing of them is part of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from partita.partitioner import PartitionProblem, solve
from partita.partitioner.maxload import METHODS

GIB = 2**30
ACCELERATORS = (4, 8, 16)
PIPER_GRID = [(devices, memory) for memory in (1, 2, 8, 80) for devices in (8, 32, 64, 128, 512)]


@dataclass(frozen=True)
class Instance:
    suite: str
    name: str
    problem: object
    contiguous: bool = True


def throughput(data: Path, suite: str) -> Iterator[Instance]:
    for path in sorted((data / "dnn-partitioning" / "throughput-inputs").rglob("*.json")):
        yield Instance(
            suite, f"{path.parent.name}/{path.stem}", PartitionProblem.from_json(path), contiguous=suite == "contiguous"
        )


def pipedream(data: Path, suite: str) -> Iterator[Instance]:
    for path in sorted((data / "pipedream").rglob("graph.txt")):
        for k in ACCELERATORS:
            problem = PartitionProblem.from_pipedream(
                path, accelerators=k, bandwidth_bytes_per_s=12e9, memory_bytes=16 * GIB
            )
            yield Instance(suite, f"{path.parent.name} k={k}", problem)


def piper(data: Path, suite: str) -> Iterator[Instance]:
    path = next((data / "piper").rglob("bert32*.json"))
    for devices, memory in PIPER_GRID:
        problem = PartitionProblem.from_piper(
            path,
            devices=devices,
            memory_bytes=memory * GIB,
            bandwidth_bytes_per_s=25 * GIB,
            microbatches=1920,
        )
        yield Instance(suite, f"bert32 {devices} x {memory} GiB", problem)


SUITES = {"contiguous": throughput, "noncontiguous": throughput, "pipedream": pipedream, "piper": piper}


def measure(instance: Instance, method: str, arguments: argparse.Namespace) -> dict[str, object]:
    result = solve(
        instance.problem,
        method=method,
        contiguous=instance.contiguous,
        time_limit_s=arguments.seconds,
        workers=arguments.workers,
        seed=arguments.seed,
    )
    return {
        "suite": instance.suite,
        "instance": instance.name,
        "method": method,
        "objective": result.objective if isfinite(result.objective) else None,
        "bound": result.bound if isfinite(result.bound) else None,
        "status": result.status,
        "seconds": round(result.wall_s, 3),
        "seed": result.seed,
    }


def table(rows: list[dict[str, object]], methods: list[str]) -> str:
    """Objectives side by side: the first method's in figures, the others' relative to it."""
    lines = [f"| suite | instance | {' | '.join(methods)} | gap | s |", "|" + "---|" * (len(methods) + 4)]
    for key in dict.fromkeys((row["suite"], row["instance"]) for row in rows):
        by_method = {row["method"]: row for row in rows if (row["suite"], row["instance"]) == key}
        first = by_method[methods[0]]
        base, bound = first["objective"], first["bound"]
        cells = ["-" if base is None else f"{base:.5g}"]
        for method in methods[1:]:
            value = by_method[method]["objective"] if method in by_method else None
            cells.append("-" if value is None or not base else f"{value / base - 1:+.1%}")
        gap = "-" if not base else f"{(base - bound) / base:.2%}"
        lines.append(f"| {key[0]} | {key[1]} | {' | '.join(cells)} | {gap} | {first['seconds']:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("PARTITA_BENCHDATA"))
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=["contiguous"])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["ilp", "dp", *list(METHODS)[2:]])
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.data:
        parser.error("name the folder of the inputs by --data or PARTITA_BENCHDATA")
    rows = []
    for suite in arguments.suite:
        for instance in SUITES[suite](Path(arguments.data), suite):
            if arguments.only not in instance.name:
                continue
            for method in arguments.method if suite != "piper" else arguments.method[:1]:
                rows.append(measure(instance, method, arguments))
                print(*rows[-1].values(), file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows, arguments.method))
    return 0


if __name__ == "__main__":
    sys.exit(main())
