"""Control-flow operators of the containers' own code: ``cond``, ``while_loop``, ``scan``, ``map`` and their kind.

Theory of operation.  Under the trace such an operator is one node whose operands are tensors, numbers and *bodies*:
graphs of operators that the trace made from the user's functions.  A body is closed.  Parameters, other tensors and
sizes that the function read from around it are operands of the node, so that placing the step where its operands are
places the weights of the body too, and no size is frozen in it.

A step runs the operator itself on the bodies, not a loop of our own: an eager call of ``torch.cond`` ends in the same
operator, so values, gradients and even *which* gradients exist (zeros, not None, for the branch that is not taken) are
those of the user's model.

Rows.  An operator keeps rows apart if its bodies do, which is judged by following the rows through each body as through
the call around it.  A value that is carried from step to step and has no rows must not depend on them; with that, what
holds for one step holds for any number of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor

from partita.tracer.nodes import bodies, body_of, is_mutable, is_opaque, memory_of, packet, updated_statistics
from partita.tracer.sizes import expression_of
from partita.tracer.tree import Marker, leaves, map_leaves

if TYPE_CHECKING:
    from partita.tracer.rows import RowAnalysis

REPEATED = {"scan", "associative_scan"}
"""Operators that step along dim 0 of a list of operands; what a step makes may depend on the steps before."""
_MAPPED = {"map_impl"}
"""Operators that step along dim 0 of a list of operands; the steps know nothing of each other."""
ATTENTION = {"flex_attention"}
_DECIDED = {"cond", "while_loop"}
"""Operators in which a value decides what runs."""
KNOWN = {*_DECIDED, *REPEATED, *_MAPPED, *ATTENTION}
"""Operators that may be steps of their own; others run inside a module of the user's only."""


@dataclass(frozen=True, eq=False, slots=True)
class Body(Marker):
    """A graph of operators as the argument of a step.

    Attributes:
        graph: The graph; it reads nothing but its arguments and its own constants.
    """

    graph: fx.GraphModule

    def __repr__(self) -> str:
        """Return the text of the graph and of the graphs inside it: equal texts compute the same."""
        inner = [repr(Body(g)) for node in self.graph.graph.nodes if (g := body_of(node)) is not None]
        held = [repr(value) for value in _constants(self.graph)]
        return "\n".join([self.graph.code, *held, *inner])


@dataclass(frozen=True, slots=True)
class ControlOperator:
    """Runs a control-flow operator on a step's arguments.

    Attributes:
        operator: E.g. ``torch.ops.higher_order.cond``.
    """

    operator: HigherOrderOperator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator with the graphs in place of their markers."""
        args, kwargs = map_leaves(lambda _path, leaf: leaf.graph if isinstance(leaf, Body) else leaf, (args, kwargs))
        return self.operator(*args, **kwargs)

    def __str__(self) -> str:
        """Return the operator's name."""
        return str(self.operator.name())


def is_control(node: fx.Node) -> bool:
    """Whether a node is a control-flow operator that may be a step of its own."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in KNOWN and bool(bodies(node))


def why_not_control(node: fx.Node) -> str:
    """Say why a control-flow operator cannot be a step ("" if it can)."""
    for graph in _all_bodies(node):
        given = {memory_of(n) for n in graph.graph.nodes if n.op in {"placeholder", "get_attr"}} - {None}
        for inner in graph.graph.nodes:
            if is_mutable(inner) and given & {memory_of(source) for source in inner.all_input_nodes[:1]}:
                return f"{inner.name} inside it changes an operand"
            if updated_statistics(inner):
                return f"{inner.name} inside it updates running statistics"
            if is_opaque(inner):
                return "a module inside it cannot be traced"
            if any(isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool) for _, a in leaves(list(inner.args))):
                return f"{inner.name} inside it holds a size of the example"
        if any(isinstance(value, FakeTensor) for value in _constants(graph)):
            return "it makes a tensor in a way that the trace cannot follow"
    return ""


def plainly(operator: HigherOrderOperator, args: Any, kwargs: Any, around: Callable[[], Any]) -> Any:
    """Run a control-flow operator with its bodies inside a context.

    A dispatch mode that is active around such an operator is not active in its bodies; this puts it there.

    Args:
        operator: The operator.
        args: Its arguments with callables for bodies.
        kwargs: Its keyword arguments.
        around: Makes the context.
    """

    def leaf(_path: object, value: Any) -> Any:
        if isinstance(value, torch.Tensor) or not callable(value):
            return value

        def body(*given: Any) -> Any:
            with around():
                return value(*given)

        return body

    args, kwargs = map_leaves(leaf, (args, dict(kwargs)))
    return operator(*args, **kwargs)


def _all_bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    for graph in bodies(node):
        yield graph
        for inner in graph.graph.nodes:
            yield from _all_bodies(inner)


def _constants(graph: fx.GraphModule) -> list[torch.Tensor]:
    held = [getattr(graph, str(n.target), None) for n in graph.graph.nodes if n.op == "get_attr"]
    return [value for value in held if isinstance(value, torch.Tensor)]


# -- how often ---------------------------------------------------------------------------------------------------------
def trips(node: fx.Node, size: Callable[[Any], int]) -> int:
    """Return how often the body of a control-flow operator runs at the example's shapes; 1 where only values decide.

    Args:
        node: The operator.
        size: Evaluates a symbolic size.
    """
    stepped = _stepped_along(node)
    return max(1, size(stepped[0].meta["val"].shape[0])) if stepped else 1


def _stepped_along(node: fx.Node) -> list[fx.Node]:
    """Return the operands along whose dim 0 an operator steps."""
    place = {"scan": 2, "associative_scan": 1, "map_impl": 1}.get(packet(node.target))
    return [] if place is None else [n for n in node.args[place] if isinstance(n, fx.Node)]  # type: ignore[union-attr]


# -- rows --------------------------------------------------------------------------------------------------------------
def why_rows_meet(node: fx.Node, analysis: RowAnalysis) -> str:
    """Say why the rows of the batch cannot be computed apart in a control-flow operator ("" if they can).

    Args:
        node: The operator; its operands have been visited.
        analysis: How the rows go through the call around it.
    """
    name = packet(node.target)
    stepped = [n.name for n in _stepped_along(node) if analysis.dims.get(n.name) == 0]
    if stepped and name in REPEATED:
        return f"{node.name} steps along the rows of the batch"
    if stepped:
        others = {n.name for n in node.all_input_nodes} - set(stepped)
        return f"{node.name} steps along rows that meet others" if others & analysis.dims.keys() else ""
    if name in ATTENTION:
        counted = [graph for graph, at in zip(bodies(node), (1, 0), strict=False) if _placeholders(graph)[at].users]
        return f"{node.name} asks for the number of a row" if counted else ""
    if name in _DECIDED and _counts_rows(node, analysis):
        return f"{node.name} is decided by the number of rows"
    for graph in bodies(node):
        reason = _why_body_couples(graph, analysis)
        if reason:
            return f"{node.name}: {reason}"
    return ""


def _counts_rows(node: fx.Node, analysis: RowAnalysis) -> bool:
    """Whether the number of rows takes part in a decision: a branch's condition, or the end of a loop."""
    deciding = bodies(node)[0].graph.nodes if packet(node.target) == "while_loop" else node.args[:1]
    numbers = [n for n in deciding if isinstance(n, fx.Node) and (n.users or n is node.args[0])]
    return any(
        expression_of(value) is not None and analysis.symbol in analysis.recording.settle(value).free_symbols
        for value in (n.meta.get("val") for n in numbers)
    )


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def _why_body_couples(graph: fx.GraphModule, analysis: RowAnalysis) -> str:
    nodes = list(graph.graph.nodes)
    inside = type(analysis)(dataclasses.replace(analysis.recording, nodes=nodes), analysis.symbol)
    for result in nodes[-1].all_input_nodes:
        if result.name in inside.coupled:
            return str(inside.coupled[result.name])
        if result.name in inside.joins:
            return f"a result of its body, {result.name}, depends on all rows"
    return ""
