"""`auto_parallelize`: from a user's model and example to a running `ParallelModule`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.errors import PlanMismatchError
from partita.ir.plan import Plan
from partita.ir.serde import from_json, to_json
from partita.runtime.agreement import align
from partita.runtime.engine import Engine, Seat
from partita.runtime.gradients import GradientBook
from partita.runtime.module import ParallelModule
from partita.runtime.placement import Placement, live_model, place
from partita.runtime.stages import lay_out, planned_stages
from partita.runtime.state import StateKeeper
from partita.runtime.transport import ProcessGroupTransport
from partita.runtime.variants import Variants
from partita.runtime.world import World
from partita.tracer.capture import Captured
from partita.tracer.skeleton import named_tensors

Planner = Callable[[Captured], Plan]
"""Makes the plan for a capture; runs on rank 0."""


def agree_on_plan(captured: Captured, planner: Planner, plan: Plan | str | Path | None, world: World) -> Plan:
    """Return rank 0's plan on every rank.

    Args:
        captured: The capture.
        planner: Makes a plan if none is given.
        plan: A plan or the path of a saved one.
        world: The ranks.

    Raises:
        PlanMismatchError: If a given plan was made for another graph or does not fit the job.
        PlanError: If no plan can be made.
    """

    def decide() -> str:
        chosen = planner(captured) if plan is None else plan if isinstance(plan, Plan) else Plan.load(plan)
        check_fits(chosen, captured, world)
        return to_json(chosen)

    return from_json(Plan, world.agree(decide))


def check_fits(plan: Plan, captured: Captured, world: World) -> None:
    """Check that a plan belongs to this model and this job.

    Raises:
        PlanMismatchError: With what differs.
    """
    if plan.graph_fingerprint != captured.graph.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for another graph of {plan.model!r}: "
            f"its fingerprint is {plan.graph_fingerprint}, this one's {captured.graph.fingerprint}",
            hint="plan again with the same model, example and torch version",
        )
    used = max((rank for stage in plan.stages for rank in stage.ranks), default=0)
    if used >= world.size:
        raise PlanMismatchError(
            f"the plan uses rank {used}, but the job has {world.size} ranks",
            hint=f"start the job with at least {used + 1} processes",
        )


def seat_of(plan: Plan, rank: int) -> Seat | None:
    """Return a rank's place in the plan, or None if it has none."""
    return next((Seat(stage.index, stage.ranks.index(rank)) for stage in plan.stages if rank in stage.ranks), None)


def tensor_lookup(root: nn.Module) -> Callable[[str], torch.Tensor]:
    """Return a function from a qualified name to the live parameter or buffer."""
    modules = dict(root.named_modules(remove_duplicate=False))

    def find(name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        parameter: torch.Tensor | None = module._parameters.get(leaf)
        tensor = module._buffers[leaf] if parameter is None else parameter
        assert tensor is not None
        return tensor

    return find


def _without_values(model: nn.Module) -> frozenset[str]:
    """Return the canonical names of the tensors of a model that are on the meta device."""
    first: dict[int, str] = {}
    for name, tensor, _ in named_tensors(model):
        first.setdefault(id(tensor), name)
    return frozenset(first[id(tensor)] for _, tensor, _ in named_tensors(model) if tensor.is_meta)


def build(
    model: nn.Module,
    captured: Captured,
    plan: Plan,
    world: World,
    *,
    loss_fn: Callable[[Any, Any], Any] | None,
    show: Callable[[Plan], str],
) -> ParallelModule:
    """Put the planned model on this rank.

    Args:
        model: The user's model; it stays as it is.
        captured: Its capture.
        plan: The plan, the same on every rank.
        world: The ranks.
        loss_fn: The loss of the fused loop, or None.
        show: Writes a plan for people.

    Returns:
        The parallel module.
    """
    stage_of = planned_stages(captured.traced.program, plan)
    layout = lay_out(captured.traced.program, stage_of, len(plan.stages))
    placement = place(layout, plan, model)
    redundant = captured.unseen
    if redundant:  # every rank computes everything, so nothing has to be reduced
        placement = Placement(placement.stages, dict.fromkeys(placement.ranks, tuple(range(world.size))))
    root = live_model(model, placement, world.rank, world.device)
    parameters = {n: p for n, p in root.named_parameters() if not p.is_meta}
    shared = [] if redundant else placement.shared([n for n, _ in root.named_parameters()])
    groups = {tuple(sorted(s.ranks)): world.group(s.ranks) for s in shared if len(s.ranks) > 1}
    if world.size > 1 and not _without_values(model):
        align(root, placement, world)
    seat = seat_of(plan, world.rank)
    lanes = [stage.ranks[seat.replica if seat else 0] for stage in plan.stages]
    transport = ProcessGroupTransport(lanes, groups, world.device, world.talking)
    book = GradientBook(parameters, shared)
    engine = Engine(plan, world, seat, transport, root, tensor_lookup(root), book)
    variants = Variants(captured, plan, stage_of, placement, root, world)
    keeper = StateKeeper(root, placement, world, missing=_without_values(model))
    return ParallelModule(
        root=root,
        plan=plan,
        world=world,
        engine=engine,
        variants=variants,
        keeper=keeper,
        loss_fn=loss_fn,
        show=show,
        redundant=redundant,
    )
