"""Which configurations there are, which of them the user allows, and which devices they use.

A configuration is (stages S, replicas d, microbatches m, schedule) and a `placement` of the S x d ranks.  Left out
because another one is at least as good under the same cost model:

* a degree d whose replicas have as many rows as those of a smaller one (the reduction only grows);
* a number of microbatches whose microbatches have as many rows as those of a smaller one;
* fill-drain where 1F1B is allowed: the same objective, and never more microbatches in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import factorial, prod
from typing import Any

from partita.errors import InfeasibleError
from partita.ir.cluster import Cluster
from partita.ir.graph import ModelGraph
from partita.ir.plan import LossPlace
from partita.ir.request import Limits, Search, choices
from partita.partitioner.pricing import Configuration
from partita.schedules.makers import SCHEDULES

Ranks = tuple[tuple[int, ...], ...]
Kind = tuple[int, tuple[int, ...]]
MAX_ORDERS = 24
"""Orders of unequal devices that are tried one by one."""
_TRAINING_SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A configuration without its devices: stages, replicas, microbatches, schedule, rows of a microbatch."""

    num_stages: int
    data_degree: int
    num_microbatches: int
    schedule: str
    rows: int

    def placed(self, ranks: Ranks) -> Configuration:
        """Return the configuration on these ranks."""
        return Configuration(
            ranks=ranks, num_microbatches=self.num_microbatches, schedule=self.schedule, rows=self.rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from.

    Attributes:
        batch: Rows per step, or None if the graph has no batch axis.
        num_devices: Ranks with memory.
        stages: Numbers of stages, ascending.
        degrees: Data-parallel degrees, ascending.
        microbatches: The number wanted, or None.
        schedules: Names of schedules.
    """

    batch: int | None
    num_devices: int
    stages: tuple[int, ...]
    degrees: tuple[int, ...]
    microbatches: int | None
    schedules: tuple[str, ...]

    def shapes(self) -> Iterator[Shape]:
        """Yield every shape worth pricing."""
        for degree in self.degrees:
            for count, rows in self._microbatches(degree):
                for stages in self.stages:
                    if stages * degree <= self.num_devices:
                        for schedule in self.schedules:
                            yield Shape(
                                num_stages=stages,
                                data_degree=degree,
                                num_microbatches=count,
                                schedule=schedule,
                                rows=rows,
                            )

    def _microbatches(self, degree: int) -> list[tuple[int, int]]:
        """Return (microbatches, rows of the largest) for one degree."""
        if self.batch is None:
            return [(1, 1)]
        rows, most = -(-self.batch // degree), self.batch // degree
        if self.microbatches is not None:
            counts = [min(self.microbatches, most)]
        else:
            counts = sorted({c for c in range(1, most + 1) if rows % c == 0 or c & (c - 1) == 0})
        smallest: dict[int, int] = {}
        for count in counts:
            smallest.setdefault(-(-rows // count), count)
        return [(count, size) for size, count in smallest.items()]

    def __str__(self) -> str:
        """Return what was searched and what was left out."""
        wanted = f"{self.microbatches} wanted" if self.microbatches else "powers of two and divisors of the rows"
        stages = _text(self.stages)
        return (
            f"pp in {stages}, dp in {_text(self.degrees)}, microbatches: {wanted}, schedule in "
            f"{', '.join(self.schedules)}; on up to {self.num_devices} devices; every stage has the same dp; tp=1, "
            "zero=0, recompute=none; blocks are contiguous along their dependencies"
        )


def _text(values: Sequence[int]) -> str:
    """Write a range of numbers shortly."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}..{values[-1]}"
    return ", ".join(map(str, values[:12])) + (f" ... {values[-1]}" if len(values) > 12 else "")


def make_space(
    graph: ModelGraph, num_blocks: int, *, memory: Sequence[int], limits: Limits, search: Search, loss: LossPlace
) -> Space:
    """Return what may be searched.

    Raises:
        InfeasibleError: If a restriction allows nothing; says what could be met.
        ValueError: If a limit makes no sense.
    """
    devices = sum(limit > 0 for limit in memory)
    if not devices:
        raise InfeasibleError(
            "every device has a memory limit of 0 bytes, so no device is left", hint="raise memory_bytes"
        )
    _only(search.tp, "tp", 1, "tensor parallel degree {} is not available in this version; use tp=1")
    _only(search.cp, "cp", 1, "context parallel degree {} is not available in this version; use cp=1")
    _only(search.ep, "ep", 1, "expert parallel degree {} is not available in this version; use ep=1")
    _only(search.zero, "zero", 0, "ZeRO level {} is not available in this version; use zero=0")
    _only(
        search.recompute, "recompute", "none", "recompute {!r} is not available in this version; use recompute='none'"
    )
    batch = None if graph.batch_rows is None else limits.global_batch or graph.batch_rows
    _positive("global_batch", limits.global_batch)
    _positive("num_microbatches", limits.num_microbatches)
    stages, degrees = _stages(search, num_blocks, devices), _degrees(search, batch, devices, graph.notes)
    if stages[0] * degrees[0] > devices:
        raise InfeasibleError(
            f"pp={stages[0]} with dp={degrees[0]} needs {stages[0] * degrees[0]} devices, {devices} may be used",
            hint=f"use pp={max(1, devices // degrees[0])} or dp={max(1, devices // stages[0])}",
        )
    return Space(
        batch=batch,
        num_devices=devices,
        stages=stages,
        degrees=degrees,
        microbatches=limits.num_microbatches,
        schedules=_schedules(search, loss),
    )


def _only(wanted: object, name: str, available: object, message: str) -> None:
    """Refuse a restriction that leaves out the one value there is."""
    allowed = choices(wanted)
    if allowed is not None and available not in allowed:
        raise InfeasibleError(message.format(allowed[0]), restriction=name, available=available)


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def _stages(search: Search, num_blocks: int, devices: int) -> tuple[int, ...]:
    most = min(num_blocks, devices)
    allowed = choices(search.pp)
    if allowed is None:
        return tuple(range(1, most + 1))
    kept = _within(allowed, most)
    if not kept:
        why = f"the model has {num_blocks} blocks and {devices} devices may be used"
        raise InfeasibleError(
            f"{_these('pp', allowed)} cannot be met: {why}", hint=f"use pp from 1 to {most}", most=most
        )
    return kept


def _degrees(search: Search, batch: int | None, devices: int, notes: Sequence[str]) -> tuple[int, ...]:
    most = 1 if batch is None else min(batch, devices)
    allowed = choices(search.dp)
    if allowed is not None:
        kept = _within(allowed, most)
        if not kept:
            reason = next((note for note in notes if note.startswith("the batch is not cut")), "there is no batch axis")
            rows = reason if batch is None else f"the batch has {batch} rows"
            why = f"{rows} and {devices} devices may be used"
            raise InfeasibleError(
                f"{_these('dp', allowed)} cannot be met: {why}", hint=f"use dp from 1 to {most}", most=most
            )
        return kept
    smallest: dict[int, int] = {}
    for degree in range(1, most + 1):
        smallest.setdefault(-(-(batch or 1) // degree), degree)
    return tuple(sorted(smallest.values()))


def _within(allowed: Iterable[Any], most: int) -> tuple[int, ...]:
    return tuple(sorted({value for value in allowed if 1 <= value <= most}))


def _these(name: str, allowed: Sequence[object]) -> str:
    return f"{name}={allowed[0]}" if len(allowed) == 1 else f"{name} in {tuple(allowed)}"


def _schedules(search: Search, loss: LossPlace) -> tuple[str, ...]:
    allowed = choices(search.schedule)
    unknown = [name for name in allowed or () if name not in SCHEDULES]
    if unknown:
        raise InfeasibleError(f"unknown schedule {unknown[0]!r}", hint=f"known are {', '.join(SCHEDULES)}")
    possible = ("gpipe",) if loss == "outside" else _TRAINING_SCHEDULES
    kept = tuple(name for name in possible if allowed is None or name in allowed)
    if not kept:
        raise InfeasibleError(
            f"{_these('schedule', allowed or ())} needs the loss inside the step, but it is computed outside, in the "
            "training loop: every forward ends before the first backward begins",
            hint="give loss_fn, or use schedule='gpipe'",
        )
    return kept[:1]


def placements(cluster: Cluster, memory: Sequence[int], num_stages: int, degree: int) -> list[Ranks]:
    """Return the ways to lay ``num_stages`` stages of ``degree`` replicas on the devices that are worth pricing.

    The devices with the most memory are used, the first of equals.  Equal devices: the replicas of a stage side by side
    (good for the reduction), and the stages of a replica side by side (good for the messages).  Unequal ones: replicas
    are grouped by similar memory, which gives the best multiset of capacities, and the groups are ordered in every way
    that makes a difference, or, if there are more than `MAX_ORDERS`, by rank, by falling and by rising memory.

    Returns:
        For each placement the ranks of every stage, one per replica; different ones only.
    """
    usable = [rank for rank, limit in enumerate(memory) if limit > 0]
    chosen = sorted(usable, key=lambda rank: (-memory[rank], cluster.device_kinds[rank], rank))[: num_stages * degree]
    alike = len({(memory[rank], cluster.device_kinds[rank]) for rank in chosen}) == 1
    groups = [tuple(sorted(chosen[s * degree : (s + 1) * degree])) for s in range(num_stages)]
    if not alike:
        return _orders(cluster, memory, groups)
    found = [tuple(groups)]
    if len(cluster.levels) > 1:
        found.append(tuple(tuple(sorted(chosen)[s::num_stages]) for s in range(num_stages)))
    return list(dict.fromkeys(found))


def _orders(cluster: Cluster, memory: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[Ranks]:
    """Return the orders of unequal groups; those that only swap groups alike count once."""

    def kind(group: tuple[int, ...]) -> Kind:
        return min(memory[rank] for rank in group), tuple(cluster.device_kinds[rank] for rank in group)

    counts = Counter(map(kind, groups))
    number = factorial(len(groups)) // prod(map(factorial, counts.values()))
    if number > MAX_ORDERS:
        return list(dict.fromkeys((tuple(sorted(groups)), tuple(groups), tuple(reversed(groups)))))
    members = {key: sorted(group for group in groups if kind(group) == key) for key in counts}
    found = []
    for order in sorted(_arrangements(counts)):
        taken = {key: iter(same) for key, same in members.items()}
        found.append(tuple(next(taken[key]) for key in order))
    return found


def _arrangements(counts: Mapping[Kind, int]) -> Iterator[tuple[Kind, ...]]:
    """Yield every different order of a multiset."""
    if not any(counts.values()):
        yield ()
    for key, count in counts.items():
        if count:
            for rest in _arrangements({**counts, key: count - 1}):
                yield (key, *rest)
