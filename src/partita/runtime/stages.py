"""Which steps of a program each stage runs, and what crosses between stages.

The plan was made for one captured call.  Other calls of the same model (evaluation, another shape, another flag) have
programs of their own; their steps follow the placement of the parameters: the same call of the same module runs where
it ran in the plan, and glue runs as early as its operands allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.errors import ExecutionError
from partita.ir.plan import Plan
from partita.tracer.mutation import changed_values, colocated_items
from partita.tracer.program import Program, Step
from partita.tracer.recorder import refs


@dataclass(frozen=True, eq=False, slots=True)
class StageMap:
    """A program laid out over the stages.

    Attributes:
        program: The program.
        steps: For each stage its steps in order, those it recomputes for itself included.
        edges: (source, target) to the values that cross, in the order of the message.
        home: For each value that a step makes the stage that owns it.
        received: For each stage the values that it receives.
        copied: For each stage the received values that it changes in place, which therefore must be copied first.
    """

    program: Program
    steps: tuple[tuple[Step, ...], ...]
    edges: Mapping[tuple[int, int], tuple[str, ...]]
    home: Mapping[str, int]
    received: tuple[tuple[str, ...], ...]
    copied: tuple[frozenset[str], ...]

    def active(self, seeds: frozenset[str]) -> frozenset[str]:
        """Return the values that a gradient reaches when it enters at ``seeds``.

        Steps are followed as wholes: a step that makes an active value makes all its differentiable operands active.
        """
        found = set(seeds & self.program.differentiable)
        for step in reversed(self.program.steps):
            if found.intersection(step.writes):
                found.update(name for name in step.reads if name in self.program.differentiable)
        return frozenset(found)

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of the result's values that a step makes, each once, in the result's order."""
        return tuple(name for name in dict.fromkeys(refs(self.program.result)) if name in self.home)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.steps)

    def tensors_of(self, stage: int) -> set[str]:
        """Return the value names of the parameters and buffers that a stage reads or replaces."""
        written = {
            value
            for name in self.program.buffer_writes
            for value, names in self.program.tensors.items()
            if name in names
        }
        read = {name for step in self.steps[stage] for name in step.reads if name in self.program.tensors}
        last = {w for w in written if self._writer(w) == stage}
        return read | last

    def _writer(self, tensor: str) -> int:
        by_value = {value: name for name, value in self.program.buffer_writes.items()}
        for value, name in by_value.items():
            if name in self.program.tensors[tensor]:
                return self.home.get(value, 0)
        return 0


def planned_stages(program: Program, plan: Plan) -> dict[int, int]:
    """Return the stage of every step that is not recomputed, as the plan says."""
    stage_of = {
        item: stage.index for stage in plan.stages for item in stage.items if not program.steps[item].replicable
    }
    missing = [step.name for step in program.steps if not step.replicable and step.id not in stage_of]
    if missing:
        raise ExecutionError(f"the plan places no stage for {missing[0]!r}", hint="make the plan again for this model")
    return stage_of


def follow_stages(
    program: Program,
    base: Program,
    base_stages: Mapping[int, int],
    holders: Mapping[str, Sequence[int]],
    num_stages: int,
) -> dict[int, int]:
    """Place the steps of another call of the same model.

    Args:
        program: The other call.
        base: The planned call.
        base_stages: Where its steps run.
        holders: For each parameter and buffer value name the stages that hold it.
        num_stages: Number of stages.

    Returns:
        The stage of every step that is not recomputed.

    Raises:
        ExecutionError: If a step would have to run before one of its operands is there.
    """
    known = {
        (step.kind, step.name, str(step.target)): base_stages[step.id] for step in base.steps if step.id in base_stages
    }
    found: dict[int, int] = {}
    made: dict[str, int] = {}
    for step in program.steps:
        if step.replicable:
            continue
        lowest = max((made[r] for r in step.reads if r in made), default=0)
        held = [set(holders[r]) for r in step.reads if r in program.tensors and r in holders]
        allowed = sorted(set(range(num_stages)).intersection(*held)) if held else list(range(num_stages))
        wanted = known.get((step.kind, step.name, str(step.target)), lowest)
        choice = wanted if wanted in allowed and wanted >= lowest else next((s for s in allowed if s >= lowest), None)
        if choice is None:
            raise ExecutionError(
                f"{step.name!r} needs values of stage {lowest}, but its parameters are on stages {allowed or 'apart'}",
                hint="this call takes another path than the planned one; plan with Search(pp=1)",
            )
        found[step.id] = choice
        for name in step.writes:
            made[name] = choice
    for group in colocated_items(program):
        if len({found[i] for i in group if i in found}) > 1:
            raise ExecutionError(
                f"{program.steps[group[0]].name!r} changes a value in place "
                f"that {program.steps[group[-1]].name!r} reads on another stage",
                hint="this call of the model takes another path than the planned one",
            )
    return found


def lay_out(
    program: Program, stage_of: Mapping[int, int], num_stages: int, *, last_reads: Iterable[str] = ()
) -> StageMap:
    """Lay a program out over the stages.

    Args:
        program: The program.
        stage_of: Stage of every step that is not recomputed.
        num_stages: Number of stages.
        last_reads: Values that the last stage needs besides (the loss reads the results there).

    Returns:
        The stage map.
    """
    free = {name: step for step in program.steps if step.replicable for name in step.writes}
    home = {name: stage_of[step.id] for step in program.steps if not step.replicable for name in step.writes}
    needs: list[set[str]] = [set() for _ in range(num_stages)]
    for step in program.steps:
        if not step.replicable:
            needs[stage_of[step.id]].update(step.reads)
    needs[num_stages - 1].update(last_reads)
    results = [name for name in [*refs(program.result), *program.buffer_writes.values()] if name in free]
    needs[num_stages - 1].update(results)
    home |= dict.fromkeys(results, num_stages - 1)
    steps: list[tuple[Step, ...]] = []
    for stage in range(num_stages):
        wanted = _free_closure(needs[stage], free)
        steps.append(tuple(s for s in program.steps if (s.id in wanted if s.replicable else stage_of[s.id] == stage)))
    made = {name for step in program.steps for name in step.writes if not step.replicable}
    edges: dict[tuple[int, int], tuple[str, ...]] = {}
    order = {name: i for i, name in enumerate(name for step in program.steps for name in step.writes)}
    for target in range(num_stages):
        for name in sorted((n for n in needs[target] if n in made and home[n] != target), key=order.__getitem__):
            key = (home[name], target)
            edges[key] = (*edges.get(key, ()), name)
    received = tuple(
        tuple(n for (_, t), names in sorted(edges.items()) if t == stage for n in names) for stage in range(num_stages)
    )
    copied = tuple(frozenset(changed_values(program, steps[stage], received[stage])) for stage in range(num_stages))
    return StageMap(program, tuple(steps), edges, home, received, copied)


def _free_closure(needs: set[str], free: Mapping[str, Step]) -> set[int]:
    """Return the ids of the recomputable steps that some needs rest on."""
    wanted: set[int] = set()
    pending = [name for name in needs if name in free]
    while pending:
        step = free[pending.pop()]
        if step.id not in wanted:
            wanted.add(step.id)
            pending += [name for name in step.reads if name in free]
    return wanted
