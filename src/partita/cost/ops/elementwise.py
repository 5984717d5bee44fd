"""Pointwise operators, reductions, norms, losses and pools: the operators whose time is memory traffic.

What autograd keeps follows ``derivatives.yaml`` of PyTorch: some derivatives need the operand, some the result, some
the other operand, some nothing. The tables at the end are that knowledge.
"""

from __future__ import annotations

from math import prod

from partita.cost.ops.call import FLOAT_BYTES, Formula, OpCall, OpPrice, is_floating, named, streaming
from partita.ir.graph import TensorSpec


def keeps_nothing(call: OpCall) -> OpPrice:
    """Pointwise, with a derivative that is constant or nowhere used."""
    return streaming(call, "pointwise", flops=call.elements)


def keeps_operand(call: OpCall) -> OpPrice:
    """Pointwise, with a derivative at the first operand."""
    return streaming(call, "pointwise", flops=call.elements, saved=call.reads[:1])


def keeps_operands(call: OpCall) -> OpPrice:
    """Pointwise, with derivatives at all operands."""
    return streaming(call, "pointwise", flops=call.elements, saved=call.reads)


def keeps_result(call: OpCall) -> OpPrice:
    """Pointwise, with a derivative that the result tells."""
    return streaming(call, "pointwise", flops=call.elements, saved=call.writes[:1])


def keeps_condition(call: OpCall) -> OpPrice:
    """``where, masked_fill``: the boolean operand."""
    saved = [tensor for tensor in call.reads if tensor.dtype == "bool"]
    return streaming(call, "pointwise", flops=call.elements, saved=saved)


def multiply(call: OpCall) -> OpPrice:
    """``mul``: each factor that needs a gradient keeps the other one; a number is free."""
    if len(call.reads) == 1:
        saved = () if "other" in call.literals else call.reads  # one operand and no number: x * x
    else:
        first, second = call.reads[:2]
        saved = (*((second,) if first.requires_grad else ()), *((first,) if second.requires_grad else ()))
    return streaming(call, "pointwise", flops=call.elements, saved=saved)


def divide(call: OpCall) -> OpPrice:
    """``div``: the divisor; the dividend too if the divisor needs a gradient."""
    if len(call.reads) == 1:
        return streaming(call, "pointwise", flops=call.elements)
    first, second = call.reads[:2]
    saved = (second, *((first,) if second.requires_grad else ()))
    return streaming(call, "pointwise", flops=call.elements, saved=saved)


def power(call: OpCall) -> OpPrice:
    """``pow``: the base; with a tensor exponent also exponent and result."""
    saved = call.reads[:1] if len(call.reads) == 1 else (*call.reads, *call.writes)
    return streaming(call, "pointwise", flops=call.elements, saved=saved)


def multiply_add(call: OpCall) -> OpPrice:
    """``addcmul, addcdiv, lerp``: all operands but the summand."""
    return streaming(call, "pointwise", flops=2 * call.elements, saved=call.reads[1:])


def dropout(call: OpCall) -> OpPrice:
    """``dropout``: a mask of one byte per element, unless it is off; see `formulas.cpu_workspace` for a CPU."""
    active = call.number("p", 0.5) > 0.0 and call.flag("train", default=True) and call.flag("training", default=True)
    if not active:
        return OpPrice(kind="view") if call.is_view else streaming(call, "movement")
    return streaming(call, "random", flops=call.elements, workspace=call.elements)


def distances(call: OpCall) -> OpPrice:
    """``cdist, pairwise_distance``: three operations for each pair of numbers; operands and result."""
    width = call.reads[0].shape[-1] if call.reads and call.reads[0].shape else 1
    pairs = max(call.widest, width * call.elements if "cdist" in call.name or "pdist" in call.name else 0)
    return streaming(call, "reduction", flops=3 * pairs, saved=(*call.reads, *call.writes))


def weight_norm(call: OpCall) -> OpPrice:
    """``_weight_norm``: direction, magnitude, and the norms, one for each magnitude."""
    inner = call.reads[1].bytes if len(call.reads) > 1 and len(call.writes) < 2 else 0
    return streaming(call, "norm", flops=4 * call.widest, saved=(*call.reads, *call.writes[1:]), workspace=inner)


def segment_reduce(call: OpCall) -> OpPrice:
    """``segment_reduce``: operand, result and what tells the segments."""
    return streaming(call, "reduction", flops=call.widest, saved=(*call.reads, *call.writes))


def softmax(call: OpCall) -> OpPrice:
    """``softmax, log_softmax``: five operations per element; the result is kept."""
    return streaming(call, "norm", flops=5 * call.elements, saved=call.writes[:1])


def logsumexp(call: OpCall) -> OpPrice:
    """``logsumexp``: operand and result."""
    return streaming(call, "reduction", flops=5 * call.widest, saved=(*call.reads[:1], *call.writes))


def layer_norm(call: OpCall) -> OpPrice:
    """``layer_norm``: operand, weight, mean and reciprocal deviation per normalised row."""
    return _norm(call, 2 * _rows(call), 8)


def rms_norm(call: OpCall) -> OpPrice:
    """``rms_norm``: operand, weight and one reciprocal per normalised row."""
    return _norm(call, _rows(call), 5)


def group_norm(call: OpCall) -> OpPrice:
    """``group_norm, instance_norm``: operand, weight, mean and reciprocal deviation per row and group."""
    source = call.reads[0]
    channels = source.shape[1] if len(source.shape) > 1 else 1
    groups = int(call.number("num_groups", call.number("group", channels)))
    return _norm(call, 2 * (source.shape[0] if source.shape else 1) * groups, 8)


def batch_norm(call: OpCall) -> OpPrice:
    """``batch_norm``: operand, weight, mean and reciprocal deviation per channel; running statistics are buffers."""
    source = call.reads[0]
    return _norm(call, 2 * (source.shape[1] if len(source.shape) > 1 else 1), 8)


def reduction(call: OpCall) -> OpPrice:
    """``sum, mean`` and those without a derivative: nothing is kept."""
    return streaming(call, "reduction", flops=call.widest)


def reduction_keeps_operand(call: OpCall) -> OpPrice:
    """``norm, var, std, prod, cumprod``: the operand, and the (small) result."""
    return streaming(call, "reduction", flops=2 * call.widest, saved=(*call.reads[:1], *call.writes[:1]))


def reduction_keeps_indices(call: OpCall) -> OpPrice:
    """``max, min, median`` along a dim: the indices; over everything: operand and result."""
    indices = [tensor for tensor in call.writes if not is_floating(tensor)]
    return streaming(call, "reduction", flops=call.widest, saved=indices or (*call.reads[:1], *call.writes))


def cumulative(call: OpCall) -> OpPrice:
    """``cumsum``: nothing is kept."""
    return streaming(call, "scan", flops=call.elements)


def sort(call: OpCall) -> OpPrice:
    """``sort, topk, argsort``: elements x log2 of the sorted length comparisons; the indices are kept."""
    source = call.reads[0] if call.reads else None
    length = source.shape[-1] if source is not None and source.shape else 1
    indices = [tensor for tensor in call.writes if not is_floating(tensor)]
    return streaming(call, "reduction", flops=call.widest * max(1, length.bit_length()), saved=indices)


def cross_entropy(call: OpCall) -> OpPrice:
    """``cross_entropy_loss``: the target, and inside it the log-softmax of the scores, as large as the scores.

    The backward makes two tensors of that size: the gradients of the log-softmax and of the scores.
    """
    scores = call.reads[0]
    price = streaming(call, "loss", flops=6 * scores.numel, saved=call.reads[1:], workspace=scores.bytes)
    return OpPrice(
        kind="loss",
        flops=price.flops,
        backward_flops=price.backward_flops,
        bytes=price.bytes + 2 * scores.bytes,
        backward_bytes=price.backward_bytes + 2 * scores.bytes if call.needs_grad else 0,
        saved=price.saved,
        workspace=price.workspace,
    )


def loss_keeps_targets(call: OpCall) -> OpPrice:
    """``nll_loss``: the target and its weights."""
    return streaming(call, "loss", flops=call.widest, saved=call.reads[1:])


def loss_keeps_operands(call: OpCall) -> OpPrice:
    """``mse_loss`` and most others: prediction and target."""
    return streaming(call, "loss", flops=3 * call.widest, saved=call.reads)


def composite_loss(call: OpCall) -> OpPrice:
    """Losses made of several pointwise steps: prediction and target, and about two results between them."""
    largest = max((tensor.bytes for tensor in call.reads), default=0)
    return streaming(call, "loss", flops=8 * call.widest, saved=call.reads, workspace=2 * largest)


def average_pool(call: OpCall) -> OpPrice:
    """``avg_pool*, adaptive_avg_pool*``: the operand (for its shape, but autograd keeps it)."""
    return streaming(call, "reduction", flops=call.widest * _kernel(call), saved=call.reads[:1])


def max_pool(call: OpCall) -> OpPrice:
    """``max_pool*``: the operand, and an int64 index per result where the operator does not return it."""
    inner = 0 if len(call.writes) > 1 else 8 * call.elements
    saved = (*call.reads[:1], *call.writes[1:])
    return streaming(call, "reduction", flops=call.elements * _kernel(call), saved=saved, workspace=inner)


def upsample(call: OpCall) -> OpPrice:
    """``upsample_*, interpolate, grid_sampler``: interpolation weights come from the shapes."""
    saved = call.reads if "grid_sampler" in call.name else ()
    return streaming(call, "pointwise", flops=8 * call.elements, saved=saved)


def _norm(call: OpCall, statistics: int, flops_per_element: int) -> OpPrice:
    source = call.reads[0]
    weights = [tensor for tensor in call.reads[1:2] if tensor.role == "parameter" or is_floating(tensor)]
    saved: tuple[TensorSpec, ...] = (source, *weights)
    return streaming(
        call, "norm", flops=flops_per_element * source.numel, saved=saved, workspace=statistics * FLOAT_BYTES
    )


def _rows(call: OpCall) -> int:
    """Return how many rows are normalised on their own."""
    source = call.reads[0]
    shape = call.literals.get("normalized_shape")
    if isinstance(shape, tuple | list) and all(isinstance(size, int) for size in shape):
        return int(source.numel // max(1, prod(shape)))
    return int(source.numel // max(1, source.shape[-1] if source.shape else 1))


def _kernel(call: OpCall) -> int:
    """Return the number of elements under a pool's window, 1 if it is not known."""
    kernel = call.literals.get("kernel_size")
    if isinstance(kernel, tuple | list) and all(isinstance(size, int) for size in kernel):
        return max(1, int(prod(kernel)))
    return 1


_NOTHING = """
add sub rsub diff neg positive subtract sign sgn round floor ceil trunc frac floor_divide remainder fmod
eq ne lt le gt ge equal isclose isnan isinf isfinite isneginf isposinf is_nonzero allclose
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__
real imag conj heaviside signbit nextafter searchsorted bucketize isin deg2rad rad2deg fill zero
negative fix greater greater_equal less less_equal not_equal isreal gcd lcm frexp
"""
_OPERAND = """
gelu silu sin cos tan asin acos atan sinh cosh log log2 log10 log1p abs absolute square leaky_relu elu celu selu
softplus hardswish hardsigmoid hardtanh relu6 mish erf erfc log_sigmoid logsigmoid clamp clamp_min clamp_max clip
softsign hardshrink softshrink tanhshrink threshold glu nan_to_num xlogy digamma lgamma i0 sinc angle view_as_complex
polar special_expit native_gelu logit acosh asinh atanh arccos arccosh arcsin arcsinh arctan arctanh erfinv polygamma
mvlgamma igamma igammac special_erf special_erfc special_erfinv special_gammaln special_digamma special_log1p special_i0
special_ndtr special_ndtri special_log_ndtr special_entr special_xlogy special_logit special_sinc
"""
_OPERANDS = """
maximum minimum fmax fmin atan2 arctan2 hypot prelu _prelu_kernel copysign logaddexp logaddexp2 ldexp cross linalg_cross
"""
_RESULT = "relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal rrelu special_exp2 special_expm1"

ELEMENTWISE: dict[str, Formula] = {
    **named(keeps_nothing, _NOTHING),
    **named(keeps_operand, _OPERAND),
    **named(keeps_operands, _OPERANDS),
    **named(keeps_result, _RESULT),
    **named(keeps_condition, "where masked_fill"),
    **named(multiply, "mul multiply"),
    **named(divide, "div divide true_divide"),
    **named(power, "pow float_power"),
    **named(multiply_add, "addcmul addcdiv lerp"),
    **named(dropout, "dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout _fused_dropout"),
    **named(
        softmax,
        "softmax _softmax log_softmax _log_softmax softmin _safe_softmax special_softmax "
        "special_log_softmax _masked_softmax",
    ),
    **named(logsumexp, "logsumexp special_logsumexp"),
    **named(
        distances,
        "cdist _cdist_forward _euclidean_dist dist pdist _pdist_forward pairwise_distance "
        "cosine_similarity linalg_vecdot",
    ),
    **named(weight_norm, "_weight_norm _weight_norm_interface"),
    "segment_reduce": segment_reduce,
    **named(layer_norm, "layer_norm native_layer_norm"),
    **named(rms_norm, "rms_norm _fused_rms_norm"),
    **named(group_norm, "group_norm native_group_norm instance_norm"),
    **named(
        batch_norm,
        "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_impl_index",
    ),
    **named(
        reduction,
        "sum mean nansum nanmean any all argmax argmin count_nonzero trace sum_to_size bincount histc unique "
        "unique2 _unique2 unique_consecutive unique_dim unique_dim_consecutive nonzero nonzero_numpy masked_select "
        "_is_all_true _is_any_true argwhere histogram trapezoid trapz cumulative_trapezoid",
    ),
    **named(
        reduction_keeps_operand,
        "norm linalg_vector_norm linalg_norm linalg_matrix_norm frobenius_norm var std var_mean std_mean prod "
        "cumprod logcumsumexp renorm norm_except_dim linalg__powsum cov corrcoef",
    ),
    **named(reduction_keeps_indices, "max min amax amin aminmax median nanmedian kthvalue mode cummax cummin"),
    "cumsum": cumulative,
    **named(sort, "sort topk argsort msort quantile nanquantile"),
    "cross_entropy_loss": cross_entropy,
    **named(loss_keeps_targets, "nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward"),
    **named(
        loss_keeps_operands,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
        "soft_margin_loss",
    ),
    **named(
        composite_loss,
        "hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss poisson_nll_loss "
        "multi_margin_loss multilabel_margin_loss",
    ),
    **named(
        average_pool,
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d",
    ),
    **named(
        max_pool,
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d",
    ),
    **named(
        upsample,
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa interpolate grid_sampler "
        "grid_sampler_2d grid_sampler_3d affine_grid_generator",
    ),
}
"""Formula by operator name."""
