"""Fold recorded operators back to calls of the user's own modules.

A call may be folded when its body touches nothing but its arguments, parameters, constants and sizes, and nothing of
its body but its results is used outside: then running the user's module gives the same values, with its hooks, custom
backward and flags right by construction. Containers of the cut candidates are opened, and every other call is folded
as high up as possible.  What stands between the calls stays as operators.  This one check finds every tensor side
channel: values stashed on ``self``, read by other layers, or gathered by hooks.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from partita.errors import CaptureError
from partita.tracer.control import Body, ControlOperator, is_control, why_not_control
from partita.tracer.exchange import objects_of, unseen_exchange
from partita.tracer.nodes import (
    body_of,
    depends_on_data,
    differentiable_nodes,
    is_check,
    is_mutable,
    is_opaque,
    is_random,
    is_size,
    node_regions,
    packet,
    storages,
    updated_statistics,
)
from partita.tracer.objects import check_handed_back
from partita.tracer.program import Program, Step
from partita.tracer.recorder import Assumption, Call, Recording, Ref, refs
from partita.tracer.sizes import Size, evaluate, expression_of
from partita.tracer.tree import map_leaves, path_text

_SILENT = {
    "_assert_scalar",
    "_assert_async",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}
_COSTLY = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "scaled_dot_product_attention",
    "lstm",
    "gru",
}
CANDIDATE_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
OPEN_SHARE = 1 / 8
"""A cut candidate that itself holds lists of modules is opened when it holds more than this share of all operators."""


@dataclass(eq=False)
class _Folder:
    recording: Recording
    model: nn.Module
    index: dict[str, int] = field(init=False)
    node: dict[str, fx.Node] = field(init=False)
    fixed: dict[str, str] = field(init=False)
    readers: dict[str, list[int]] = field(init=False)
    mentions: dict[str, list[Call]] = field(init=False)
    holders: dict[int, list[Call]] = field(init=False)
    order: dict[int, tuple[int, int]] = field(init=False)
    names: dict[str, str] = field(init=False)
    free: set[str] = field(default_factory=set)
    moved_later: set[str] = field(init=False)
    steps: list[Step] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        nodes = self.recording.nodes
        self.index = {n.name: i for i, n in enumerate(nodes)}
        self.node = {n.name: n for n in nodes}
        self.fixed = {name: name for name in (*self.recording.tensors, *self.recording.constants)}
        self.readers = {}
        for i, n in enumerate(nodes):
            for name in [] if is_size(n) else self.reads_of(n):
                self.readers.setdefault(name, []).append(i)
            root = self._in_place_root(n)
            if root is not None:
                self.fixed[n.name] = root
        self.moved_later = {s.name for n in nodes if is_mutable(n) for s in n.all_input_nodes[:1]} | {
            n.name for n in nodes if is_mutable(n)
        }
        self.mentions, self.order, self.holders = {}, {}, {}
        self._walk(self.recording.root, 0)
        self.names = {
            **{
                n: f"{'p' if n in self.recording.parameters else 'b'}:{names[0]}"
                for n, names in self.recording.tensors.items()
            }
        }
        self.names |= {n: f"c:{n}" for n in self.recording.constants}
        self.names |= {
            n: self.names[root] for n, root in self.fixed.items() if n not in self.names
        }  # changed in place: the same tensor

    # -- the recorded graph --------------------------------------------------------------------------------------------
    def reads_of(self, node: fx.Node) -> list[str]:
        """Return the nodes whose *values* a node reads; sizes that follow from the inputs are not values."""
        return [n.name for n in node.all_input_nodes if not is_size(n) and body_of(n) is None]

    def _in_place_root(self, node: fx.Node) -> str | None:
        """Return the parameter, buffer or constant that an in-place operator changes and returns."""
        if not is_mutable(node):
            return None
        first = node.args[0] if node.args else None
        return self.fixed.get(first.name) if isinstance(first, fx.Node) else None

    def _walk(self, call: Call, number: int) -> int:
        first = number
        for name in {*refs((call.args, call.kwargs)), *refs(call.result)}:
            self.mentions.setdefault(name, []).append(call)
        for held in objects_of(call):
            self.holders.setdefault(id(held), []).append(call)
        for child in call.children:
            number = self._walk(child, number + 1)
        self.order[id(call)] = (first, number)
        return number

    def _inside(self, inner: Call, outer: Call) -> bool:
        low, high = self.order[id(outer)]
        return low <= self.order[id(inner)][0] <= high

    def changed(self) -> set[str]:
        """Return the parameters and buffers that the call writes into, by node name."""
        found = {
            self.fixed[n] for n in self.fixed if n not in self.recording.tensors and n not in self.recording.constants
        }
        for node in self.recording.nodes:
            found |= {statistics.name for statistics in updated_statistics(node)}
        by_name = {name: node for node, names in self.recording.tensors.items() for name in names}
        return {
            n
            for n in found | {by_name.get(name, "") for name in self.recording.buffer_writes}
            if n in self.recording.tensors
        }

    def nodes_of(self, names: frozenset[str]) -> set[str]:
        """Return the nodes of parameters and buffers by qualified name."""
        return {node for node, known in self.recording.tensors.items() if names.intersection(known)}

    # -- the fold check ------------------------------------------------------------------------------------------------
    def why_not(self, call: Call) -> str:
        """Say why a call cannot be folded ("" if it can)."""
        if call.changes:
            return f"it changes {call.changes}"
        allowed = {*refs((call.args, call.kwargs)), *self.fixed}
        results = {*refs(call.result), *(after for _, after in call.moved), *self.fixed}
        for i in range(call.start, call.end):
            node = self.recording.nodes[i]
            if is_size(node):
                continue
            for name in self.reads_of(node):
                if self.index[name] < call.start and name not in allowed and not self._a_size_of(call, name):
                    return f"it reads {name} besides its arguments"
            if node.name not in results and not self._lifts(call, node):
                outside = next((r for r in self.readers.get(node.name, ()) if r >= call.end), None)
                if outside is not None:
                    return f"{node.name} inside is read outside by {self.recording.nodes[outside].name}"
                if any(not self._inside(other, call) for other in self.mentions.get(node.name, ())):
                    return f"{node.name} inside is used by another call"
        if "<untracked>" in allowed | results:
            return "it takes or returns a tensor that the trace cannot see"
        return unseen_exchange(call, lambda other: self._inside(other, call) or self._inside(call, other), self.holders)

    def _a_size_of(self, call: Call, name: str) -> bool:
        """Whether a number that the data decide follows from the sizes of what a call was given."""
        number = expression_of(self.recording.nodes[self.index[name]].meta.get("val"))
        if number is None:
            return False
        nodes = (self.recording.nodes[self.index[n]] for n in refs((call.args, call.kwargs)) if n in self.index)
        sizes = (size for node in nodes for size in getattr(node.meta.get("val"), "shape", ()))
        known = {symbol for size in sizes for symbol in self.recording.settle(size).free_symbols}
        return bool(self.recording.settle(number).free_symbols <= known)

    def _lifts(self, call: Call, node: fx.Node) -> bool:
        """Whether a number that the data decide, first asked for inside a call, is known before it."""
        given = all(self.index[name] < call.start for name in self.reads_of(node))
        return given and expression_of(node.meta.get("val")) is not None and depends_on_data(node)

    # -- which calls to open -------------------------------------------------------------------------------------------
    def candidates(self) -> tuple[set[str], set[str]]:
        """Return the paths of cut candidates and of the containers around them."""
        found: set[str] = set()
        for path, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, CANDIDATE_CONTAINERS):
                found |= {f"{path}.{name}" if path else name for name, _ in module.named_children()}
        around = {".".join(parts[:i]) for path in found for parts in [path.split(".")] for i in range(len(parts))}
        return found, around

    def must_open(self, call: Call) -> bool:
        """Whether a call holds cut candidates that are worth reaching."""
        found, around = self._candidate_sets
        if not call.path:
            return True
        if call.path not in around:
            return False
        inside_candidate = any(
            ".".join(call.path.split(".")[:i]) in found for i in range(1, len(call.path.split(".")) + 1)
        )
        share = (call.end - call.start) / max(1, self.recording.root.end - self.recording.root.start)
        return not inside_candidate or share > OPEN_SHARE

    # -- emission ------------------------------------------------------------------------------------------------------
    def run(self) -> list[Step]:
        self._candidate_sets = self.candidates()
        self._emit(self.recording.root)
        return self.steps

    def checks(self) -> list[Step]:
        """Return the operators that compute what the capture assumes about values."""
        self.steps = []
        wanted = {name for assumption in self.recording.assumed for name in assumption.nodes}
        for i, node in enumerate(self.recording.nodes):
            if node.name in wanted and node.op == "call_function" and node.target is not operator.getitem:
                self._op(node, i, self.recording.root)
        return self.steps

    def assumptions(self) -> list[Assumption]:
        """Return the assumptions in terms of the program's values."""

        def value(node: str) -> str:
            return self.names.get(node, node)

        return [
            dataclasses.replace(a, arguments=map_leaves(lambda _path, leaf: self.settled(leaf, value), a.arguments))
            for a in self.recording.assumed
        ]

    def _emit(self, call: Call) -> None:
        closed = call.opaque or (isinstance(call.function, type) and "an autograd function keeps its own backward")
        if not closed and self.must_open(call):
            self._open(call)
            return
        reason = self.why_not(call)
        if not reason:
            self._fold(call)
        elif closed:
            raise CaptureError(
                f"{call.path or 'the model'!r} must run as one piece ({closed}), but {reason}",
                hint="pass the value as an argument or result instead of a side channel",
                module=call.path,
            )
        else:
            self.reasons[call.path] = reason
            self._open(call)

    def _open(self, call: Call) -> None:
        self.paths.add(call.path)
        at = call.start
        for child in call.children:
            self._glue(at, child.start, call)
            self._emit(child)
            at = child.end
        self._glue(at, call.end, call)

    def _fold(self, call: Call) -> None:
        nodes = self.recording.nodes[call.start : call.end]
        for i, node in enumerate(nodes, start=call.start):
            wanted = any(reader >= call.end for reader in self.readers.get(node.name, ()))
            if wanted and self._lifts(call, node) and node.name not in refs(call.result):
                self._op(node, i, call)
                self.steps[-1].nodes = (call.start, call.start)
        body = {n.name for n in nodes}
        foreign = [name for n in nodes for name in self.reads_of(n) if name in self.recording.tensors]
        owned = (
            []
            if call.function
            else [
                node for node, names in self.recording.tensors.items() if any(_under(call.path, name) for name in names)
            ]
        )
        moved = tuple((b, a) for b, a in call.moved)
        writes = [name for name in [*refs(call.result), *(a for _, a in moved)] if name in body]
        self._add(
            kind="call",
            name=f"{call.path}#{call.occurrence}",
            path=call.path,
            target=call.function.apply if isinstance(call.function, type) else call.function,  # type: ignore[attr-defined]
            args=call.args,
            kwargs=call.kwargs,
            result=call.result,
            reads=[*refs((call.args, call.kwargs)), *owned, *foreign],
            writes=writes,
            moved=moved,
            nodes=(call.start, call.end),
            grad_enabled=call.grad_enabled,
            autocast=call.autocast,
            random=any(is_random(n) for n in nodes),
            recompute=call.recompute and not moved,
        )

    def _glue(self, start: int, end: int, owner: Call) -> None:
        for i in range(start, end):
            node = self.recording.nodes[i]
            skipped = is_size(node) or self._is_region(node) or node.target is operator.getitem
            if node.op == "call_function" and not skipped:
                self._op(node, i, owner)

    def _is_region(self, node: fx.Node) -> bool:
        return packet(node.target) in _SILENT or packet(node.target) in {
            "_set_grad_enabled",
            "_enter_autocast",
            "_exit_autocast",
        }

    def _op(self, node: fx.Node, i: int, owner: Call) -> None:
        target = self._target(node, owner)
        parts = [u for u in node.users if u.target is operator.getitem]
        result: Any = Ref(node.name)
        if isinstance(node.meta.get("val"), tuple | list):
            result = [None] * len(node.meta["val"])
            for part in parts:
                result[part.args[1]] = Ref(part.name)
        moved: tuple[tuple[str, str], ...] = ()
        if is_mutable(node) and isinstance(node.args[0], fx.Node):
            moved = ((node.args[0].name, node.name),)
        reads = self.reads_of(node)
        free = self._is_free(node, reads, moved)
        if free:
            self.free.add(node.name)
            self.free.update(part.name for part in parts)
        self._add(
            kind="op",
            name=node.name,
            path=owner.path,
            target=target,
            args=self._arguments(tuple(node.args)),
            kwargs=self._arguments(dict(node.kwargs)),
            result=result,
            reads=reads,
            writes=refs(result),
            moved=moved,
            nodes=(i, i + 1),
            replicable=free,
            grad_enabled=self.regions[i][0],
            autocast=self.regions[i][1],
            random=is_random(node),
            check=is_check(node),
        )

    @staticmethod
    def _target(node: fx.Node, owner: Call) -> Callable[..., Any]:
        """Return what runs an operator of the glue; refuse what only runs inside the user's own module."""
        if isinstance(node.target, torch._ops.OpOverload) or (depends_on_data(node) and not is_control(node)):
            return node.target  # type: ignore[return-value]
        reason = why_not_control(node) if is_control(node) else "it only runs as a whole"
        if reason:
            raise CaptureError(
                f"the forward of {owner.path or 'the model'!r} uses {packet(node.target)!r}: {reason}",
                hint="move it into a submodule of its own",
                module=owner.path,
            )
        return ControlOperator(node.target)  # type: ignore[arg-type]

    def _is_free(self, node: fx.Node, reads: list[str], moved: tuple[Any, ...]) -> bool:
        """Whether an operator is cheap and pure, and computed from inputs, constants and other such values only."""
        given = {*self.recording.inputs, *self.recording.constants} - self.recording.trainable
        cheap = (
            not is_check(node)
            and packet(node.target) not in _COSTLY
            and not is_control(node)
            and not is_random(node)
            and not moved
        )
        settled = not self.moved_later.intersection([*reads, node.name])
        return cheap and settled and all(name in given or name in self.free for name in reads)

    def _arguments(self, tree: Any) -> Any:
        def leaf(_path: object, value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            body = body_of(value)
            if body is not None:
                return Body(body)
            expression = expression_of(value.meta.get("val"))
            if is_size(value):
                number = value.meta["val"]
                if expression is None:
                    return number
                return Size(expression, {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(number)])
            return Ref(value.name)

        return map_leaves(leaf, _plain_containers(tree))

    @property
    def regions(self) -> list[tuple[bool, tuple[Any, ...]]]:
        """Grad mode and autocast regions around each node, as the model's own code set them."""
        if not hasattr(self, "_regions"):
            self._regions = list(node_regions(self.recording))
        return self._regions

    def settled(self, leaf: Any, name: Callable[[str], str]) -> Any:
        """Rename a value, and bring a size to what the whole trace has learnt about sizes."""
        if isinstance(leaf, Ref):
            return Ref(name(leaf.name))
        if not isinstance(leaf, Size):
            return leaf
        expression = self.recording.settle(leaf.expression)
        return Size(expression, leaf.kind) if expression.free_symbols else leaf.kind(evaluate(expression, {}))

    def _add(self, **fields: Any) -> None:
        def name(node: str) -> str:
            return self.names.get(node, node)

        for key in ("args", "kwargs", "result"):
            fields[key] = map_leaves(lambda _path, leaf: self.settled(leaf, name), fields[key])
        for key in ("reads", "writes"):
            fields[key] = tuple(dict.fromkeys(name(n) for n in fields[key]))
        fields["moved"] = tuple((name(b), name(a)) for b, a in fields["moved"])
        self.steps.append(Step(id=len(self.steps), **fields))


def _under(path: str, name: str) -> bool:
    """Whether a qualified tensor name lies in a module's subtree."""
    return not path or name.startswith(f"{path}.")


def _plain_containers(tree: Any) -> Any:
    """Turn fx's immutable argument containers into plain ones."""
    if isinstance(tree, dict):
        return {key: _plain_containers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain_containers(value) for value in tree]
    if isinstance(tree, tuple):
        return tuple(_plain_containers(value) for value in tree)
    return tree


@dataclass(frozen=True, eq=False, slots=True)
class Folded:
    """What folding gives.

    Attributes:
        program: The steps.
        names: Node name to value name where they differ.
        opened: Module path to the reason why its call could not be folded.
        paths: Paths of all modules whose forward was opened: their plain attributes are part of the capture.
    """

    program: Program
    names: dict[str, str]
    opened: dict[str, str]
    paths: frozenset[str]


def fold(
    recording: Recording, model: nn.Module, input_names: tuple[str, ...], changed: frozenset[str] = frozenset()
) -> Folded:
    """Turn a recording into a program.

    Args:
        recording: What a trace left behind.
        model: The traced (weightless) model, for its module tree.
        input_names: What to call the inputs, in their order.
        changed: Buffers that an eager run was seen to change, by qualified name.

    Returns:
        The program with its value names and the calls that had to be opened.

    Raises:
        CaptureError: If something that must stay whole cannot be folded.
    """
    check_handed_back(recording.root.changes, CaptureError)
    folder = _Folder(recording, model)
    folder.names |= dict(zip(recording.inputs, input_names, strict=True))
    steps = folder.run()
    rename: Callable[[str], str] = lambda name: folder.names.get(name, name)  # noqa: E731
    wanted = {rename(n) for n in [*refs(recording.root.result), *recording.buffer_writes.values()]}
    steps = _needed(steps, wanted)
    _house_unread([step for step in steps if not step.replicable], [rename(node) for node in recording.tensors])
    program = Program(
        steps=tuple(steps),
        inputs=input_names,
        tensors={rename(node): names for node, names in recording.tensors.items()},
        parameters=frozenset(rename(node) for node in recording.parameters),
        constants={rename(node): tensor for node, tensor in recording.constants.items()},
        sizes=recording.sizes,
        result=map_leaves(lambda _path, leaf: folder.settled(leaf, rename), recording.root.result),
        buffer_writes={name: rename(node) for name, node in recording.buffer_writes.items()},
        changed=frozenset(rename(node) for node in folder.changed() | folder.nodes_of(changed)),
        storage=storages(recording, rename),
        differentiable=frozenset(rename(node) for node in differentiable_nodes(recording)),
        stored=recording.stored,
        dynamic=any(depends_on_data(node) or is_opaque(node) for node in recording.nodes),
        assumptions=tuple(folder.assumptions()),
        checks=tuple(folder.checks()),
    )
    _check_visible(program)
    _check_constants(recording)
    return Folded(program, folder.names, folder.reasons, frozenset(folder.paths))


def _needed(steps: list[Step], wanted: set[str]) -> list[Step]:
    """Drop operators of the glue whose values nobody uses; calls and in-place operators have effects of their own."""
    kept: list[Step] = []
    wanted = set(wanted)
    for step in reversed(steps):
        if step.kind == "call" or step.moved or step.check or wanted & set(step.writes):
            kept.append(step)
            wanted |= set(step.reads)
    kept.reverse()
    for i, step in enumerate(kept):
        step.id = i
    return kept


def _house_unread(steps: list[Step], tensors: Sequence[str]) -> None:
    """Give every parameter and buffer that no step reads a home beside the one registered after it.

    A head that this call does not use belongs near its neighbours, and rather too late than too early: values flow
    forward, so another call of the model can still bring it what it needs.
    """
    reader = {name: step for step in reversed(steps) for name in step.reads}
    near = steps[-1] if steps else None
    for name in reversed(tensors):
        near = reader.get(name, near)
        if near is not None and name not in near.reads:
            near.reads = (*near.reads, name)


def _check_constants(recording: Recording) -> None:
    """Refuse values that exist only while tracing; the module that makes one may run as it is."""
    for i, node in enumerate(recording.nodes):
        if isinstance(recording.constants.get(node.name), FakeTensor):
            raise CaptureError(
                f"the forward makes the tensor c:{node.name} in a way that the trace cannot follow",
                hint="autograd.grad inside a forward, or a change of .data, keeps its module whole",
                module=_owner(recording.root, i).path,
            )


def _owner(call: Call, position: int) -> Call:
    """Return the innermost module call around a recorded node."""
    inside = (c for c in call.children if c.function is None and c.start <= position < c.end)
    return next((_owner(child, position) for child in inside), call)


def _check_visible(program: Program) -> None:
    """Refuse results that the trace could not follow."""

    def leaf(path: tuple[str | int, ...], value: Any) -> None:
        if isinstance(value, Ref) and value.name == "<untracked>":
            raise CaptureError(
                f"the result {path_text(path)} is a tensor that the trace cannot see",
                hint="return tensors that the forward computes from its inputs and parameters",
            )

    map_leaves(leaf, program.result)
