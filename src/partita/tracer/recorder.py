"""The hooks of one trace: what every submodule was given and gave back, in terms of operator nodes."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import sympy
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from partita.tracer.hooks import UserHook, wrapped_hooks
from partita.tracer.objects import Snapshot, holds_tensors, own_attributes
from partita.tracer.reconcile import EagerCall, Reconciler
from partita.tracer.sizes import Size, SizeRules, depends_on_values, expression_of, rules_from, settled
from partita.tracer.skeleton import named_tensors
from partita.tracer.tree import PLAIN, Marker, Path, map_leaves, tensors_in
from partita.tracer.unrolled import count_operators, count_repeated

UNTRACED = "the trace cannot enter it"
"""Why a call is opaque whose module is kept whole."""


@dataclass(frozen=True, slots=True)
class Ref(Marker):
    """Stands for the value of a node inside a recorded tree."""

    name: str


@dataclass(frozen=True, slots=True)
class ModuleRef(Marker):
    """Stands for one of the model's own modules that is passed as an argument."""

    path: str


@dataclass(eq=False, slots=True)
class Call:
    """One recorded call.

    Attributes:
        path: Qualified name of the module ("" is the root), or of the autograd function.
        occurrence: How many calls of the same path came before it.
        start: Nodes recorded before the call.
        end: Nodes recorded when it returned.
        args: Positional arguments with `Ref`, `Size` and constants as leaves.
        kwargs: Keyword arguments likewise.
        result: What it returned, likewise.
        function: The autograd function or hook, if it is not a module.
        moved: Argument nodes that an in-place operation inside replaced: (before, after).
        grad_enabled: Grad mode at the call.
        autocast: Autocast state at the call.
        children: Calls inside it, in order.
        opaque: Why it must not be opened ("" if it may be).
        operators: Nodes that it recorded by itself and in repeated calls inside it.
        recompute: It lies in an activation-checkpoint region of the code around it.
        held: What the lists, dicts and objects among its arguments held when it began.
        changes: What it changed in them ("" if nothing); then only its operators say what it did.
    """

    path: str
    occurrence: int
    start: int
    args: Any
    kwargs: Any
    grad_enabled: bool
    autocast: tuple[Any, ...]
    function: type | UserHook | None = None
    end: int = -1
    result: Any = None
    moved: tuple[tuple[str, str], ...] = ()
    children: list[Call] = field(default_factory=list)
    opaque: str = ""
    operators: int = 0
    recompute: bool = False
    held: Snapshot | None = None
    changes: str = ""


@dataclass(eq=False, slots=True)
class Recording:
    """Everything that one trace left behind.

    Attributes:
        nodes: The operator nodes, in order.
        root: The root's call; its children are the calls of the submodules.
        inputs: Node names of the input tensors.
        tensors: Node name of each parameter and buffer to all its qualified names.
        parameters: Node names that are parameters.
        trainable: Node names of parameters and inputs that require a gradient.
        constants: Tensors that the model made or held without registering, by node name.
        sizes: How sizes follow from the inputs.
        buffer_writes: Buffers that the forward replaced by another tensor: qualified name to node name.
        settle: Turns a symbolic or plain size into an expression, with everything the trace learnt about sizes applied.
        omitted: For each call (path, occurrence) that was given None, because eager gives it, where it was.
        assumed: Values that the forward read.
        stored: Attributes by module path that the forward left tensors, or filled lists, dicts and objects, in.
    """

    nodes: list[torch.fx.Node]
    root: Call
    inputs: tuple[str, ...]
    tensors: dict[str, tuple[str, ...]]
    parameters: frozenset[str]
    trainable: frozenset[str]
    constants: dict[str, torch.Tensor]
    sizes: SizeRules
    buffer_writes: dict[str, str]
    settle: Callable[[Any], sympy.Basic]
    assumed: tuple[Assumption, ...] = ()
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    omitted: Mapping[tuple[str, int], frozenset[Path]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Assumption:
    """A value that the forward read, and that the capture takes for given.

    Attributes:
        question: What was asked, e.g. ``Tensor.__bool__``.
        arguments: Of what: ``(args, kwargs)`` with `Ref` and `Size` leaves.
        value: The answer.
        place: The user's file and line.
        nodes: The nodes that compute what was asked about.
    """

    question: Callable[..., Any]
    arguments: Any
    value: Any
    place: str
    nodes: tuple[str, ...]


class RecordedError(Exception):
    """Ends the trace once everything is noted."""


class Entry(nn.Module):
    """Hides the user's argument structure from export, which then only sees a tuple of tensors."""

    def __init__(self, model: nn.Module, call: Callable[[tuple[torch.Tensor, ...]], Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the model around the given tensors."""
        return self._call(tensors)


def _autocast_state() -> tuple[Any, ...]:
    return tuple(
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
        for d in ("cpu", "cuda")
        if torch.is_autocast_enabled(d)
    )


class Recorder:
    """The hooks' state during one trace."""

    def __init__(
        self, model: nn.Module, fake_mode: FakeTensorMode, stateful: Mapping[str, str], foreseen: tuple[EagerCall, ...]
    ) -> None:
        self.model = model
        self.reconciler = Reconciler(foreseen)
        self.fake_mode = fake_mode
        self.paths = {id(module.__dict__): path for path, module in model.named_modules()}
        self.before = {path: dict(vars(module)) for path, module in model.named_modules()}
        self.counts: dict[str, int] = {}
        self.stack: list[Call] = []
        self.tensors: dict[str, tuple[str, ...]] = {}
        self.parameters: set[str] = set()
        self.trainable: set[str] = set()
        self.recording: Recording | None = None
        self.stateful = stateful
        self.input_tensors: tuple[torch.Tensor, ...] = ()
        self.inputs: tuple[str, ...] = ()
        self.buffers: dict[str, dict[str, torch.Tensor | None]] = {}
        self.changed: dict[str, str] = {}
        self.assumed: list[Assumption] = []
        self.checkpoints = 0
        self.held: dict[str, dict[str, Snapshot]] = {}

    # -- nodes of values -----------------------------------------------------------------------------------------------
    @property
    def tracer(self) -> Any:
        """The proxy tracer that is at work."""
        mode = get_proxy_mode()
        assert mode is not None, "a recording hook ran outside the trace"
        return mode.tracer

    def node_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the node that holds a tensor's present value."""
        slot = get_proxy_slot(tensor, self.tracer, None)
        return None if slot is None else str(slot.proxy.node.name)

    def leaf(self, _path: object, value: Any) -> Any:
        """Replace one leaf of a recorded tree."""
        if isinstance(value, torch.Tensor):
            name = self.node_of(value)
            return value.detach() if name is None and not isinstance(value, FakeTensor) else Ref(name or "<untracked>")
        if isinstance(value, nn.Module) and id(value.__dict__) in self.paths:
            return ModuleRef(self.paths[id(value.__dict__)])
        expression = expression_of(value)
        if expression is None:
            return value
        expression = self.fake_mode.shape_env.replace(expression)  # type: ignore[union-attr]
        if not expression.free_symbols:
            return _plain(value, expression)
        if depends_on_values(expression):
            return Ref(str(get_proxy_slot(value.node, self.tracer).force().node.name))
        return Size(expression, {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)])

    # -- calls ---------------------------------------------------------------------------------------------------------
    def enter(self, path: str, args: Any, kwargs: Any, function: type | UserHook | None = None) -> Call:
        """Open a call inside the innermost one."""
        occurrence = self.counts.get(path, 0)
        self.counts[path] = occurrence + 1
        call = Call(
            path=path,
            occurrence=occurrence,
            start=len(self.tracer.graph.nodes),
            args=map_leaves(self.leaf, args),
            kwargs=map_leaves(self.leaf, dict(kwargs)),
            grad_enabled=torch.is_grad_enabled(),
            autocast=_autocast_state(),
            function=function,
            held=Snapshot((args, kwargs)),
        )
        if self.stack:
            self.stack[-1].children.append(call)
        self.stack.append(call)
        return call

    def leave(self, args: Any, kwargs: Any, result: Any) -> Any:
        """Close the innermost call; return its result with arguments that came back unchanged replaced by aliases."""
        call = self.stack[-1]
        given = tensors_in((args, kwargs))

        def distinct(_path: object, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and any(value is argument for argument in given):
                return torch.ops.aten.alias.default(
                    value
                )  # otherwise later reads would look like reads of the argument
            return value

        result = map_leaves(distinct, result)
        call.result = map_leaves(self.leaf, result)
        assert call.held is not None
        call.changes = call.changes or call.held.changed()
        if not call.changes:
            after = map_leaves(self.leaf, (args, dict(kwargs)))
            pairs = zip(refs((call.args, call.kwargs)), refs(after), strict=True)
            call.moved = tuple((b, a) for b, a in pairs if a != b)
        call.end = len(self.tracer.graph.nodes)
        self.stack.pop()
        if self.stack:
            count_repeated(call, self.stack[-1], self.paths)
        return result

    def pre_hook(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Open a module's call; return its arguments if eager gives it others."""
        path = self.paths.get(id(module.__dict__))
        if path is None or torch.compiler.is_dynamo_compiling() or get_proxy_mode() is None:
            return None
        if not self.stack:
            self._note_tensors()
            count_operators(self.tracer, self.stack, self.paths)
        settled = self.reconciler.settle(path, args, kwargs)
        args, kwargs = settled or (args, kwargs)
        call = self.enter(path, args, kwargs)
        call.opaque = _why_opaque(module)
        call.recompute = self.checkpoints > 0 and type(module).__call__ is nn.Module.__call__  # others do it themselves
        call.changes = getattr(vars(module).get("forward"), "changes", "")
        return settled

    def user_hook(self, path: str, place: UserHook, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that is recorded as a call inside its module's call."""

        def call(*given: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or get_proxy_mode() is None or not self.stack:
                return hook(*given)
            self.enter(f"{path}.{place.table}[{place.index}]", given, {}, function=place)
            return self.leave(given, {}, hook(*given))

        return call

    def post_hook(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        """Close a module's call; end the trace with the root's."""
        if id(module.__dict__) not in self.paths or torch.compiler.is_dynamo_compiling() or get_proxy_mode() is None:
            return None
        call = self.stack[-1]
        result = self.leave(args, kwargs, result)
        changed = _changed_attributes(self.before[call.path], vars(module))
        if changed:
            self.changed[call.path] = changed[0]
        if call.path in self.stateful and not call.opaque:
            call.opaque = f"its forward changes the attribute {self.stateful[call.path]!r}"
        if not self.stack:
            assert call.held is not None
            call.changes = call.held.handed_back()
            self._finish(call)
            raise RecordedError
        return result

    def _note_tensors(self) -> None:
        self.buffers = {path: dict(module._buffers) for path, module in self.model.named_modules()}
        self.inputs = tuple(self.node_of(tensor) or "" for tensor in self.input_tensors)
        self.trainable = {
            name for name, tensor in zip(self.inputs, self.input_tensors, strict=True) if tensor.requires_grad
        }
        for name, tensor, is_parameter in named_tensors(self.model):
            node = self.node_of(tensor)
            if node is not None:
                self.tensors[node] = (*self.tensors.get(node, ()), name)
                if is_parameter:
                    self.parameters.add(node)
                if tensor.requires_grad:
                    self.trainable.add(node)

    def _finish(self, root: Call) -> None:
        tracer = self.tracer
        nodes = list(tracer.graph.nodes)
        for node in nodes:
            if node.op == "get_attr":  # the bodies of control-flow operators; the trace's root forgets them
                node.meta["body"] = getattr(tracer.root, str(node.target), None)
        constants = {
            n.name: getattr(tracer.root, str(n.target))
            for n in nodes
            if n.op == "get_attr" and isinstance(getattr(tracer.root, str(n.target), None), torch.Tensor)
        }
        names = self.inputs
        self.recording = Recording(
            nodes=nodes,
            root=root,
            inputs=names,
            tensors=self.tensors,
            parameters=frozenset(self.parameters),
            trainable=frozenset(self.trainable),
            constants=constants,
            sizes=rules_from(self.fake_mode.shape_env, [t.shape for t in self.input_tensors]),
            buffer_writes=self._buffer_writes(),
            settle=settled(self.fake_mode.shape_env),
            assumed=tuple(self.assumed),
            stored=self._stored(),
            omitted=self.reconciler.omitted,
        )

    def _stored(self) -> dict[str, tuple[str, ...]]:
        found = {}
        for path, module in self.model.named_modules():
            held, before = self.held[path], self.before[path]
            new = {n: v for n, v in own_attributes(module).items() if v is not before.get(n)}
            names = {n for n, v in new.items() if not isinstance(v, PLAIN) and holds_tensors(v)}
            names |= {n for n, snapshot in held.items() if n not in new and snapshot.changed()}
            if names:
                found[path] = tuple(sorted(names))
        return found

    def _buffer_writes(self) -> dict[str, str]:
        writes: dict[str, str] = {}
        for path, module in self.model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is not None and tensor is not self.buffers[path].get(name):
                    writes[f"{path}.{name}" if path else name] = self.node_of(tensor) or "<untracked>"
        return writes


def _plain(value: Any, expression: sympy.Basic) -> Any:
    if isinstance(value, torch.SymBool):
        return bool(expression)
    return int(expression) if isinstance(value, torch.SymInt) else float(expression)


def refs(tree: Any) -> list[str]:
    """Return the value names in a template, in leaf order."""
    found: list[str] = []
    map_leaves(lambda _path, leaf: found.append(leaf.name) if isinstance(leaf, Ref) else None, tree)
    return found


def _changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of plain attributes whose value a forward changed."""
    return [
        name
        for name, value in after.items()
        if isinstance(value, PLAIN)
        and (name not in before or (before[name] != value or type(before[name]) is not type(value)))
    ]


def _why_opaque(module: nn.Module) -> str:
    """Say why a module's call must stay one piece whatever its size ("" if it may be opened)."""
    if module._backward_hooks or module._backward_pre_hooks:
        return "it has backward hooks"
    if "forward" in vars(module):
        return UNTRACED
    return ""


@contextlib.contextmanager
def patched_functions(recorder: Recorder) -> Iterator[None]:
    """Record ``autograd.Function.apply`` as a call, so that its own backward survives in the glue.

    Activation-checkpoint regions are traced through, and the calls inside are marked: the user's function may hold
    tensors of the trace, so it cannot run again itself.
    """
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None or not recorder.stack or torch.compiler.is_dynamo_compiling():
            return original(cls, *args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return _through_region(recorder, args[0], *args[2:])
        recorder.enter(f"{cls.__module__}.{cls.__qualname__}", args, kwargs, function=cls)
        return recorder.leave(args, kwargs, original(cls, *args, **kwargs))

    def region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        recorder.checkpoints += 1
        yield
        recorder.checkpoints -= 1

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", region),
    ):
        yield


def _through_region(recorder: Recorder, function: Callable[..., Any], *args: Any) -> Any:
    """Trace through a reentrant checkpoint, which gives no gradients unless one of its arguments has one."""
    recorder.checkpoints += 1
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))):
            return function(*args)
    finally:
        recorder.checkpoints -= 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep off the terminal what torch and the user's forward print or log during the trace."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.fx.experimental.symbolic_shapes", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # where warnings are errors, one would end the trace
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def hooked(recorder: Recorder) -> Iterator[None]:
    """Put the recorder's hooks outside the user's own."""
    handles = []
    with wrapped_hooks(recorder.model, recorder.user_hook):
        for module in recorder.model.modules():
            handles.append(module.register_forward_pre_hook(recorder.pre_hook, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(recorder.post_hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def restored_attributes(recorder: Recorder, *, settle: bool) -> Iterator[None]:
    """Undo what the traced forward did to the copy's own attributes, except plain constants if they are to settle."""
    for path, module in recorder.model.named_modules():
        recorder.before[path] = {**vars(module), "_buffer_copy": dict(module._buffers)}
        recorder.held[path] = {n: Snapshot(v) for n, v in own_attributes(module).items() if not isinstance(v, PLAIN)}
    try:
        yield
    finally:
        for path, module in recorder.model.named_modules():
            before = recorder.before[path]
            for snapshot in recorder.held[path].values():
                snapshot.restore()
            kept = {n: v for n, v in vars(module).items() if settle and isinstance(v, PLAIN)}
            for name in [name for name in vars(module) if name not in before and name not in kept]:
                object.__delattr__(module, name)
            for name, value in before.items():
                if name != "_buffer_copy" and name not in kept and vars(module).get(name) is not value:
                    vars(module)[name] = value
            for name, value in before["_buffer_copy"].items():
                module._buffers[name] = value
