"""``partita doctor``: what is installed, what this machine is, and how fast it is."""

from __future__ import annotations

import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import partita
from partita.units import format_bandwidth, format_bytes, format_flops, format_seconds

REQUIRED = ("torch", "numpy", "networkx", "ortools", "rich")
"""Packages that partita needs."""
OPTIONAL = (("transformers", "models of Hugging Face: pip install 'partita[hf]'"),)
"""Packages that some features need, and for what."""


def configure_doctor(parser: ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.add_argument("--cluster", metavar="TEXT", help="also describe this cluster, e.g. 2x8xH100-80GB or a file")
    parser.add_argument("--no-measure", action="store_true", help="do not measure the CPU")
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")


def run_doctor(arguments: Namespace) -> int:
    """Show versions, devices and what is missing; measure the CPU and keep the result for later plans."""
    missing: list[str] = []
    findings: dict[str, Any] = {"partita": partita.__version__, "python": platform.python_version()}
    findings["packages"] = _packages(missing)
    findings["machine"] = _machine()
    torch_found = findings["packages"].get("torch") is not None
    findings["devices"] = _devices(missing) if torch_found else []
    findings["measured"] = _measured(missing) if torch_found and not arguments.no_measure else _kept()
    if arguments.cluster:
        findings["cluster"] = _cluster(arguments.cluster)
    findings["missing"] = missing
    if arguments.json:
        from partita.ir.serde import layout_json

        sys.stdout.write(layout_json({"schema": "partita.doctor", "version": 1} | findings))
    else:
        print("\n".join(_text(findings)))
    return 0


def _packages(missing: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in (*REQUIRED, *(name for name, _ in OPTIONAL)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    missing += [f"{name} is not installed: pip install {name}" for name in REQUIRED if found[name] is None]
    missing += [f"{name} is not installed (optional; {use})" for name, use in OPTIONAL if found[name] is None]
    return found


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"system": platform.platform(), "cores": cores, "memory_bytes": memory}


def _devices(missing: list[str]) -> list[dict[str, Any]]:
    import torch
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        missing.append("this torch has no gloo: plans cannot run on CPU processes")
    if not torch.cuda.is_available():
        missing.append("no CUDA device: plans for GPUs can be made and looked at here, but not run")
        return []
    from partita.cost.clusters import match_device
    from partita.errors import CostError

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            kind: str | None = match_device(properties.name, properties.total_memory)
        except CostError as error:
            kind = None
            missing.append(f"{properties.name} is not in the catalogue: {error.hint}")
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory, "kind": kind})
    return devices


def _measured(missing: list[str]) -> dict[str, Any] | None:
    from partita.cost.measure_file import save_measurement
    from partita.errors import TransportError
    from partita.profiler.cpu import measure_cpu

    try:
        measurement = measure_cpu()
    except TransportError as error:
        missing.append(error.message)
        return _kept()
    return _as_dict(measurement) | {"file": str(save_measurement(measurement))}


def _kept() -> dict[str, Any] | None:
    from partita.cost.measure_file import load_measurement, measurement_path

    measurement = load_measurement()
    return None if measurement is None else _as_dict(measurement) | {"file": str(measurement_path())}


def _as_dict(measurement: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(measurement) | {"gemm_flops": dict(measurement.gemm_flops)}


def _cluster(text: str) -> dict[str, Any]:
    from partita.cost.clusters import parse_cluster

    cluster = parse_cluster(text)
    kinds = [
        {
            "name": kind.name,
            "count": cluster.device_kinds.count(index),
            "memory_bytes": kind.memory_bytes,
            "memory_bandwidth": kind.memory_bandwidth,
            "peak_flops": dict(kind.peak_flops),
            "launch_s": kind.launch_s,
            "source": kind.source,
        }
        for index, kind in enumerate(cluster.kinds)
    ]
    levels = [
        {"name": level.name, "ranks": level.group_size, "in_network": level.in_network}
        | {"latency_s": level.link.latency_s, "bandwidth": level.link.bandwidth, "source": level.link.source}
        | {"group_bandwidths": [link.bandwidth for link in level.group_links]}
        for level in cluster.levels
    ]
    return {"name": cluster.name, "devices": cluster.num_devices, "kinds": kinds, "levels": levels}


def _text(findings: dict[str, Any]) -> list[str]:
    machine, measured = findings["machine"], findings["measured"]
    packages = ", ".join(f"{name} {found}" for name, found in findings["packages"].items() if found)
    memory = format_bytes(machine["memory_bytes"]) if machine["memory_bytes"] else "unknown"
    lines = [
        f"partita {findings['partita']}, Python {findings['python']}",
        packages,
        f"{machine['system']}: {machine['cores']} cores, {memory} of memory",
    ]
    for index, device in enumerate(findings["devices"]):
        kind = f", planned as {device['kind']}" if device["kind"] else ""
        lines.append(f"cuda:{index} {device['name']}: {format_bytes(device['memory_bytes'])}{kind}")
    lines += ["", *_measured_text(measured)]
    if "cluster" in findings:
        lines += ["", *_cluster_text(findings["cluster"])]
    if findings["missing"]:
        lines += ["", "missing:", *(f"  {line}" for line in findings["missing"])]
    return lines


def _measured_text(measured: dict[str, Any] | None) -> list[str]:
    if measured is None:
        return ["CPU: not measured; plans use built-in values until `partita doctor` has measured it"]
    latency, bandwidth = measured["loopback_latency_s"], measured["loopback_bandwidth"]
    return [
        f"CPU, measured on {measured['date']}: {measured['cpu_name']}, {measured['threads']} thread(s) per process",
        *(f"  product, {dtype}: {format_flops(rate)}/s" for dtype, rate in sorted(measured["gemm_flops"].items())),
        f"  memory: {format_bandwidth(measured['memory_bandwidth'])}",
        f"  smallest operator: {format_seconds(measured['launch_s'])}",
        f"  between two processes: {format_seconds(latency)} and {format_bandwidth(bandwidth)}",
        f"  kept in {measured['file']}",
    ]


def _cluster_text(cluster: dict[str, Any]) -> list[str]:
    lines = [f"cluster {cluster['name']}: {cluster['devices']} devices"]
    for kind in cluster["kinds"]:
        peaks = ", ".join(f"{dtype} {format_flops(peak)}/s" for dtype, peak in kind["peak_flops"].items())
        memory = f"{format_bytes(kind['memory_bytes'])} at {format_bandwidth(kind['memory_bandwidth'])}"
        lines += [
            f"  {kind['count']} x {kind['name']} with {memory}",
            f"    peaks: {peaks}",
            f"    source: {kind['source']}",
        ]
    for level in cluster["levels"]:
        sums = ", added up by its switches" if level["in_network"] else ""
        unlike = ", ".join(format_bandwidth(rate) for rate in level["group_bandwidths"])
        rates = f"{format_seconds(level['latency_s'])} and {unlike or format_bandwidth(level['bandwidth'])}{sums}"
        lines += [
            f"  {level['name']}: groups of {level['ranks']}, {rates}",
            f"    source: {level['source']}",
        ]
    return lines
