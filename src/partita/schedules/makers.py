"""Schedule makers: from a number of stages and microbatches to the order in which every stage computes.

A maker is a pure function and knows nothing of messages, costs or devices; `partita.schedules.passes` adds the rest.
Stage ``s`` runs on pipeline position ``s``.  Every maker here runs each stage's microbatches in ascending order,
forward and backward, so that gradients are summed in the same order whatever the schedule: a change of schedule changes
no bit of the result.

With equal stages and free messages both schedules take ``(m + S - 1) * (f + b)``; they differ in the microbatches whose
activations are alive at once: ``m`` for ``gpipe``, at most ``S - s`` on stage ``s`` for ``1f1b``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from partita.ir.schedule import Action, ActionKind, Schedule


class ScheduleMaker(Protocol):
    """Order the compute actions of every stage.

    A maker is deterministic, gives every (stage, microbatch) one ``F`` and one ``B`` (or one ``I`` and one ``W``), and
    accepts any ``num_stages >= 1`` and ``num_microbatches >= 1``, fewer microbatches than stages included.
    """

    def __call__(self, num_stages: int, num_microbatches: int) -> Schedule:
        """Return the schedule, compute actions only."""
        ...


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Fill and drain: all forwards, then all backwards.

    The backwards run in ascending order too.  GPipe drains in descending order; the length and the peak of the memory
    are the same either way.

    Source: Huang et al., "GPipe", 2019, section 2.3.
    """
    _check(num_stages, num_microbatches)
    microbatches = range(num_microbatches)
    ranks = (
        (*(_compute(stage, "F", k) for k in microbatches), *(_compute(stage, "B", k) for k in microbatches))
        for stage in range(num_stages)
    )
    return Schedule(name="gpipe", num_stages=num_stages, num_microbatches=num_microbatches, ranks=tuple(ranks))


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm up with forwards, then alternate one forward and one backward, then drain.

    Stage ``s`` warms up with ``min(m, S - 1 - s)`` forwards; the last stage alternates from the start.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021 (PipeDream-Flush).
    """
    _check(num_stages, num_microbatches)
    ranks = tuple(_one_f_one_b_stage(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule(name="1f1b", num_stages=num_stages, num_microbatches=num_microbatches, ranks=ranks)


def _one_f_one_b_stage(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return one stage's row of `one_f_one_b`."""
    warm_up = min(num_microbatches, num_stages - 1 - stage)
    steady = num_microbatches - warm_up
    row = [_compute(stage, "F", k) for k in range(warm_up)]
    for k in range(steady):
        row += [_compute(stage, "F", warm_up + k), _compute(stage, "B", k)]
    row += [_compute(stage, "B", k) for k in range(steady, num_microbatches)]
    return tuple(row)


SCHEDULES: dict[str, ScheduleMaker] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""The makers by name; the one place where a schedule is registered."""

_IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda _num_stages, num_microbatches, _stage: num_microbatches,
    "1f1b": lambda num_stages, num_microbatches, stage: min(num_microbatches, num_stages - stage),
}


def make_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Return the schedule that ``name`` makes, compute actions only.

    Raises:
        ValueError: If no maker has that name, or a count is below 1.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[name](num_stages, num_microbatches)


def in_flight(name: str, num_stages: int, num_microbatches: int, stage: int) -> int:
    """Return the largest number of microbatches whose activations ``stage`` holds at once.

    In closed form where one is known, else by counting (`peak_in_flight`).

    Raises:
        ValueError: If no maker has that name, a count is below 1, or there is no such stage.
    """
    _check(num_stages, num_microbatches)
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} is not one of {num_stages} stages")
    closed_form = _IN_FLIGHT.get(name)
    if closed_form is not None:
        return closed_form(num_stages, num_microbatches, stage)
    return peak_in_flight(make_schedule(name, num_stages, num_microbatches), stage)


def peak_in_flight(schedule: Schedule, stage: int) -> int:
    """Count the microbatches that ``stage`` holds at once: alive from ``F`` to ``B`` (to ``W`` where it is split)."""
    alive = peak = 0
    for action in (action for actions in schedule.ranks for action in actions if action.stage == stage):
        alive += (action.kind == "F") - (action.kind in {"B", "W"})
        peak = max(peak, alive)
    return peak


def _compute(stage: int, kind: ActionKind, microbatch: int) -> Action:
    return Action(stage=stage, kind=kind, microbatch=microbatch)


def _check(num_stages: int, num_microbatches: int) -> None:
    """Raise ValueError for a count below 1."""
    for count, what in ((num_stages, "stage"), (num_microbatches, "microbatch")):
        if count < 1:
            raise ValueError(f"a schedule needs at least one {what}, not {count}")
