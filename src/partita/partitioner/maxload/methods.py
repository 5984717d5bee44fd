"""The methods by name, and the one verb that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from partita.partitioner.maxload.baselines import BASELINES
from partita.partitioner.maxload.line_dp import Line, improve_orders, solve_ideals, solve_order, starting_orders
from partita.partitioner.maxload.problem import PartitionProblem, evaluate
from partita.partitioner.maxload.reduction import Reduced, reduce_problem, work_bound
from partita.partitioner.maxload.replicated import ReplicatedProblem, solve_replicated
from partita.partitioner.maxload.result import OPTIMALITY, Limits, PartitionResult
from partita.partitioner.solvers import solve_line, solve_placement

QUICK_DP = 200_000_000
"""Element operations that the exact DP may take before the integer model is asked instead: under a second."""
SHUFFLE_RATE = 50_000_000
"""Element operations that count as a second of shuffling orders, so that its length does not depend on the machine."""
SHUFFLE_OVERHEAD = 500_000
"""What a shuffle costs besides, in the same measure."""
FIRST_SHUFFLES = 12
"""Shuffles before the integer model is first asked."""


def solve(
    problem: PartitionProblem | ReplicatedProblem,
    *,
    method: str = "ilp",
    contiguous: bool = True,
    time_limit_s: float = 60.0,
    workers: int = 2,
    seed: int = 0,
) -> PartitionResult:
    """Solve a bare partition problem.

    Searches are limited by deterministic measures of work derived from ``time_limit_s``; the wall clock is only a
    safety net.  With one worker the same seed gives the same answer wherever that net is not reached; with several,
    CP-SAT's threads race and only the objective of a proven optimum is sure to repeat.  An interrupt from the keyboard
    ends the search and returns the best so far.

    Args:
        problem: The problem, from one of the readers.
        method: ``ilp``, ``dp`` (exact over down-sets, or over a few orders where those are too many), or one of
            `BASELINES`.
        contiguous: Devices form a line; else a device may hold several chunks.
        time_limit_s: About how long to search.
        workers: Threads of CP-SAT.
        seed: Of everything drawn.

    Raises:
        ValueError: If the method does not exist or the time limit is not positive.
    """
    if time_limit_s <= 0:
        raise ValueError(f"time_limit_s is {time_limit_s}; it has to be positive")
    start = time.perf_counter()
    if isinstance(problem, ReplicatedProblem):
        result = solve_replicated(problem, method=method, time_limit_s=time_limit_s)
        return replace(result, seed=seed, wall_s=time.perf_counter() - start)
    if method not in METHODS:
        raise ValueError(f"no method {method!r}; there are {', '.join(METHODS)}")
    limits = Limits(time_s=time_limit_s, deterministic_time=time_limit_s, workers=workers, seed=seed)
    search = _Search(problem, contiguous=contiguous, limits=limits, start=start)
    try:
        METHODS[method](search)
    except KeyboardInterrupt:
        search.limit = "interrupted"
    return search.result(method)


@dataclass(slots=True)
class _Search:
    """The best so far of one solve, and the limits it runs under."""

    problem: PartitionProblem
    contiguous: bool
    limits: Limits
    start: float
    reduced: Reduced = field(init=False)
    bound: float = field(init=False)
    best: float = inf
    assignment: tuple[int, ...] = ()
    line: Line = field(default_factory=lambda: Line(objective=inf))
    limit: str = ""
    proven: bool = False
    deterministic_time: float = 0.0

    def __post_init__(self) -> None:
        self.reduced = reduce_problem(self.problem, contiguous=self.contiguous)
        self.bound = work_bound(self.reduced)

    @property
    def left_s(self) -> float:
        """Wall seconds left."""
        return self.limits.time_s - (time.perf_counter() - self.start)

    @property
    def done(self) -> bool:
        """Whether the best is proven to be."""
        return self.proven or self.bound == inf or self.best <= self.bound * (1 + OPTIMALITY)

    def offer(self, assignment: tuple[int, ...]) -> None:
        """Keep an assignment of nodes if it is the best so far."""
        value = evaluate(self.problem, assignment, contiguous=self.contiguous).objective
        if value < self.best:
            self.best, self.assignment = value, assignment

    def offer_line(self, line: Line, *, along: Reduced | None = None) -> None:
        """Keep a line if it is the best so far."""
        before = self.best
        if line.stages:
            self.offer((along or self.reduced).seat(line.stages))
        if self.best < before:
            self.line = replace(line, objective=self.best)

    def result(self, method: str) -> PartitionResult:
        """Return the answer."""
        found = isfinite(self.best)
        status = "FEASIBLE" if found else "UNKNOWN"
        if self.done:
            status = "OPTIMAL" if found else "INFEASIBLE"
        return PartitionResult(
            objective=self.best,
            bound=min(self.bound, self.best),
            status=status,
            assignment=self.assignment,
            method=method,
            seed=self.limits.seed,
            wall_s=time.perf_counter() - self.start,
            deterministic_time=self.deterministic_time,
            limit="" if self.done else self.limit,
            loads=evaluate(self.problem, self.assignment, contiguous=self.contiguous).loads if found else (),
        )


def _dp(search: _Search) -> None:
    """Solve exactly over all down-sets, or else along a few orders."""
    along = search.reduced if search.contiguous else reduce_problem(search.problem, contiguous=True)
    exact = solve_ideals(along)
    if exact is not None:
        search.offer_line(exact, along=along)
        if search.contiguous:
            search.bound, search.proven = exact.objective, True
        return
    for order in starting_orders(along):
        search.offer_line(solve_order(along, order), along=along)


def _ilp(search: _Search) -> None:
    along = search.reduced if search.contiguous else reduce_problem(search.problem, contiguous=True)
    for order in starting_orders(along):
        search.offer_line(solve_order(along, order), along=along)
    if search.contiguous:
        quick = solve_ideals(along, max_ideals=2000, max_work=QUICK_DP)
        if quick is not None:
            search.offer_line(quick)
            search.bound, search.proven = quick.objective, True
            return
        _shuffle(search, along, FIRST_SHUFFLES)
        _exact(search, 0.2)
    work = along.num_items**2 * along.problem.num_devices * len(along.problem.classes) + SHUFFLE_OVERHEAD
    total = 0.04 if search.contiguous else 0.05
    for share in (0.5, 1.0):
        if not search.done:
            _shuffle(search, along, int(total * search.limits.time_s * SHUFFLE_RATE / work))
            _exact(search, share)


def _shuffle(search: _Search, along: Reduced, rounds: int) -> None:
    """Improve the line by shuffling its order a number of times."""
    left = iter(range(rounds))

    def more() -> bool:
        if search.left_s <= 0:
            search.limit = "wall"
        return search.left_s > 0 and not search.done and next(left, None) is not None

    for line in improve_orders(along, search.line, seed=search.limits.seed, more=more):
        search.offer_line(line, along=along)


def _exact(search: _Search, share: float) -> None:
    """Ask the integer model, within a share of the limits."""
    if search.left_s <= 0 or search.done:
        return
    work = share * search.limits.deterministic_time - search.deterministic_time
    limits = replace(search.limits, deterministic_time=max(work, 0.1), time_s=search.left_s)
    known = isfinite(search.best)
    if search.contiguous:
        line = solve_line(search.reduced, incumbent=search.line, limits=limits)
        if line.answer is not None:
            search.offer_line(line.answer)
        outcome = (line.status, line.bound, line.deterministic_time, line.wall_limit)
    else:
        devices = tuple(search.assignment[nodes[0]] for nodes in search.reduced.members) if known else ()
        placed = solve_placement(search.reduced, incumbent=devices, ceiling=search.best, limits=limits)
        if placed.answer is not None:
            search.offer(search.reduced.expand(placed.answer))
        outcome = (placed.status, placed.bound, placed.deterministic_time, placed.wall_limit)
    status, bound, spent, wall = outcome
    search.deterministic_time += spent
    search.limit = "wall" if wall else "deterministic"
    if status == "infeasible" and known:  # a fault of the solver's (docs/design/0007): what is known stays
        search.limit = "solver fault"
        return
    search.bound = max(search.bound, bound)
    search.proven |= status in {"optimal", "infeasible"}


def _baseline(name: str) -> Callable[[_Search], None]:
    def run(search: _Search) -> None:
        along = search.reduced if search.contiguous else reduce_problem(search.problem, contiguous=True)
        search.offer_line(BASELINES[name](along), along=along)

    return run


METHODS: dict[str, Callable[[_Search], None]] = {
    "ilp": _ilp,
    "dp": _dp,
    **{name: _baseline(name) for name in BASELINES},
}
"""The methods by name; the one place where one is registered."""
