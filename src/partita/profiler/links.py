"""Measure messages and all-reduces on the job's own process group, by size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from partita.cost.profile_table import Curve
from partita.cost.profiled import reduction_layout
from partita.ir.cluster import Cluster

SIZES = tuple(2048 * 4**step for step in range(8))
"""Bytes, 2 KiB to 32 MiB: each range between two of them has its own latency and bandwidth."""
BUDGET_BYTES = 256 * 2**20
"""Bytes sent per size at most, so that slow links do not take minutes."""
MOST, LEAST = 60, 6
"""Repeats per size."""
QUANTILE = 0.25
"""Of the repeats this share is faster than what counts: the others waited for a core or another message."""


def live_curves(cluster: Cluster, device: torch.device) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Measure the running job; every rank of the default process group calls this together.

    Args:
        cluster: The job's devices; its levels say which pairs and groups are different.
        device: This rank's device.

    Returns:
        Messages by the level's name, all-reduces by `reduction_layout`; the same on every rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    links: dict[str, Curve] = {}
    inner = 1
    for level in cluster.levels:
        if inner < size:
            links[level.name] = _curve(lambda message, to=inner: _ping(message, rank, to), device, 0.5)  # type: ignore[misc]
        inner = level.group_size
    reductions: dict[str, Curve] = {}
    for ranks in _reducing(cluster, size):
        group: Any = dist.group.WORLD if len(ranks) == size else dist.new_group(list(ranks))

        def reduce(message: torch.Tensor, group: Any = group, ranks: Sequence[int] = ranks) -> None:
            if rank in ranks:
                dist.all_reduce(message, group=group)

        reductions[reduction_layout(ranks, cluster)] = _curve(reduce, device, 1.0)
    box: list[Any] = [(links, reductions)]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[no-any-return]


def _reducing(cluster: Cluster, size: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks to measure, rank 0 in each: powers of two, levels, one rank per group."""
    found: dict[str, tuple[int, ...]] = {}
    lengths = {size, *(1 << bit for bit in range(1, size.bit_length())), *(lv.group_size for lv in cluster.levels)}
    rows = [tuple(range(length)) for length in sorted(lengths) if 2 <= length <= size]
    rows += [tuple(range(0, size, lv.group_size)) for lv in cluster.levels if lv.group_size < size]
    for ranks in rows:
        if len(ranks) > 1:
            found.setdefault(reduction_layout(ranks, cluster), ranks)
    yield from found.values()


def _ping(message: torch.Tensor, rank: int, other: int) -> None:
    """Send a message from rank 0 to another one and back."""
    if rank == 0:
        dist.send(message, other)
        dist.recv(message, other)
    elif rank == other:
        dist.recv(message, 0)
        dist.send(message, 0)


def _curve(run: Callable[[torch.Tensor], None], device: torch.device, share: float) -> Curve:
    """Time ``run`` on messages of all `SIZES`; ``share`` of the time is one message's."""
    points = []
    for size in SIZES:
        message = torch.zeros(size // 4, dtype=torch.float32, device=device)
        samples = []
        for _ in range(2 + max(LEAST, min(MOST, BUDGET_BYTES // size // 2))):
            dist.barrier()
            start = time.perf_counter()
            run(message)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples.append(time.perf_counter() - start)
        counted = sorted(samples[2:])
        points.append((size, share * counted[int(QUANTILE * len(counted))]))
    return Curve(tuple(points))
