"""Products, convolutions, attention and recurrent layers: the operators whose time is arithmetic.

The backward of a product needs one product of the same size for each factor that needs a gradient, and keeps the
*other* factor for it. Additions of a bias are not counted, as in ``torch.utils.flop_counter``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import ceil, isqrt, prod

from partita.cost.ops.call import (
    FLOAT_BYTES,
    Formula,
    OpCall,
    OpPrice,
    ids,
    is_floating,
    named,
    streaming,
    total_bytes,
)
from partita.ir.graph import ITEM_SIZE, OpKind, TensorSpec


def product(call: OpCall, kind: OpKind, flops: int, factors: tuple[TensorSpec, TensorSpec]) -> OpPrice:
    """Price a bilinear operator.

    Args:
        call: The call; further operands are summands (a bias).
        kind: Cost class.
        flops: Operations of the forward product.
        factors: Both factors.

    Returns:
        The price; the backward has one product of ``flops`` for each factor that needs a gradient.
    """
    first, second = factors
    saved: list[TensorSpec] = []
    num_products = 0
    backward_bytes = 0
    for needs, other in ((first, second), (second, first)):
        if needs.requires_grad:
            num_products += 1
            saved.append(other)
            backward_bytes += call.write_bytes + other.bytes + needs.bytes
    for summand in call.reads:
        if summand.requires_grad and summand.id not in {first.id, second.id}:
            backward_bytes += call.write_bytes + summand.bytes
    return OpPrice(
        kind=kind,
        flops=flops,
        backward_flops=num_products * flops,
        bytes=call.read_bytes + call.write_bytes,
        backward_bytes=backward_bytes,
        saved=ids(saved),
    )


def matmul(call: OpCall) -> OpPrice:
    """``linear, matmul, mm, bmm, mv, dot``: 2 x results x length of the contracted dim."""
    if not call.reads:
        return streaming(call, "matmul")
    left, right = call.reads[0], call.reads[min(1, len(call.reads) - 1)]
    inner = left.shape[-1] if left.shape else 1
    return product(call, "matmul", 2 * _results(call) * inner, (left, right))


def matmul_added(call: OpCall) -> OpPrice:
    """``addmm, baddbmm, addbmm, addmv``: a summand first, then both factors."""
    if len(call.reads) < 3:
        return matmul(call)
    left, right = call.reads[1], call.reads[2]
    # addbmm also sums over the batch of the factors, so count from them: rows of the left x contracted x columns.
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    return product(call, "matmul", 2 * left.numel * columns, (left, right))


def tensordot(call: OpCall) -> OpPrice:
    """``tensordot``: with I x K and K x J to I x J the sizes' product is the square of I J K."""
    if len(call.reads) < 2:
        return streaming(call, "matmul", saved=call.reads)
    left, right = call.reads[:2]
    return product(call, "matmul", 2 * isqrt(left.numel * right.numel * _results(call)), (left, right))


def chain(call: OpCall) -> OpPrice:
    """``linalg_multi_dot, chain_matmul``: from left to right (torch looks for the cheapest order)."""
    rows = call.reads[0].shape[0] if call.reads and call.reads[0].shape else 1
    flops = sum(2 * rows * tensor.numel for tensor in call.reads[1:])
    price = streaming(call, "matmul", flops=flops, saved=call.reads)
    return replace(price, backward_flops=2 * flops if call.needs_grad else 0)


def grouped_product(call: OpCall) -> OpPrice:
    """``_grouped_mm`` and its like: a product per group of rows, and each row meets the matrix of one group only.

    Both factors flat (rows x left, rows x right) give one matrix per group; then the rows are what is contracted.
    """
    if len(call.reads) < 2:
        return streaming(call, "matmul", saved=call.reads)
    left, right = call.reads[:2]
    flat = len(left.shape) == len(right.shape) == 2
    flops = 2 * left.numel * right.shape[-1] if flat else 2 * _results(call) * (left.shape[-1] if left.shape else 1)
    price = product(call, "matmul", flops, (left, right))
    offsets = [tensor for tensor in call.reads[2:] if not is_floating(tensor)]
    return replace(price, saved=(*price.saved, *ids(offsets)) if price.saved else ())


def is_grouped_product(call: OpCall) -> bool:
    """Return whether an operator of any namespace multiplies by groups: its name says so and its shapes agree."""
    if not _GROUPED.search(call.name) or len(call.reads) < 3 or not call.writes:
        return False
    left, right, result = call.reads[0], call.reads[1], call.writes[0]
    shapes = tuple(len(tensor.shape) for tensor in (left, right, result))
    return shapes in _GROUPED_DIMS and left.shape[-1] in right.shape[-2:] and result.shape[-1] in right.shape[-2:]


_GROUPED = re.compile(r"(^|_)(grouped_(mm|gemm|matmul)|gmm)(?!.*backward)(_|$)")
_GROUPED_DIMS = {(2, 3, 2), (3, 2, 2), (3, 3, 3)}
"""Dims of the factors and the result: rows by matrices, matrices by columns, pairs."""


def outer(call: OpCall) -> OpPrice:
    """``outer, ger``: one multiplication for each result."""
    left, right = call.reads[0], call.reads[min(1, len(call.reads) - 1)]
    return product(call, "matmul", _results(call), (left, right))


def bilinear(call: OpCall) -> OpPrice:
    """``bilinear``: x1 . W . x2; priced as the larger product, x1 with the whole weight."""
    if len(call.reads) < 3:
        return streaming(call, "matmul", saved=call.reads)
    left, _, weight = call.reads[:3]
    rows = left.numel // max(1, left.shape[-1])
    flops = 2 * rows * weight.numel
    price = streaming(call, "matmul", flops=flops, saved=call.reads[:3])
    return replace(price, backward_flops=3 * flops if call.needs_grad else 0)


def einsum(call: OpCall) -> OpPrice:
    """``einsum``: 2 x results x contracted sizes for two operands; more operands are priced as that many pairs."""
    equation = str(call.literals.get("equation", ""))
    contracted = _contracted(equation, call.reads)
    if len(call.reads) == 2:
        flops = _results(call) * (2 * contracted if contracted > 1 else 1)
        return product(call, "matmul", flops, (call.reads[0], call.reads[1]))
    if len(call.reads) < 2:
        return streaming(call, "reduction", flops=call.widest)
    flops = 2 * (len(call.reads) - 1) * _results(call) * contracted
    price = streaming(call, "matmul", flops=flops, saved=call.reads)
    return replace(price, backward_flops=2 * flops if call.needs_grad else 0)


def convolution(call: OpCall) -> OpPrice:
    """``conv1d/2d/3d, conv_transpose*, convolution``: 2 x positions x weights that meet at a position."""
    if len(call.reads) < 2:
        return streaming(call, "convolution")
    source, weight = call.reads[0], call.reads[1]
    if call.name == "conv_tbc":  # the one whose weight is (*kernel, in, out)
        flops = 2 * _results(call) * prod(weight.shape[:-1])
        return product(call, "convolution", flops, (source, weight))
    transposed = "transpose" in call.name or call.flag("transposed")
    # A weight is (out, in / groups, *kernel); transposed it is (in, out / groups, *kernel), used per input position.
    positions = source.numel if transposed else _results(call)
    return product(call, "convolution", 2 * positions * prod(weight.shape[1:]), (source, weight))


def attention(call: OpCall) -> OpPrice:
    """``scaled_dot_product_attention`` and its fused variants: two products over the scores.

    The fused kernels keep query, key, value, result and one log-sum-exp per row of scores, and compute the scores again
    in the backward (5 products of the forward's 2). Where no fused kernel applies (a mask with gradient, operands that
    are not 4-dimensional) the scores are kept; dropout on a CPU does the same, see `formulas.cpu_workspace`.

    Causal attention is not halved: the CPU kernel and the math path compute the whole square.
    """
    if len(call.reads) < 3:
        return streaming(call, "attention", saved=call.reads)
    query, key, value = call.reads[:3]
    scores = num_scores(query, key)
    half = 2 * scores * (query.shape[-1] if query.shape else 1)
    other_half = 2 * scores * (value.shape[-1] if value.shape else 1)
    flops = half + other_half
    grad = call.needs_grad
    fused = uses_fused_attention(call)
    element = ITEM_SIZE[query.dtype]
    rows = scores // max(1, key.shape[-2] if len(key.shape) > 1 else 1)
    kept = math_attention_bytes(query, key, dropout=call.number("dropout_p") > 0.0)
    workspace = rows * FLOAT_BYTES if fused else kept
    saved = (query, key, value, *call.reads[3:4], *call.writes[:1]) if fused else (value,)
    passes = 0 if fused else 4 * scores * element  # the scores are written, normalised (read, written) and read
    backward_flops = 3 * half + 2 * other_half if fused else 2 * flops
    return OpPrice(
        kind="attention",
        flops=flops,
        backward_flops=backward_flops if grad else 0,
        bytes=call.read_bytes + call.write_bytes + passes,
        backward_bytes=call.grads_bytes() + total_bytes(saved) + workspace + 2 * passes if grad else 0,
        saved=ids(saved) if grad else (),
        workspace=workspace if grad else 0,
    )


def uses_fused_attention(call: OpCall) -> bool:
    """Return whether CUDA has a fused kernel for the call: 4-dimensional operands, no gradient for the mask."""
    if call.name != "scaled_dot_product_attention":
        return True
    return len(call.reads[0].shape) == 4 and not (len(call.reads) > 3 and call.reads[3].requires_grad)


def math_attention_bytes(query: TensorSpec, key: TensorSpec, *, dropout: bool) -> int:
    """Return what attention without a fused kernel keeps besides the value.

    Scaled copies of query and key, the softmax, and with dropout the mask and the product of both.
    """
    return (3 if dropout else 1) * num_scores(query, key) * ITEM_SIZE[query.dtype] + query.bytes + key.bytes


def num_scores(query: TensorSpec, key: TensorSpec) -> int:
    """Return the number of attention scores: heads and batch of the query x queries x keys."""
    if len(query.shape) < 2 or len(key.shape) < 2:
        return query.numel
    return prod(query.shape[:-1]) * key.shape[-2]


def recurrent(call: OpCall) -> OpPrice:
    """``lstm, gru, rnn_tanh, rnn_relu``: every weight matrix meets every time step and row once.

    What is kept for each step, row and layer follows saved-tensor hooks on a CPU (torch 2.13): 17 states for an LSTM
    (4 gates), 7 to 8 for a GRU (3 gates). What cuDNN reserves is not known here.
    """
    source = call.reads[0]
    steps = source.numel // max(1, source.shape[-1] if source.shape else 1)
    # The states come first: two for an LSTM, one for the others. A weight need not be a parameter (weight_norm).
    floating = [tensor for tensor in call.reads[1:] if is_floating(tensor)][2 if "lstm" in call.name else 1 :]
    matrices = [tensor for tensor in floating if len(tensor.shape) == 2]
    flops = 2 * steps * sum(matrix.numel for matrix in matrices)
    gates = sum(matrix.shape[0] for matrix in matrices) // 2  # a layer has two matrices of as many rows as gates
    workspace = ceil(steps * gates * _KEPT_BY_GATE.get(call.name, 2.0)) * ITEM_SIZE[source.dtype]
    price = streaming(call, "scan", flops=flops, saved=(source, *matrices, *call.writes[:1]), workspace=workspace)
    # The gradient of the state flows back through every step, whether or not the input needs one.
    num_products = 1 + any(matrix.requires_grad for matrix in matrices) if call.needs_grad else 0
    return replace(price, backward_flops=num_products * flops)


_KEPT_BY_GATE = {"lstm": 17 / 4, "gru": 8 / 3}


def multi_head(call: OpCall) -> OpPrice:
    """The inference paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``; they have no backward."""
    source = call.reads[0]
    tokens = source.numel // max(1, source.shape[-1] if source.shape else 1)
    matrices = [tensor for tensor in call.reads[1:] if len(tensor.shape) == 2 and is_floating(tensor)]
    sequence = source.shape[-2] if len(source.shape) > 1 else 1
    flops = 2 * tokens * sum(matrix.numel for matrix in matrices) + 4 * sequence * source.numel
    return streaming(call, "attention", flops=flops, saved=call.reads)


def _results(call: OpCall) -> int:
    return call.writes[0].numel if call.writes else 0


def _contracted(equation: str, operands: tuple[TensorSpec, ...]) -> int:
    """Return the product of the sizes over which operands are multiplied and summed (1 if the equation is not known).

    What one operand has alone and the result has not is summed before the product.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return 1
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, operands, strict=True):
        head, _, tail = term.partition("...")
        labelled = [*zip(head, tensor.shape, strict=False)]
        labelled += [*zip(reversed(tail), reversed(tensor.shape), strict=False)]
        sizes.update(labelled)
    if not arrow:
        right = "".join(label for label in sizes if left.count(label) == 1)
    return prod(size for label, size in sizes.items() if label not in right and left.count(label) > 1)


DENSE: dict[str, Formula] = {
    **named(matmul, "linear matmul mm bmm mv dot vdot inner linalg_matmul _int_mm _scaled_mm"),
    "tensordot": tensordot,
    **named(chain, "linalg_multi_dot chain_matmul"),
    **named(grouped_product, "_grouped_mm _scaled_grouped_mm grouped_mm"),
    **named(matmul_added, "addmm baddbmm addbmm addmv _addmm_activation"),
    **named(outer, "outer ger addr kron"),
    "bilinear": bilinear,
    "einsum": einsum,
    **named(
        convolution,
        "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc "
        "_conv_depthwise2d conv_depthwise3d slow_conv3d thnn_conv2d mkldnn_convolution cudnn_convolution",
    ),
    **named(
        attention,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention",
    ),
    **named(recurrent, "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    **named(multi_head, "_native_multi_head_attention _transformer_encoder_layer_fwd"),
}
"""Formula by operator name."""
