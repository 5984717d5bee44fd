"""Progress of a training: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

LINES = 8
"""Lines where there is no terminal, about."""


class Progress:
    """Shows steps and losses.

    Args:
        steps: Steps of the training.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._step = steps, 0
        self._created = time.monotonic()
        self._bar = _Bar(steps) if sys.stdout.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.progress.stop()

    def start(self) -> None:
        """Note that the training begins."""
        if self._bar is not None:
            self._bar.start()
        elif time.monotonic() - self._created >= 1.0:
            print(f"ready after {time.monotonic() - self._created:.0f} s", flush=True)

    def step(self, loss: float) -> None:
        """Note a step."""
        self._step += 1
        if self._bar is not None:
            self._bar.step(loss)
        elif self._step in {1, self._steps} or self._step % max(1, self._steps // LINES) == 0:
            print(f"step {self._step:4d} of {self._steps}   loss {loss:.4f}", flush=True)


class _Bar:
    """The bar of a terminal."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
        )
        self.progress = RichProgress(*columns)
        self._task = self.progress.add_task("getting ready", total=steps, start=False)

    def start(self) -> None:
        self.progress.start_task(self._task)

    def step(self, loss: float) -> None:
        self.progress.update(self._task, advance=1, description=f"loss {loss:.4f}")
