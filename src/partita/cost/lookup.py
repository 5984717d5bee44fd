"""Find devices and links by name; this machine's own are as measured, if they were."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from partita.cost.catalogue import ALIASES, CPU, LINKS
from partita.cost.measure_file import load_measurement, measurement_path
from partita.errors import CostError
from partita.ir.cluster import DeviceSpec, Link

MAX_DEVICES = 1_000_000
"""A larger count is taken for a slip of the pen."""


NODE_S = 5e-6
"""Seconds between two operators of a graph on a CPU (Python, autograd, deallocation), unseen when timing one alone."""


def known_name(name: str, known: Iterable[str], what: str, where: str, usage: str = "") -> str:
    """Return a known name in the catalogue's spelling, or say what is known and what is nearest."""
    spellings = {entry.lower(): entry for entry in known}
    spoken = name.lower().replace(" ", "")  # chips are often written as in "RTX 4090"
    if spoken in spellings:
        return spellings[spoken]
    alias = next((entry for other, entry in ALIASES.items() if other.lower() == spoken), "")
    if alias.lower() in spellings:
        return alias
    near = get_close_matches(name.lower(), spellings, n=1, cutoff=0.4)
    near = near or [entry for entry in spellings if name and entry.startswith(name.lower())][:1]
    raise CostError(
        f"unknown {what} {name!r} in the cluster {where!r}; known: {', '.join(spellings.values())}",
        hint=f"did you mean {spellings[near[0]]!r}?" if near else usage,
        name=name,
        nearest=spellings[near[0]] if near else None,
    )


def cpu_device(measurement: Path | None = None) -> DeviceSpec:
    """Return a CPU process of this machine as a device.

    Args:
        measurement: The file that ``partita doctor`` saved, or None for its usual place.

    Returns:
        The measured rates, or the built-in ones if there is no file. Its memory is that of the whole machine: several
        processes share it, so set ``Limits.memory_bytes`` to split it.

    Raises:
        CostError: The file exists and cannot be read as a measurement.
    """
    path = measurement_path() if measurement is None else measurement
    measured = load_measurement(path)
    memory_bytes = _machine_memory() or CPU.memory_bytes
    if measured is None:
        return replace(CPU, memory_bytes=memory_bytes)
    peaks = dict(measured.gemm_flops)
    slower = min(1.0, peaks["float32"] / dict(CPU.peak_flops)["float32"])
    peaks = {**{dtype: peak * slower for dtype, peak in CPU.peak_flops}, **peaks}
    return replace(
        CPU,
        memory_bytes=memory_bytes,
        peak_flops=tuple(sorted(peaks.items())),
        memory_bandwidth=measured.memory_bandwidth,
        launch_s=measured.launch_s + NODE_S,
        source=f"measured by `partita doctor` on {measured.date}: {measured.cpu_name}, {measured.threads} thread(s)",
    )


def find_link(name: str) -> Link:
    """Return a link of the catalogue; the loopback as measured, if it was."""
    measured = load_measurement() if name == "loopback" else None
    if measured is None:
        return LINKS[name]
    return Link(
        latency_s=measured.loopback_latency_s,
        bandwidth=measured.loopback_bandwidth,
        source=f"measured by `partita doctor` on {measured.date}",
    )


def _machine_memory() -> int | None:
    """Return the machine's memory in bytes, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
