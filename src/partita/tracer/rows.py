"""Which axis of each tensor carries the rows of the batch, and whether rows may be computed apart.

The sizes tell where the batch's symbol goes; operators that are known to mix rows, and dims that are not simply
proportional to the batch, say where it may not be cut.  Results that have lost the axis (a loss inside the model)
must have lost it by a mean or a sum and be linear from there on, so that the parts can be put together exactly;
everything else is *coupled* and such a model runs on the whole batch. This is the structural half of the judgement;
the numerical half (`partita.tracer.verify`) runs the real model on parts of the example.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx

from partita.tracer.control import is_control, why_rows_meet
from partita.tracer.nodes import BATCH_NORMS, arguments_of, packet
from partita.tracer.places import is_users_code
from partita.tracer.recorder import Recording
from partita.tracer.sizes import expression_of

Merge = Literal["rows", "whole", "mean", "sum", "count"]


@dataclass(frozen=True, slots=True)
class Join:
    """How the parts of one result are put together.

    Attributes:
        how: ``rows`` concatenates along ``dim``; ``whole`` is the same in every part; ``mean`` weights by rows;
            ``sum`` adds; ``count`` weights by the number of counted targets.
        dim: The rows' dim of ``rows``.
        targets: For ``count``: node name of the targets of the mean.
        ignored: For ``count``: the target value that does not count.
    """

    how: Merge
    dim: int = 0
    targets: str = ""
    ignored: int = -100


WHOLE = Join("whole")
_SHAPES_ONLY = {"new_ones", "new_zeros", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like"}
_MEANS = {
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
}
_COUNTED = {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
_LINEAR = {
    "neg",
    "to",
    "_to_copy",
    "float",
    "double",
    "half",
    "bfloat16",
    "clone",
    "contiguous",
    "alias",
    "view",
    "reshape",
    "squeeze",
    "detach",
    "type_as",
}
_ALONG = {
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "sort",
    "argsort",
    "topk",
    "flip",
    "roll",
    "logcumsumexp",
    "kthvalue",
    "median",
    "unique_dim",
    "renorm",
    "cummax",
    "cummin",
}


class CoupledError(Exception):
    """The rows of the batch cannot be computed apart; the text says why.

    Attributes:
        final: Whether it would be so whatever other inputs had as many rows.
    """

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass(eq=False)
class RowAnalysis:
    """Follow one batch symbol through a recording.

    Attributes:
        recording: The trace.
        symbol: The symbol of the batch axis.
        dims: For every node that has it, the dim that carries the rows.
        joins: For nodes that depend on the rows without carrying them, how parts are put together.
        coupled: Node name to the reason why its parts cannot be put together.
        alike: Symbols of other axes that are taken to count the same rows.
    """

    recording: Recording
    symbol: sympy.Symbol
    dims: dict[str, int] = field(default_factory=dict)
    joins: dict[str, Join] = field(default_factory=dict)
    coupled: dict[str, CoupledError] = field(default_factory=dict)
    alike: frozenset[sympy.Basic] = frozenset()

    def __post_init__(self) -> None:
        """Visit every node in order."""
        for node in self.recording.nodes:
            try:
                self._visit(node)
            except CoupledError as reason:
                self.coupled[node.name] = reason

    # -- results -------------------------------------------------------------------------------------------------------
    def join(self, name: str) -> Join:
        """Return how the parts of a value are put together.

        Raises:
            CoupledError: If they cannot be.
        """
        if name in self.coupled:
            raise self.coupled[name]
        if name in self.dims:
            return Join("rows", dim=self.dims[name])
        return self.joins.get(name, WHOLE)

    def input_dims(self) -> tuple[int | None, ...]:
        """Return for each input the dim that carries the rows, or None."""
        return tuple(self.dims.get(name) for name in self.recording.inputs)

    # -- one node ------------------------------------------------------------------------------------------------------
    def _visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        for source in node.all_input_nodes:
            if source.name in self.coupled:
                raise self.coupled[source.name]
        if node.op == "call_function":
            self._check_mixing(node)
        if isinstance(value, torch.Tensor):
            dim = self._row_dim(value, node)
            if dim is not None:
                if any(s.name in self.joins for s in node.all_input_nodes):
                    raise CoupledError(f"{node.name} reads a reduction over the batch ({_where(node)})")
                self.dims[node.name] = dim
            elif packet(node.target) in _SHAPES_ONLY or _is_control_part(node):
                return  # reads shape and dtype, not values; a part without rows knows nothing of them
            elif any(s.name in self.dims or s.name in self.joins for s in node.all_input_nodes):
                self.joins[node.name] = self._reduced(node)
        elif isinstance(value, tuple | list):
            self._visit_parts(node, value)

    def _visit_parts(self, node: fx.Node, value: Any) -> None:
        """A multi-output node stands for its parts; getitem takes them out."""
        if any(s.name in self.joins for s in node.all_input_nodes):
            raise CoupledError(f"{node.name} splits a reduction over the batch ({_where(node)})")
        fed = any(s.name in self.dims for s in node.all_input_nodes)
        if fed and is_control(node):
            reason = why_rows_meet(node, self)
            if reason:
                raise CoupledError(f"{reason} ({_where(node)})")
        for part in value:
            if fed and not is_control(node) and isinstance(part, torch.Tensor) and self._row_dim(part, node) is None:
                raise CoupledError(f"a part of {node.name} depends on all rows ({_where(node)})")
        first = next((self._row_dim(p, node) for p in value if isinstance(p, torch.Tensor)), None)
        if first is not None:
            self.dims[node.name] = first

    def _row_dim(self, value: torch.Tensor, node: fx.Node) -> int | None:
        """Return the dim of a tensor that carries the rows."""
        found = None
        for dim, size in enumerate(value.shape):
            expression = self._settled(size)
            if self.symbol not in expression.free_symbols:
                continue
            if found is not None:
                raise CoupledError(
                    f"{node.name} pairs the rows of the batch with each other ({_where(node)})", final=True
                )
            if not _proportional(expression, self.symbol):
                raise CoupledError(
                    f"a size of {node.name} is {expression}, not proportional to the batch ({_where(node)})"
                )
            found = dim
        return found

    def _check_mixing(self, node: fx.Node) -> None:
        name = packet(node.target).rstrip("_")
        given = arguments_of(node)
        source = next((a for a in node.args if isinstance(a, fx.Node)), None)
        row_dim = self.dims.get(source.name) if source is not None else None
        if row_dim is None or source is None:
            return
        ndim = source.meta["val"].ndim if isinstance(source.meta.get("val"), torch.Tensor) else 0
        if name in BATCH_NORMS and (given.get("training") or given.get("running_mean") is None):
            raise CoupledError(f"{node.name} normalises over the rows of the batch ({_where(node)})", final=True)
        if name in _ALONG:
            dims = given.get("dim", given.get("dims", -1))
            dims = dims if isinstance(dims, list | tuple) else [dims]
            if any(isinstance(d, int) and d % max(ndim, 1) == row_dim for d in dims):
                raise CoupledError(f"{node.name} works along the rows of the batch ({_where(node)})", final=True)

    def _reduced(self, node: fx.Node) -> Join:
        """Return how a value without the batch axis, computed from rows, is put together."""
        name = packet(node.target).rstrip("_") if node.op == "call_function" else ""
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source.name in self.dims:
                raise CoupledError(f"{node.name} depends on all rows ({_where(node)})")
            return self.joins[source.name]
        sources = [s for s in node.all_input_nodes if s.name in self.joins]
        if not any(s.name in self.dims for s in node.all_input_nodes):
            return self._linear(node, name, sources)
        if sources:
            raise CoupledError(f"{node.name} mixes rows with a reduction over them ({_where(node)})")
        return self._reducing(node, name)

    def _reducing(self, node: fx.Node, name: str) -> Join:
        given = arguments_of(node)
        reduction = given.get("reduction", 1)
        if name in _MEANS and reduction in {1, 2}:
            return Join("mean" if reduction == 1 else "sum")
        if name in _COUNTED and reduction == 2:
            return Join("sum")
        if name in _COUNTED and reduction == 1:
            return self._counted(node, given)
        if name in {"mean", "sum"} and not given.get("correction"):
            return Join("mean" if name == "mean" else "sum")
        value = node.meta.get("val")
        scalar = isinstance(value, torch.Tensor) and value.ndim == 0
        raise CoupledError(f"{node.name} reduces over the rows by {name!r} ({_where(node)})", final=scalar)

    def _counted(self, node: fx.Node, given: dict[str, Any]) -> Join:
        target = given.get("target")
        if given.get("weight") is not None:
            raise CoupledError(f"{node.name} divides by class weights of all rows ({_where(node)})")
        if not isinstance(target, fx.Node):
            raise CoupledError(f"the targets of {node.name} are not visible ({_where(node)})")
        if target.meta["val"].dtype.is_floating_point:
            return Join("mean")
        ignored = given.get("ignore_index", -100)
        return Join("count", targets=target.name, ignored=ignored)

    def _linear(self, node: fx.Node, name: str, sources: list[fx.Node]) -> Join:
        joins = {self.joins[s.name] for s in sources}
        if len(joins) > 1:
            raise CoupledError(f"{node.name} mixes different reductions over the batch ({_where(node)})")
        join = joins.pop()
        uses = sum(argument in sources for argument in node.args)
        alone = uses == 1 and (name in {"mul", "neg"} or node.args[0] is sources[0])
        growing = [a for a in node.args if isinstance(a, fx.Node) and self._grows(a)]
        if growing:  # a sum divided by a multiple of the number of rows is a mean
            if name == "div" and join.how == "sum" and alone and growing == [node.args[1]]:
                return Join("mean")
        elif name in _LINEAR or (name in {"mul", "div"} and alone):
            return join
        elif name in {"add", "sub"} and (join.how != "sum" or all(a in sources for a in node.args[:2])):
            return join  # weights that sum to one keep constants
        raise CoupledError(f"{node.name} is not linear in a reduction over the batch ({_where(node)})")

    def _grows(self, node: fx.Node) -> bool:
        """Whether a node is a number proportional to the rows of the batch."""
        expression = expression_of(node.meta.get("val"))
        return expression is not None and self.symbol in self._settled(node.meta["val"]).free_symbols

    def _settled(self, size: Any) -> sympy.Basic:
        """Return a size's expression, with one symbol for everything that counts the rows."""
        expression = self.recording.settle(size)
        return expression.xreplace(dict.fromkeys(self.alike, self.symbol)) if self.alike else expression


def _is_control_part(node: fx.Node) -> bool:
    """Whether a node takes one result out of a control-flow operator, whose rows were judged as a whole."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_control(node.args[0])


@functools.cache
def _proportional(expression: sympy.Basic, symbol: sympy.Symbol) -> bool:
    """Whether an expression is ``symbol`` times something that does not contain it."""
    ratio = sympy.cancel(expression / symbol) if expression != symbol else sympy.Integer(1)
    return symbol not in ratio.free_symbols


def source_of(node: fx.Node) -> str:
    """Return ``file:line`` of the user's code that ran a node, or ""."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    for line in reversed(lines):
        if is_users_code(line) and '"<' not in line:  # "<...>" is generated code
            file, number = line.split('"')[1], line.split("line ")[1].split(",")[0]
            return f"{file}:{number}"
    return ""


def _where(node: fx.Node) -> str:
    return source_of(node) or str(node.target)


def batch_symbols(recording: Recording) -> list[sympy.Symbol]:
    """Return the symbols that could be the batch: those of leading axes in the inputs' order, then the others."""
    leading = [axes[0] for axes in recording.sizes.axes if axes and isinstance(axes[0], sympy.Symbol)]
    others = [axis for axes in recording.sizes.axes for axis in axes[1:] if isinstance(axis, sympy.Symbol)]
    return list(dict.fromkeys([*leading, *others]))
