"""Which configurations are solved: a best-first search with bounds.

Each configuration has a lower bound that needs no devices, from the seconds of its blocks on the fastest kind
(`ConfigurationSearch.compute_bound`, equation (7) of `partita.partitioner.bounds`), and a sharper one with its
reductions once it is placed (`Pricer.bound`).  Configurations are looked at by ascending bound.  One
whose bound reaches the incumbent is *pruned*: it cannot be better.  The others are solved.  When all are solved or
pruned, the smallest bound met is a bound of the whole space, and equals the incumbent if every solution was proved.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from partita.partitioner import PARTITIONERS
from partita.partitioner.baselines import solve_greedy, solve_uniform
from partita.partitioner.bounds import lower_bound
from partita.partitioner.configurations import Ranks, Shape, Space, placements
from partita.partitioner.exact_dp import make_tables, solve_dp
from partita.partitioner.pricing import Configuration, Pricer
from partita.partitioner.problem import PipelineProblem, SolutionStatus, StageSolution
from partita.partitioner.solvers import solve_slots
from partita.partitioner.tables import Tables

COMPARED = 12
"""Configurations that are solved, if near the best, although their bound excludes them: the simulation may rank them
first, and the report has runner-ups."""
NEAR = 1.15
"""Ratio of bound to incumbent up to which an excluded configuration is worth it: what the objective overestimates."""
TOLERANCE = 1e-9
"""Relative difference below which two objectives are equal."""
_RESCUED = 32
"""Configurations that get plain cuts if the time was over before one was solved."""
_MAX_TABLES = 8
"""Tables kept: those of 1,000 blocks take 60 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A configuration with its solution."""

    configuration: Configuration
    problem: PipelineProblem
    solution: StageSolution

    @property
    def rank(self) -> tuple[float, int, int, str]:
        """Order: the objective, then fewer devices, fewer microbatches."""
        chosen = self.configuration
        devices = chosen.num_stages * chosen.data_degree
        return self.solution.objective, devices, chosen.num_microbatches, str(chosen)


@dataclass(slots=True, kw_only=True)
class ConfigurationSearch:
    """The configurations by ascending bound, and what became of them.

    Attributes:
        pricer: Prices configurations.
        space: What may be searched.
        method: Who solves.
        seed: Seed of the solver.
        deadline: Monotonic seconds at which the search ends.
        solved: Configurations with a solution, as found.
        bound: No plan of the space has a smaller objective.
        counts: Configurations by what became of them: solved, pruned, infeasible.
        limit: Which limit ended the search, or "".
    """

    pricer: Pricer
    space: Space
    method: str
    seed: int
    deadline: float
    solved: list[Solved] = field(default_factory=list)
    bound: float = inf
    counts: dict[str, int] = field(default_factory=lambda: {"solved": 0, "pruned": 0, "infeasible": 0})
    limit: str = ""
    _tables: dict[PipelineProblem, tuple[Tables, ...]] = field(default_factory=dict)

    @property
    def _kinds(self) -> set[int]:
        """The kinds of devices that may be used."""
        devices = self.pricer.cluster.device_kinds
        return {kind for kind, limit in zip(devices, self.pricer.limits, strict=True) if limit > 0}

    def run(self) -> None:
        """Look at the configurations until all are solved or pruned, or the time is over."""
        kinds = self._kinds
        queue: list[tuple[float, int, int, Shape, Configuration | None]] = [
            (self.compute_bound(shape, kinds), shape.num_stages * shape.data_degree, number, shape, None)
            for number, shape in enumerate(self.space.shapes())
        ]
        heapq.heapify(queue)
        number = len(queue)
        while queue:
            bound, devices, _, shape, configuration = heapq.heappop(queue)
            if self._pruned(bound):
                self.bound = min(self.bound, bound)
                self.counts["pruned"] += 1 + len(queue)
                return
            if time.monotonic() > self.deadline:
                self.bound = min(self.bound, bound)
                self.limit = "solve_s"
                entries = [(shape, configuration), *(entry[3:] for entry in heapq.nsmallest(_RESCUED, queue))]
                self._rescue(entries)
                return
            if configuration is not None:
                self._solve(configuration)
                continue
            for ranks in self._placements(shape):
                placed = shape.placed(ranks)
                number += 1
                heapq.heappush(queue, (self.pricer.bound(placed), devices, number, shape, placed))

    def _rescue(self, entries: Sequence[tuple[Shape, Configuration | None]]) -> None:
        """Cut the next configurations plainly if the time was too short to solve any."""
        for shape, configuration in entries if not self.solved else ():
            if configuration is None:
                configuration = shape.placed(self._placements(shape)[0])
            problem = self.pricer.problem(configuration)
            solution = min((solve_greedy(problem), solve_uniform(problem)), key=lambda answer: answer.objective)
            if solution.assignment:
                self.solved.append(Solved(configuration=configuration, problem=problem, solution=solution))

    def _placements(self, shape: Shape) -> list[Ranks]:
        return placements(self.pricer.cluster, self.pricer.limits, shape.num_stages, shape.data_degree)

    def confirm(self, solved: Solved) -> Solved:
        """Solve one configuration again by CP-SAT, with the known solution as hint.

        Raises:
            AssertionError: If the two exact methods disagree.
        """
        known = solved.solution
        answer = solve_slots(solved.problem, incumbent=known, seed=self.seed)
        if known.status == "optimal" and answer.objective < known.objective * (1 - TOLERANCE):
            raise AssertionError(f"{solved.configuration}: CP-SAT finds {answer.objective}, the DP {known.objective}")
        bound = max(known.bound, answer.bound)
        proved = "optimal" in {known.status, answer.status}
        status: SolutionStatus = "optimal" if proved else "feasible"
        return replace(solved, solution=replace(answer, bound=min(bound, answer.objective), status=status))

    @property
    def best(self) -> float:
        """The smallest objective found."""
        return min((solved.solution.objective for solved in self.solved), default=inf)

    def _pruned(self, bound: float) -> bool:
        """Return whether a configuration with this bound need not be looked at."""
        if bound == inf or bound < self.best * (1 - TOLERANCE):
            return bound == inf
        return len(self.solved) >= COMPARED or bound > NEAR * self.best

    def compute_bound(self, shape: Shape, kinds: set[int]) -> float:
        """Return a lower bound of the objective on any devices of these kinds: compute alone, on the fastest."""
        bounds = []
        for kind in kinds:
            ascending = self.pricer.work(kind, shape.rows)
            bounds.append(lower_bound(ascending, num_stages=shape.num_stages, num_microbatches=shape.num_microbatches))
        return min(bounds)

    def _solve(self, configuration: Configuration) -> None:
        problem = self.pricer.problem(configuration)
        if self.method in {"dp", "ilp"}:
            solution = solve_dp(problem, self._tables_of(problem))
        else:
            solution = PARTITIONERS[self.method](problem, seed=self.seed)
        self.bound = min(self.bound, solution.bound)
        self.counts["solved" if solution.assignment else "infeasible"] += 1
        if solution.assignment:
            self.solved.append(Solved(configuration=configuration, problem=problem, solution=solution))

    def _tables_of(self, problem: PipelineProblem) -> tuple[Tables, ...]:
        """Return the tables, shared by configurations that differ only in stages, schedule and capacities."""
        key = replace(
            problem, num_stages=1, num_microbatches=1, schedule="gpipe", capacities=(0,), base_bytes=0, pins=()
        )
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.pop(next(iter(self._tables)))
            self._tables[key] = make_tables(problem)
        return self._tables[key]
