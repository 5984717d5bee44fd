"""Fold recorded operators back to calls of the user's own modules.

A call may be folded when its body touches nothing but its arguments, parameters, constants and sizes, and nothing of its body but its results
is used outside: then running the user's module gives the same values, with its hooks, custom backward and flags right by construction.
Containers of the cut candidates are opened, and every other call is folded as high up as possible.  What stands between the calls stays as
operators.  This one check finds every tensor side channel: values stashed on ``self``, read by other layers, or gathered by hooks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from partita.errors import CaptureError
from partita.tracer.program import Program, Step, refs
from partita.tracer.record import Call, Recording, Ref
from partita.tracer.sizes import Size, depends_on_values, expression_of
from partita.tracer.tree import map_leaves, path_text

_SILENT = {"_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}
CANDIDATE_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
OPEN_SHARE = 1 / 8
"""A cut candidate that itself holds lists of modules is opened when it holds more than this share of all operators."""


def packet(target: Any) -> str:
    """Return the operator's name without namespace and overload, e.g. ``add_``."""
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def is_random(target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers with these arguments."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    given = {a.name: v for a, v in zip(schema.arguments, arguments, strict=False)} | keywords
    given = {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments}
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    if "train" in given and ("p" in given or "dropout" in given):
        return bool(given["train"]) and bool(given.get("p", given.get("dropout")))
    return torch.Tag.nondeterministic_seeded in target.tags


@dataclass(eq=False)
class _Folder:
    recording: Recording
    model: nn.Module
    index: dict[str, int] = field(init=False)
    node: dict[str, fx.Node] = field(init=False)
    fixed: dict[str, str] = field(init=False)
    readers: dict[str, list[int]] = field(init=False)
    mentions: dict[str, list[Call]] = field(init=False)
    order: dict[int, tuple[int, int]] = field(init=False)
    names: dict[str, str] = field(init=False)
    steps: list[Step] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.recording.nodes
        self.index = {n.name: i for i, n in enumerate(nodes)}
        self.node = {n.name: n for n in nodes}
        self.fixed = {name: name for name in (*self.recording.tensors, *self.recording.constants)}
        self.readers = {}
        for i, n in enumerate(nodes):
            for name in self.reads_of(n):
                self.readers.setdefault(name, []).append(i)
            root = self._in_place_root(n)
            if root is not None:
                self.fixed[n.name] = root
        self.mentions, self.order = {}, {}
        self._walk(self.recording.root, 0)
        self.names = {**{n: f"{'p' if n in self.recording.parameters else 'b'}:{names[0]}" for n, names in self.recording.tensors.items()}}
        self.names |= {n: f"c:{n}" for n in self.recording.constants}

    # -- the recorded graph --------------------------------------------------------------------------------------------
    def reads_of(self, node: fx.Node) -> list[str]:
        """Return the nodes whose *values* a node reads; sizes that follow from the inputs are not values."""
        return [n.name for n in node.all_input_nodes if not self.is_size(n)]

    @staticmethod
    def is_size(node: fx.Node) -> bool:
        """Whether a node is a number that follows from the inputs' sizes."""
        value = node.meta.get("val")
        if isinstance(value, bool | int | float):
            return True
        expression = expression_of(value)
        return expression is not None and not depends_on_values(expression)

    def _in_place_root(self, node: fx.Node) -> str | None:
        """Return the parameter, buffer or constant that an in-place operator changes and returns."""
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            return None
        first = node.args[0] if node.args else None
        return self.fixed.get(first.name) if isinstance(first, fx.Node) else None

    def _walk(self, call: Call, number: int) -> int:
        first = number
        for name in {*refs((call.args, call.kwargs)), *refs(call.result)}:
            self.mentions.setdefault(name, []).append(call)
        for child in call.children:
            number = self._walk(child, number + 1)
        self.order[id(call)] = (first, number)
        return number

    def _inside(self, inner: Call, outer: Call) -> bool:
        low, high = self.order[id(outer)]
        return low <= self.order[id(inner)][0] <= high

    # -- the fold check ------------------------------------------------------------------------------------------------
    def why_not(self, call: Call) -> str:
        """Say why a call cannot be folded ("" if it can)."""
        allowed = {*refs((call.args, call.kwargs)), *self.fixed}
        results = {*refs(call.result), *(after for _, after in call.moved), *self.fixed}
        for i in range(call.start, call.end):
            node = self.recording.nodes[i]
            if self.is_size(node):
                continue
            for name in self.reads_of(node):
                if self.index[name] < call.start and name not in allowed:
                    return f"it reads {name} besides its arguments"
            if node.name not in results:
                outside = next((r for r in self.readers.get(node.name, ()) if r >= call.end), None)
                if outside is not None:
                    return f"{node.name} inside is read outside by {self.recording.nodes[outside].name}"
                if any(not self._inside(other, call) for other in self.mentions.get(node.name, ())):
                    return f"{node.name} inside is used by another call"
        if "<untracked>" in allowed | results:
            return "it takes or returns a tensor that the trace cannot see"
        return ""

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
        inside_candidate = any(".".join(call.path.split(".")[:i]) in found for i in range(1, len(call.path.split(".")) + 1))
        share = (call.end - call.start) / max(1, self.recording.root.end - self.recording.root.start)
        return not inside_candidate or share > OPEN_SHARE

    # -- emission ------------------------------------------------------------------------------------------------------
    def run(self) -> list[Step]:
        self._candidate_sets = self.candidates()
        self._emit(self.recording.root)
        return self.steps

    def _emit(self, call: Call) -> None:
        closed = call.opaque or (call.function is not None and "an autograd function keeps its own backward")
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
        at = call.start
        for child in call.children:
            self._glue(at, child.start, call)
            self._emit(child)
            at = child.end
        self._glue(at, call.end, call)

    def _fold(self, call: Call) -> None:
        nodes = self.recording.nodes[call.start : call.end]
        body = {n.name for n in nodes}
        foreign = [name for n in nodes for name in self.reads_of(n) if name in self.recording.tensors]
        owned = [] if call.function else [node for node, names in self.recording.tensors.items() if any(_under(call.path, name) for name in names)]
        moved = tuple((b, a) for b, a in call.moved)
        writes = [name for name in [*refs(call.result), *(a for _, a in moved)] if name in body]
        writes += [n.name for n in nodes if n.name in self.fixed and n.name not in self.recording.tensors and n.name not in self.recording.constants]
        self._add(
            kind="call",
            name=f"{call.path}#{call.occurrence}",
            path=call.path,
            target=None if call.function is None else call.function.apply,  # type: ignore[attr-defined]
            args=call.args,
            kwargs=call.kwargs,
            result=call.result,
            reads=[*refs((call.args, call.kwargs)), *owned, *foreign],
            writes=writes,
            moved=moved,
            nodes=(call.start, call.end),
            grad_enabled=call.grad_enabled,
            autocast=call.autocast,
            random=any(is_random(n.target, n.args, n.kwargs) for n in nodes),
        )

    def _glue(self, start: int, end: int, owner: Call) -> None:
        for i in range(start, end):
            node = self.recording.nodes[i]
            if node.op == "call_function" and not self.is_size(node) and not self._is_region(node):
                if node.target is not operator.getitem:
                    self._op(node, i, owner)

    def _is_region(self, node: fx.Node) -> bool:
        return packet(node.target) in _SILENT or packet(node.target) in {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}

    def _op(self, node: fx.Node, i: int, owner: Call) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"the glue of {owner.path or 'the model'!r} uses {packet(node.target)!r}, which cannot run outside its module",
                hint="move it into a submodule of its own",
                module=owner.path,
            )
        parts = [u for u in node.users if u.target is operator.getitem]
        result: Any = Ref(node.name)
        if isinstance(node.meta.get("val"), tuple | list):
            result = [None] * len(node.meta["val"])
            for part in parts:
                result[part.args[1]] = Ref(part.name)
        moved = ()
        if node.target._schema.is_mutable and isinstance(node.args[0], fx.Node):
            moved = ((node.args[0].name, node.name),)
        self._add(
            kind="op",
            name=node.name,
            path=owner.path,
            target=node.target,
            args=self._arguments(tuple(node.args)),
            kwargs=self._arguments(dict(node.kwargs)),
            result=result,
            reads=self.reads_of(node),
            writes=refs(result),
            moved=moved,
            nodes=(i, i + 1),
            grad_enabled=self.regions[i][0],
            autocast=self.regions[i][1],
            random=is_random(node.target, node.args, node.kwargs),
        )

    def _arguments(self, tree: Any) -> Any:
        def leaf(_path: object, value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            expression = expression_of(value.meta.get("val"))
            if self.is_size(value):
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
            self._regions = list(_regions(self.recording))
        return self._regions

    def _add(self, **fields: Any) -> None:
        rename = lambda _path, leaf: Ref(self.names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf  # noqa: E731
        named = lambda names: tuple(dict.fromkeys(self.names.get(n, n) for n in names))  # noqa: E731
        for key in ("args", "kwargs", "result"):
            fields[key] = map_leaves(rename, fields[key])
        for key in ("reads", "writes"):
            fields[key] = named(fields[key])
        fields["moved"] = tuple((self.names.get(b, b), self.names.get(a, a)) for b, a in fields["moved"])
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


def _regions(recording: Recording) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    grad, autocast = True, []
    for node in recording.nodes:
        yield grad, tuple(autocast)
        name = packet(node.target) if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif name == "_enter_autocast":
            device, dtype, enabled, _cache = node.args
            autocast.append((device, enabled, dtype or torch.get_autocast_dtype(str(device))))
        elif name == "_exit_autocast":
            autocast.pop()


def fold(recording: Recording, model: nn.Module, input_names: tuple[str, ...]) -> tuple[Program, dict[str, str]]:
    """Turn a recording into a program.

    Args:
        recording: What a trace left behind.
        model: The traced (weightless) model, for its module tree.
        input_names: What to call the inputs, in their order.

    Returns:
        The program, and for every call that had to be opened the reason by module path.

    Raises:
        CaptureError: If something that must stay whole cannot be folded.
    """
    folder = _Folder(recording, model)
    folder.names |= dict(zip(recording.inputs, input_names, strict=True))
    steps = folder.run()
    rename: Callable[[str], str] = lambda name: folder.names.get(name, name)  # noqa: E731
    program = Program(
        steps=tuple(_needed(steps, {rename(n) for n in [*refs(recording.root.result), *recording.buffer_writes.values()]})),
        inputs=input_names,
        tensors={rename(node): names for node, names in recording.tensors.items()},
        parameters=frozenset(rename(node) for node in recording.parameters),
        constants={rename(node): tensor for node, tensor in recording.constants.items()},
        sizes=recording.sizes,
        result=map_leaves(lambda _p, leaf: Ref(rename(leaf.name)) if isinstance(leaf, Ref) else leaf, recording.root.result),
        buffer_writes={name: rename(node) for name, node in recording.buffer_writes.items()},
    )
    _check_visible(program)
    return program, folder.reasons


def _needed(steps: list[Step], wanted: set[str]) -> list[Step]:
    """Drop operators of the glue whose values nobody uses; keep calls, which may have effects of their own, and in-place operators."""
    kept: list[Step] = []
    wanted = set(wanted)
    for step in reversed(steps):
        if step.kind == "call" or step.moved or wanted & set(step.writes):
            kept.append(step)
            wanted |= set(step.reads)
    kept.reverse()
    for i, step in enumerate(kept):
        step.id = i
    return kept


def _check_visible(program: Program) -> None:
    """Refuse results that the trace could not follow."""

    def leaf(path: tuple[str | int, ...], value: Any) -> None:
        if isinstance(value, Ref) and value.name == "<untracked>":
            raise CaptureError(
                f"the result {path_text(path)} is a tensor that the trace cannot see",
                hint="return tensors that the forward computes from its inputs and parameters",
            )

    map_leaves(leaf, program.result)
