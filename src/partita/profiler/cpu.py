"""Measure this machine's CPU: products, memory, the smallest operator, and the loopback between two processes.

Every rate is the median of repeated samples of one thread, because a plan's devices are processes with one thread each
unless the user says otherwise.  Of the loopback's messages the fastest tenth counts: the others waited for a core,
which is no property of the link.  The whole measurement takes a few seconds; the processes of the loopback import
torch anew.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from partita.cost.measure_file import Measurement
from partita.errors import TransportError

BUDGET_S = 0.4
"""Seconds spent on each figure."""
GEMM_DIM = 512
"""Rows and columns of the product: 0.27 GFLOP, fits the second-level cache in parts as layers of models do."""
LAYERS = 100
"""Modules called in a row for the smallest operator."""
COPY_BYTES = 64 * 2**20
"""Bytes copied for the memory bandwidth, beyond the last-level cache's share of one core."""
MESSAGE_BYTES = 8 * 2**20
"""Bytes of the large message over the loopback."""
DTYPES = (("float32", torch.float32), ("float64", torch.float64), ("bfloat16", torch.bfloat16))
"""Measured dtypes by name."""
TIMEOUT_S = 60.0
"""Seconds after which the other process of the loopback is given up; it has to import torch."""


def measure_cpu(*, threads: int = 1) -> Measurement:
    """Measure this machine.

    Args:
        threads: Threads of the process.

    Returns:
        The measured rates.

    Raises:
        TransportError: If two processes of this machine cannot talk to each other.
    """
    with _threads(threads):
        gemm = tuple((name, gemm_flops(dtype)) for name, dtype in DTYPES)
        bandwidth, launch = memory_bandwidth(), launch_s()
    latency, loopback = loopback_link()
    return Measurement(
        cpu_name=cpu_name(),
        date=datetime.now(UTC).date().isoformat(),
        threads=threads,
        gemm_flops=gemm,
        memory_bandwidth=bandwidth,
        launch_s=launch,
        loopback_latency_s=latency,
        loopback_bandwidth=loopback,
    )


def gemm_flops(dtype: torch.dtype) -> float:
    """Return the rate of a square product, FLOP/s."""
    a, b = (torch.ones(GEMM_DIM, GEMM_DIM, dtype=dtype) for _ in range(2))
    out = torch.empty(GEMM_DIM, GEMM_DIM, dtype=dtype)
    return 2 * GEMM_DIM**3 / _median_s(lambda: torch.mm(a, b, out=out))


def memory_bandwidth() -> float:
    """Return the rate of a large copy, bytes read plus bytes written per second."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _median_s(lambda: target.copy_(source))


def launch_s() -> float:
    """Return the seconds of the smallest operator in training: a module's call, its kernel and its autograd node."""
    layers = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(LAYERS)))
    x = torch.ones(1, requires_grad=True)
    return _median_s(lambda: layers(x)) / LAYERS


def _median_s(run: Callable[[], object]) -> float:
    """Return the median time of a call over `BUDGET_S`, at least three calls, the first one apart."""
    run()
    samples: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while len(samples) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return median(samples)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loopback_link() -> tuple[float, float]:
    """Return latency (s) and bandwidth (bytes/s) of gloo messages between two processes of this machine.

    Raises:
        TransportError: If the other process does not answer.
    """
    points = loopback_points()
    (_, latency), (size, seconds) = points[0], points[-1]
    return latency, size / max(seconds - latency, 1e-9)


def loopback_points() -> tuple[tuple[int, float], ...]:
    """Return the seconds of messages between two processes of this machine by bytes, ascending.

    Raises:
        TransportError: If the other process does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="partita-") as folder:
        store = str(Path(folder) / "store")
        # A plain program: with multiprocessing it would run the user's script again.
        other = subprocess.Popen(  # noqa: S603  (our own interpreter and code)
            [sys.executable, "-c", _OTHER, store],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            group = _group(store, 0)
            points = tuple((size, _ping(group, size, count) / 2) for size, count in SAMPLES)
        except RuntimeError as error:
            raise TransportError(
                f"two processes of this machine cannot talk over 127.0.0.1: {error}",
                hint="a firewall or sandbox may forbid it; plan with the built-in values",
            ) from error
        finally:
            other.kill()  # it has answered everything, or never will
            other.wait()
    return points


_OTHER = "import sys; from partita.profiler.cpu import answer; answer(sys.argv[1])"
SAMPLES = ((1, 500), (2**14, 200), (2**17, 100), (2**20, 60), (MESSAGE_BYTES, 20))
"""Bytes and number of the messages there and back, in the order that both processes know."""


def _group(store: str, rank: int) -> Any:
    """Return a group of two over 127.0.0.1; no default group, which belongs to the user, is touched."""
    gloo: Any = distributed.ProcessGroupGloo  # its stubs miss what follows
    options = gloo._Options()  # noqa: SLF001  (torch has no public name for it)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    options._timeout = timedelta(seconds=TIMEOUT_S)  # noqa: SLF001
    shared: Any = distributed.FileStore(store, 2)  # type: ignore[attr-defined]
    shared.set_timeout(timedelta(seconds=TIMEOUT_S))
    return gloo(shared, rank, 2, options)


def _ping(group: Any, num_bytes: int, count: int) -> float:
    """Return the seconds of a message there and back: of all, the slowest of the fastest tenth."""
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        group.send([message], 1, 0).wait()
        group.recv([message], 1, 0).wait()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 10]


def answer(store: str) -> None:
    """Send every message back; runs in the other process."""
    group = _group(store, 1)
    for num_bytes, count in SAMPLES:
        message = torch.zeros(num_bytes, dtype=torch.uint8)
        for _ in range(count):
            group.recv([message], 0, 0).wait()
            group.send([message], 0, 0).wait()


def cpu_name() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
