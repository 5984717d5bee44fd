"""The captured call in executable form: steps over named values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita.errors import ExecutionError
from partita.tracer.objects import guarded
from partita.tracer.recorder import Assumption, ModuleRef, Ref
from partita.tracer.sizes import Binding, Size, SizeRules
from partita.tracer.tree import map_leaves, object_state


@dataclass(eq=False, slots=True)
class Step:
    """One executable item; the torch side of `partita.ir.graph.Item`.

    Attributes:
        id: Position in the program.
        kind: ``call`` runs a module (or autograd function), ``op`` an ATen operator.
        name: ``path#occurrence`` for calls, the node's name for operators.
        path: The called module, or the module whose forward contains the operator.
        target: The operator or autograd function; None for modules.
        args: Positional arguments with `Ref` and `Size` leaves.
        kwargs: Keyword arguments likewise.
        result: Tree of `Ref` that names the result's tensors; other leaves are ignored.
        reads: Values it needs.
        writes: Values it makes, in-place successors of its arguments included.
        moved: Arguments changed in place: (name before, name after).
        nodes: Half-open range of recorded nodes.
        grad_enabled: Whether the model itself had gradients enabled here.
        autocast: Autocast regions of the model itself: (device type, enabled, dtype).
        random: Draws random numbers.
        replicable: Cheap, pure, computed from inputs and constants only: every stage that needs it may recompute it.
        check: Only looks at a value, and raises or does nothing.
        recompute: It keeps no activations, as the model's own code says, and runs again before its backward.
    """

    id: int
    kind: Literal["call", "op"]
    name: str
    path: str
    target: Callable[..., Any] | None
    args: Any
    kwargs: Any
    result: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    moved: tuple[tuple[str, str], ...]
    nodes: tuple[int, int]
    grad_enabled: bool = True
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    random: bool = False
    replicable: bool = False
    recompute: bool = False
    check: bool = False


@dataclass(eq=False)
class Program:
    """One captured call of a model.

    Attributes:
        steps: In execution order.
        inputs: Value names of the input tensors, in the call's leaf order.
        tensors: Value name of each parameter and buffer to all its qualified names.
        parameters: Those of them that are parameters.
        constants: Tensors that are neither.
        sizes: How sizes follow from the inputs' shapes, and when the capture holds.
        result: The call's result with `Ref`, `Size` and constants as leaves.
        buffer_writes: Buffers that the call replaces: qualified name to value name.
        changed: Value names of the parameters and buffers that the call writes into or replaces.
        storage: For each tensor value the first value that has the same memory.
        differentiable: Values through which a gradient flows.
        dynamic: Some shape or number depends on values, so that messages must carry their shapes every time.
        stored: Attributes by module path that the forward leaves tensors, or filled lists, dicts and objects, in.
        assumptions: Values that the forward read; the capture is valid for calls that give the same ones.
        checks: Steps that compute from the inputs what the assumptions are about.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    tensors: Mapping[str, tuple[str, ...]]
    parameters: frozenset[str]
    constants: Mapping[str, torch.Tensor]
    sizes: SizeRules
    result: Any
    buffer_writes: Mapping[str, str]
    changed: frozenset[str]
    storage: Mapping[str, str]
    differentiable: frozenset[str]
    dynamic: bool = False
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    checks: tuple[Step, ...] = ()
    random: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note whether any step draws random numbers."""
        self.random = any(step.random for step in self.steps)


def same_steps(first: Program, second: Program, shapes: Binding) -> bool:
    """Whether two captures do the same at the given input shapes (for which the second must hold).

    The steps, their targets, operands and constants must be equal, and every size must have the same value.
    """
    if len(first.steps) != len(second.steps) or not second.sizes.holds(shapes) or not first.sizes.waive(shapes):
        return False

    def plain(program: Program, step: Step) -> list[Any]:
        found: list[Any] = [
            step.kind,
            step.name,
            step.path,
            str(step.target),
            step.moved,
            step.grad_enabled,
            step.autocast,
        ]

        def leaf(path: object, value: Any) -> None:
            value = program.sizes.number(value, shapes) if isinstance(value, Size) else value
            found.append(
                (path, value if isinstance(value, Ref | int | float | str | bool | type(None)) else repr(value))
            )

        map_leaves(leaf, (step.args, step.kwargs, step.result))
        return found

    same = all(plain(first, a) == plain(second, b) for a, b in zip(first.steps, second.steps, strict=True))
    if not same:
        first.sizes.refuse(shapes)
    return same


@dataclass(eq=False)
class Environment:
    """The values of one call (or one microbatch of it) while its steps run.

    Attributes:
        program: What runs.
        modules: Qualified module path to the live module.
        tensors: Qualified name to the live parameter or buffer.
        shapes: Shapes of the input tensors of this call.
        values: Value name to tensor.
    """

    program: Program
    modules: Callable[[str], nn.Module]
    tensors: Callable[[str], torch.Tensor]
    shapes: Binding
    values: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return the present value of ``name``."""
        if name in self.values:
            return self.values[name]
        if name in self.program.tensors:
            return self.tensors(self.program.tensors[name][0])
        return self.program.constants[name]

    def fill(self, template: Any) -> Any:
        """Return a template with this call's values in place of its markers."""
        return map_leaves(self._leaf, template)

    def _leaf(self, _path: object, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self.value(leaf.name)
        if isinstance(leaf, Size):
            return self.program.sizes.number(leaf, self.shapes)
        return self.modules(leaf.path) if isinstance(leaf, ModuleRef) else leaf

    def run(self, steps: Iterable[Step]) -> None:
        """Execute steps in order; each finds what it reads in `values`, the parameters or the constants."""
        for step in steps:
            with _regions(step):
                self._store(step, self._function(step)(*self.fill(step.args), **self.fill(step.kwargs)))

    def _function(self, step: Step) -> Callable[..., Any]:
        if step.target is not None:
            return step.target
        module = self.modules(step.path)
        if step.recompute and torch.is_grad_enabled():
            return partial(checkpoint, module, use_reentrant=False)
        return module if step.path else guarded(module, ExecutionError)

    def _store(self, step: Step, result: Any) -> None:
        self._bind(step.result, result)
        for before, after in step.moved:
            self.values[after] = self.value(before)

    def _bind(self, template: Any, value: Any) -> None:
        """Name the tensors of a result after the markers of its template."""
        if isinstance(template, Ref):
            self.values[template.name] = value
        elif isinstance(template, Mapping):
            for key, child in template.items():
                self._bind(child, value[key])
        elif isinstance(template, tuple | list):
            for child, part in zip(template, value, strict=True):
                self._bind(child, part)
        elif hasattr(template, "__dataclass_fields__") and not isinstance(template, Size | type):
            for key in template.__dataclass_fields__:
                if hasattr(template, key):
                    self._bind(getattr(template, key), getattr(value, key))
        else:
            for key, child in (object_state(template) or {}).items():
                self._bind(child, getattr(value, key))


@contextlib.contextmanager
def _entered(step: Step) -> Any:
    with contextlib.ExitStack() as stack:
        if not step.grad_enabled:
            stack.enter_context(torch.no_grad())
        for device, enabled, dtype in step.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


_NOTHING = contextlib.nullcontext()


def _regions(step: Step) -> contextlib.AbstractContextManager[Any]:
    """Return the grad and autocast regions that the model itself had around a step."""
    return _NOTHING if step.grad_enabled and not step.autocast else _entered(step)
