"""What a simulated step looks like: events, the figures drawn from them, and their trace for a viewer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from partita.ir.schedule import RECV_KINDS, Action

MemoryCurve = tuple[tuple[float, int], ...]
"""A step function: (seconds, bytes from then on), times ascending from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action with its time.

    Attributes:
        position: The pipeline position that acts.
        action: What it does; None is the optimiser update.
        start_s: When compute starts, a send's message starts to travel, or a receive starts to be awaited.
        end_s: When compute ends, a send's message has arrived, or a receive is there (``start_s`` if it was already).
    """

    position: int
    action: Action | None
    start_s: float
    end_s: float

    @property
    def occupies(self) -> bool:
        """Whether the position is occupied: it computes, reduces or updates, and neither sends nor waits."""
        return self.action is None or self.action.peer is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every position does, and when.

    Attributes:
        events: By position, and for each in the order in which it executed them.
        labels: One name per position.
        memory: One memory curve per position; empty where no plan told the sizes.
    """

    events: tuple[Event, ...]
    labels: tuple[str, ...]
    memory: tuple[MemoryCurve, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Seconds from the start to the end of the last event."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the positions' time in which they neither compute, reduce nor update."""
        busy = sum(event.end_s - event.start_s for event in self.events if event.occupies)
        total = len(self.labels) * self.step_time_s
        return 1 - busy / total if total > 0 else 0.0

    def order(self, position: int) -> tuple[Action, ...]:
        """Return the actions in the order in which ``position`` executed them, receives where they were awaited."""
        return tuple(event.action for event in self.events if event.position == position and event.action is not None)

    def peak_bytes(self, position: int) -> int:
        """Return the largest value of a position's memory curve."""
        return max(size for _, size in self.memory[position])

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline in the trace event format of Chrome, which Perfetto reads.

        Process 0 has one row per position with its compute and its waits, process 1 one row per link direction with its
        messages; the memory curves are counters.
        """
        trace = {"displayTimeUnit": "ms", "traceEvents": list(_trace_events(self))}
        Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")


def _trace_events(timeline: Timeline) -> Iterator[dict[str, object]]:
    """Yield Chrome trace events; times in microseconds."""
    home = {event.action.stage: event.position for event in timeline.events if event.action is not None}
    names = {(0, position): label for position, label in enumerate(timeline.labels)}
    slices: list[dict[str, object]] = []
    width = len(timeline.labels)
    for event in timeline.events:
        action, row, name, kind = event.action, (0, event.position), "optimizer", "update"
        if action is not None:
            name, kind = str(action), action.kind
            if kind in RECV_KINDS:
                name, kind = f"wait {action}", "wait"
            elif action.peer is not None:
                target = home[action.peer]
                row = 1, event.position * width + target
                names[row] = f"{timeline.labels[event.position]} to {timeline.labels[target]}"
        if event.end_s > event.start_s:
            times = {"ts": _us(event.start_s), "dur": _us(event.end_s - event.start_s)}
            slices.append({"ph": "X", "pid": row[0], "tid": row[1], "name": name, "cat": kind, **times})
    for process, name in enumerate(("positions", "links")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for (process, row_number), name in sorted(names.items()):
        yield {"ph": "M", "pid": process, "tid": row_number, "name": "thread_name", "args": {"name": name}}
    yield from slices
    for position, curve in enumerate(timeline.memory):
        for time, size in curve:
            name = f"memory of position {position}"
            yield {"ph": "C", "pid": 0, "name": name, "ts": _us(time), "args": {"bytes": size}}


def _us(seconds: float) -> float:
    """Return microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
