"""One operator call as the formulas see it, and the price they return.

Theory of operation. A formula counts four things for the forward and the backward of one call: floating point
operations, bytes moved through main memory, the tensors that autograd keeps (`OpPrice.saved`) and the bytes that it
keeps besides the graph's own tensors (`OpPrice.workspace`: masks, statistics, results inside a composite operator).
Time is no business of a formula; `partita.cost.analytic` turns the counts into seconds on a device.

Bytes assume that each tensor crosses main memory once per kernel (no reuse in caches across kernels) and that tensors
are dense. The backward reads the gradients of the results and what was saved, and writes one gradient for each operand
that needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from partita.ir.graph import ITEM_SIZE, OpKind, TensorSpec

FLOAT_BYTES = ITEM_SIZE["float32"]
"""Bytes of one statistic (mean, reciprocal deviation, log-sum-exp); kernels keep them in float32 or wider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrice:
    """What one operator costs at the example's shapes.

    Attributes:
        kind: Cost class; ``"unknown"`` if there is no formula.
        flops: Floating point operations of the forward (a multiply-add is 2).
        backward_flops: The same for the backward, as far as gradients are needed.
        bytes: Bytes read and written by the forward.
        backward_bytes: Bytes read and written by the backward.
        saved: Ids of the operands and results that autograd keeps, each once.
        workspace: Bytes kept for the backward besides `saved`.
    """

    kind: OpKind
    flops: int = 0
    backward_flops: int = 0
    bytes: int = 0
    backward_bytes: int = 0
    saved: tuple[str, ...] = ()
    workspace: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an operator.

    Attributes:
        name: Packet name without namespace, overload and the underscore of in-place variants, e.g. ``"add"``.
        reads: Tensor operands in argument order; operands that are None are left out.
        writes: Results.
        literals: Other arguments by schema name; entries may be missing.
    """

    name: str
    reads: tuple[TensorSpec, ...]
    writes: tuple[TensorSpec, ...]
    literals: Mapping[str, object]

    @property
    def read_bytes(self) -> int:
        """Bytes of the distinct operands."""
        return total_bytes(self.reads)

    @property
    def write_bytes(self) -> int:
        """Bytes of the distinct results."""
        return total_bytes(self.writes)

    @property
    def elements(self) -> int:
        """Elements of the largest result, or of the largest operand if there is no result."""
        return max((tensor.numel for tensor in self.writes or self.reads), default=0)

    @property
    def widest(self) -> int:
        """Elements of the largest operand or result."""
        return max((tensor.numel for tensor in (*self.reads, *self.writes)), default=0)

    @property
    def needs_grad(self) -> bool:
        """Whether any operand needs a gradient."""
        return any(tensor.requires_grad for tensor in self.reads)

    @property
    def is_view(self) -> bool:
        """Whether every result shares the memory of an operand."""
        owners = {owner(tensor) for tensor in self.reads}
        return all(owner(tensor) in owners for tensor in self.writes)

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a numeric literal, or ``default`` if it is missing or no number."""
        value = self.literals.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean literal, or ``default`` if it is missing."""
        return bool(self.literals.get(name, default))

    def grads_bytes(self) -> int:
        """Bytes of the results' gradients, read, and of the operands' gradients, written, by the backward."""
        if not self.needs_grad:
            return 0
        results = total_bytes(tensor for tensor in self.writes if is_floating(tensor))
        return results + total_bytes(tensor for tensor in self.reads if tensor.requires_grad)


Formula = Callable[[OpCall], OpPrice]
"""Prices one call; total: any shapes and any literals give a price."""


def named(formula: Formula, names: str) -> dict[str, Formula]:
    """Return the entries of a registry for blank-separated operator names that share a formula."""
    return dict.fromkeys(names.split(), formula)


def owner(tensor: TensorSpec) -> str:
    """Return the id of the tensor that owns the memory."""
    return tensor.storage or tensor.id


def is_floating(tensor: TensorSpec) -> bool:
    """Return whether a gradient could flow into the tensor."""
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def total_bytes(tensors: Iterable[TensorSpec]) -> int:
    """Return the bytes of the tensors, each id once."""
    return sum({tensor.id: tensor.bytes for tensor in tensors}.values())


def ids(tensors: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Return the tensors' ids, each once, in order."""
    return tuple(dict.fromkeys(tensor.id for tensor in tensors))


def streaming(
    call: OpCall,
    kind: OpKind,
    *,
    flops: int = 0,
    saved: Sequence[TensorSpec] = (),
    workspace: int = 0,
) -> OpPrice:
    """Price a call that reads every operand and writes every result once.

    Args:
        call: The call.
        kind: Cost class.
        flops: Forward operations; the backward is taken to need as many.
        saved: What autograd keeps if an operand needs a gradient.
        workspace: Bytes kept besides, under the same condition.

    Returns:
        The price; without a gradient nothing is kept and the backward is free.
    """
    grad = call.needs_grad
    return OpPrice(
        kind=kind,
        flops=flops,
        backward_flops=flops if grad else 0,
        bytes=call.read_bytes + call.write_bytes,
        backward_bytes=call.grads_bytes() + total_bytes(saved) + workspace if grad else 0,
        saved=ids(saved) if grad else (),
        workspace=workspace if grad else 0,
    )
