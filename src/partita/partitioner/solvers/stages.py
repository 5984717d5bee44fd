r"""Stage partition as ordered slots, solved by CP-SAT.

Variables ``y[v, t] = [stage(v) <= t]`` for t = 0..S-2, ``y[v, -1] = 0``, ``y[v, S-1] = 1``, and the expression
``x[v, t] = y[v, t] - y[v, t-1] = [stage(v) = t]``::

    (a)  y[v, t-1] <= y[v, t];   y[v, t] <= y[u, t] for each edge u -> v of the transitive reduction      _Slots.order
    (b)  sum_v x[v, t] >= 1                                                                               _Slots.order
    (c)  send[e, t]  >= x[p, t] - y[r, t]                for each reader r of net e made by p             _Slots.net
         recv[e, t]  >= x[r, t] - x[p, t]
         keep[e, t]  >= x[p, t] + x[r, t] - 1            for each reader r that saves it (p saves: x[p, t])
    (d)  held[g, t]  >= x[v, t] for each reader v;   split[g, t] >= x[v, t] - x[w, t] for readers v, w    _Slots.group
    (e)  static + buffers + k_t pinned + largest[t] <= capacity_t,  largest[t] >= transient_v x[v, t]     _Slots.memory
         static + buffers + update[t] <= capacity_t,  update[t] >= update_g held[g, t], or their sum
    (f)  W >= (m-1) t_t + r_t for each t;   S W >= (m-1) F + R (redundant)                                _model
    (g)  minimise sum_e seconds_e (send + recv) + W;  the compute F = sum_v (f_v + b_v) is a constant

Ordering the slots removes the symmetry of the devices and gives convexity and an acyclic pipeline for free.  Windows on
``stage(v)`` follow from the incumbent, and the incumbent is given as a *complete* hint, every auxiliary variable
included.  Seconds become integers by rounding down at a scale of `UNITS`, so the solver's bound holds for the real
figures; bytes are exact.  The answer is evaluated again in floating point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf

import networkx as nx
from ortools.sat.python import cp_model

from partita.partitioner.bounds import work_bound
from partita.partitioner.problem import (
    Evaluation,
    Net,
    ParameterGroup,
    PipelineProblem,
    SolutionStatus,
    StageSolution,
    evaluate,
)

UNITS = 10_000_000
"""Integer units that the work bound is scaled to: rounding loses 1e-7 of the objective per term."""

Linear = cp_model.LinearExpr


def solve(
    problem: PipelineProblem,
    *,
    incumbent: StageSolution | None = None,
    deterministic_limit: float = 10.0,
    workers: int = 1,
    seed: int = 0,
) -> StageSolution:
    """Solve the problem by CP-SAT.

    Args:
        problem: The configuration.
        incumbent: A known solution: becomes the hint and bounds the slots.
        deterministic_limit: CP-SAT's deterministic time, about a second each on an idle core.
        workers: Threads; the answer is reproducible with one.
        seed: Seed of the search.

    Returns:
        The solution with a valid lower bound; ``optimal`` if it is proved up to the rounding of `UNITS`.
    """
    floor_s = work_bound(problem)
    if floor_s == inf:
        return _answer(problem, (), inf, "infeasible")
    hint = incumbent.assignment if incumbent is not None else ()
    known = evaluate(problem, hint)
    slots = _Slots(problem, hint if known.feasible else ())
    scale = UNITS / floor_s if floor_s > 0 else 1.0
    _model(slots, scale, known if known.feasible else None)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = deterministic_limit
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    status = solver.solve(slots.model)
    if status == cp_model.INFEASIBLE:
        return _answer(problem, (), inf, "infeasible")
    bound = max(floor_s, sum(problem.block_s) + solver.best_objective_bound / scale)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _answer(problem, slots.hint, bound, "feasible" if slots.hint else "unknown", deterministic_limit)
    assignment = min((a for a in (slots.read(solver), slots.hint) if a), key=lambda a: evaluate(problem, a).objective)
    if status == cp_model.FEASIBLE:
        return _answer(problem, assignment, bound, "feasible", deterministic_limit)
    return _answer(problem, assignment, bound, "optimal")


def _answer(
    problem: PipelineProblem,
    assignment: Sequence[int],
    bound: float,
    status: SolutionStatus,
    limit: float | None = None,
) -> StageSolution:
    objective = evaluate(problem, assignment).objective if assignment else inf
    return StageSolution(
        assignment=tuple(assignment),
        objective=objective,
        bound=min(bound, objective),
        status=status,
        method="ilp",
        limit="" if limit is None else f"deterministic time {limit:g}",
    )


class _Slots:
    """The variables of one model, each created together with its value in the incumbent."""

    def __init__(self, problem: PipelineProblem, hint: tuple[int, ...]) -> None:
        self.problem = problem
        self.hint = hint
        self.model = cp_model.CpModel()
        self._last = problem.num_stages - 1
        self._never, self._always = self.model.new_constant(0), self.model.new_constant(1)
        self._y = [
            [self.flag(value=bool(hint) and hint[v] <= t) for t in range(self._last)] for v in range(problem.num_blocks)
        ]

    def flag(self, *, value: bool) -> cp_model.IntVar:
        """Make a 0/1 variable with its hint."""
        variable = self.model.new_bool_var("")
        if self.hint:
            self.model.add_hint(variable, value)
        return variable

    def integer(self, largest: int, value: int) -> cp_model.IntVar:
        """Make an integer variable from 0 to ``largest`` with its hint."""
        variable = self.model.new_int_var(0, largest, "")
        if self.hint:
            self.model.add_hint(variable, value)
        return variable

    def y(self, v: int, t: int) -> Linear:
        """Return [stage(v) <= t]."""
        if t < 0:
            return self._never
        return self._y[v][t] if t < self._last else self._always

    def x(self, v: int, t: int) -> Linear:
        """Return [stage(v) = t]."""
        return self.y(v, t) - self.y(v, t - 1)

    def on(self, v: int, t: int) -> bool:
        """Return whether block v is on stage t in the incumbent."""
        return bool(self.hint) and self.hint[v] == t

    def read(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """Return the assignment that the solver found."""
        return tuple(sum(not solver.boolean_value(flag) for flag in row) for row in self._y)

    def order(self) -> None:
        """Add (a), (b) and the pins."""
        graph = nx.DiGraph(self.problem.edges)
        edges = sorted(nx.transitive_reduction(graph).edges)
        for v, pin in enumerate(self.problem.pins):
            if pin is not None:
                self.model.add(self.x(v, pin) == 1)
        for t in range(self.problem.num_stages):
            self.model.add(_weighted((1, self.x(v, t)) for v in range(self.problem.num_blocks)) >= 1)
            for v in range(self.problem.num_blocks):
                if 0 < t < self._last:
                    self.model.add_implication(self._y[v][t - 1], self._y[v][t])
            for u, v in edges if t < self._last else ():
                self.model.add_implication(self._y[v][t], self._y[u][t])

    def windows(self, scale: float, objective: float) -> None:
        """Bound stage(v): the work up to v has to fit into the stages up to v's, and the work from v on behind.

        Any better plan has ``W <= objective - F``, so stages 0..t hold at most ``(t + 1) (objective - F) / (m - 1)``.
        """
        problem, again = self.problem, self.problem.num_microbatches - 1
        work = sum(problem.block_s)
        room = (objective - work) * (1 + 1e-9) + 2 / scale
        graph = nx.DiGraph(problem.edges)
        graph.add_nodes_from(range(problem.num_blocks))
        for v in range(problem.num_blocks) if room > 0 else ():
            before = again * (sum(problem.block_s[u] for u in nx.ancestors(graph, v)) + problem.block_s[v])
            behind = again * (sum(problem.block_s[u] for u in nx.descendants(graph, v)) + problem.block_s[v])
            for t in range(self._last):
                if before > (t + 1) * room:
                    self.model.add(self._y[v][t] == 0)
                if behind > (self._last - t) * room:
                    self.model.add(self._y[v][t] == 1)

    def net(self, net: Net, t: int) -> tuple[cp_model.IntVar, cp_model.IntVar, Linear]:
        """Add (c) for one net and slot; return send, receive and kept."""
        made = self.on(net.producer, t)
        send = self.flag(value=made and any(not self.on(r, t) for r in net.readers))
        recv = self.flag(value=not made and any(self.on(r, t) for r in net.readers))
        for r in net.readers:
            self.model.add(send >= self.x(net.producer, t) - self.y(r, t))
            self.model.add(recv >= self.x(r, t) - self.x(net.producer, t))
        if not net.savers or net.producer in net.savers:
            return send, recv, self.x(net.producer, t) if net.savers else self._never
        keep = self.flag(value=made and any(self.on(r, t) for r in net.savers))
        for r in net.savers:
            self.model.add(keep >= self.x(net.producer, t) + self.x(r, t) - 1)
        return send, recv, keep

    def group(self, group: ParameterGroup, t: int) -> tuple[Linear, Linear]:
        """Add (d) for one parameter group and slot; return held and split."""
        if len(group.readers) == 1:
            return self.x(group.readers[0], t), self._never
        inside = [self.on(v, t) for v in group.readers]
        held, split = self.flag(value=any(inside)), self.flag(value=any(inside) and not all(inside))
        for v, w in zip(group.readers, (*group.readers[1:], group.readers[0]), strict=True):
            self.model.add(held >= self.x(v, t))
            self.model.add(split >= self.x(v, t) - self.x(w, t))
        return held, split

    def memory(self, t: int, nets: Sequence[tuple[Net, Linear, Linear, Linear]], held: Sequence[Linear]) -> None:
        """Add (e) for one slot."""
        problem, k = self.problem, self.problem.in_flight(t)
        limit = problem.capacities[t] - (problem.base_bytes if t == 0 else 0)
        always = [(group.bytes, flag) for group, flag in zip(problem.parameters, held, strict=True)]
        in_use = [(k * size, self.x(v, t)) for v, size in enumerate(problem.saved_bytes)]
        for net, send, recv, keep in nets:
            always += [(net.bytes + net.gradient_bytes, send), (net.bytes + net.gradient_bytes, recv)]
            in_use += [(k * net.bytes, recv), (k * net.bytes, keep)]
        on = [(size, self.x(v, t), self.on(v, t)) for v, size in enumerate(problem.transient_bytes)]
        self.model.add(_weighted([*always, *in_use, (1, self.largest(on))]) <= limit)
        update = [(group.update_bytes, flag) for group, flag in zip(problem.parameters, held, strict=True)]
        if problem.update_in_turn:
            there = [any(self.on(v, t) for v in group.readers) for group in problem.parameters]
            update = [(1, self.largest([(*term, here) for term, here in zip(update, there, strict=True)]))]
        self.model.add(_weighted([*always, *update]) <= limit)

    def largest(self, terms: Sequence[tuple[int, Linear, bool]]) -> Linear:
        """Return a variable that is at least each size whose flag is set; the last of each term is the hint."""
        sizes = [size for size, _, _ in terms]
        variable = self.integer(max(sizes, default=0), max((size for size, _, here in terms if here), default=0))
        for size, flag, _ in terms:
            if size:
                self.model.add(variable >= size * flag)
        return variable


def _weighted(terms: Iterable[tuple[int, Linear]]) -> Linear:
    """Return the sum of the terms with a weight."""
    kept = [(weight, flag) for weight, flag in terms if weight]
    return cp_model.LinearExpr.weighted_sum([flag for _, flag in kept], [weight for weight, _ in kept])


def _model(slots: _Slots, scale: float, known: Evaluation | None) -> None:
    """Fill the model: all constraints, (f) and the objective (g)."""
    problem, again = slots.problem, slots.problem.num_microbatches - 1
    slots.order()
    if known is not None and again:
        slots.windows(scale, known.objective)

    def units(seconds: float) -> int:
        return floor(seconds * scale)

    rows: list[Linear] = []
    hints: list[int] = []
    traffic: list[tuple[int, Linear]] = []
    for t in range(problem.num_stages):
        nets = [(net, *slots.net(net, t)) for net in problem.nets]
        groups = [slots.group(group, t) for group in problem.parameters]
        slots.memory(t, nets, [held for held, _ in groups])
        row = [(units(again * s), slots.x(v, t)) for v, s in enumerate(problem.block_s)]
        for net, send, recv, _ in nets:
            row += [(units(again * net.seconds), send), (units(again * net.seconds), recv)]
            traffic += [(units(net.seconds), send), (units(net.seconds), recv)]
        for group, (held, split) in zip(problem.parameters, groups, strict=True):
            row += [(units(group.seconds), held), (units(group.split_s), split)]
        rows.append(_weighted(row) + units(problem.stage_s))
        hints.append(units(known.stages[t].bottleneck_s) if known else 0)
    ceiling = sum(units(again * s) for s in problem.block_s) + units(problem.stage_s)
    ceiling += sum(2 * units(again * net.seconds) for net in problem.nets)
    ceiling += sum(units(group.seconds) + units(group.split_s) for group in problem.parameters)
    bottleneck = slots.integer(ceiling, min(ceiling, max(hints)))
    for expression in rows:
        slots.model.add(bottleneck >= expression)
    floor_units = sum(units(again * s) for s in problem.block_s) + sum(units(g.seconds) for g in problem.parameters)
    slots.model.add(problem.num_stages * bottleneck >= floor_units + problem.num_stages * units(problem.stage_s))
    slots.model.minimize(bottleneck + _weighted(traffic))
