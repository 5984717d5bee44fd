r"""Contiguous max-load partition as ordered slots, solved by CP-SAT.

Variables ``y[v, t] = [slot(v) <= t]`` for slots t = 0..T-1, ``y[v, -1] = 0``, ``y[v, T-1] = 1``, the expression
``x[v, t] = y[v, t] - y[v, t-1] = [slot(v) = t]``, and ``a[t, c] = [slot t is a device of class c]``::

    (a)  y[v, t-1] <= y[v, t];   y[v, t] <= y[u, t] for each (u, v) of the reduced order                    _order
    (b)  sum_c a[t, c] = 1;   sum_t a[t, c] = count_c;   x[v, t] + a[t, c] <= 1 where c cannot run v        _classes
    (c)  cut[n, t] >= x[u, t] - x[r, t];   cut[n, t] >= x[r, t] - x[u, t]   for u the first, r any other  _cuts
    (d)  a[t, c]  =>  sum_v time_c(v) x[v, t] + sum_n cost(n) cut[n, t] <= L                                _loads
    (e)  a[t, c]  =>  sum_v size(v) x[v, t] <= memory_c                                                     _loads
    (f)  T L >= sum_v min_c time_c(v) (+ all cuts, if there is one class)              redundant            _loads
    (g)  minimise L

Ordered slots remove the symmetry of the devices and give contiguity for free.  Where r depends on u, ``y[r, t]`` stands
for ``x[r, t]`` in the first row of (c), which is tighter: r cannot be before t if u is on t.  Windows on
``slot(v)`` follow from the incumbent, which is given as a *complete* hint.  Times become integers by rounding down, so
the bound holds for the real figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, gcd, inf

import networkx as nx
import numpy as np
from ortools.sat.python import cp_model

from partita.partitioner.maxload.line_dp import Line
from partita.partitioner.maxload.reduction import Reduced, highest_load
from partita.partitioner.maxload.result import Limits
from partita.partitioner.solvers.search import Outcome, run_cp_sat

UNITS = 60_000_000
"""Integer units that the largest load looked at is scaled to; beyond about 2**29 CP-SAT 9.15 calls solvable models
infeasible in its presolve."""


def solve(reduced: Reduced, *, incumbent: Line, limits: Limits) -> Outcome[Line]:
    """Solve the problem by CP-SAT.

    Args:
        reduced: A contiguous problem.
        incumbent: A known line: becomes the hint and the windows; may be empty.
        limits: Of the search.

    Returns:
        The best line found, if any, with a valid lower bound on the load of every line.
    """
    if not np.isfinite(reduced.times.min(axis=0)).all():
        return Outcome(answer=None, bound=inf, status="infeasible")
    model = _Line(reduced, incumbent)
    model.build()
    outcome = run_cp_sat(model.model, limits, model.flat())
    return outcome.translate(model.read(outcome.values) if outcome.values else None, model.scale)


class _Line:
    """The model of one problem, each variable created together with its value in the incumbent."""

    def __init__(self, reduced: Reduced, incumbent: Line) -> None:
        self.reduced = reduced
        self.model = cp_model.CpModel()
        self.classes = reduced.problem.classes
        self.slots = reduced.problem.num_devices
        self.least = reduced.times.min(axis=0)
        self.ceiling = min(incumbent.objective, highest_load(reduced))
        self.room = self.ceiling * (1 + 1e-9)
        self.scale = UNITS / self.ceiling if self.ceiling > 0 else 1.0
        self.kinds, self.hint = self._seats(incumbent)
        graph = nx.DiGraph(reduced.order)
        graph.add_nodes_from(range(reduced.num_items))
        self._behind = [nx.descendants(graph, v) for v in range(reduced.num_items)]
        self._before = [nx.ancestors(graph, v) for v in range(reduced.num_items)]
        self._never, self._always = self.model.new_constant(0), self.model.new_constant(1)
        self._y = [
            [self._flag(value=bool(self.hint) and self.hint[v] <= t) for t in range(self.slots - 1)]
            for v in range(reduced.num_items)
        ]
        self._a = [[self._flag(value=self.kinds[t] == c) for c in range(len(self.classes))] for t in range(self.slots)]

    def _seats(self, incumbent: Line) -> tuple[list[int], list[int]]:
        """Return the class of each slot and the slot of each item; unused devices come last."""
        left = [c.count for c in self.classes]
        kinds = [kind for kind, _ in incumbent.stages]
        for kind in kinds:
            left[kind] -= 1
        kinds += [c for c, count in enumerate(left) for _ in range(count)]
        slot = {v: t for t, (_, items) in enumerate(incumbent.stages) for v in items}
        return kinds, [slot[v] for v in range(self.reduced.num_items)] if slot else []

    def _flag(self, *, value: bool) -> cp_model.IntVar:
        variable = self.model.new_bool_var("")
        if self.hint:
            self.model.add_hint(variable, value)
        return variable

    def y(self, v: int, t: int) -> cp_model.IntVar:
        """Return [slot(v) <= t]."""
        if t < 0:
            return self._never
        return self._y[v][t] if t < self.slots - 1 else self._always

    def x(self, v: int, t: int) -> cp_model.LinearExpr:
        """Return [slot(v) = t]."""
        return self.y(v, t) - self.y(v, t - 1)

    def flat(self) -> list[cp_model.IntVar]:
        """Return the variables that `read` wants the values of."""
        return [flag for row in (*self._y, *self._a) for flag in row]

    def read(self, values: Sequence[int]) -> Line:
        """Return the line that the values of `flat` say; its objective is for the caller to evaluate."""
        width, n = self.slots - 1, self.reduced.num_items
        slot = [width - sum(values[v * width : (v + 1) * width]) for v in range(n)]
        rest = values[n * width :]
        stages = []
        for t in range(self.slots):
            kind = rest[t * len(self.classes) : (t + 1) * len(self.classes)].index(1)
            items = tuple(v for v in range(n) if slot[v] == t)
            if items:
                stages.append((kind, items))
        return Line(objective=inf, stages=tuple(stages))

    def build(self) -> None:
        """Fill the model."""
        self._order()
        self._classes()
        self._windows()
        self._loads([self._cuts(items) for _, items in self.reduced.nets])

    def _order(self) -> None:
        for v in range(self.reduced.num_items):
            for t in range(1, self.slots - 1):
                self.model.add_implication(self._y[v][t - 1], self._y[v][t])
        for u, v in self.reduced.order:
            for t in range(self.slots - 1):
                self.model.add_implication(self._y[v][t], self._y[u][t])

    def _classes(self) -> None:
        for row in self._a:
            self.model.add_exactly_one(row)
        for c, kind in enumerate(self.classes):
            self.model.add(sum(row[c] for row in self._a) == kind.count)
            # An item that alone is more than the incumbent is banned too: large coefficients upset CP-SAT's presolve.
            for v in np.flatnonzero(self.reduced.times[c] > self.room).tolist():
                for t in range(self.slots):
                    self.model.add(self.x(v, t) + self._a[t][c] <= 1)

    def _windows(self) -> None:
        """Bound slot(v): what comes before v has to fit into the slots up to v's, what comes after into the rest."""
        for v in range(self.reduced.num_items):
            before = sum(self.least[u] for u in self._before[v]) + self.least[v]
            behind = sum(self.least[u] for u in self._behind[v]) + self.least[v]
            for t in range(self.slots - 1):
                if before > (t + 1) * self.room:
                    self.model.add(self._y[v][t] == 0)
                if behind > (self.slots - 1 - t) * self.room:
                    self.model.add(self._y[v][t] == 1)

    def _cuts(self, items: Sequence[int]) -> list[cp_model.IntVar]:
        cuts = []
        for t in range(self.slots):
            inside = sum(bool(self.hint) and self.hint[v] == t for v in items)
            cut = self._flag(value=0 < inside < len(items))
            first, *others = items
            for r in others:
                there = self.y(r, t) if r in self._behind[first] else self.x(r, t)
                self.model.add(cut >= self.x(first, t) - there)
                self.model.add(cut >= self.x(r, t) - self.x(first, t))
            cuts.append(cut)
        return cuts

    def _loads(self, cuts: Sequence[Sequence[cp_model.IntVar]]) -> None:
        items = range(self.reduced.num_items)
        costs = [self.units(cost) for cost, _ in self.reduced.nets]
        top = self.units(self.room)
        unit = gcd(*self.reduced.sizes) or 1
        load = self.model.new_int_var(0, top, "load")
        for t in range(self.slots):
            for c, kind in enumerate(self.classes):
                times = self.reduced.times[c]
                row = [(self.units(times[v]), self.x(v, t)) for v in items if times[v] <= self.room]
                if kind.communicates:
                    row += [(cost, cut[t]) for cost, cut in zip(costs, cuts, strict=True)]
                rows = [self.model.add(weighted(row) <= load)]
                if kind.memory_bytes is not None and sum(self.reduced.sizes) > kind.memory_bytes:
                    held = [(self.reduced.sizes[v] // unit, self.x(v, t)) for v in items]
                    rows.append(self.model.add(weighted(held) <= kind.memory_bytes // unit))
                if len(self.classes) > 1:
                    for added in rows:
                        added.only_enforce_if(self._a[t][c])
        least = sum(self.units(time) for time in self.least)
        spread = [(cost, flag) for cost, cut in zip(costs, cuts, strict=True) for flag in cut]
        alone = len(self.classes) == 1 and self.classes[0].communicates
        self.model.add(self.slots * load >= least + (weighted(spread) if alone else 0))
        self.model.minimize(load)
        if self.hint:
            self.model.add_hint(load, top)

    def units(self, time: float) -> int:
        """Return a time in integer units, rounded down."""
        return floor(time * self.scale)


def weighted(terms: Sequence[tuple[int, cp_model.LinearExprT]]) -> cp_model.LinearExpr:
    """Return the sum of the terms with a weight."""
    kept = [(weight, flag) for weight, flag in terms if weight]
    return cp_model.LinearExpr.weighted_sum([flag for _, flag in kept], [weight for weight, _ in kept])
