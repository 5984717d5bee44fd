"""Transforms, matrix decompositions and dynamic programs: work that grows faster than the operands.

Counts are the leading terms of the standard algorithms (Golub and Van Loan, Matrix Computations, 4th edition, for the
decompositions; 5 N log2 N for a complex transform of length N, as FFTW states its speed).
"""

from __future__ import annotations

from math import log2, prod

from partita.cost.ops.call import FLOAT_BYTES, Formula, OpCall, OpPrice, is_floating, named, streaming
from partita.ir.graph import TensorSpec


def transform(call: OpCall) -> OpPrice:
    """``fft_*``: 5 N log2 N per transform, half of it if one side is real; linear, so nothing is kept."""
    longest = max((*call.reads, *call.writes), key=lambda tensor: tensor.numel, default=None)
    if longest is None:
        return streaming(call, "scan")
    length = prod(longest.shape[dim] for dim in _transformed(call, len(longest.shape)))
    real = any(not tensor.dtype.startswith("complex") for tensor in (*call.reads[:1], *call.writes[:1]))
    return streaming(call, "scan", flops=_transform_flops(longest.numel, length, real=real))


def windowed_transform(call: OpCall) -> OpPrice:
    """``stft, istft``: one transform of ``n_fft`` numbers for each frame; the frames are made anew, nothing is kept."""
    length = int(call.number("n_fft", 2))
    bins = max(
        (tensor.numel for tensor in (*call.reads, *call.writes) if tensor.dtype.startswith("complex")), default=0
    )
    return streaming(call, "scan", flops=_transform_flops(2 * bins, length, real=True))


def decomposition(call: OpCall) -> OpPrice:
    """``linalg_*`` of matrices: a multiple of m n min(m, n) per matrix; the operand and the results are kept."""
    flops = int(_CUBIC.get(call.name, 2.0) * sum(_cube(tensor) for tensor in call.reads[:1]))
    flops += sum(2 * tensor.numel * _columns(call.reads[0]) for tensor in call.reads[1:2])  # right-hand sides
    return streaming(call, "scan", flops=flops, saved=(*call.reads, *(t for t in call.writes if is_floating(t))))


def ctc_loss(call: OpCall) -> OpPrice:
    """``ctc_loss``: a lattice of steps x (2 labels + 1) per sequence, which is kept with the losses and operands."""
    if len(call.reads) < 2:
        return streaming(call, "loss", saved=call.reads)
    scores, labels = call.reads[:2]
    steps = prod(scores.shape[:-1])  # time x sequences
    sequences = scores.shape[1] if len(scores.shape) > 2 else 1
    longest = labels.shape[-1] if len(labels.shape) > 1 else -(-labels.numel // max(1, sequences))
    lattice = steps * (2 * longest + 1)
    return streaming(call, "loss", flops=10 * lattice, saved=call.reads, workspace=(lattice + sequences) * FLOAT_BYTES)


def _transformed(call: OpCall, num_dims: int) -> tuple[int, ...]:
    """Return the dims that a transform runs over."""
    dims = call.literals.get("dim")
    if not isinstance(dims, int) and not dims:
        dims = range(num_dims) if call.name.endswith("n") else (-2, -1) if call.name.endswith("2") else (-1,)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list | range):
        return ()
    return tuple(dim for dim in dims if isinstance(dim, int) and -num_dims <= dim < num_dims)


def _transform_flops(elements: int, length: int, *, real: bool) -> int:
    return int((2.5 if real else 5.0) * elements * log2(max(2, length)))


def _cube(tensor: TensorSpec) -> int:
    """Return m n min(m, n), summed over the matrices of a batch."""
    return tensor.numel * min(tensor.shape[-2:], default=1)


def _columns(tensor: TensorSpec) -> int:
    return tensor.shape[-1] if tensor.shape else 1


_MULTIPLES = {
    0.0: "cholesky_solve linalg_solve_triangular triangular_solve linalg_lu_solve",
    1 / 3: "cholesky linalg_cholesky linalg_cholesky_ex",
    2 / 3: "linalg_lu_factor linalg_lu_factor_ex linalg_lu linalg_det linalg_slogdet det slogdet logdet _linalg_det "
    "_linalg_slogdet linalg_solve linalg_solve_ex _linalg_solve_ex",
    9.0: "linalg_eigh linalg_eigvalsh _linalg_eigh",
    20.0: "linalg_svd linalg_svdvals _linalg_svd svd linalg_pinv pinverse linalg_matrix_rank linalg_cond nuclear_norm "
    "linalg_lstsq linalg_matrix_exp matrix_exp",
    25.0: "linalg_eig linalg_eigvals",
}
"""Operators by their multiple of m n min(m, n); those not named take 2 (an inverse, a QR decomposition)."""
_CUBIC = {name: multiple for multiple, names in _MULTIPLES.items() for name in names.split()}

NUMERIC: dict[str, Formula] = {
    **named(
        transform,
        "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 "
        "fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn _fft_c2c _fft_r2c _fft_c2r",
    ),
    **named(windowed_transform, "stft istft"),
    **named(decomposition, " ".join(_CUBIC)),
    **named(
        decomposition,
        "linalg_inv linalg_inv_ex inverse linalg_qr qr cholesky_inverse lu_solve lu_unpack linalg_ldl_factor "
        "linalg_ldl_factor_ex linalg_ldl_solve linalg_householder_product geqrf orgqr ormqr linalg_matrix_power "
        "matrix_power linalg_tensorinv linalg_tensorsolve",
    ),
    **named(ctc_loss, "ctc_loss _ctc_loss"),
}
"""Formula by operator name."""
