"""Processes of this machine that train together, and what they tell their parent.

Each process has a pipe to the parent: down comes the plan's file, up come `Ready`, one `Step` per step from rank 0, and
`Done` or `Failed`.  A process ends when its parent does.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from partita.errors import PartitaError, RankFailedError

TIMEOUT_S = 120.0
"""Seconds without any message after which the processes are given up."""
METERED = 5
"""First steps, in which the memory is measured; they are slower for it."""
PATIENCE_S = 10.0
"""Seconds that a process gets to end."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the processes share the cores
    "GLOO_SOCKET_IFNAME": "lo",  # all on one machine: independent of names and networks
}
"""Set in the processes, unless the user has set it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has its model and begins to train."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training.

    Attributes:
        loss: Its loss.
        seconds: Its time.
    """

    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """The process has finished.

    Attributes:
        held_bytes: Parameters and buffers of this rank.
        growth_bytes: Growth of the process over the first steps, without them; None where it cannot be measured.
    """

    held_bytes: int
    growth_bytes: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The process has failed.

    Attributes:
        message: What happened.
        hint: What to try, or "".
    """

    message: str
    hint: str = ""


Event = Ready | Step | Done | Failed


class Ranks:
    """Processes that wait for a plan, train it, and end; a context manager that leaves none behind.

    Args:
        count: Number of processes.
        steps: Steps of training.
        folder: Where the processes find each other; must be empty.
    """

    def __init__(self, count: int, steps: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[Connection, int] = {}
        self._processes = []
        with _environment():
            for rank in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_main, args=(there, rank, count, steps, folder), daemon=True)
                process.start()
                there.close()  # so that its end is seen when the process ends
                self._pipes[here] = rank
                self._processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(process.pid or 0 for process in self._processes)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + (PATIENCE_S if kind is None else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()

    def train(self, plan: Path) -> Iterator[tuple[int, Event]]:
        """Let the processes train; yield what they tell until all are done.

        Args:
            plan: The saved plan.

        Yields:
            The rank, and its event.

        Raises:
            RankFailedError: If a process fails, ends early, or all are silent for too long.
        """
        for pipe in self._pipes:
            with suppress(ConnectionError):  # a process that has ended is noticed below
                pipe.send(plan)
        running = dict(self._pipes)
        while running:
            ready = wait(list(running), timeout=TIMEOUT_S)
            if not ready:
                raise RankFailedError(
                    f"ranks {sorted(running.values())} have been silent for {TIMEOUT_S:.0f} s",
                    hint="is the machine very busy? try fewer processes with --nproc",
                )
            for told in ready:
                assert isinstance(told, Connection)
                rank, event = running[told], _receive(told)
                if isinstance(event, Failed):
                    raise RankFailedError(f"rank {rank} failed: {event.message}", hint=event.hint, rank=rank)
                if isinstance(event, Done):
                    del running[told]
                yield rank, event


def _receive(pipe: Connection) -> Event:
    try:
        event: Event = pipe.recv()
    except (EOFError, ConnectionError):
        return Failed("its process ended without a word", "was it killed for lack of memory?")
    return event


@contextmanager
def _environment() -> Iterator[None]:
    """Set `ENVIRONMENT` for the processes that start meanwhile."""
    wanted = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if not Path("/sys/class/net/lo").exists():
        wanted.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]


def _main(pipe: Connection, rank: int, count: int, steps: int, folder: Path) -> None:
    """Run one process: the boundary at which its errors become messages."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send(_train(pipe, rank, count, steps, folder))
    except PartitaError as error:
        pipe.send(Failed(error.message, error.hint))
    except Exception:  # noqa: BLE001  (a rank's boundary)
        pipe.send(Failed(f"an unexpected error\n{traceback.format_exc()}", "please report this"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _load_everything(steps: int) -> None:
    """Train a tiny plain model, so that the libraries' code is in memory and does not count as the training's."""
    from partita.demo import script, task

    tiny = task.make_model(width=32, layers=1)
    for _ in script.train(tiny, task.make_optimizer(tiny), task.batches(steps)):
        pass


def _train(pipe: Connection, rank: int, count: int, steps: int, folder: Path) -> Done:
    import torch
    import torch.distributed as dist

    from partita.demo import script, task
    from partita.runtime.meter import MemoryMeter, free_at_once, keep_freed

    free_at_once()
    torch.set_num_threads(1)
    _load_everything(steps=2)  # while the parent is still planning
    plan: Path = pipe.recv()
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        model = script.parallel_model(plan)
        assert model.optimizer is not None
        tensors = [*model.parameters(), *model.buffers()]
        held = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)
        meter, growth = MemoryMeter(), None
        pipe.send(Ready())
        before = time.perf_counter()
        for step, loss in enumerate(script.train(model, model.optimizer, task.batches(steps)), start=1):
            now = time.perf_counter()
            if rank == 0:
                pipe.send(Step(loss, now - before))
            if step == min(METERED, steps):
                growth = meter.growth_bytes()
                keep_freed()
            before = now
        return Done(held, growth)
    finally:
        dist.destroy_process_group()
