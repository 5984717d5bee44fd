"""What an operator costs at given shapes: one registry from its name to its formula.

The formulas stand in `partita.cost.ops`, by kind. An operator without one is priced as its operands and results moved
once, marked ``"unknown"`` and listed by the caller: it is never guessed to be something it is not. An operator of
another namespace has a formula only if its name and its shapes say the same (`dense.is_grouped_product`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.cost.ops.call import Formula, OpCall, OpPrice, streaming
from partita.cost.ops.dense import DENSE, grouped_product, is_grouped_product, math_attention_bytes
from partita.cost.ops.elementwise import ELEMENTWISE
from partita.cost.ops.layout import LAYOUT
from partita.cost.ops.numeric import NUMERIC
from partita.ir.graph import ITEM_SIZE, Op, TensorSpec

__all__ = ["FORMULAS", "OpPrice", "cpu_workspace", "packet_name", "price_op"]

FORMULAS: dict[str, Formula] = {**LAYOUT, **ELEMENTWISE, **NUMERIC, **DENSE}
"""Formula by operator name, without namespace, overload and the underscore of in-place variants."""

_HIGHER_ORDER = """
cond while_loop scan associative_scan map map_impl wrap wrap_with_autocast wrap_with_set_grad_enabled
flex_attention checkpoint tag_activation_checkpoint wrap_activation_checkpoint autograd_function_apply
invoke_subgraph hints_wrapper strict_mode out_dtype with_effects auto_functionalized auto_functionalized_v2
triton_kernel_wrapper_mutation triton_kernel_wrapper_functional run_const_graph call_torchbind foreach_map
inductor_compiled_code
""".split()  # noqa: SIM905  (a list of words is read as text)


def packet_name(target: str) -> tuple[str, str]:
    """Split an operator's target.

    Args:
        target: E.g. ``"aten.add_.Tensor"``, ``"torch.ops.aten.add.Tensor"`` or ``"<built-in function getitem>"``.

    Returns:
        Namespace and name; the name has no overload and no trailing underscore.

    Example:
        >>> packet_name("aten.add_.Tensor")
        ('aten', 'add')
    """
    words = target.strip("<>").split()[-1] if target.strip() else ""
    parts = words.removeprefix("torch.ops.").split(".")
    namespace, name = (parts[0], parts[1]) if len(parts) > 1 else ("", parts[0])
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return namespace, name


def price_op(
    target: str,
    reads: Sequence[TensorSpec],
    writes: Sequence[TensorSpec],
    *,
    literals: Mapping[str, object] | None = None,
) -> OpPrice:
    """Count what one operator call computes, moves and keeps.

    Args:
        target: Operator overload, e.g. ``"aten.linear.default"``.
        reads: Tensor operands in argument order; operands that are None are left out.
        writes: Results. Results that share an operand's ``storage`` are views.
        literals: The other arguments by schema name; entries may be missing.

    Returns:
        The price at these shapes, for fused kernels where a device has them (`cpu_workspace` adds what a CPU keeps on
        top). The backward is counted as far as ``requires_grad`` of the operands asks for it.

    Example:
        >>> x = TensorSpec(id="x", shape=(8, 16), dtype="float32", role="input")
        >>> w = TensorSpec(id="w", shape=(32, 16), dtype="float32", role="parameter", requires_grad=True)
        >>> y = TensorSpec(id="y", shape=(8, 32), dtype="float32", role="activation", requires_grad=True)
        >>> price = price_op("aten.linear.default", (x, w), (y,))
        >>> price.flops == price.backward_flops == 2 * 8 * 16 * 32, price.saved
        (True, ('x',))
    """
    namespace, name = packet_name(target)
    call = OpCall(name=name, reads=tuple(reads), writes=tuple(writes), literals=literals or {})
    if namespace == "higher_order" or (namespace == "" and name in _HIGHER_ORDER):
        return streaming(call, "opaque", saved=call.reads)
    known = namespace in {"", "aten", "_operator", "prims"}
    formula = FORMULAS.get(name) if known else grouped_product if is_grouped_product(call) else None
    if formula is None or (not call.reads and name in _NEEDS_OPERAND):
        return streaming(call, "unknown", saved=call.reads)
    return formula(call)


_NEEDS_OPERAND = frozenset(name for name in FORMULAS if name in {**DENSE, **ELEMENTWISE, **NUMERIC})


def cpu_workspace(op: Op, tensors: Mapping[str, TensorSpec]) -> int:
    """Return the bytes that the CPU's kernels keep for the backward on top of ``op.workspace``.

    Three composite operators have a fused kernel on CUDA only (measured with saved-tensor hooks, torch 2.13):
    ``dropout`` keeps a mask of the operand's dtype instead of one byte per element; ``scaled_dot_product_attention``
    with dropout takes the math path, which keeps scaled copies of query and key, and of the scores the softmax, the
    mask and the product of both; ``rms_norm`` keeps a normalised copy.

    Args:
        op: The operator, priced by `price_op`.
        tensors: The graph's tensors by id.
    """
    if not op.workspace:
        return 0
    _, name = packet_name(op.target)
    first = tensors[op.reads[0]] if op.reads else None
    if first is None:
        return 0
    if name == "dropout":
        return op.workspace * (ITEM_SIZE[first.dtype] - 1)
    if name == "rms_norm":
        return first.bytes
    if name == "scaled_dot_product_attention" and op.random and len(op.reads) > 1:
        return max(0, math_attention_bytes(first, tensors[op.reads[1]], dropout=True) - op.workspace)
    return 0
