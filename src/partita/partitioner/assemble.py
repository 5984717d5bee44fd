"""From a configuration and its solution to a `Plan`: every figure a reader or a runtime needs."""

from __future__ import annotations

from dataclasses import replace

from partita.cost.memory import stage_memory
from partita.ir.graph import TensorSpec
from partita.ir.layout import Layout
from partita.ir.plan import (
    ZERO,
    BlockPlan,
    Edge,
    Estimate,
    LossPlace,
    Memory,
    ParameterPlan,
    Plan,
    Prediction,
    SolveReport,
    StagePlan,
)
from partita.ir.schedule import Schedule
from partita.partitioner.blockgraph import Holding
from partita.partitioner.pricing import Configuration, Pricer
from partita.partitioner.problem import Evaluation, PipelineProblem, StageSolution, evaluate
from partita.schedules.makers import make_schedule
from partita.schedules.passes import add_communication, add_reduction


def assemble(
    pricer: Pricer,
    configuration: Configuration,
    problem: PipelineProblem,
    solution: StageSolution,
    *,
    loss: LossPlace,
    global_batch: int,
    seed: int,
) -> Plan:
    """Fill a plan.  Its step time is the solver's objective until the simulator has seen it.

    Args:
        pricer: Prices the stages.
        configuration: The configuration.
        problem: Its pipeline problem.
        solution: A feasible assignment.
        loss: Where the loss is computed.
        global_batch: Rows per step.
        seed: Seed of the search.
    """
    graph, parts = pricer.blocks.graph, _Parts(pricer, configuration, problem, solution.assignment)
    stages = tuple(parts.stage(stage) for stage in range(configuration.num_stages))
    edges = parts.edges(results_last=loss == "fused")
    peaks = {rank: stage.memory.total for stage in stages for rank in stage.ranks}
    step = Estimate(value=solution.objective, low=solution.objective, high=solution.objective, source="modelled")
    return Plan(
        model=graph.name,
        graph_fingerprint=graph.fingerprint,
        cluster=pricer.cluster,
        memory_limits=pricer.limits,
        global_batch=global_batch,
        data_degree=configuration.data_degree,
        schedule=_schedule(configuration, edges),
        blocks=parts.blocks(),
        stages=stages,
        edges=edges,
        parameter_plans=parts.parameters(),
        optimizer=pricer.optimizer,
        precision=pricer.precision,
        loss=loss,
        predicted=Prediction(
            step_time=step,
            peak_bytes=tuple(peaks.get(rank, 0) for rank in range(pricer.cluster.num_devices)),
            bubble_fraction=0.0,
            measured_share=parts.measured_share(),
        ),
        solve=SolveReport(
            method=solution.method,
            status="optimal" if solution.status == "optimal" else "feasible",
            objective=solution.objective,
            bound=solution.bound,
            binding=parts.binding(),
            seed=seed,
            limit=solution.limit,
        ),
    )


def _schedule(configuration: Configuration, edges: tuple[Edge, ...]) -> Schedule:
    schedule = make_schedule(configuration.schedule, configuration.num_stages, configuration.num_microbatches)
    messages = ((edge.source, edge.target, edge.backward_bytes > 0) for edge in edges)
    return add_reduction(add_communication(schedule, messages))


class _Parts:
    """The parts of one plan."""

    def __init__(
        self, pricer: Pricer, configuration: Configuration, problem: PipelineProblem, assignment: tuple[int, ...]
    ) -> None:
        self._pricer = pricer
        self._configuration = configuration
        self._problem = problem
        self._assignment = assignment
        self._evaluation: Evaluation = evaluate(problem, assignment)
        kind = pricer.kind_of(configuration)
        self._device = pricer.cluster.kinds[kind]
        self._costs = pricer.block_costs(kind, configuration.rows)
        self._training = pricer.blocks.graph.training
        self._stages_of = {
            holding.tensor.id: tuple(sorted({assignment[block] for block in holding.readers}))
            for holding in pricer.blocks.holdings
        }

        self._messages = self._communication()

    def blocks(self) -> tuple[BlockPlan, ...]:
        """Return every block with its cost."""
        sizes = [0] * len(self._costs)
        for holding in self._pricer.blocks.holdings:
            for block in holding.readers:
                sizes[block] += holding.tensor.bytes if holding.tensor.role == "parameter" else 0
        return tuple(
            BlockPlan(
                id=block.id,
                label=block.label,
                items=block.items,
                repeat_of=block.repeat_of,
                forward_s=cost.forward_s,
                backward_s=cost.backward_s,
                parameter_bytes=size,
            )
            for block, cost, size in zip(self._pricer.blocks.blocks, self._costs, sizes, strict=True)
        )

    def stage(self, stage: int) -> StagePlan:
        """Return one stage."""
        blocks = tuple(block for block, where in enumerate(self._assignment) if where == stage)
        held = [h for h in self._pricer.blocks.holdings if stage in self._stages_of[h.tensor.id]]
        trained = sum(h.tensor.bytes for h in held if h.trainable and self._training)
        return StagePlan(
            index=stage,
            blocks=blocks,
            items=self._pricer.blocks.items_of(blocks),
            ranks=self._configuration.ranks[stage],
            forward_s=sum((self._costs[block].forward_s for block in blocks), ZERO),
            backward_s=sum((self._costs[block].backward_s for block in blocks), ZERO),
            communication_s=self._messages[stage],
            reduction_s=self._reduction(held),
            optimizer_s=self._pricer.cost.optimizer_s(trained, self._pricer.optimizer, self._device),
            memory=self._memory(stage, held),
            in_flight=self._problem.in_flight(stage),
            schedule_position=stage,
        )

    def _communication(self) -> tuple[Estimate, ...]:
        """Return for each stage the messages of one microbatch, equation (3)."""
        link, totals = self._pricer.slowest_link(self._configuration), [ZERO] * self._configuration.num_stages
        for net in self._problem.nets if link else ():
            homes = {self._assignment[v] for v in (net.producer, *net.readers)}
            if link and len(homes) > 1:
                message = self._pricer.message(net.bytes, net.gradient_bytes, link)
                for stage in homes:
                    totals[stage] += message
        return tuple(totals)

    def _reduction(self, held: list[Holding]) -> Estimate:
        """Return the reduction over the replicas, and over the stages that share a parameter."""
        by_stages: dict[tuple[int, ...], int] = {}
        for holding in held:
            if holding.trainable and self._training:
                stages = self._stages_of[holding.tensor.id]
                by_stages[stages] = by_stages.get(stages, 0) + holding.tensor.bytes
        total = ZERO
        for stages, size in sorted(by_stages.items()):
            ranks = [rank for where in stages for rank in self._configuration.ranks[where]]
            if len(ranks) > 1:
                total += self._pricer.cost.all_reduce_s(size, ranks, self._pricer.cluster)
        return total

    def _memory(self, stage: int, held: list[Holding]) -> Memory:
        cost = self._evaluation.stages[stage]
        specs = [h.tensor for h in held]
        if stage == 0:
            # Nothing reads them, so they get no gradient and no state.
            specs += [replace(h.tensor, requires_grad=False) for h in self._pricer.blocks.holdings if not h.readers]
        memory = stage_memory(
            parameters=specs,
            optimizer=self._pricer.optimizer,
            precision=self._pricer.precision,
            saved_bytes=cost.saved_bytes,
            in_flight=self._problem.in_flight(stage),
            received_bytes=cost.received_bytes,
            buffer_bytes=cost.buffer_bytes,
            transient_bytes=cost.transient_bytes,
            platform=self._device.platform,
            training=self._training,
        )
        if memory.total != cost.memory_bytes:
            raise AssertionError(f"stage {stage} needs {memory.total} B, the problem says {cost.memory_bytes} B")
        return memory

    def edges(self, *, results_last: bool) -> tuple[Edge, ...]:
        """Return what every stage sends to every other.

        Args:
            results_last: The last stage reads every result, because the loss is computed there.
        """
        tensors: dict[tuple[int, int], list[tuple[TensorSpec, bool]]] = {}
        for value in self._pricer.blocks.values:
            source = self._assignment[value.producer]
            for target in sorted({self._assignment[v] for v in value.readers} - {source}):
                tensors.setdefault((source, target), []).append((value.tensor, value.gradient))
        if results_last:
            self._add_results(tensors)
        edges = []
        for (source, target), found in sorted(tensors.items()):
            sizes = [self._pricer.blocks.bytes_at(tensor, self._configuration.rows) for tensor, _ in found]
            backward = sum(size for size, (_, gradient) in zip(sizes, found, strict=True) if gradient)
            names = tuple(tensor.id for tensor, _ in found)
            edges.append(Edge(source=source, target=target, tensors=names, bytes=sum(sizes), backward_bytes=backward))
        return tuple(edges)

    def _add_results(self, tensors: dict[tuple[int, int], list[tuple[TensorSpec, bool]]]) -> None:
        """Let the last stage receive every result that it does not make or receive anyway."""
        graph, blocks = self._pricer.blocks.graph, self._pricer.blocks.blocks
        producers = {n: block.id for block in blocks for item in block.items for n in graph.items[item].writes}
        last, known = self._configuration.num_stages - 1, graph.tensor_map()
        for name in graph.outputs:
            source = self._assignment[producers[name]] if name in producers else last
            if source != last and all(name != tensor.id for tensor, _ in tensors.get((source, last), ())):
                gradient = known[name].requires_grad and graph.training
                tensors.setdefault((source, last), []).append((known[name], gradient))

    def parameters(self) -> tuple[ParameterPlan, ...]:
        """Return where every parameter lives; an unread one on stage 0's devices."""
        owners = {h.tensor.storage or h.tensor.id: self._stages_of[h.tensor.id] for h in self._pricer.blocks.holdings}
        plans = []
        for tensor in self._pricer.blocks.graph.parameters:
            stages = owners[tensor.storage or tensor.id]
            homes = [rank for stage in stages or (0,) for rank in self._configuration.ranks[stage]]
            plans.append(
                ParameterPlan(
                    name=tensor.names[0] if tensor.names else tensor.id,
                    names=tensor.names or (tensor.id,),
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    requires_grad=tensor.requires_grad,
                    stages=stages,
                    ranks=tuple(homes),
                    layout=Layout(),
                    bytes_per_rank=tensor.bytes,
                )
            )
        return tuple(plans)

    def binding(self) -> str:
        """Say what limits the plan: the slowest stage, and the devices that are nearly full."""
        costs = self._evaluation.stages
        worst = max(range(len(costs)), key=lambda stage: costs[stage].bottleneck_s)
        steady = costs[worst].bottleneck_s - costs[worst].once_s
        what = "gradient reduction and update" if costs[worst].once_s > steady + costs[worst].time_s else "time"
        full = [
            f"memory of rank {ranks[0]}"
            for cost, limit, ranks in zip(costs, self._problem.capacities, self._configuration.ranks, strict=True)
            if cost.memory_bytes > 0.9 * limit
        ]
        return ", ".join([f"stage {worst}'s {what}", *full])

    def measured_share(self) -> float:
        """Return the share of the blocks' seconds that rests on measurements."""
        estimates = [part for cost in self._costs for part in (cost.forward_s, cost.backward_s)]
        total = sum(part.value for part in estimates)
        measured = sum(part.value for part in estimates if part.source != "modelled")
        return measured / total if total > 0 else 0.0
