"""The ranks of the running job."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partita.cost.clusters import default_cluster, parse_cluster
from partita.errors import PartitaError, RankFailedError
from partita.ir.cluster import Cluster
from partita.runtime.pulse import Pulse, start_pulse

T = TypeVar("T")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for a message of another before it gives up."""


@dataclass(eq=False)
class World:
    """This process among the ranks of the job.

    Attributes:
        rank: This process.
        size: Number of processes.
        device: Where this rank computes.
        pulse: This rank's signs of life, where the job's store can carry them.
    """

    rank: int
    size: int
    device: torch.device
    pulse: Pulse | None = None
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def agree(self, decide: Callable[[], T]) -> T:
        """Let rank 0 decide and give every rank its answer, or its error.

        Args:
            decide: Runs on rank 0 only; its result must pickle.

        Returns:
            Rank 0's result, on every rank.

        Raises:
            PartitaError: Rank 0's error, on every rank.
        """
        if self.size == 1:
            return decide()
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(True, decide())]
            except PartitaError as error:
                box = [(False, error)]
            except Exception as error:  # noqa: BLE001  (a rank's boundary: the other ranks must not wait for an answer)
                text = "".join(traceback.format_exception(error))
                box = [(False, PartitaError(f"rank 0 failed: {type(error).__name__}: {error}\n{text}"))]
        with self.talking():
            dist.broadcast_object_list(box, src=0)
        good, answer = box[0]
        if not good:
            raise answer
        return answer  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self.talking():
            dist.all_gather_object(found, value)
        return found

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any = None) -> None:
        """Give every rank of a group one rank's values of a contiguous tensor, in place."""
        with self.talking():
            dist.broadcast(torch.view_as_real(tensor) if tensor.is_complex() else tensor, src=src, group=group)

    def all_reduce(self, tensor: torch.Tensor, largest: bool = False) -> None:
        """Sum a tensor over all ranks, or take the largest values, in place; a job of one has nothing to do."""
        if self.size > 1:
            with self.talking():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Stands around every exchange with other ranks: if one is gone, the error says which, and this rank stops too.

        Raises:
            RankFailedError: If another rank has failed or is lost.
        """
        try:
            yield
        except RuntimeError as error:  # every error of `torch.distributed` is one
            if self.pulse is None:
                raise
            failure = self.pulse.explain(error)
            self.abort()
            raise failure from error

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one stops, and close its connections so that none waits for it for ever."""
        if self.pulse is not None and not isinstance(error, RankFailedError):
            self.pulse.tell(self.rank, f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        self.abort()

    def abort(self) -> None:
        """Close this rank's connections."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def group(self, ranks: Sequence[int]) -> Any:
        """Return the process group of ``ranks``; every rank must ask for the same groups in the same order."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            self._groups[key] = None if len(key) == self.size else dist.new_group(list(key))
        return self._groups[key]


def world_cluster(world: World) -> Cluster:
    """Describe the running job's devices.

    Args:
        world: The ranks; all are taken to have a device like this one.
    """
    if world.device.type != "cuda":
        return parse_cluster(f"{world.size}xcpu")
    facts = torch.cuda.get_device_properties(world.device)
    return default_cluster(platform="cuda", device_name=facts.name, memory_bytes=facts.total_memory)


def join_world() -> World:
    """Return this process' world; create the default process group if torchrun's environment asks for one.

    Without torchrun's environment and without a process group the world is this process alone.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized() and all(name in os.environ for name in _TORCHRUN):
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return running_world(device)


def running_world(device: torch.device) -> World:
    """Return this process' world as it is; nothing is created.

    Args:
        device: Where this rank computes.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return World(rank=rank, size=size, device=device, pulse=start_pulse(rank, size))
    return World(rank=0, size=1, device=device)
