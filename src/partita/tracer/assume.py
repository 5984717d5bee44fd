"""Values that a forward reads to decide its path, taken from the example and checked at every call.

``if labels.max() >= vocabulary`` or ``if mask.all()`` cannot be traced: there is no value while tracing.  Where such a
value follows from the call's inputs alone, it is computed from the example, the trace goes on with it, and the
operators that give it become part of the capture: before each call they are computed again, and a call with another
value is captured anew.  What depends on parameters or on other values of the model cannot be known before the call and
is not assumed; only checks that raise (`partita.tracer.checks`) may look at it.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from partita.tracer.checks import passing_answer
from partita.tracer.nodes import is_mutable, is_opaque, is_random, is_size, memory_of
from partita.tracer.places import innermost_place
from partita.tracer.program import Environment, Program
from partita.tracer.recorder import Assumption, Recorder, Ref
from partita.tracer.tree import map_leaves

LEVELS = ("nothing", "truths", "numbers")
"""What the trace may assume: nothing, the truth of tensors, any number read from them."""

_TRUTHS = {
    torch.Tensor.__bool__,
    torch.Tensor.__contains__,
    torch.Tensor.equal,
    torch.Tensor.allclose,
    torch.Tensor.is_nonzero,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
_NUMBERS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a trace may take from the values of its inputs.

    Attributes:
        level: One of `LEVELS`.
        known: Answers to use instead of the example's, in the order of the questions.
    """

    level: str = "nothing"
    known: tuple[Assumption, ...] = ()

    def mode(self, recorder: Recorder, given: tuple[torch.Tensor, ...]) -> contextlib.AbstractContextManager[Any]:
        """Return the mode in which the traced forward runs."""
        return ValueReads(recorder, given, self)


class ValueReads(TorchFunctionMode):
    """Answers what the traced forward asks of values.

    Args:
        recorder: The trace at work.
        given: The call's real input tensors, in the recorder's order.
        reading: What may be answered.
    """

    def __init__(self, recorder: Recorder, given: tuple[torch.Tensor, ...], reading: Reading) -> None:
        super().__init__()
        self._recorder = recorder
        self._given = given
        self._level = reading.level
        self._known = reading.known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a question about values; leave everything else to torch."""
        answer = _UNKNOWN
        truth = func in _TRUTHS or _is_truth(func, args)
        if (truth or func in _NUMBERS) and any(isinstance(a, FakeTensor) for a in args) and _tracing():
            if truth:
                answer = _checked(args, sys._getframe(1))
            if answer is _UNKNOWN and (self._level == "numbers" or (truth and self._level == "truths")):
                answer = self._assumed(func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {})) if answer is _UNKNOWN else answer

    def _assumed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a value of the inputs from the example."""
        recorder = self._recorder
        template = map_leaves(recorder.leaf, (args, kwargs))
        nodes = slice_of(list(recorder.tracer.graph.nodes), _names(recorder, (args, kwargs)), recorder.inputs)
        if nodes is None:
            return _UNKNOWN
        number = len(recorder.assumed)
        if number < len(self._known):
            value = self._known[number].value
        elif any(tensor.is_meta for tensor in self._given):
            return _UNKNOWN
        else:
            operands, root = map_leaves(self._operand, (args, kwargs)), recorder.tracer.root
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                value = self._compute(func, nodes, operands, root)
        place = innermost_place(traceback.extract_stack())
        recorder.assumed.append(Assumption(func, template, value, place, tuple(n.name for n in nodes)))
        return value

    def _operand(self, _path: object, leaf: Any) -> Any:
        return Ref(self._recorder.node_of(leaf) or "") if isinstance(leaf, FakeTensor) else _hint(leaf)

    def _compute(self, func: Any, nodes: Sequence[fx.Node], operands: Any, root: Any) -> Any:
        """Compute the answer from the real inputs."""
        inputs = self._recorder.inputs
        values: dict[str, Any] = {name: t.detach().clone() for name, t in zip(inputs, self._given, strict=True)}

        def real(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return values[leaf.name] if leaf.name in values else _hint(leaf.meta["val"])
            return leaf

        for node in nodes:
            if node.op == "get_attr":
                values[node.name] = getattr(root, str(node.target))
            elif node.op == "call_function":
                given, named = fx.node.map_aggregate((node.args, node.kwargs), real)
                values[node.name] = node.target(*given, **named)  # type: ignore[operator]

        given, named = map_leaves(lambda _path, leaf: values[leaf.name] if isinstance(leaf, Ref) else leaf, operands)
        return func(*given, **named)


def _tracing() -> bool:
    return get_proxy_mode() is not None and not torch.compiler.is_dynamo_compiling()


def _checked(args: tuple[Any, ...], frame: FrameType) -> Any:
    """Go on as if a check of values held, and leave an operator that sees to it."""
    answer = passing_answer(frame) if len(args) == 1 else None
    if answer is None:
        return _UNKNOWN
    torch.ops.partita.expect(args[0], answer, f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return answer


def _is_truth(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is ``item()`` of a truth value, as ``assert torch.all(x).item()`` has it."""
    return func is torch.Tensor.item and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bool


def _hint(value: Any) -> Any:
    """Return the example's number for a symbolic one."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _names(recorder: Recorder, tree: Any) -> list[str]:
    found: list[str] = []

    def leaf(_path: object, value: Any) -> None:
        if isinstance(value, FakeTensor):
            found.append(recorder.node_of(value) or "<untracked>")

    map_leaves(leaf, tree)
    return found


def slice_of(nodes: Sequence[fx.Node], names: Iterable[str], inputs: Iterable[str]) -> list[fx.Node] | None:
    """Return the nodes that compute some values from inputs and constants alone, in order.

    Operators that write into memory which one of them reads belong to them.

    Args:
        nodes: The trace so far.
        names: The wanted nodes.
        inputs: Nodes of the call's input tensors.

    Returns:
        The nodes; None if a parameter, chance or something else that is unknown before the call takes part.
    """
    by_name, given = {n.name: n for n in nodes}, set(inputs)
    writers: dict[int | None, list[fx.Node]] = {}
    for node in nodes:
        if is_mutable(node) and (memory := memory_of(node)) is not None:
            writers.setdefault(memory, []).append(node)
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if name not in by_name or not _knowable(by_name[name], given):
            return None
        found.add(name)
        node = by_name[name]
        waiting += [source.name for source in node.all_input_nodes if not is_size(source)]
        waiting += [writer.name for writer in writers.get(memory_of(node), ())]
    return [node for node in nodes if node.name in found]


def _knowable(node: fx.Node, inputs: set[str]) -> bool:
    """Whether a node's value is known before the call."""
    if node.op == "placeholder":
        return node.name in inputs
    if node.op == "get_attr":
        return isinstance(node.meta.get("val"), torch.Tensor | None)
    if node.target is operator.getitem:
        return True
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and not is_random(node) and not is_opaque(node)


def holds_for(program: Program, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether what a capture assumed about values is true of a call.

    Args:
        program: A capture whose sizes hold for the call.
        tensors: The call's input tensors.
    """
    if not program.assumptions:
        return True
    shapes = tuple(tuple(t.shape) for t in tensors)
    written = any(step.moved for step in program.checks)
    given = tuple(t.detach().clone() if written else t.detach() for t in tensors)

    def nothing(name: str) -> Any:
        raise KeyError(name)

    env = Environment(program, nothing, nothing, shapes, dict(zip(program.inputs, given, strict=True)))
    with torch.no_grad():
        env.run(program.checks)
        for assumption in program.assumptions:
            args, kwargs = env.fill(assumption.arguments)
            value = assumption.question(*args, **kwargs)
            if type(value) is not type(assumption.value) or value != assumption.value:
                return False
    return True
