"""What ``partita doctor`` measured on this machine, and the file it is kept in.

Measuring needs torch and is done elsewhere; this file only says what a measurement is, and reads and writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path

from partita.errors import CostError

VERSION = 1
"""Version of the file's format."""
_REMEASURE = "run `partita doctor` again, or delete the file to use built-in values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Rates that this machine's CPU reached.

    Attributes:
        cpu_name: The processor's name.
        date: ISO date of the measurement.
        threads: Threads of one process while it was measured.
        gemm_flops: Reached rate of a large product by dtype name, FLOP/s.
        memory_bandwidth: Reached rate of a large copy, bytes read plus bytes written per second.
        launch_s: Seconds that the smallest operator takes in a loop (what lies between operators is added on use).
        loopback_latency_s: Seconds of the smallest message between two processes of this host.
        loopback_bandwidth: Bytes per second of a large message between them.
    """

    cpu_name: str
    date: str
    threads: int
    gemm_flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    launch_s: float
    loopback_latency_s: float
    loopback_bandwidth: float


def measurement_path() -> Path:
    """Return where the measurement is kept: ``cpu.json`` in the `cache_folder`."""
    return cache_folder() / "cpu.json"


def cache_folder() -> Path:
    """Return where measurements are kept: ``$PARTITA_CACHE`` or the user's cache directory for partita."""
    explicit = os.environ.get("PARTITA_CACHE")
    if explicit:
        return Path(explicit)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "partita"


def save_measurement(measurement: Measurement, path: Path | None = None) -> Path:
    """Write a measurement, making its directory.

    Args:
        measurement: What was measured.
        path: The file, or None for `measurement_path`.

    Returns:
        The file.
    """
    path = measurement_path() if path is None else path
    data = {"version": VERSION, **asdict(measurement), "gemm_flops": dict(measurement.gemm_flops)}
    write_at_once(path, json.dumps(data, indent=2, sort_keys=True) + "\n")
    return path


def write_at_once(path: Path, text: str) -> None:
    """Write a file so that a reader at the same time (another rank) sees the old one or the new, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def load_measurement(path: Path | None = None) -> Measurement | None:
    """Read a measurement.

    Args:
        path: The file, or None for `measurement_path`.

    Returns:
        The measurement, or None if there is no such file.

    Raises:
        CostError: The file is no measurement of this version.
    """
    path = measurement_path() if path is None else path
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CostError(f"the measurement {path} cannot be read: {error.strerror}", hint=_REMEASURE) from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CostError(f"the measurement {path} is not JSON: {error}", hint=_REMEASURE) from error
    return _checked(data, path)


def _checked(data: object, path: Path) -> Measurement:
    """Return the measurement that a parsed file holds, or say which entry is wrong."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        raise CostError(f"{path} is not a measurement of version {VERSION}", hint=_REMEASURE)
    missing = [field.name for field in fields(Measurement) if field.name not in data]
    if missing:
        raise CostError(f"the measurement {path} lacks {', '.join(missing)}", hint=_REMEASURE)
    rates = data["gemm_flops"]
    if not isinstance(rates, Mapping) or "float32" not in rates:
        raise CostError(f"the measurement {path} has no rate for float32 products in 'gemm_flops'", hint=_REMEASURE)
    positive = {f"gemm_flops[{dtype!r}]": rate for dtype, rate in rates.items()}
    names = ("memory_bandwidth", "launch_s", "loopback_latency_s", "loopback_bandwidth", "threads")
    positive |= {name: data[name] for name in names}
    for name, value in positive.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise CostError(f"{name} in the measurement {path} is {value!r}, not a positive number", hint=_REMEASURE)
    return Measurement(
        cpu_name=str(data["cpu_name"]),
        date=str(data["date"]),
        threads=int(data["threads"]),
        gemm_flops=tuple(sorted((str(dtype), float(rate)) for dtype, rate in rates.items())),
        memory_bandwidth=float(data["memory_bandwidth"]),
        launch_s=float(data["launch_s"]),
        loopback_latency_s=float(data["loopback_latency_s"]),
        loopback_bandwidth=float(data["loopback_bandwidth"]),
    )
