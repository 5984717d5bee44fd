"""How long something takes on a device, and how much memory the device has left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

Clock = Callable[[Callable[[], object]], float]
"""Runs a function and returns the seconds that it took on the device."""


def device_clock(device: torch.device) -> Clock:
    """Return the clock of a device.

    CUDA is timed by events on its own stream.  A CPU process of one thread is timed by the thread's own time, in which
    waiting for a core that others use does not count; with several threads only the wall clock sees all of them.
    """
    if device.type == "cuda":
        return lambda run: _cuda_s(run, device)
    read = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def cpu_s(run: Callable[[], object]) -> float:
        start = read()
        run()
        return read() - start

    return cpu_s


def _cuda_s(run: Callable[[], object], device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        start.record()
        run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
