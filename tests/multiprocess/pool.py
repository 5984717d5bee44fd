"""Gloo ranks that stay alive between tests.

`Pool.run` calls a module-level function on a number of ranks with a process group of their own and returns the results
by rank.  A rank's error is raised here with its traceback; ranks that do not answer in time are shown with the stacks
of all their threads and replaced.  The pool only ends processes that it started.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from partita.errors import RankFailedError
from tests.multiprocess.nursery import Answer, Task

GRACE_S = 2.0
"""How long the other ranks may go on after one has failed: their errors are consequences."""
DUMP_S = 0.5
"""How long a rank has for writing its stacks."""


CONSEQUENCE = "gloo/transport"
"""In an error that only says that another rank has hung up; it is raised if there is no other."""
NURSERY = "import sys; from tests.multiprocess.nursery import main; main(*sys.argv[1:])"


class PoolTimeoutError(Exception):
    """Ranks did not answer in time; the text has their stacks."""


class RankEndedError(Exception):
    """A rank ended without an answer."""


@dataclass(frozen=True, slots=True)
class _Worker:
    number: int
    pid: int
    connection: Connection


class Pool:
    """Ranks on this machine.

    Args:
        directory: Where the ranks write their output and stacks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener = Listener(str(directory / "socket"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(directory / "socket"), str(directory)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._idle: list[_Worker] = []
        self._started = 0
        self._runs = 0

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks, then the process that forks them."""
        for worker in self._idle:
            worker.connection.close()
        self._idle.clear()
        self._listener.close()
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait(10)

    @property
    def pids(self) -> list[int]:
        """The process ids of the idle ranks."""
        return [worker.pid for worker in self._idle]

    def run(
        self, function: Callable[..., Any], size: int, *args: Any, seconds: float = 60.0, grace: float = GRACE_S
    ) -> list[Any]:
        """Call ``function(*args)`` on ``size`` ranks with a fresh process group.

        Args:
            function: A module-level function.
            size: Number of ranks.
            *args: Its arguments; they are pickled.
            seconds: Time limit.
            grace: How long the other ranks may go on after one has failed.

        Returns:
            The results by rank.

        Raises:
            PoolTimeoutError: If a rank does not answer in time.
            Exception: The error that was raised first on any rank; its notes have the rank and the traceback.
        """
        workers = self._take(size)
        self._runs += 1
        answers: list[Answer | None] = [None] * size
        try:
            for rank, worker in enumerate(workers):
                task = Task(function, args, rank, size, self._store.port, str(self._runs), seconds)
                worker.connection.send_bytes(pickle.dumps(task))
            self._collect(workers, answers, seconds, grace)
            self._judge(workers, answers, seconds)
        except BaseException:
            self._end(workers)
            raise
        self._idle += workers
        return [answer.result for answer in answers if answer is not None]

    # -- workers -------------------------------------------------------------------------------------------------------
    def _take(self, size: int) -> list[_Worker]:
        assert self._nursery.stdin is not None
        missing = max(0, size - len(self._idle))
        for number in range(self._started, self._started + missing):
            print(number, file=self._nursery.stdin, flush=True)
        self._started += missing
        for _ in range(missing):
            connection = self._listener.accept()
            self._idle.append(_Worker(*pickle.loads(connection.recv_bytes()), connection))
        self._idle.sort(key=lambda worker: worker.number)
        taken, self._idle = self._idle[:size], self._idle[size:]
        return taken

    def _end(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    # -- answers -------------------------------------------------------------------------------------------------------
    def _collect(self, workers: list[_Worker], answers: list[Answer | None], seconds: float, grace: float) -> None:
        """Wait for answers: all of them, or until the limit, or until a little after the first failure."""
        deadline = time.monotonic() + seconds
        while pending := {w.connection: rank for rank, w in enumerate(workers) if answers[rank] is None}:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for connection in wait(list(pending), left):
                rank = pending[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(workers[rank].connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    text = f"rank {rank} of {len(workers)} ended without an answer"
                    answers[rank] = Answer(error=RankEndedError(text), failed_at=0.0)  # errors of others follow from it
                answer = answers[rank]
                if answer is not None and answer.error is not None:
                    deadline = min(deadline, time.monotonic() + grace)

    def _judge(self, workers: list[_Worker], answers: list[Answer | None], seconds: float) -> None:
        failures = [
            (isinstance(a.error, RankFailedError) or CONSEQUENCE in str(a.error), a.failed_at, rank, a)
            for rank, a in enumerate(answers)
            if a is not None and a.error is not None
        ]
        if failures:
            _, _, rank, answer = min(failures, key=lambda failure: failure[:3])
            assert answer.error is not None
            answer.error.add_note(f"on rank {rank} of {len(workers)}\n{answer.traceback}{self._said(workers[rank])}")
            raise answer.error
        late = [rank for rank, answer in enumerate(answers) if answer is None]
        if late:
            stacks = "\n".join(f"rank {rank}:\n{self._stacks(workers[rank])}" for rank in late)
            raise PoolTimeoutError(f"ranks {late} of {len(workers)} did not answer within {seconds:g} s\n{stacks}")

    def _stacks(self, worker: _Worker) -> str:
        path = self._directory / f"{worker.number}.stacks"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(DUMP_S)
        return path.read_text(encoding="utf-8")

    def _said(self, worker: _Worker) -> str:
        """Return the end of what a rank has written."""
        text = (self._directory / f"{worker.number}.log").read_text(encoding="utf-8", errors="replace")
        return f"\nits output ends with:\n{text[-2000:]}" if text.strip() else ""
