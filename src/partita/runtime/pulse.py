"""Which rank is gone: every rank shows signs of life, and who is left looks for those who show none.

A backend notices within milliseconds that a connection is closed, but names an address, not a rank, and the closed end
may belong to a rank that only gave up because of a third one.  Each rank therefore counts up in the job's store once
a second, in a thread of its own, and writes there why it stops when it does.  Nobody reads any of this before
something has gone wrong; then the first cause that was written is the one that every rank reports.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist

from partita.errors import RankFailedError

BEAT_S = 1.0
"""Seconds between two signs of life."""
SILENCE_S = 10.0
"""A rank without a sign of life for so long is taken for lost."""
_CAUSE = "partita/cause"
_BEAT = "partita/beat"


class Pulse:
    """This rank's signs of life, and its view of those of the others.

    Args:
        rank: This rank.
        size: Number of ranks.
        store: The job's store; the pulse has a connection of its own, since a waiting call blocks one.
    """

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size = rank, size
        self._store, self._looking = store.clone(), store.clone()
        self._end = threading.Event()
        thread = threading.Thread(target=_beat, args=(self._store, rank, self._end), name="partita-pulse", daemon=True)
        weakref.finalize(self, self._end.set)
        thread.start()

    def stop(self) -> None:
        """Show no more signs of life."""
        self._end.set()

    def tell(self, rank: int, what: str) -> None:
        """Write that a rank stops and why, unless a cause is known already.

        Args:
            rank: The rank that stops, or has stopped.
            what: What has become of it: ``"failed: ..."``, ``"was lost: ..."``.
        """
        with contextlib.suppress(Exception):  # the store may be gone with its host; then nobody can be told
            self._looking.compare_set(_CAUSE, "", json.dumps([rank, what]))

    def explain(self, error: BaseException) -> RankFailedError:
        """Find out which rank an error of the transport goes back to; takes up to `SILENCE_S`.

        Args:
            error: What the backend raised on this rank.

        Returns:
            The error to raise in its place.
        """
        what = (str(error).splitlines() or [""])[0]
        try:
            cause = self._cause()
        except Exception:  # noqa: BLE001  (whatever the store raises, it is its host that is gone)
            return RankFailedError(
                f"rank {self._rank} lost the connection to the job's store, which rank 0 or the launcher keeps: {what}",
                hint="look at the output of that process; resume from the last checkpoint",
                rank=0,
            )
        if cause is None:
            return RankFailedError(
                f"rank {self._rank} could not go on, though every rank is alive: {what}",
                hint="ranks that call the model differently wait for each other; check the data loaders",
            )
        rank, text = cause
        return RankFailedError(
            f"rank {rank} {text}; rank {self._rank} cannot go on without it",
            hint="look at that rank's output, and the kernel's log for an out-of-memory kill; "
            "resume from the last checkpoint",
            rank=rank,
        )

    def _cause(self) -> tuple[int, str] | None:
        """Return the rank that stopped first and what became of it; None if all live and none says anything."""
        first = self._beats()
        silent = {rank for rank in range(self._size) if rank != self._rank}
        deadline = time.monotonic() + SILENCE_S
        while silent and time.monotonic() < deadline and not self._looking.check([_CAUSE]):
            time.sleep(BEAT_S / 4)
            now = self._beats()
            silent = {rank for rank in silent if now[rank] == first[rank]}
        if silent:
            self.tell(min(silent), "was lost: its process has ended or does not answer")
        if not self._looking.check([_CAUSE]):
            return None
        rank, what = json.loads(self._looking.get(_CAUSE))
        return int(rank), str(what)

    def _beats(self) -> list[bytes]:
        """Return every rank's last sign of life."""
        keys = [f"{_BEAT}/{rank}" for rank in range(self._size)]
        return [bytes(self._looking.get(key)) if self._looking.check([key]) else b"" for key in keys]


def _beat(store: Any, rank: int, end: threading.Event) -> None:
    """Count up until told to end, or until the store is gone."""
    count = 0
    with contextlib.suppress(Exception):
        while True:
            store.set(f"{_BEAT}/{rank}", str(count))
            count += 1
            if end.wait(BEAT_S):
                return


def start_pulse(rank: int, size: int) -> Pulse | None:
    """Return a pulse of this rank, or None for a job of one or with a store that cannot be shared between threads."""
    if size == 1 or not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        return Pulse(rank, size, store)
    except (AttributeError, RuntimeError, NotImplementedError):  # stores of files and tests have no second connection
        return None
