"""The verbs: capture, profile, plan, simulate, inspect, auto_parallelize.

Thin: each joins the layers below it and adds nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from partita.errors import PlanError
from partita.ir.cluster import Cluster
from partita.ir.graph import ModelGraph
from partita.ir.plan import LossPlace, Plan
from partita.ir.request import Limits, Search

if TYPE_CHECKING:
    import torch
    from torch import nn

    from partita.cost.model import CostModel
    from partita.cost.profile_table import ProfileTable
    from partita.report import Report
    from partita.runtime.module import ParallelModule
    from partita.simulator import Timeline

Verify = Literal["off", "auto", "always"]
Cost: TypeAlias = "CostModel | ProfileTable | str | Path | None"
_OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adafactor": "adafactor"}


def capture(model: nn.Module, example: Any, *, verify: Verify = "auto") -> ModelGraph:
    """Capture a model's graph.

    Args:
        model: On CPU, on a device, or on meta.
        example: Positional arguments as a tuple, keyword arguments as a dict, a `partita.Example`, or a list of them.
        verify: Comparison with the real model, where it has weights: its results, gradients and buffers on the
            examples, in a second call, with other sizes and values, and in evaluation. ``"off"`` makes none, ``"auto"``
            leaves out what follows when one takes more than 20 s, ``"always"`` makes all.

    Returns:
        The graph, which can be saved and planned without the model.

    Raises:
        CaptureError: If the capture differs from the model.
    """
    from partita.partitioner.coarsen import coarsen
    from partita.tracer.capture import capture_model

    graph = capture_model(model, example, verify=verify).graph
    blocks = coarsen(graph)
    distinct = sum(block.repeat_of is None for block in blocks)
    return replace(graph, report=replace(graph.report, blocks=len(blocks), distinct_blocks=distinct))


def profile(
    model_or_graph: nn.Module | ModelGraph,
    example: Any = None,
    *,
    device: torch.device | str | None = None,
    rows: tuple[int, ...] | None = None,
    optimizer: str = "adamw",
    links: bool = True,
    operators: bool = False,
    split: bool = False,
    cache: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> ProfileTable:
    """Measure a model's distinct blocks, its update and the links on the target device.

    What was measured before, by this or another model, comes from the cache. Ctrl-C keeps what was measured; the next
    call goes on from there. In a job of several processes every one of them calls this: rank 0 measures the blocks, all
    together the links and all-reduces.

    Args:
        model_or_graph: The model. A graph can't be run: for one only what the cache has is returned.
        example: The model's example.
        device: Where to measure; None is the GPU if there is one, else the CPU.
        rows: Rows of a microbatch; by default those of the example, and half of them, down to one.
        optimizer: Whose update to measure, as for `plan`.
        links: Also measure messages (and all-reduces in a running job).
        operators: Also measure every distinct item by itself.
        split: Also measure the gradients of the inputs and of the weights apart.
        cache: Read and write the cache; without it everything is measured anew.
        progress: Called with (units done, all units, what is measured).

    Returns:
        What is known of the device, to be passed as ``cost`` to `plan` or saved.

    Raises:
        CostError: If the weights do not fit into the device's memory, or nothing is known of a graph.
        CaptureError: If the model cannot be captured.
    """
    from partita.profiler.run import known_of, profile_model, target_device

    target = target_device(device)
    if isinstance(model_or_graph, ModelGraph):
        return known_of(model_or_graph, target)
    from partita.profiler.profile import Options
    from partita.runtime.world import running_world, world_cluster

    options = Options(rows=rows, operators=operators, split=split, optimizer=optimizer, links=links)
    world = running_world(target)
    several = world.size > 1
    return profile_model(
        model_or_graph,
        example,
        target,
        options=options,
        cache=cache,
        progress=progress,
        job=world_cluster(world) if several else None,
        agree=world.agree,
    )


def plan(
    model_or_graph: nn.Module | ModelGraph,
    example: Any = None,
    cluster: Cluster | str | Path | None = None,
    *,
    optimizer: str | int = "adamw",
    precision: str = "as_is",
    limits: Limits | None = None,
    search: Search | None = None,
    cost: Cost = None,
    loss: LossPlace | None = None,
    seed: int = 0,
    method: str = "dp",
) -> Plan:
    """Make a plan; no device of the cluster is needed.

    Args:
        model_or_graph: A model (meta tensors suffice) or a captured graph.
        example: The model's example; unused for a graph.
        cluster: ``"2x8xH100-80GB"``, ``"4xcpu"``, a path of a cluster file, a `Cluster`, or None for this machine.
        optimizer: ``sgd``, ``sgd_momentum``, ``adam``, ``adamw``, ``adafactor``, or bytes of state per parameter.
        precision: ``as_is``, ``fp32``, ``bf16`` or ``fp16``.
        limits: What the plan has to respect.
        search: Restrictions of the search.
        cost: What things cost: measurements (a table of `profile` or its file), or a cost model; analytic by default.
        loss: ``"model"``, ``"fused"`` or ``"outside"``; by default as the graph says, else ``"fused"``.
        seed: The same seed gives the same plan.
        method: ``"dp"`` or ``"ilp"``.

    Returns:
        The plan, verified.

    Raises:
        InfeasibleError: If nothing fits; says what is missing.
        CaptureError: If the model cannot be captured.
    """
    from partita.planner import make_plan

    graph = model_or_graph if isinstance(model_or_graph, ModelGraph) else capture(model_or_graph, example)
    model, devices = _priced(cost, _cluster(cluster))
    return make_plan(
        graph,
        devices,
        optimizer=str(optimizer),
        precision=precision,
        limits=limits or Limits(),
        search=search or Search(),
        cost=model,
        loss=loss or ("model" if graph.scalar_loss else "fused"),
        seed=seed,
        method=method,
    )


def simulate(plan: Plan) -> Timeline:
    """Simulate one step of a plan.

    Args:
        plan: The plan.

    Returns:
        What every device does when; ``save_trace(path)`` writes it for Perfetto.
    """
    from partita.simulator import simulate_plan

    return simulate_plan(plan)


def inspect(plan: Plan | str | Path, against: Plan | str | Path | None = None) -> Report:
    """Show a plan: table, schedule, memory, and one honest line.

    Args:
        plan: A plan or the path of a saved one.
        against: Another one to compare with.

    Returns:
        A report; ``print`` it, or ``save_html(path)``.
    """
    from partita.report import report

    return report(_plan(plan), None if against is None else _plan(against))


def auto_parallelize(
    model: nn.Module,
    example: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    cluster: Cluster | str | Path | None = None,
    limits: Limits | None = None,
    search: Search | None = None,
    plan: Plan | str | Path | None = None,
    cost: Cost = None,
    verify: Verify = "auto",
) -> ParallelModule:
    """Turn a model into a hybrid-parallel one.

    Every rank calls it with the same arguments.  If torchrun's environment is set and there is no process group, it is
    created.

    Args:
        model: The model, on every rank the same; it stays usable and unchanged.
        example: As for `capture`.
        loss_fn: ``loss_fn(output, target)`` for `ParallelModule.train_step`; None if the loss is in the model or in the
            training loop.
        optimizer: Called with the parallel module; the result is kept as its ``optimizer``.
        cluster: The devices; None is the running job.
        limits: What the plan has to respect.
        search: Restrictions of the search.
        plan: Use this plan instead of searching.
        cost: As for `plan`.
        verify: Compare the capture with the real model before training.

    Returns:
        The parallel module.

    Raises:
        CaptureError: If the model cannot be captured exactly.
        PlanError: If there is no plan, or the given one does not fit.
    """
    from partita.cost.analytic import AnalyticModel
    from partita.cost.corrected import CorrectedModel
    from partita.planner import make_plan
    from partita.runtime.build import agree_on_plan, build
    from partita.runtime.measured import Alternative, cuts_of
    from partita.runtime.sharing import capture_together
    from partita.runtime.world import join_world, world_cluster
    from partita.tracer.capture import examples_of

    if limits is not None and limits.batch != "global":
        raise PlanError(
            f"Limits(batch={limits.batch!r}) is not available in this version",
            hint="pass the whole batch on every rank, which is Limits(batch='global')",
        )
    world = join_world()
    captured = capture_together(model, example, world, verify=verify)

    def planner(found: Any, compute: Any = None, reduction: float = 1.0) -> Plan:
        graph: ModelGraph = found.graph
        place: LossPlace = "model" if graph.scalar_loss else "outside" if loss_fn is None else "fused"
        priced, devices = _priced(cost, _cluster(cluster) if cluster is not None else world_cluster(world))
        if compute is not None:
            priced = CorrectedModel(base=priced or AnalyticModel(), compute=compute, reduction=reduction)
        return make_plan(
            graph,
            devices,
            cost=priced,
            optimizer=_optimizer_name(optimizer, model),
            limits=limits or Limits(),
            search=search or Search(),
            loss=place,
        )

    def replan(compute: Any, reduction: float) -> Alternative:
        """Plan again with the measured costs, and hold the present plan against the result."""
        other = planner(captured, compute, reduction)
        factors = [compute.get(stage.items[0], 1.0) if stage.items else 1.0 for stage in chosen.stages]
        stages = tuple(
            replace(
                stage,
                forward_s=stage.forward_s.scaled(factor),
                backward_s=stage.backward_s.scaled(factor),
                reduction_s=stage.reduction_s.scaled(reduction),
            )
            for stage, factor in zip(chosen.stages, factors, strict=True)
        )
        now = simulate(replace(chosen, stages=stages)).step_time_s
        return Alternative(
            plan=other, current_s=now, other_s=other.predicted.step_time_s, same=cuts_of(other) == cuts_of(chosen)
        )

    chosen = agree_on_plan(captured, planner, plan, world)
    module = build(model, captured, chosen, world, loss_fn=loss_fn, show=lambda made: str(inspect(made)))
    if example is not None:
        first = examples_of(example)[0]
        module.remember((tuple(first.args), dict(first.kwargs)), replan)
    if optimizer is not None:
        module.optimizer = optimizer(module)
    return module


def _priced(cost: Cost, cluster: Cluster) -> tuple[CostModel | None, Cluster]:
    """Return the cost model that a user means, and the cluster with the links that it has measured."""
    from partita.cost.profile_table import ProfileTable
    from partita.cost.profiled import ProfiledModel

    table = ProfileTable.load(cost) if isinstance(cost, str | Path) else cost
    model = ProfiledModel(table) if isinstance(table, ProfileTable) else table
    return model, model.cluster(cluster) if isinstance(model, ProfiledModel) else cluster


def _cluster(cluster: Cluster | str | Path | None) -> Cluster:
    from partita.cost.clusters import default_cluster, parse_cluster

    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        return parse_cluster(cluster)
    return default_cluster(platform="cpu")


def _optimizer_name(factory: Callable[[nn.Module], torch.optim.Optimizer] | None, model: nn.Module) -> str:
    """Find out what state an optimizer factory's product keeps, by making one for the plain model."""
    if factory is None:
        return "adamw"
    made = factory(model)
    name = type(made).__name__
    if name == "SGD" and any(group.get("momentum") for group in made.param_groups):
        return "sgd_momentum"
    return _OPTIMIZERS.get(name, "adamw")


def _plan(plan: Plan | str | Path) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(plan)
