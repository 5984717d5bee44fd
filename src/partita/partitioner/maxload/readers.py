"""Readers of public formats, each with its authors' meaning of cost.

**dnn-partitioning** (JSON): accelerators take ``fpgaLatency``, one processor per ``maxCPUs`` takes ``cpuLatency``, has
no memory limit and pays no communication.  The ``cost`` of the edges of u is what a device pays once if the net of u is
cut there.  Nodes of one ``colorClass`` stay together.  Contiguity is asked of forward nodes; the backward pass runs the
line in reverse.

**PipeDream** (``graph.txt``): a node takes its forward and backward time, input nodes none (some profiles carry the
time of loading data there), sends its activations forward and their gradients back, and holds its activations and
three times its parameters.

**Piper** (JSON): `partita.partitioner.maxload.replicated`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from math import ceil, inf
from os import PathLike
from pathlib import Path
from typing import Any

from partita.partitioner.maxload.problem import DeviceClass, PartitionProblem
from partita.partitioner.maxload.replicated import Option, ReplicatedProblem

PARAMETER_COPIES = 3
"""Weights, gradients and one optimiser state, as the PipeDream profiles are commonly sized."""

_NODE = re.compile(r"^(?P<id>\S+) -- (?P<text>.*) -- (?P<fields>forward_compute_time=.*)$")


def read_json(source: str | PathLike[str] | dict[str, Any]) -> PartitionProblem:
    """Read the dnn-partitioning format.

    Args:
        source: Path or content of the file.

    Raises:
        ValueError: If the edges of one node have different costs, or a field is missing.
    """
    data = _content(source)
    try:
        return _from_dnn_partitioning(data)
    except KeyError as error:
        raise ValueError(f"not the dnn-partitioning format: field {error} is missing") from error


def _from_dnn_partitioning(data: dict[str, Any]) -> PartitionProblem:
    number = {node["id"]: index for index, node in enumerate(data["nodes"])}
    nodes = data["nodes"]
    edges = tuple((number[edge["sourceId"]], number[edge["destId"]]) for edge in data["edges"])
    costs = [0.0] * len(nodes)
    for (u, _), edge in zip(edges, data["edges"], strict=True):
        if costs[u] not in (0.0, edge["cost"]):
            raise ValueError(
                f"node {nodes[u]['id']} sends at cost {costs[u]} and at cost {edge['cost']}; one is allowed"
            )
        costs[u] = float(edge["cost"])
    colours: defaultdict[Any, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        if node.get("colorClass") is not None:
            colours[node["colorClass"]].append(index)
    backward = [bool(node["isBackwardNode"]) for node in nodes]
    paired = {v for group in colours.values() if not all(backward[u] for u in group) for v in group}
    order = [(u, v) for u, v in edges if not backward[u] and not backward[v]]
    # A backward node without a forward partner goes down the line: what it reads comes from a later device.
    order += [(v, u) for u, v in edges if backward[u] and backward[v] and not paired.issuperset((u, v))]
    accelerator = DeviceClass(
        name="accelerator",
        count=int(data["maxFPGAs"]),
        times=tuple(float(node["fpgaLatency"]) if node["supportedOnFpga"] else inf for node in nodes),
        memory_bytes=int(data["maxSizePerFPGA"]),
    )
    processor = DeviceClass(
        name="processor",
        count=int(data["maxCPUs"]),
        times=tuple(float(node["cpuLatency"]) for node in nodes),
        communicates=False,
    )
    return PartitionProblem(
        nodes=tuple(str(node["id"]) for node in nodes),
        classes=tuple(c for c in (accelerator, processor) if c.count),
        sizes=tuple(ceil(node["size"]) for node in nodes),
        edges=edges,
        costs=tuple(costs),
        order=tuple(order),
        colocated=tuple(tuple(group) for group in colours.values() if len(group) > 1),
    )


def read_pipedream(
    source: str | PathLike[str], *, accelerators: int, bandwidth_bytes_per_s: float, memory_bytes: int
) -> PartitionProblem:
    """Read a PipeDream profile as a max-load problem in milliseconds.

    Args:
        source: Path of ``graph.txt``.
        accelerators: Number of devices.
        bandwidth_bytes_per_s: Of each device, to the others.
        memory_bytes: Of each device.

    Raises:
        ValueError: If a line is not of the format.
    """
    names: dict[str, int] = {}
    times: list[float] = []
    sizes: list[int] = []
    costs: list[float] = []
    links: list[tuple[str, str]] = []
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if line.startswith("\t"):
            ends = line.strip().split(" -- ")
            if len(ends) != 2:
                raise ValueError(f"line {number} of {source} is not an edge: {line.strip()!r}")
            links.append((ends[0], ends[1]))
            continue
        match = _NODE.match(line)
        if match is None:
            raise ValueError(f"line {number} of {source} is not a node: {line.strip()!r}")
        fields = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]+)", match["fields"]))
        activation = _total(fields["activation_size"])
        names[match["id"]] = len(times)
        loading = match["text"].startswith("Input")
        times.append(0.0 if loading else float(fields["forward_compute_time"]) + float(fields["backward_compute_time"]))
        sizes.append(ceil(activation + PARAMETER_COPIES * float(fields["parameter_size"])))
        costs.append(2 * activation / bandwidth_bytes_per_s * 1e3)
    edges = tuple((names[a], names[b]) for a, b in links)
    device = DeviceClass(name="accelerator", count=accelerators, times=tuple(times), memory_bytes=memory_bytes)
    return PartitionProblem(
        nodes=tuple(names),
        classes=(device,),
        sizes=tuple(sizes),
        edges=edges,
        costs=tuple(costs),
        order=edges,
    )


def _total(text: str) -> float:
    """Return a size, or the sum of a list of sizes of a node with several outputs."""
    return sum(float(part) for part in text.strip("[]").split(";"))


def _content(source: str | PathLike[str] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(source, dict):
        return source
    content = json.loads(Path(source).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds no JSON object")  # noqa: TRY004 - the file is wrong, not the call
    return content


def read_piper(
    source: str | PathLike[str] | dict[str, Any],
    *,
    devices: int,
    memory_bytes: int,
    bandwidth_bytes_per_s: float,
    microbatches: int,
) -> ReplicatedProblem:
    """Read Piper's format; the limits in the file give way to the arguments.

    Args:
        source: Path or content of the file.
        devices: How many there are.
        memory_bytes: Of each.
        bandwidth_bytes_per_s: Of each; bytes per unit of time of the profile, which some files give in milliseconds.
        microbatches: Per batch.

    Raises:
        ValueError: If a field is missing.
    """
    data = _content(source)
    try:
        number = {node["id"]: index for index, node in enumerate(data["nodes"])}
        return ReplicatedProblem(
            nodes=tuple(str(node.get("name", node["id"])) for node in data["nodes"]),
            options=tuple(_options(node, number) for node in data["nodes"]),
            edges=tuple(
                (number[edge["sourceId"]], number[edge["destId"]], float(edge["communicationCost"]))
                for edge in data["edges"]
            ),
            devices=devices,
            memory_bytes=memory_bytes,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            microbatches=microbatches,
        )
    except KeyError as error:
        raise ValueError(f"not Piper's format: field {error} is missing") from error


def _options(node: dict[str, Any], number: dict[int, int]) -> dict[int, tuple[Option, ...]]:
    return {
        int(degree): tuple(
            Option(
                name=str(row["id"]),
                time=float(row["timePerSample"]),
                parameter_bytes=float(row["parameterSize"]),
                activation_bytes=float(row["memoryUsageA"]),
                static_bytes=float(row["memoryUsageB"]),
                sync_bytes={
                    number[int(other)]: float(size)
                    for key in ("syncTimeFw", "syncTimeBw")
                    for other, size in row[key].items()
                },
            )
            for row in rows
        )
        for degree, rows in node["TMPCs"].items()
        if rows
    }
