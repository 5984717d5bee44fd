"""Facts about recorded operator nodes: names, arguments, randomness, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from partita.tracer.recorder import UNTRACED, Call, Recording, refs
from partita.tracer.sizes import depends_on_values, expression_of

BATCH_NORMS = {"batch_norm", "_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
"""Operators that normalise over the rows of the batch in training."""
_TRAINS = ("training", "use_input_stats")
"""Arguments by which normalisations take the batch's statistics, and update the running ones."""
_NO_GRADIENT = {
    "detach",
    "argmax",
    "argmin",
    "argsort",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "sign",
}


def packet(target: Any) -> str:
    """Return the operator's name without namespace and overload, e.g. ``add_``."""
    return (
        target._schema.name.split("::")[-1]
        if isinstance(target, torch._ops.OpOverload)
        else getattr(target, "__name__", str(target))
    )


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return an operator node's arguments by schema name, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    schema = node.target._schema.arguments
    given = {a.name: v for a, v in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def updated_statistics(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a normalisation updates without saying so in its schema."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    given = arguments_of(node)
    if not any(given.get(flag) for flag in _TRAINS):
        return []
    running = (given.get("running_mean"), given.get("running_var"))
    return [statistics for statistics in running if isinstance(statistics, fx.Node)]


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that follows from the inputs' sizes."""
    value = node.meta.get("val")
    if isinstance(value, bool | int | float):
        return True
    expression = expression_of(value)
    return expression is not None and not depends_on_values(expression)


def memory_of(node: fx.Node) -> int | None:
    """Return what identifies the memory of a node's tensor; None if it is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def is_mutable(node: fx.Node) -> bool:
    """Whether an operator writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node names as an operand of a control-flow operator, or None."""
    if node.op != "get_attr":
        return None
    known = node.meta.get("body")
    if known is None and node.graph.owning_module is not None:
        known = getattr(node.graph.owning_module, str(node.target), None)
    return known if isinstance(known, fx.GraphModule) else None


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a control-flow operator runs, in the order of its arguments."""
    found = [body_of(source) for source in node.all_input_nodes]
    return [graph for graph in found if graph is not None]


def inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graphs that a control-flow operator runs, and of those inside them."""
    for graph in bodies(node):
        for inner in graph.graph.nodes:
            yield inner
            yield from inner_nodes(inner)


def is_opaque(node: fx.Node) -> bool:
    """Whether a node stands for a module that the trace did not enter."""
    return node.op == "call_function" and str(node.target) == "partita.opaque.default"


def is_check(node: fx.Node) -> bool:
    """Whether an operator looks at a value, and raises or does nothing."""
    return node.op == "call_function" and str(node.target) == "partita.expect.default"


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers with its recorded arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return any(is_random(inner) for inner in inner_nodes(node))
    if is_opaque(node):
        return True
    given = arguments_of(node)
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    if "train" in given and ("p" in given or "dropout" in given):
        return bool(given["train"]) and bool(given.get("p", given.get("dropout")))
    return torch.Tag.nondeterministic_seeded in node.target.tags


def node_regions(recording: Recording) -> Iterator[tuple[bool, tuple[Any, ...]]]:
    """Yield for every node the grad mode and the autocast regions that the model's own code set around it."""
    grad = True
    autocast: list[Any] = []
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


def differentiable_nodes(recording: Recording) -> set[str]:
    """Return the names of the nodes through which a gradient flows.

    What an autograd function returns has a gradient as soon as an argument has one, whatever its forward does; what an
    untraced module returns, as soon as an argument or one of its parameters has one.
    """
    found = set(recording.trainable)
    unseen = _unseen_by_end(recording)
    for i, (node, (grad_enabled, _autocast)) in enumerate(
        zip(recording.nodes, node_regions(recording), strict=True), start=1
    ):
        if node.op == "call_function" and grad_enabled and packet(node.target) not in _NO_GRADIENT:
            value = node.meta.get("val")
            smooth = any(map(_is_smooth, value if isinstance(value, tuple | list) else [value]))
            if smooth and any(source.name in found for source in node.all_input_nodes):
                found.add(node.name)
        for arguments, results in unseen.get(i, ()):
            if grad_enabled and found.intersection(arguments):
                found |= results
    return found


def _unseen_by_end(recording: Recording) -> dict[int, list[tuple[set[str], set[str]]]]:
    """Return the calls whose backward the trace does not see by their end: what they read and give.

    These are the calls of autograd functions and of modules that the trace does not enter.
    """
    found: dict[int, list[tuple[set[str], set[str]]]] = {}
    smooth = {node.name for node in recording.nodes if _is_smooth(node.meta.get("val"))}

    def visit(inner: Call) -> None:
        for child in inner.children:
            visit(child)
        if inner.function is not None or inner.opaque == UNTRACED:
            read = set(refs((inner.args, inner.kwargs)))
            if inner.function is None:
                own = f"{inner.path}." if inner.path else ""
                read |= {n for n, names in recording.tensors.items() if any(name.startswith(own) for name in names)}
            found.setdefault(inner.end, []).append((read, smooth.intersection(refs(inner.result))))

    visit(recording.root)
    return found


def _is_smooth(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def depends_on_data(node: fx.Node) -> bool:
    """Whether a node is a number, or has a size, that only the data decides."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    return any((e := expression_of(size)) is not None and depends_on_values(e) for size in sizes)


def storages(recording: Recording, rename: Callable[[str], str]) -> dict[str, str]:
    """Return for every tensor value the first value that has the same memory."""
    owner: dict[int, str] = {}
    found: dict[str, str] = {}
    for node in recording.nodes:
        memory = memory_of(node)
        if memory is not None:
            found[rename(node.name)] = owner.setdefault(memory, rename(node.name))
    return found
