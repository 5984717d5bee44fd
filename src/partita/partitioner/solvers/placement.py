r"""Max-load partition with several chunks per device, solved by CP-SAT.

Variables ``x[v, d] = [item v is on device d]`` and ``cut[n, d]``::

    (a)  sum_d x[v, d] = 1;   x[v, d] = 0 where d cannot run v                                       build
    (b)  cut[n, d] >= x[v, d] - x[w, d]      for neighbours v, w of a circle through the items of n   _cuts
    (c)  sum_v time_d(v) x[v, d] + sum_n cost(n) cut[n, d] <= L                                      _loads
    (d)  sum_v size(v) x[v, d] <= memory_d                                                           _loads
    (e)  sum_d (c) <= D L                                   redundant                                _loads
    (f)  minimise L

In (b) a net that is neither absent from a device nor whole on it has somewhere on the circle an item on the device
followed by one that is not.  Devices of one class are alike: items may use the j-th of them only if an earlier
item uses the one before, which the incumbent is renumbered to respect.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, gcd, inf

import numpy as np
from ortools.sat.python import cp_model

from partita.partitioner.maxload.reduction import Reduced, highest_load
from partita.partitioner.maxload.result import Limits
from partita.partitioner.solvers.line import weighted
from partita.partitioner.solvers.search import Outcome, run_cp_sat

UNITS = 20_000_000
"""Integer units that the largest load looked at is scaled to."""


def solve(reduced: Reduced, *, incumbent: Sequence[int], ceiling: float, limits: Limits) -> Outcome[tuple[int, ...]]:
    """Solve the problem by CP-SAT.

    Args:
        reduced: A problem that is not contiguous.
        incumbent: Device of each item: the hint.
        ceiling: Its largest load.
        limits: Of the search.

    Returns:
        The best assignment of items found, if any, with a valid lower bound on the load of every assignment.
    """
    if not np.isfinite(reduced.times.min(axis=0)).all():
        return Outcome(answer=None, bound=inf, status="infeasible")
    model = _Placement(reduced, renumber(reduced, incumbent), ceiling)
    model.build()
    outcome = run_cp_sat(model.model, limits, [flag for row in model.x for flag in row])
    width = reduced.problem.num_devices
    rows = [outcome.values[v : v + width] for v in range(0, len(outcome.values), width)]
    answer = tuple(row.index(1) for row in rows) if rows else None
    return outcome.translate(answer, model.scale)


def renumber(reduced: Reduced, devices: Sequence[int]) -> tuple[int, ...]:
    """Return the same assignment with the devices of each class taken into use in turn."""
    kinds = reduced.problem.devices
    free = {kind: [d for d, k in enumerate(kinds) if k == kind] for kind in set(kinds)}
    new: dict[int, int] = {}
    for d in devices:
        if d not in new:
            new[d] = free[kinds[d]].pop(0)
    return tuple(new[d] for d in devices)


class _Placement:
    """The model of one problem with its hint."""

    def __init__(self, reduced: Reduced, hint: Sequence[int], ceiling: float) -> None:
        self.reduced, self.hint = reduced, hint
        ceiling = min(ceiling, highest_load(reduced))
        self.kinds = reduced.problem.devices
        self.model = cp_model.CpModel()
        self.scale = UNITS / ceiling if ceiling > 0 else 1.0
        self.room = ceiling * (1 + 1e-9)
        self.x = [
            [self._flag(value=bool(hint) and hint[v] == d) for d in range(len(self.kinds))]
            for v in range(reduced.num_items)
        ]

    def _flag(self, *, value: bool) -> cp_model.IntVar:
        variable = self.model.new_bool_var("")
        if self.hint:
            self.model.add_hint(variable, value)
        return variable

    def build(self) -> None:
        """Fill the model."""
        for v, row in enumerate(self.x):
            self.model.add_exactly_one(row)
            for d, kind in enumerate(self.kinds):
                if self.reduced.times[kind][v] > self.room:
                    self.model.add(row[d] == 0)
        self._symmetry()
        self._loads([self._cuts(items) for _, items in self.reduced.nets])

    def _symmetry(self) -> None:
        """Let the j-th device of a class come into use only after the one before."""
        first = {kind: self.kinds.index(kind) for kind in set(self.kinds)}
        for v, row in enumerate(self.x):
            for d, kind in enumerate(self.kinds):
                if d - first[kind] > v:
                    self.model.add(row[d] == 0)
                elif d > first[kind] and v < SYMMETRY_DEPTH:
                    self.model.add(sum(self.x[u][d - 1] for u in range(v)) >= row[d])

    def _cuts(self, items: Sequence[int]) -> list[cp_model.IntVar]:
        cuts = []
        for d in range(len(self.kinds)):
            inside = sum(bool(self.hint) and self.hint[v] == d for v in items)
            cut = self._flag(value=0 < inside < len(items))
            for v, w in zip(items, (*items[1:], items[0]), strict=True):
                self.model.add_bool_or(cut, self.x[v][d].negated(), self.x[w][d])
            cuts.append(cut)
        return cuts

    def _loads(self, cuts: Sequence[Sequence[cp_model.IntVar]]) -> None:
        top = floor(self.room * self.scale)
        load = self.model.new_int_var(0, top, "load")
        unit = gcd(*self.reduced.sizes) or 1
        everything: list[tuple[int, cp_model.IntVar]] = []
        for d, kind in enumerate(self.kinds):
            device, times = self.reduced.problem.classes[kind], self.reduced.times[kind]
            row = [(floor(times[v] * self.scale), x[d]) for v, x in enumerate(self.x) if times[v] <= self.room]
            if device.communicates:
                row += [
                    (floor(cost * self.scale), cut[d]) for (cost, _), cut in zip(self.reduced.nets, cuts, strict=True)
                ]
            self.model.add(weighted(row) <= load)
            everything += row
            if device.memory_bytes is not None and sum(self.reduced.sizes) > device.memory_bytes:
                held = [(size // unit, x[d]) for size, x in zip(self.reduced.sizes, self.x, strict=True)]
                self.model.add(weighted(held) <= device.memory_bytes // unit)
        self.model.add(weighted(everything) <= len(self.kinds) * load)
        self.model.minimize(load)
        if self.hint:
            self.model.add_hint(load, top)


SYMMETRY_DEPTH = 40
"""Items whose use of devices is put in turn: enough to tell the devices apart, few enough to stay sparse."""
