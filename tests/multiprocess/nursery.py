"""The processes behind `Pool`: one that imports everything once and forks workers, and the workers.

The nursery computes nothing, because autograd and OpenMP do not survive a fork; it only imports, and captures one model
without weights so that everything that torch.export imports late is there too.  A forked worker is ready in
milliseconds where a fresh interpreter needs seconds.

Each line on its standard input asks for a worker of that number.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank is to do.

    Attributes:
        function: A function of a module.
        args: Its arguments.
        rank: The rank.
        size: Number of ranks.
        port: Port of the pool's store on this machine.
        name: Keeps the runs of one store apart.
        seconds: How long a rank waits for a message.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    size: int
    port: int
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a task: a result, or an error with its traceback and the time it was raised (0 if unknown)."""

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float = 0.0


def perform(task: Task) -> Any:
    """Run a task in a process group of its own."""
    random.seed(0)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=timedelta(seconds=task.seconds))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(task.name, store),
        rank=task.rank,
        world_size=task.size,
        timeout=timedelta(seconds=task.seconds),
    )
    dist.barrier()  # a rank that is done at once must not hang up on those that still connect
    result = task.function(*task.args)
    if dist.is_initialized():  # after an error there may be none; then, or if this raises, the process ends
        dist.destroy_process_group()
    return result


def answer(message: bytes) -> tuple[bytes, bool]:
    """Perform a pickled task; return the pickled answer and whether the worker may go on."""
    try:
        return pickle.dumps(Answer(result=perform(pickle.loads(message)))), True
    except BaseException as error:  # noqa: BLE001  (the rank's boundary)
        failed_at, text = time.monotonic(), traceback.format_exc()
        try:
            data = pickle.dumps(Answer(error=error, traceback=text, failed_at=failed_at))
            pickle.loads(data)
        except Exception:  # noqa: BLE001  (an error that does not survive pickling is told by its text)
            told = RuntimeError(f"{type(error).__name__}: {error}")
            data = pickle.dumps(Answer(error=told, traceback=text, failed_at=failed_at))
        return data, False


def work(address: str, directory: Path, number: int) -> None:
    """Take tasks until the pool hangs up or one fails."""
    log = (directory / f"{number}.log").open("w", encoding="utf-8")
    stacks = (directory / f"{number}.stacks").open("w", encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    with Client(address) as connection:
        connection.send_bytes(pickle.dumps((number, os.getpid())))
        going_on = True
        while going_on:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            data, going_on = answer(message)
            del message
            gc.collect()
            connection.send_bytes(data)


def warm() -> None:
    """Import what tests use, late imports of torch.export included, without computing anything."""
    import partita
    import partita.runtime.build

    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    partita.capture(model, (torch.empty(2, 2, device="meta"),), verify="off")


def main(address: str, directory: str) -> None:
    """Fork a worker for every line on standard input."""
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        if os.fork() == 0:
            status = 1
            try:
                work(address, Path(directory), int(line))
                status = 0
            finally:
                os._exit(status)
