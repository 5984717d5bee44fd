r"""The search over configurations: which degrees, how many microbatches, which schedule, which devices.

Theory of operation.

1. `coarsen` makes blocks, `Space` lists the configurations that the request allows.
2. `ConfigurationSearch` solves or prunes each, by ascending lower bound; what is left is a proof for the space.
3. The best few become plans (`assemble`) and are simulated (`simulate_plan`); the shortest simulated step wins.  The
   objective follows the simulated step closely but not exactly (overlap, tails), so the two orders may differ among
   near equals; the report keeps the bound on the objective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from partita.cost.analytic import AnalyticModel
from partita.cost.memory import PRECISIONS, optimizer_cost
from partita.cost.model import CostModel
from partita.errors import SolverLimitError
from partita.ir.cluster import Cluster
from partita.ir.graph import ModelGraph
from partita.ir.plan import ZERO, LossPlace, Plan, RunnerUp, Source
from partita.ir.request import Limits, Search
from partita.ir.verify import check
from partita.partitioner import PARTITIONERS
from partita.partitioner.assemble import assemble
from partita.partitioner.blockgraph import BlockGraph
from partita.partitioner.coarsen import coarsen
from partita.partitioner.configurations import make_space
from partita.partitioner.diagnose import explain_shortage
from partita.partitioner.pricing import Pricer
from partita.partitioner.requests import memory_limits, pinned_stages
from partita.partitioner.search import TOLERANCE, ConfigurationSearch, Solved
from partita.simulator import simulate_plan

_SIMULATED = 8
"""Configurations that are simulated, the best by objective."""
_SIMULATED_ACTIONS = 400_000
"""Forwards and backwards simulated in all, about 10 s; the first configuration always is."""


def make_plan(
    graph: ModelGraph,
    cluster: Cluster,
    *,
    optimizer: str = "adamw",
    precision: str = "as_is",
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    search: Search = Search(),  # noqa: B008  (frozen)
    cost: CostModel | None = None,
    loss: LossPlace = "outside",
    seed: int = 0,
    method: str = "dp",
) -> Plan:
    """Find the plan with the shortest step.

    Args:
        graph: The captured model.
        cluster: The devices.
        optimizer: Name of the optimiser, or bytes of state per parameter as text.
        precision: What the optimiser's state follows: ``as_is``, ``fp32``, ``bf16``, ``fp16``.
        limits: Memory, microbatches, batch and seconds of the search.
        search: Restrictions.
        cost: The cost model; the analytic one if not given.
        loss: Where the loss is computed; ``outside`` allows fill-drain only.
        seed: Seed of the solver.
        method: ``"dp"`` or ``"ilp"`` (the winner is solved again by CP-SAT), or a baseline of `PARTITIONERS`.

    Returns:
        A verified plan.

    Raises:
        InfeasibleError: If no plan meets the limits and restrictions; says what is missing and what would help.
        SolverLimitError: If ``limits.solve_s`` ended the search before a plan was found.
        ValueError: If an argument makes no sense.
    """
    if method not in PARTITIONERS:
        raise ValueError(f"unknown method {method!r}; known are {', '.join(PARTITIONERS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; known are {', '.join(PRECISIONS)}")
    optimizer_cost(optimizer)  # an unknown one is refused before any work
    started = time.monotonic()
    memory = memory_limits(cluster, limits)
    blocks = BlockGraph(graph, coarsen(graph))
    space = make_space(graph, len(blocks.blocks), memory=memory, limits=limits, search=search, loss=loss)
    pricer = Pricer(
        blocks=blocks,
        cluster=cluster,
        cost=AnalyticModel() if cost is None else cost,
        optimizer=optimizer,
        precision=precision,
        limits=memory,
        pins=pinned_stages(blocks, search.pins or {}, space),
    )
    found = ConfigurationSearch(pricer=pricer, space=space, method=method, seed=seed, deadline=started + limits.solve_s)
    found.run()
    if not found.solved:
        if found.limit:
            raise SolverLimitError(
                f"no plan was found in {limits.solve_s:g} s, and none is proved not to exist",
                hint="raise Limits(solve_s=...), or restrict the search",
            )
        raise explain_shortage(pricer, space, loss_outside=loss == "outside")
    plan = _choose(found, loss=loss, global_batch=space.batch or limits.global_batch or 1)
    plan = replace(plan, solve=replace(plan.solve, wall_s=time.monotonic() - started))
    check(plan)
    return plan


def _choose(found: ConfigurationSearch, *, loss: LossPlace, global_batch: int) -> Plan:
    """Simulate the best few configurations and return the plan of the shortest step, with the others as runner-ups."""

    def simulated(solved: Solved) -> Plan:
        return _simulate(
            assemble(
                found.pricer,
                solved.configuration,
                solved.problem,
                solved.solution,
                loss=loss,
                global_batch=global_batch,
                seed=found.seed,
            )
        )

    ranked = sorted(found.solved, key=lambda solved: solved.rank)
    candidates = [(str(solved.configuration), simulated(solved), solved) for solved in _affordable(ranked)]
    # The objective does not see everything that the simulation does: even plain cuts may come out first by a hair.
    candidates += [
        (f"{name} cuts, else as the smallest objective", simulated(cut), cut)
        for name, cut in _baselines(found, ranked[0])
    ]
    shortest = min(plan.predicted.step_time_s for _, plan, _ in candidates)
    # Of equals the first: the smallest objective, then the fewest devices.
    title, plan, chosen = next(c for c in candidates if c[1].predicted.step_time_s <= shortest * (1 + TOLERANCE))
    if found.method == "ilp":
        chosen = found.confirm(chosen)
        plan = simulated(chosen)
    others = [
        RunnerUp(description=name, step_time_s=other.predicted.step_time_s, reason=_slower(other, plan))
        for name, other, _ in candidates
        if name != title
    ]
    others.sort(key=lambda runner_up: runner_up.step_time_s)
    return _report(found, plan, chosen, tuple(others))


def _affordable(ranked: list[Solved]) -> Iterator[Solved]:
    """Yield the best configurations as long as their simulation is affordable."""
    actions = 0
    for index, solved in enumerate(ranked[:_SIMULATED]):
        actions += 2 * solved.configuration.num_stages * solved.configuration.num_microbatches
        if index and actions > _SIMULATED_ACTIONS:
            return
        yield solved


def _baselines(found: ConfigurationSearch, best: Solved) -> Iterator[tuple[str, Solved]]:
    """Yield what uniform and greedy cuts make of the best configuration, if they fit."""
    if best.configuration.num_stages == 1 or found.method not in {"dp", "ilp"}:
        return
    for name in ("uniform", "greedy"):
        solution = PARTITIONERS[name](best.problem)
        if solution.assignment:
            yield (
                name,
                replace(best, solution=replace(solution, method=best.solution.method, bound=best.solution.bound)),
            )


def _slower(other: Plan, plan: Plan) -> str:
    """Say how much slower another plan is."""
    ratio = other.predicted.step_time_s / plan.predicted.step_time_s - 1 if plan.predicted.step_time_s > 0 else 0.0
    if ratio >= 5e-4:
        return f"{100 * ratio:.1f} % slower in the simulation"
    return "the same cuts" if _cuts(other) == _cuts(plan) else "as fast in the simulation, with a larger objective"


def _cuts(plan: Plan) -> tuple[object, ...]:
    return plan.schedule.name, plan.num_microbatches, tuple((stage.blocks, stage.ranks) for stage in plan.stages)


def _simulate(plan: Plan) -> Plan:
    """Replace the objective by the simulated step, with the credible range of the stages' times."""
    timeline = simulate_plan(plan)
    times = [part for stage in plan.stages for part in (stage.forward_s, stage.backward_s)]
    total = sum(part.value for part in times)
    low, high = (sum(map(end, times)) / total if total > 0 else 1.0 for end in (lambda p: p.low, lambda p: p.high))
    value = timeline.step_time_s
    step = replace(
        plan.predicted.step_time,
        value=value,
        low=value * min(1.0, low),
        high=value * max(1.0, high),
        source=_source(plan),
    )
    bubble = min(1.0, max(0.0, timeline.bubble_fraction))
    return replace(plan, predicted=replace(plan.predicted, step_time=step, bubble_fraction=bubble))


def _source(plan: Plan) -> Source:
    """Return the weakest source among the stages' times."""
    total = sum((part for stage in plan.stages for part in (stage.forward_s, stage.backward_s)), ZERO)
    return total.source


def _report(found: ConfigurationSearch, plan: Plan, chosen: Solved, others: tuple[RunnerUp, ...]) -> Plan:
    """Add what the whole search can prove, and the notes."""
    objective = chosen.solution.objective
    bound = min(found.bound, objective)
    proved = objective - bound <= 1e-6 * objective
    limit = found.limit or chosen.solution.limit
    if not proved and not limit:
        limit = f"the simulated step decided between plans whose objectives differ by {objective / bound - 1:.2%}"
    counts = ", ".join(f"{count} {what}" for what, count in found.counts.items())
    solve = replace(
        plan.solve,
        status="optimal" if proved else "feasible",
        bound=bound,
        space=f"{found.space}; configurations: {counts}",
        limit="" if proved else limit,
    )
    return replace(plan, solve=solve, runner_ups=others, notes=tuple(_notes(found, plan)))


def _notes(found: ConfigurationSearch, plan: Plan) -> Iterator[str]:
    """Yield what a reader should know and cannot see in the figures."""
    graph, cluster = found.pricer.blocks.graph, plan.cluster
    used = sorted(rank for stage in plan.stages for rank in stage.ranks)
    idle = [rank for rank in range(cluster.num_devices) if rank not in used]
    excluded = [rank for rank in idle if plan.memory_limits[rank] == 0]
    if excluded:
        yield f"Rank {', '.join(map(str, excluded))} may use no memory and is left out."
    if len(idle) > len(excluded):
        rest = ", ".join(str(rank) for rank in idle if rank not in excluded)
        yield f"{len(used)} of {cluster.num_devices} devices are used; rank {rest} would not make the step shorter."
    if len({cluster.device_kinds[rank] for rank in used}) > 1:
        yield "Devices of different kinds are used; every stage is priced on the slowest of them."
    if graph.batch_rows is None:
        yield "The example has no batch axis, so there is one replica and one microbatch."
    elif plan.global_batch % (plan.data_degree * plan.num_microbatches):
        yield f"{plan.global_batch} rows do not divide evenly; the largest microbatch is priced."
    if plan.precision in {"bf16", "fp16"} and any(tensor.dtype == "float32" for tensor in graph.parameters):
        yield f"Times and activations assume the captured dtypes; {plan.precision} concerns 16-bit parameters only."
    unread = [
        holding.tensor.names[0]
        for holding in found.pricer.blocks.holdings
        if not holding.readers and holding.tensor.names
    ]
    if unread:
        shown = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        yield f"Nothing reads {shown}; stage 0 holds them."
    if graph.unknown_ops:
        yield f"Without a cost formula, priced by their bytes: {', '.join(graph.unknown_ops)}."
