r"""Stages with replicas, a tensor degree and an option per node: the problem that Piper states.

A plan is a line of stages.  Stage i has d_i replicas (d_i divides the microbatches N), each of t_i devices, and one
option o_v per node out of those profiled for degree t_i.  With S_i its nodes and B the bandwidth::

    (1)  time_i = sum_{v in S_i} ( (p_o + edges_o / B) / d_i  +  4 (d_i - 1) / d_i  w_o / (N B) )
    (2)  edges_o = 2 sum over edges between v and other stages of (bytes of the edge + synchronisation of o there)
    (3)  bytes_i = sum_{v in S_i} ( a_o ceil((d_i + d_{i+1} + ...) / d_i) + b_o )  <=  memory
    (4)  sum_i d_i t_i <= devices;   sum_i d_i <= N
    (5)  minimise max_i time_i

For a fixed limit W on (5), ``G_J(s)``, the fewest devices that run the last nodes J in stages whose replicas sum to s,
obeys a dynamic program over the up-sets J: the stage before needs only s for its memory::

    G_J(s + d) = min over up-sets I in J, t, d:  G_I(s) + d t    if ceil((s + d) / d) <= K(J - I, t, d, W)

where K is the largest number of microbatches in flight that some choice of options allows at a time of at most W.  W
is found by bisection, each feasible W replaced by the true maximum of the plan it gave; so the answer is exact up to
the last interval (`CLOSE`).

Options are chosen exactly: nodes whose two options differ by the same bytes and weights are interchangeable but for
their time, so the m of them that lose least time are switched, for every m.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, prod

import numpy as np
import numpy.typing as npt

from partita.partitioner.ideals import Bools, enumerate_ideals
from partita.partitioner.maxload.result import PartitionResult

CLOSE = 1e-7
"""Relative width of the last interval of the bisection."""
MAX_CHOICES = 4096
"""Combinations of options per stage; beyond, only those where all nodes choose alike are tried, without proof."""
MAX_IDEALS = 4000
"""Up-sets that the dynamic program may have."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a node at one tensor degree.

    Attributes:
        name: What the profile calls it.
        time: Forward and backward of one sample.
        parameter_bytes: Weights to synchronise between replicas.
        activation_bytes: For each microbatch in flight.
        static_bytes: Besides.
        sync_bytes: Per neighbour on another stage, besides the edge itself.
    """

    name: str
    time: float
    parameter_bytes: float
    activation_bytes: float
    static_bytes: float
    sync_bytes: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedProblem:
    """What stages, with how many replicas of which degree, run the nodes fastest.

    Attributes:
        nodes: Names.
        options: Per node and tensor degree, the options.
        edges: (producer, reader, bytes).
        devices: How many there are.
        memory_bytes: Of each.
        bandwidth_bytes_per_s: Of each, in the unit of time of the profile.
        microbatches: Per batch.
    """

    nodes: tuple[str, ...]
    options: tuple[dict[int, tuple[Option, ...]], ...]
    edges: tuple[tuple[int, int, float], ...]
    devices: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    microbatches: int

    def __post_init__(self) -> None:
        for name, value in (("devices", self.devices), ("microbatches", self.microbatches)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        if self.bandwidth_bytes_per_s <= 0 or self.memory_bytes < 0:
            raise ValueError("the bandwidth has to be positive and the memory not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStage:
    """One stage of the answer.

    Attributes:
        nodes: Its nodes.
        replicas: d of (1).
        degree: t of (1).
        options: Index of the option of each node.
    """

    nodes: tuple[int, ...]
    replicas: int
    degree: int
    options: tuple[int, ...]


def evaluate_replicated(problem: ReplicatedProblem, stages: tuple[ReplicatedStage, ...]) -> float:
    """Return (5) of a plan, ``inf`` where it breaks (3), (4) or the order of the graph: the one place that says so."""
    place = {v: i for i, stage in enumerate(stages) for v in stage.nodes}
    if len(place) != len(problem.nodes) or sum(len(stage.nodes) for stage in stages) != len(place):
        return inf
    if any(place[u] > place[v] for u, v, _ in problem.edges):
        return inf
    replicas = [stage.replicas for stage in stages]
    if sum(s.replicas * s.degree for s in stages) > problem.devices or sum(replicas) > problem.microbatches:
        return inf
    worst = 0.0
    for i, stage in enumerate(stages):
        if problem.microbatches % stage.replicas:
            return inf
        inside = set(stage.nodes)
        chosen = [problem.options[v][stage.degree][o] for v, o in zip(stage.nodes, stage.options, strict=True)]
        in_flight = ceil(sum(replicas[i:]) / stage.replicas)
        used = sum(o.activation_bytes * in_flight + o.static_bytes for o in chosen)
        if used > problem.memory_bytes:
            return inf
        near = _neighbours(problem)
        alone = sum(_alone(problem, near[v], o, inside) for v, o in zip(stage.nodes, chosen, strict=True))
        resync = sum(_resync(problem, o) for o in chosen)
        worst = max(worst, alone / stage.replicas + (stage.replicas - 1) / stage.replicas * resync)
    return worst


def _neighbours(problem: ReplicatedProblem) -> list[list[tuple[int, float]]]:
    near: list[list[tuple[int, float]]] = [[] for _ in problem.nodes]
    for u, v, size in problem.edges:
        near[u].append((v, size))
        near[v].append((u, size))
    return near


def _alone(problem: ReplicatedProblem, near: list[tuple[int, float]], option: Option, inside: set[int]) -> float:
    """Return the time of a node on one replica: its own and that of its edges to other stages."""
    crossing = sum(size + option.sync_bytes.get(w, 0.0) for w, size in near if w not in inside)
    return option.time + 2 * crossing / problem.bandwidth_bytes_per_s


def _resync(problem: ReplicatedProblem, option: Option) -> float:
    return 4 * option.parameter_bytes / problem.microbatches / problem.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Menu:
    """All choices of options for the nodes of a stage."""

    first: tuple[int, ...]  # the fastest option of each node
    groups: tuple[tuple[tuple[float, int, int], ...], ...]  # (time lost, position, other option), least lost first
    switched: Ints  # [row, group]: how many of the group take the other option
    sums: Floats  # [row, 4]: time alone, resynchronisation, activation bytes, static bytes

    def choice(self, row: int) -> tuple[int, ...]:
        """Return the option of each node."""
        chosen = list(self.first)
        for count, group in zip(self.switched[row], self.groups, strict=True):
            for _, at, other in group[:count]:
                chosen[at] = other
        return tuple(chosen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    """The stages of the nodes between two up-sets at one degree, over all choices of options and replicas."""

    above: int
    below: int
    degree: int
    nodes: tuple[int, ...]
    menu: _Menu
    rows: Ints  # those of the menu that fit
    times: Floats  # [row, divisor]
    fastest: float  # of the times
    most: Ints  # [row]: microbatches in flight that fit


def solve_replicated(problem: ReplicatedProblem, *, method: str = "ilp", time_limit_s: float = 60.0) -> PartitionResult:
    """Solve a replicated problem exactly, by the dynamic program under bisection.

    Args:
        problem: The problem.
        method: ``ilp`` or ``dp``: both name this method, which needs no integer model.
        time_limit_s: After which the best so far is returned with its bound.

    Raises:
        ValueError: If the method does not exist or the graph has too many up-sets.
    """
    if method not in {"ilp", "dp"}:
        raise ValueError(f"no method {method!r} for replicated stages; there are ilp, dp")
    search = _Sweep(problem)
    deadline = time.perf_counter() + time_limit_s
    best = search.best_under(inf)
    if not best:
        return PartitionResult(
            objective=inf,
            bound=inf,
            status="INFEASIBLE",
            assignment=(),
            method=method,
            details=(f"no stages fit into {problem.memory_bytes} bytes on each of {problem.devices} devices",),
        )
    objective, bound, limit = evaluate_replicated(problem, best), search.work_bound(), ""
    step = 1.05
    while objective > bound * (1 + CLOSE):
        if time.perf_counter() > deadline:
            limit = "wall"
            break
        guess = min(bound * step, (bound + objective) / 2) if bound > 0 else objective / 2
        step *= step
        found = search.best_under(guess)
        if found:
            best, objective, step = found, evaluate_replicated(problem, found), inf
        else:
            bound = guess
    proven = not limit and search.exact
    return PartitionResult(
        objective=objective,
        bound=min(bound, objective) if search.exact else min(search.work_bound(), objective),
        status="OPTIMAL" if proven else "FEASIBLE",
        assignment=best,
        method=method,
        limit=limit,
        details=tuple(f"stage {i}: {len(s.nodes)} nodes, d={s.replicas}, t={s.degree}" for i, s in enumerate(best)),
    )


class _Sweep:
    """The dynamic program at any W."""

    def __init__(self, problem: ReplicatedProblem) -> None:
        self.problem = problem
        self.exact = True
        family = enumerate_ideals(len(problem.nodes), [(v, u) for u, v, _ in problem.edges], limit=MAX_IDEALS)
        if family is None:
            raise ValueError(f"the graph has more than {MAX_IDEALS} up-sets")
        self.family = family
        n = problem.microbatches
        self.divisors = np.array([d for d in range(1, min(problem.devices, n) + 1) if n % d == 0])
        self.near = _neighbours(problem)
        self._known: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, tuple[float, ...]]]] = {}
        self.candidates = [c for pair in self._pairs(family.below) for c in self._candidates(*pair)]

    @staticmethod
    def _pairs(below: Bools) -> Iterator[tuple[int, int]]:
        for j, row in enumerate(below):
            for i in np.flatnonzero(row):
                yield j, int(i)

    def work_bound(self) -> float:
        """Return a bound: each node's cheapest device time, shared by all devices."""
        least = [min(t * o.time for t, row in options.items() for o in row) for options in self.problem.options]
        return sum(least) / self.problem.devices

    def _candidates(self, j: int, i: int) -> Iterator[_Candidate]:
        nodes = tuple(np.flatnonzero(self.family.members[j] & ~self.family.members[i]).tolist())
        inside = set(nodes)
        for degree in sorted(set.intersection(*(set(self.problem.options[v]) for v in nodes))):
            if degree > self.problem.devices:
                continue
            menu = self._menu(nodes, inside, degree)
            alone, resync, activation, static = menu.sums.T
            room = self.problem.memory_bytes - static
            most = np.where(room < 0, 0, np.where(activation > 0, room // np.maximum(activation, 1e-300), 1e9))
            fits = np.flatnonzero(most >= 1)
            if not fits.size:
                continue
            d = self.divisors[self.divisors * degree <= self.problem.devices]
            times = alone[fits, None] / d + resync[fits, None] * ((d - 1) / d)
            yield _Candidate(
                above=j,
                below=i,
                degree=degree,
                nodes=nodes,
                menu=menu,
                rows=fits,
                times=times,
                fastest=float(times.min()),
                most=np.minimum(most[fits], 1e9).astype(np.int64),
            )

    def _menu(self, nodes: tuple[int, ...], inside: set[int], degree: int) -> _Menu:
        """Return all useful choices of options for the nodes of a stage."""
        base = np.zeros(4)
        groups: defaultdict[tuple[float, ...], list[tuple[float, int, int]]] = defaultdict(list)
        first, many = [0] * len(nodes), False
        for at, v in enumerate(nodes):
            kept = self._useful(v, degree, tuple(w for w, _ in self.near[v] if w not in inside))
            base += kept[0][1]
            first[at] = kept[0][0]
            many |= len(kept) > 2
            for k, row in kept[1:2]:
                extra, *rest = (b - a for a, b in zip(kept[0][1], row, strict=True))
                groups[tuple(rest)].append((extra, at, k))
        counts = [range(len(group) + 1) for group in groups.values()]
        if many or prod(map(len, counts)) > MAX_CHOICES:
            self.exact = False
            counts = [range(0, len(group) + 1, len(group)) for group in groups.values()]
        switched = np.array(list(product(*counts)), dtype=np.int64).reshape(prod(map(len, counts)), len(counts))
        sums = np.tile(base, (len(switched), 1))
        for column, (shift, group) in zip(switched.T, groups.items(), strict=True):
            group.sort()
            sums[:, 0] += np.cumsum([0.0, *(extra for extra, _, _ in group)])[column]
            sums[:, 1:] += column[:, None] * np.array(shift)
        return _Menu(first=tuple(first), groups=tuple(map(tuple, groups.values())), switched=switched, sums=sums)

    def _useful(self, v: int, degree: int, outside: tuple[int, ...]) -> list[tuple[int, tuple[float, ...]]]:
        """Return (option, its four sums) for the options of a node that no other beats, the fastest first."""
        known = self._known.get((v, degree, outside))
        if known is None:
            inside = {w for w, _ in self.near[v]}.difference(outside)
            rows = [
                (
                    _alone(self.problem, self.near[v], o, inside),
                    _resync(self.problem, o),
                    o.activation_bytes,
                    o.static_bytes,
                )
                for o in self.problem.options[v][degree]
            ]
            kept = [k for k in range(len(rows)) if not any(_beats(rows, other, k) for other in range(len(rows)))]
            known = [(k, rows[k]) for k in sorted(kept, key=rows.__getitem__)]
            self._known[v, degree, outside] = known
        return known

    def best_under(self, limit: float) -> tuple[ReplicatedStage, ...]:
        """Return a plan whose stages all take at most ``limit``, with the fewest devices; empty if there is none."""
        top = min(self.problem.devices, self.problem.microbatches)
        count = self.family.count
        fewest = np.full((count, top + 1), np.iinfo(np.int32).max // 2, dtype=np.int32)
        fewest[0, 0] = 0
        via = np.full((count, top + 1), -1, dtype=np.int32)
        by = np.zeros((count, top + 1), dtype=np.int32)
        for index, c in enumerate(self.candidates):
            if c.fastest > limit:
                continue
            allowed = np.where(c.times <= limit, c.most[:, None], 0).max(axis=0)
            reach = -1
            source = fewest[c.below]
            if not (allowed > 0).any() or source.min() >= self.problem.devices:
                continue
            for d, most in zip(self.divisors.tolist(), allowed.tolist(), strict=False):
                last = min((most - 1) * d, top - d)
                if most < 1 or last <= reach:
                    continue
                # A larger d only helps where a smaller one has too many microbatches in flight.
                begin, reach = reach + 1, last
                new = source[begin : last + 1] + d * c.degree
                old = fewest[c.above, begin + d : last + d + 1]
                better = new < old
                if better.any():
                    old[better] = new[better]
                    via[c.above, begin + d : last + d + 1][better] = index
                    by[c.above, begin + d : last + d + 1][better] = d
        return self._trace(fewest, via, by, limit)

    def _trace(
        self, fewest: npt.NDArray[np.int32], via: npt.NDArray[np.int32], by: npt.NDArray[np.int32], limit: float
    ) -> tuple[ReplicatedStage, ...]:
        j, s = self.family.count - 1, int(fewest[-1].argmin())
        if fewest[j, s] > self.problem.devices:
            return ()
        stages = []
        while j:
            c, d = self.candidates[via[j, s]], int(by[j, s])
            column = c.times[:, self.divisors.tolist().index(d)]
            fits = (column <= limit) & (c.most >= ceil(s / d))
            row = int(c.rows[np.where(fits, column, inf).argmin()])
            stages.append(ReplicatedStage(nodes=c.nodes, replicas=d, degree=c.degree, options=c.menu.choice(row)))
            j, s = c.below, s - d
        return tuple(stages)


def _beats(rows: Sequence[tuple[float, ...]], a: int, b: int) -> bool:
    """Return whether option a is never worse than b, and not just a later copy of it."""
    if a == b or any(x > y for x, y in zip(rows[a], rows[b], strict=True)):
        return False
    return rows[a] != rows[b] or a < b
