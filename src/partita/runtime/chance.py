"""Random numbers of stages, replicas and microbatches.

Everything follows from the caller's seed: each call draws one number from the global generator, the same on every
rank, and every stage, replica and microbatch computes with a generator of its own derived from it.  So masks differ
where they must differ, and the global state advances alike on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def draw() -> int:
    """Draw the call's number from the global generator."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64).item())


def fold(base: int, *coordinates: int) -> int:
    """Return a 63-bit seed that depends on the base and every coordinate."""
    digest = hashlib.blake2b(repr((base, coordinates)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Run with generators seeded by ``seed``, and put the global state back; None changes nothing."""
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
