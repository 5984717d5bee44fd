"""Rules of plans: figures that must agree with each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf, isclose, prod

from partita.ir.dtypes import ITEM_SIZE
from partita.ir.layout import Shard
from partita.ir.plan import Estimate, Plan
from partita.ir.rules import Findings, Rule

TOLERANCE = 1e-6
"""Relative difference that adding the same figures in another order may make."""


def _peaks_fit(plan: Plan) -> Findings:
    for rank, (peak, limit) in enumerate(zip(plan.predicted.peak_bytes, plan.memory_limits, strict=True)):
        if peak > limit:
            yield f"predicted.peak_bytes[{rank}]", f"{peak} B of {limit} B allowed"


def _peaks_add_up(plan: Plan) -> Findings:
    totals = {rank: stage.memory.total for stage in plan.stages for rank in stage.ranks}
    for rank, peak in enumerate(plan.predicted.peak_bytes):
        if peak != totals.get(rank, 0):
            yield f"predicted.peak_bytes[{rank}]", f"{peak} B; the rank's stage adds up to {totals.get(rank, 0)} B"


def _memory_not_negative(plan: Plan) -> Findings:
    for stage in plan.stages:
        memory = stage.memory
        figures = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
        if min(*figures, memory.skips, memory.buffers, memory.transient) < 0:
            yield f"stages[{stage.index}].memory", "has a negative part"


def _flight_fits(plan: Plan) -> Findings:
    for stage in plan.stages:
        if not 1 <= stage.in_flight <= plan.num_microbatches:
            text = f"{stage.in_flight} of {plan.num_microbatches} microbatches"
            yield f"stages[{stage.index}].in_flight", text


def _parameters_have_homes(plan: Plan) -> Findings:
    for index, parameter in enumerate(plan.parameter_plans):
        place = f"parameter_plans[{index}].ranks"
        readers = {rank for stage in parameter.stages for rank in plan.stages[stage].ranks}
        if not parameter.ranks:
            yield place, f"{parameter.name} lives nowhere"
        elif parameter.stages and set(parameter.ranks) != readers:
            yield place, f"{parameter.name} lives on {sorted(parameter.ranks)} and is read on {sorted(readers)}"
        elif not parameter.stages and not set(parameter.ranks) <= set(range(plan.num_ranks)):
            yield place, f"{parameter.name} lives outside the cluster"


def _parameter_names_unique(plan: Plan) -> Findings:
    seen: dict[str, int] = {}
    for index, parameter in enumerate(plan.parameter_plans):
        if parameter.name not in parameter.names[:1]:
            yield f"parameter_plans[{index}].names", f"{parameter.name!r} is not the first of its names"
        for name in parameter.names:
            if seen.setdefault(name, index) != index:
                yield f"parameter_plans[{index}].names", f"{name!r} is also a name of parameter {seen[name]}"


def _layouts_fit(plan: Plan) -> Findings:
    for index, parameter in enumerate(plan.parameter_plans):
        place, layout = f"parameter_plans[{index}]", parameter.layout
        if len(layout.axes) != len(layout.placements):
            yield f"{place}.layout", f"{len(layout.placements)} placements for {len(layout.axes)} axes"
        for placement in layout.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(parameter.shape):
                yield f"{place}.layout", f"dim {placement.dim} of the shape {list(parameter.shape)}"
        whole = prod(parameter.shape) * ITEM_SIZE.get(parameter.dtype, 0)
        if not 0 <= parameter.bytes_per_rank <= whole:
            yield f"{place}.bytes_per_rank", f"{parameter.bytes_per_rank} B of {whole} B"


def _estimates(plan: Plan) -> Iterator[tuple[str, Estimate]]:
    for block in plan.blocks:
        yield f"blocks[{block.id}].forward_s", block.forward_s
        yield f"blocks[{block.id}].backward_s", block.backward_s
    for stage in plan.stages:
        for name in ("forward_s", "backward_s", "communication_s", "reduction_s", "optimizer_s"):
            yield f"stages[{stage.index}].{name}", getattr(stage, name)
    yield "predicted.step_time", plan.predicted.step_time


def _ranges_hold_values(plan: Plan) -> Findings:
    for place, estimate in _estimates(plan):
        if not 0 <= estimate.low <= estimate.value <= estimate.high < inf:
            yield place, f"{estimate.value} s is not within {estimate.low}..{estimate.high} s"


def _fractions(plan: Plan) -> Findings:
    for name in ("bubble_fraction", "measured_share"):
        fraction = getattr(plan.predicted, name)
        if not 0 <= fraction <= 1:
            yield f"predicted.{name}", f"{fraction} is no fraction"


def _bound_below_objective(plan: Plan) -> Findings:
    solve = plan.solve
    if not 0 <= solve.bound <= solve.objective * (1 + TOLERANCE):
        yield "solve.bound", f"{solve.bound} s with an objective of {solve.objective} s"
    elif solve.status == "optimal" and not isclose(solve.bound, solve.objective, rel_tol=TOLERANCE):
        yield "solve.status", f"optimal with a gap of {solve.gap:.2%}"


def _batches_fit(plan: Plan) -> Findings:
    parts = plan.data_degree * plan.num_microbatches
    if plan.global_batch < parts:
        text = f"{plan.global_batch} rows for {plan.data_degree} replicas of {plan.num_microbatches} microbatches"
        yield "global_batch", text


def _runner_ups_ordered(plan: Plan) -> Findings:
    for index, (one, other) in enumerate(pairwise(plan.runner_ups)):
        if one.step_time_s > other.step_time_s:
            yield f"runner_ups[{index + 1}]", f"{other.step_time_s} s comes after {one.step_time_s} s"


def _sizes_not_negative(plan: Plan) -> Findings:
    for index, edge in enumerate(plan.edges):
        if edge.bytes < 0 or edge.backward_bytes < 0:
            yield f"edges[{index}]", f"{edge.bytes} B forward and {edge.backward_bytes} B backward"
    for block in plan.blocks:
        if block.parameter_bytes < 0:
            yield f"blocks[{block.id}].parameter_bytes", f"{block.parameter_bytes} B is negative"


RULES = (
    Rule("P017", "a rank's peak is within its limit", _peaks_fit),
    Rule("P018", "a rank's peak is what the categories of its stage add up to, 0 if it is not used", _peaks_add_up),
    Rule("P019", "no category of memory is negative", _memory_not_negative),
    Rule("P020", "between one and all microbatches are in flight", _flight_fits),
    Rule(
        "P021",
        "a parameter lives on the ranks of the stages that read it, an unread one on some rank",
        _parameters_have_homes,
    ),
    Rule("P022", "a parameter's first name is its own, and no other's", _parameter_names_unique),
    Rule("P023", "a layout has a placement per axis, cuts dims that exist, and holds at most the whole", _layouts_fit),
    Rule("P024", "an estimate is finite, not negative, and within its range", _ranges_hold_values),
    Rule("P025", "bubble and measured share are fractions", _fractions),
    Rule(
        "P026", "the bound is at most the objective, and equal to it if the status is optimal", _bound_below_objective
    ),
    Rule("P027", "every microbatch of every replica has a row", _batches_fit),
    Rule("P028", "runner-ups are listed best first", _runner_ups_ordered),
    Rule("P029", "no size is negative", _sizes_not_negative),
)
