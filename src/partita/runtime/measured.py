"""Hold a plan's prediction against its run: `ParallelModule.measure`.

The steps change nothing: gradients, buffers and random numbers are as before, and no parameter is updated.  The fastest
step counts, because what makes a step slower than another is not the plan's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from partita.ir.plan import Plan
from partita.runtime.executor import Log
from partita.runtime.meter import MemoryMeter, free_at_once, keep_freed
from partita.simulator import simulate_plan
from partita.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from partita.runtime.module import ParallelModule

_COMPUTE = frozenset({"F", "B", "I", "W"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one step on one device, without the update.

    Attributes:
        compute: Forwards and backwards.
        reduction: Sums of gradients.
        waiting: Messages: waiting for one, and handing one over.
        rest: Everything else: idle at the ends of the pipeline; measured, also what no action accounts for.
    """

    compute: float
    reduction: float
    waiting: float
    rest: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.reduction + self.waiting + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage, predicted and measured (the slowest of its replicas)."""

    index: int
    predicted: Times
    measured: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes of one rank.

    Attributes:
        rank: The rank.
        predicted: Live bytes, with the optimizer's state as far as it exists yet.
        measured: On a CPU the process' growth, with the allocator's own; None where the system does not tell.
    """

    rank: int
    predicted: int
    measured: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What planning again with the measured costs gives.

    Attributes:
        plan: The best plan then.
        current_s: Simulated step of the present plan under these costs.
        other_s: That of ``plan``.
        same: It has the same stages, schedule and microbatches.
    """

    plan: Plan
    current_s: float
    other_s: float
    same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Prediction against run.

    Attributes:
        predicted_s: Predicted step without the update.
        measured_s: The fastest measured one.
        stages: By stage.
        memory: By rank that the plan uses.
        alternative: Whether another plan would win now; None if the plan was given and cannot be made again.
    """

    predicted_s: float
    measured_s: float
    stages: tuple[StageReport, ...]
    memory: tuple[RankMemory, ...]
    alternative: Alternative | None = None

    @property
    def residuals(self) -> dict[str, float]:
        """Measured minus predicted seconds, by term of the cost, summed over the stages."""
        names = ("compute", "reduction", "waiting", "rest")
        return {n: sum(getattr(s.measured, n) - getattr(s.predicted, n) for s in self.stages) for n in names}

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(_lines(self))


def _lines(report: StepReport) -> Iterator[str]:
    yield f"step without update: {_pair(report.predicted_s, report.measured_s)}"
    for stage in report.stages:
        parts = ("compute", "reduction", "waiting", "rest")
        pairs = (f"{name} {_pair(getattr(stage.predicted, name), getattr(stage.measured, name))}" for name in parts)
        yield f"  stage {stage.index}: {'; '.join(pairs)}"
    for memory in report.memory:
        measured = "not measurable" if memory.measured is None else format_bytes(memory.measured)
        yield f"  memory of rank {memory.rank}: predicted {format_bytes(memory.predicted)}, measured {measured}"
    other = report.alternative
    if other is not None:
        better = other.current_s / other.other_s - 1 if other.other_s > 0 else 0.0
        wins = not other.same and better > 0.01
        yield (
            f"with the measured costs another plan would be {100 * better:.0f} % faster: {_shape(other.plan)}"
            if wins
            else "with the measured costs the plan stays the best"
        )


def _pair(predicted: float, measured: float) -> str:
    return f"predicted {format_seconds(predicted)}, measured {format_seconds(measured)}"


def _shape(plan: Plan) -> str:
    stages = f"{len(plan.stages)} stages, {plan.data_degree} replicas"
    return f"{stages}, {plan.num_microbatches} microbatches, {plan.schedule.name}"


def cuts_of(plan: Plan) -> tuple[object, ...]:
    """Return what makes two plans run the same."""
    return plan.schedule.name, plan.num_microbatches, tuple((stage.items, stage.ranks) for stage in plan.stages)


Replan = Callable[[Mapping[int, float], float], Alternative]
"""Plans again: measured over predicted seconds by item, and of the reduction."""


def measure_module(module: ParallelModule, run: Callable[[], object], steps: int, replan: Replan | None) -> StepReport:
    """Run steps and compare; every rank calls this together.

    Args:
        module: The parallel module.
        run: One forward and backward.
        steps: Steps to time, after one for the memory.
        replan: Plans again with what was measured, on rank 0.
    """
    world, plan = module.engine.world, module.plan
    with _unchanged(module):
        peak = _peak_bytes(module, run)
        mine = min((_timed(module, run) for _ in range(steps)), key=lambda times: times.total)
    state = sum(tensor.nbytes for tensor in _state(module))
    ranks: Sequence[tuple[Times, int | None, int]] = world.gather((mine, peak, state))
    predicted = _predicted(plan)
    stages = tuple(
        StageReport(
            index=stage.index,
            predicted=predicted[stage.index],
            measured=max((ranks[rank][0] for rank in stage.ranks), key=lambda times: times.compute),
        )
        for stage in plan.stages
    )
    planned = {rank: stage.memory.optimizer for stage in plan.stages for rank in stage.ranks}
    factors, reduction = _factors(plan, stages)
    return StepReport(
        predicted_s=max(times.total for times in predicted.values()),
        measured_s=max(times.total for times, _, _ in ranks),
        stages=stages,
        memory=tuple(
            RankMemory(
                rank=rank,
                predicted=plan.predicted.peak_bytes[rank] - whole + min(whole, ranks[rank][2]),
                measured=ranks[rank][1],
            )
            for rank, whole in sorted(planned.items())
        ),
        alternative=None if replan is None else world.agree(lambda: replan(factors, reduction)),
    )


def _factors(plan: Plan, stages: Sequence[StageReport]) -> tuple[dict[int, float], float]:
    """Return measured over predicted: compute by item, and reduction."""
    by_item = {
        item: report.measured.compute / report.predicted.compute
        for stage, report in zip(plan.stages, stages, strict=True)
        for item in stage.items
        if report.predicted.compute > 0
    }
    expected = sum(report.predicted.reduction for report in stages)
    return by_item, sum(report.measured.reduction for report in stages) / expected if expected > 0 else 1.0


def _predicted(plan: Plan) -> dict[int, Times]:
    """Return the simulated step by stage, without the update."""
    timeline = simulate_plan(plan)
    events = [event for event in timeline.events if event.action is not None]
    end = max((event.end_s for event in events), default=0.0)
    found = {}
    for stage in plan.stages:
        own = [(e.action.kind, e.end_s - e.start_s) for e in events if e.action and e.action.stage == stage.index]
        found[stage.index] = _split(own, end)
    return found


def _split(actions: Sequence[tuple[str, float]], total: float) -> Times:
    compute = sum(seconds for kind, seconds in actions if kind in _COMPUTE)
    reduction = sum(seconds for kind, seconds in actions if kind == "REDUCE_GRAD")
    waiting = sum(seconds for kind, seconds in actions if kind.startswith("RECV"))
    rest = max(0.0, total - compute - reduction - waiting)
    return Times(compute=compute, reduction=reduction, waiting=waiting, rest=rest)


def _timed(module: ParallelModule, run: Callable[[], object]) -> Times:
    """Time one step on this rank, from the common start to its own end."""
    engine, log = module.engine, Log()
    engine.log = log
    try:
        engine.world.gather(None)  # start together
        _synchronize(engine.world.device)
        start = time.perf_counter()
        run()
        _synchronize(engine.world.device)
        total = time.perf_counter() - start
    finally:
        engine.log = None
    if not log:  # this rank runs the plain model by itself
        return Times(compute=total, reduction=0.0, waiting=0.0, rest=0.0)
    return _split([(action.kind, end - begin) for action, begin, end in log], total)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(module: ParallelModule, run: Callable[[], object]) -> int | None:
    """Return the peak bytes of one step on this rank: what it holds, and what it grows by."""
    device = module.engine.world.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return int(torch.cuda.max_memory_allocated(device))
    free_at_once()
    try:
        meter = MemoryMeter()
        run()
        growth = meter.growth_bytes()
    finally:
        keep_freed()
    return None if growth is None else growth + sum(tensor.nbytes for tensor in _held(module))


def _held(module: ParallelModule) -> Iterator[torch.Tensor]:
    """Yield what this rank keeps between steps: weights, buffers, the optimizer's state."""
    yield from (tensor for tensor in [*module.parameters(), *module.buffers()] if not tensor.is_meta)
    yield from _state(module)


def _state(module: ParallelModule) -> Iterator[torch.Tensor]:
    for state in module.optimizer.state.values() if module.optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


@contextlib.contextmanager
def _unchanged(module: ParallelModule) -> Iterator[None]:
    """Leave gradients, buffers and random numbers as they were; without gradients in the meantime."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    places = [(m, name, b) for m in module.modules() for name, b in m._buffers.items()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for owner, name, buffer in places:
            owner._buffers[name] = buffer
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def outside_loss(result: Any) -> torch.Tensor:
    """Return a loss for a model without one: the mean of every differentiable tensor of its result, added up."""
    from partita.tracer.tree import leaves

    found = [leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([tensor.float().mean() for tensor in found]).sum()
