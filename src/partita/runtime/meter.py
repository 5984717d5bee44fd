"""How much memory training takes in a process, as the Linux kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_CLEAR_PEAK = "5"
"""Written to ``clear_refs`` it sets the peak of the resident memory back to its present size (proc(5))."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt`` (malloc.h)."""
_AT_ONCE = 2**16
"""Bytes from which a tensor gets pages of its own, which go back when it is freed: exact, and slow."""
_LARGEST = 2**25
"""The largest such threshold that glibc allows on 64 bits."""


def free_at_once() -> None:
    """Let glibc give freed tensors back at once, so that memory can be measured; elsewhere nothing changes."""
    _set_allocator(_MMAP_THRESHOLD, _AT_ONCE)
    _set_allocator(_TRIM_THRESHOLD, _AT_ONCE)


def keep_freed() -> None:
    """Let glibc keep what is freed for the next tensor, so that time can be measured."""
    _set_allocator(_MMAP_THRESHOLD, _LARGEST)
    _set_allocator(_TRIM_THRESHOLD, 2**30)


def give_back() -> None:
    """Give the system what was freed and kept; what runs next is measured from what is really in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_allocator(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


class MemoryMeter:
    """Measures the growth of this process beyond what it holds now; use it under `free_at_once`.

    Torch, the other libraries and the capture are there before and do not count.  What counts is every page that is in
    use at the peak, the allocator's own included, so it is more than the live tensors.
    """

    def __init__(self) -> None:
        give_back()
        self._before = _set_peak_back()

    def growth_bytes(self) -> int | None:
        """Return the growth at the peak since the start; None where the system does not tell."""
        peak = _status("VmHWM")
        return None if self._before is None or peak is None else peak - self._before


def _set_peak_back() -> int | None:
    """Forget earlier peaks; return the resident bytes."""
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")
    except OSError:  # not Linux, or not permitted
        return None
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(found[0]) * 1024 if found else None  # the file counts in KiB
