r"""Exact stage partition: a sweep over the bottleneck, a dynamic program over ideals inside.

With ``J_s`` the ideal of the blocks of stages 0..s and W a limit on every stage's bottleneck (`_Layers.cheapest`)::

    (8)  F_s(J) = min over I inside J, W[J, I] <= W, M_s[J, I] <= capacity_s  of  t[J, I] + F_{s-1}(I)

``f(W) = F_{S-1}(all)`` is the least ``sum t`` of a plan whose bottleneck is at most W.  The objective is min over W of
``f(W) + W``, and W is swept downwards (`_sweep`): at W the path found has a true bottleneck ``W' <= W``, so
``UB = min(UB, f(W) + W')``, and the next limit is ``min(UB - f(W), W')``, strictly below.

    Valid: f does not increase with W.  For W'' in (UB - f(W), W]: T >= f(W'') + W'' >= f(W) + W'' > UB.
    For W'' in [W', W]: f is constant, the best is f(W) + W' >= UB.

The sweep starts from the least possible bottleneck (`_Layers.bottleneck`, the same recursion with max in place of +),
which also proves infeasibility, and ends below it.  Why W is a parameter and not a variable: docs/design/0003.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nextafter

import numpy as np

from partita.partitioner.bounds import work_bound
from partita.partitioner.ideals import Bools, Floats, Ideals, enumerate_ideals, linear_families
from partita.partitioner.problem import PipelineProblem, SolutionStatus, StageSolution, evaluate
from partita.partitioner.tables import Tables, build_tables

MAX_IDEALS = 2_000
"""Ideals beyond which a few linear orders are searched instead: a table of 2,000^2 doubles is 32 MB."""
MAX_SWEEPS = 400
"""Programs solved per problem; real problems need 2 to 20."""
_STEP = 1e-12
"""Relative step to a strictly smaller limit: plans closer than this are the same plan."""


def solve_dp(problem: PipelineProblem, tables: Sequence[Tables] | None = None) -> StageSolution:
    """Find the best assignment, proved where the graph's ideals can be enumerated.

    Args:
        problem: The configuration.
        tables: Those of a problem that differs at most in stages, capacities, schedule and pins; made if not given.

    Returns:
        ``optimal`` or ``infeasible`` with proof; ``feasible`` or ``unknown`` with the work bound if only linear orders
        were searched.

    Complexity: a few times ``S * ideals^2`` after the tables.
    """
    if problem.num_stages > problem.num_blocks:
        return StageSolution(assignment=(), objective=inf, bound=inf, status="infeasible", method="dp")
    answers = [_sweep(problem, family) for family in (make_tables(problem) if tables is None else tables)]
    best = min(answers, key=lambda answer: answer.objective)
    if len(answers) == 1 and best.status != "unknown":
        return best
    floor = work_bound(problem)
    if floor == inf:
        return replace(best, bound=inf, status="infeasible", limit="")
    status: SolutionStatus = "feasible" if best.assignment else "unknown"
    limit = f"more than {MAX_IDEALS} ideals: {len(answers)} linear orders"
    return replace(best, bound=min(floor, best.objective), status=status, limit=best.limit or limit)


def make_tables(problem: PipelineProblem) -> tuple[Tables, ...]:
    """Return one complete family of ideals with its costs, or those of a few linear orders."""
    family = enumerate_ideals(problem.num_blocks, problem.edges, limit=MAX_IDEALS)
    if family is None and problem.num_blocks < MAX_IDEALS:
        families = linear_families(problem.num_blocks, problem.edges, problem.block_s)
        return tuple(build_tables(problem, linear) for linear in families)
    if family is None:
        raise ValueError(f"{problem.num_blocks} blocks are too many; coarsen to fewer than {MAX_IDEALS}")
    return (build_tables(problem, family),)


def least_excess(problem: PipelineProblem, tables: Sequence[Tables] | None = None) -> tuple[int, tuple[int, ...]]:
    """Return the least possible ``max_s (M_s - capacity_s)`` in bytes, and an assignment that has it.

    What an answer "it does not fit" has to say.  An empty assignment means that the order or the pins allow none.
    """
    best: tuple[float, tuple[int, ...]] = (inf, ())
    for family in make_tables(problem) if tables is None else tables:
        layers = _Layers.build(problem, family)
        excess = [layers.memory(stage) - problem.capacities[stage] for stage in range(problem.num_stages)]
        best = min(best, layers.run(excess, np.maximum))
    return (0, ()) if best[0] == inf else (int(best[0]), best[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layers:
    """The tables of one problem: what each stage may take, and the recursion (8).

    Attributes:
        problem: The configuration.
        tables: Costs by pair of ideals.
        bottleneck_s: W by pair of ideals, equation (4).
        reachable: By stage, the ideals that may end it (pins, and enough blocks before and after).
    """

    problem: PipelineProblem
    tables: Tables
    bottleneck_s: Floats
    reachable: tuple[Bools, ...]

    @classmethod
    def build(cls, problem: PipelineProblem, tables: Tables) -> _Layers:
        """Prepare the recursion."""
        bottleneck = (problem.num_microbatches - 1) * tables.time_s + tables.once_s
        reachable = tuple(_reachable(problem, tables.ideals, stage) for stage in range(problem.num_stages))
        return cls(problem=problem, tables=tables, bottleneck_s=bottleneck, reachable=reachable)

    def memory(self, stage: int) -> Floats:
        """Return M of equation (6) for every pair, on ``stage``."""
        base = self.problem.base_bytes if stage == 0 else 0
        tables = self.tables
        in_use = self.problem.in_flight(stage) * tables.pinned_bytes + tables.transient_bytes
        return tables.static_bytes + tables.buffer_bytes + base + np.maximum(in_use, tables.update_bytes)

    def masks(self) -> list[Bools]:
        """Return for each stage the pairs that fit; stages alike share one array."""
        found: dict[tuple[int, int, int], Bools] = {}
        masks = []
        for stage, capacity in enumerate(self.problem.capacities):
            key = (self.problem.in_flight(stage), capacity, self.problem.base_bytes if stage == 0 else 0)
            if key not in found:
                found[key] = self.tables.ideals.below & (self.memory(stage) <= capacity)
            masks.append(found[key])
        return masks

    def run(
        self, costs: Sequence[Floats], combine: np.ufunc, masks: Sequence[Bools] | None = None
    ) -> tuple[float, tuple[int, ...]]:
        """Run the recursion (8) with ``combine`` in the place of + and return its value and assignment.

        Args:
            costs: By stage, the cost of every pair.
            combine: ``np.add`` or ``np.maximum``.
            masks: The pairs allowed, by stage; those of nested ideals if not given.
        """
        below = self.tables.ideals.below
        allowed: dict[tuple[int, int], Floats] = {}
        matrices = []
        for stage in range(self.problem.num_stages):
            table, mask = costs[stage], below if masks is None else masks[stage]
            key = (id(table), id(mask))
            if key not in allowed:
                allowed[key] = np.where(mask, table, inf)
            matrices.append(allowed[key])
        return self._recursion(matrices, combine)

    def _recursion(self, matrices: Sequence[Floats], combine: np.ufunc) -> tuple[float, tuple[int, ...]]:
        start = 0.0 if combine is np.add else -inf
        values = [np.where(self.reachable[0], combine(matrices[0][:, 0], start), inf)]
        scratch = np.empty_like(matrices[0])
        for stage in range(1, len(matrices)):
            rows, columns = self.reachable[stage], self.reachable[stage - 1]
            following = np.full(len(rows), inf)
            r, c = _span(rows), _span(columns)
            combine(matrices[stage][r, c], values[-1][None, c], out=scratch[r, c])
            following[r] = scratch[r, c].min(axis=1, initial=inf)
            values.append(np.where(rows, following, inf))
        value = float(values[-1][-1])
        return (value, self._assignment(matrices, values, combine)) if value < inf else (inf, ())

    def _assignment(self, matrices: Sequence[Floats], values: Sequence[Floats], combine: np.ufunc) -> tuple[int, ...]:
        """Walk back along the best choices."""
        members = self.tables.ideals.members
        stage_of = np.zeros(self.problem.num_blocks, dtype=int)
        current = len(members) - 1
        for stage in range(len(matrices) - 1, 0, -1):
            previous = int(np.argmin(combine(matrices[stage][current], values[stage - 1])))
            stage_of[members[current] & ~members[previous]] = stage
            current = previous
        return tuple(int(stage) for stage in stage_of)


def _span(flags: Bools) -> slice:
    """Return the smallest slice that holds every set flag."""
    found = np.flatnonzero(flags)
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)


def _reachable(problem: PipelineProblem, ideals: Ideals, stage: int) -> Bools:
    """Return the ideals that may hold exactly the blocks of stages 0..stage."""
    sizes = ideals.members.sum(axis=1)
    if stage == problem.num_stages - 1:
        allowed: Bools = sizes == problem.num_blocks
    else:
        allowed = (sizes > stage) & (sizes <= problem.num_blocks - (problem.num_stages - 1 - stage))
    for block, pin in enumerate(problem.pins):
        if pin is not None:
            allowed = allowed & (ideals.members[:, block] == (pin <= stage))
    return allowed


@dataclass(slots=True)
class _Incumbent:
    """The best assignment so far, by `evaluate`."""

    problem: PipelineProblem
    objective: float = inf
    assignment: tuple[int, ...] = ()

    def offer(self, assignment: tuple[int, ...]) -> float:
        """Take note of an assignment; return its true bottleneck."""
        evaluation = evaluate(self.problem, assignment)
        if evaluation.objective < self.objective:
            self.objective, self.assignment = evaluation.objective, assignment
        return max(stage.bottleneck_s for stage in evaluation.stages)


def _sweep(problem: PipelineProblem, tables: Tables) -> StageSolution:
    """Solve one family of ideals exactly: the sweep of the module's docstring."""
    layers = _Layers.build(problem, tables)
    masks = layers.masks()
    least, assignment = layers.run([layers.bottleneck_s] * problem.num_stages, np.maximum, masks)
    complete = tables.ideals.complete
    if not assignment:
        status: SolutionStatus = "infeasible" if complete else "unknown"
        return StageSolution(assignment=(), objective=inf, bound=inf, status=status, method="dp")
    best = _Incumbent(problem)
    best.offer(assignment)
    limits = [least * (1 + _STEP), inf]  # a good incumbent first, then the sweep from the top
    bound, ended = -inf, ""
    for _ in range(MAX_SWEEPS):
        if not limits:
            break
        limit = limits.pop(0)
        within = np.where(layers.bottleneck_s <= limit, tables.time_s, inf)
        cheapest, assignment = layers.run([within] * problem.num_stages, np.add, masks)
        if not assignment:
            break
        bottleneck = best.offer(assignment)
        bound = cheapest + least
        if not limits:
            following = nextafter(min(best.objective - cheapest, bottleneck) * (1 - _STEP), -inf)
            limits = [following] if following >= least else []
    else:
        ended = f"{MAX_SWEEPS} bottlenecks"
    return StageSolution(
        assignment=best.assignment,
        objective=best.objective,
        bound=min(bound, best.objective) if ended else best.objective,
        status="optimal" if complete and not ended else "feasible",
        method="dp",
        limit=ended,
    )
