"""Cuts that would break an in-place operation.

A value that crosses to another stage is a copy, so a write into it is not seen by others that share its memory.  For
every value that is changed in place, a reader that comes later and still holds the *old* name of the memory must run
where the change happened, unless the value was made there too (it is sent when the stage ends, after the change).
Changed parameters and buffers keep all their readers on one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.tracer.program import Program, Step


def colocated_items(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return groups of step ids that must run on one stage.

    Args:
        program: The folded program; ``moved`` of its steps names what they change in place.

    Returns:
        Disjoint groups of at least two ids, ascending.
    """
    groups = [
        {step.id for step in program.steps if name in step.reads or name in step.writes}
        for name in sorted(program.changed)
    ]
    producer = {name: step.id for step in program.steps for name in step.writes}
    storage = program.storage
    for step in program.steps:
        for before, _after in step.moved:
            home = storage.get(before)
            later = {
                o.id
                for o in program.steps
                if o.id > step.id and any(storage.get(r) == home and producer.get(r, -1) < step.id for r in o.reads)
            }
            if home is None or not later:
                continue
            made_by = producer.get(before)
            groups.append({step.id, *later} if made_by is None else {step.id, made_by})
    return tuple(tuple(sorted(group)) for group in _merged(groups))


def changed_values(program: Program, steps: Iterable[Step], received: Sequence[str]) -> set[str]:
    """Return the received values, and the inputs, whose memory some steps change in place."""
    homes = {program.storage.get(before, before) for step in steps for before, _ in step.moved}
    return {name for name in [*received, *program.inputs] if program.storage.get(name, name) in homes}


def _merged(groups: list[set[int]]) -> list[set[int]]:
    merged: list[set[int]] = []
    for group in groups:
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*touching))
    return [group for group in merged if len(group) > 1]
