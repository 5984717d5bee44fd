"""Run parts of a captured program by themselves, on the values that they meet in a real run.

A `Unit` is a set of items: a block, or a single item.  What it reads from outside is taken from a run of the user's
example, because only then are indices, masks and the values of normalised activations what they are in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.ir.graph import ModelGraph
from partita.profiler.clock import Clock
from partita.tracer.mutation import changed_values
from partita.tracer.program import Environment, Program, Step
from partita.tracer.skeleton import named_tensors

_SEED = 1e-3
"""Value of the gradients that a backward starts from: any that is neither zero nor denormal takes the same time."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Something to measure.

    Attributes:
        digest: Of its structure.
        label: For people.
        items: Ids of its items, ascending.
    """

    digest: str
    label: str
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a unit, seconds; `input_backward` is None unless it was asked for."""

    forward: float
    backward: float
    input_backward: float | None = None


class UnitRunner:
    """Runs the units of one captured call at one number of rows.

    Args:
        graph: The captured graph.
        program: Its executable form.
        model: The model, on the device; its gradients are used as scratch.
        tensors: Input tensors of the call, on the device.
        clock: Times what is run.
        split: Also time the gradients of the inputs alone.
    """

    def __init__(
        self,
        graph: ModelGraph,
        program: Program,
        model: nn.Module,
        tensors: Sequence[torch.Tensor],
        clock: Clock,
        *,
        split: bool = False,
    ) -> None:
        self._graph, self._program, self._model, self._inputs = graph, program, model, tuple(tensors)
        self._clock, self._split = clock, split
        self._tensors = {name: tensor for name, tensor, _ in named_tensors(model)}
        self._shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self._readers: dict[str, set[int]] = {}
        for step in program.steps:
            for name in step.reads:
                self._readers.setdefault(name, set()).add(step.id)

    def collect(self, units: Iterable[Unit]) -> dict[str, dict[str, Any]]:
        """Run the call once without gradients; return for each unit's digest what it reads from outside."""
        env = self._environment(dict(zip(self._program.inputs, self._inputs, strict=True)))
        wanted: dict[int, list[Unit]] = {}
        found: dict[str, dict[str, Any]] = {}
        for unit in units:
            found[unit.digest] = {}
            for item in unit.items:
                wanted.setdefault(item, []).append(unit)
        copies: dict[str, Any] = {}
        made = {unit.digest: self._written(unit.items) for here in wanted.values() for unit in here}
        last = {name: max(readers) for name, readers in self._readers.items()}
        with torch.no_grad():
            for step in self._program.steps:
                for unit in wanted.get(step.id, ()):
                    for name in step.reads:
                        if name in env.values and name not in made[unit.digest]:
                            found[unit.digest][name] = copies.setdefault(name, _copied(env.values[name]))
                env.run([step])
                for name in {*step.reads, *step.writes}:
                    if last.get(name, step.id) <= step.id:
                        env.values.pop(name, None)
        return found

    def run(self, unit: Unit, values: Mapping[str, Any]) -> Sample:
        """Run a unit forward and backward once.

        Args:
            unit: The unit.
            values: What `collect` found for it.
        """
        steps = [self._program.steps[item] for item in unit.items]
        leaves = {name: self._leaf(name, value) for name, value in values.items()}
        changed = changed_values(self._program, steps, tuple(leaves))
        inside = {n: v.clone() if n in changed and isinstance(v, torch.Tensor) else v for n, v in leaves.items()}
        env = self._environment(inside)
        with torch.set_grad_enabled(self._graph.training):
            forward = self._clock(lambda: env.run(steps))
        roots = [env.value(name) for name in self._results(unit.items, steps)]
        roots = [root for root in roots if isinstance(root, torch.Tensor) and root.requires_grad]
        if not roots:
            return Sample(forward, 0.0, 0.0 if self._split else None)
        seeds = [torch.full_like(root, _SEED) for root in roots]
        wanted = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        inputs: float | None = None
        if self._split:
            inputs = self._clock(_input_gradients(roots, wanted, seeds)) if wanted else 0.0
        backward = self._clock(lambda: torch.autograd.backward(roots, seeds))
        return Sample(forward, backward, inputs)

    def _environment(self, values: dict[str, Any]) -> Environment:
        return Environment(
            program=self._program,
            modules=self._model.get_submodule,
            tensors=self._tensors.__getitem__,
            shapes=self._shapes,
            values=values,
        )

    def _written(self, items: Iterable[int]) -> set[str]:
        return {name for item in items for name in self._program.steps[item].writes}

    def _results(self, items: Sequence[int], steps: Sequence[Step]) -> list[str]:
        """Return the values of a unit that others read or the call returns."""
        own, outputs = set(items), set(self._graph.outputs)
        return [
            name for step in steps for name in step.writes if name in outputs or self._readers.get(name, set()) - own
        ]

    def _leaf(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        trains = self._graph.training and name in self._program.differentiable and value.is_floating_point()
        return value.detach().requires_grad_(trains)


def _input_gradients(
    roots: list[torch.Tensor], leaves: list[torch.Tensor], seeds: list[torch.Tensor]
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def at_rows(
    tensors: Sequence[torch.Tensor], dims: Sequence[int | None], rows: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return inputs with so many rows: the first of the example, repeated where it has fewer."""
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        cut = tensor
        if dim is not None:
            cut = tensor.detach().index_select(dim, torch.arange(rows, device=tensor.device) % tensor.shape[dim])
        found.append(cut.detach().to(device).requires_grad_(tensor.requires_grad))
    return tuple(found)
