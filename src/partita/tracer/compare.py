"""Compare what a capture gives with what the model gives: results, gradients, state.

Everything that differs raises a `CaptureError` that names the first result, gradient, input or buffer that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.skeleton import named_tensors
from partita.tracer.tree import leaves, path_text, structure

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
COARSE = 3e-2
"""Relative tolerance for 16-bit and smaller types, whose sums depend on the order of additions."""


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude; NaN matches NaN."""
    if a.numel() == 0:
        return 0.0
    if not a.is_floating_point() and not a.is_complex():
        return float((a != b).any())
    a, b = (
        a.detach().to(torch.complex128 if a.is_complex() else torch.float64),
        b.detach().to(torch.complex128 if b.is_complex() else torch.float64),
    )
    both = torch.isnan(a) & torch.isnan(b)
    gap = torch.where(both | (a == b), torch.zeros((), dtype=torch.float64), (a - b).abs())
    scale = a.abs()[torch.isfinite(a)]
    return float(gap.max()) / max(float(scale.max()) if scale.numel() else 0.0, 1e-6)


def is_rounding(error: float, dtype: torch.dtype) -> bool:
    """Whether a relative error is small enough to come from rounding in ``dtype``."""
    coarse = COARSE if dtype.is_floating_point else 0.0
    return error <= _TOLERANCE.get(dtype, coarse)


def within_rounding(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype differ by rounding only."""
    return is_rounding(relative_error(a, b), a.dtype)


def _differs(text: str) -> CaptureError:
    return CaptureError(f"the capture differs from the model: {text}")


def difference(what: str, expected: Any, found: Any) -> float:
    """Return the relative difference of two leaves.

    Raises:
        CaptureError: If it is no rounding error.
    """
    a, b = expected, found
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        plain = isinstance(a, bool | int | float | str | type(None))
        if plain and not (type(a) is type(b) and (a == b or a is b)):
            raise _differs(f"{what} is {b!r}, should be {a!r}")
        return 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        raise _differs(f"{what} is {b.dtype}{tuple(b.shape)}, should be {a.dtype}{tuple(a.shape)}")
    error = relative_error(a, b)
    if not is_rounding(error, a.dtype):
        raise _differs(f"{what} is off by {error:.1e} relative")
    return error


def result_differences(expected: Any, found: Any) -> float:
    """Return the largest relative difference of two results of a call.

    Raises:
        CaptureError: If they differ by more than rounding, or in structure.
    """
    if structure(expected) != structure(found):
        raise _differs("the result has another structure")
    pairs = zip(leaves(expected), leaves(found), strict=True)
    return max((difference(f"the result {path_text(path)}", a, b) for (path, a), (_, b) in pairs), default=0.0)


def gradients(model: nn.Module, inputs: Sequence[tuple[str, torch.Tensor]], result: Any) -> dict[str, Any]:
    """Return the gradients of parameters and inputs for a fixed weighting of all differentiable results.

    Args:
        model: Whose parameters are meant.
        inputs: Names and tensors of the call's inputs; those that require a gradient count.
        result: What the call gave.

    Returns:
        What each gradient is of, as text, to its value; None for what the results do not depend on.
    """
    wanted: list[tuple[str, torch.Tensor]] = [
        (f"the gradient of {n!r}", p) for n, p in model.named_parameters() if p.requires_grad
    ]
    wanted += [(f"the gradient of the input {n!r}", t) for n, t in inputs if t.requires_grad]
    total = _weighted_sum([leaf for _, leaf in leaves(result)])
    if total is None or not wanted:
        return {name: None for name, _ in wanted}
    for _, tensor in wanted:  # a shadow's own; the user's hooks on finished gradients are not for trials
        (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).clear()
        tensor.grad = None
    total.backward()  # not autograd.grad, which reentrant checkpoints refuse
    return {name: tensor.grad for name, tensor in wanted}


def gradient_differences(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the largest relative difference of two sets of `gradients`.

    Differences below a millionth of the largest gradient of all are rounding, however small their own gradient.

    Raises:
        CaptureError: If one differs by more.
    """
    floor = max((float(g.abs().max()) for g in expected.values() if g is not None and g.numel()), default=0.0) * 1e-6
    worst = 0.0
    for name, a in expected.items():
        b = found[name]
        if (a is None) != (b is None):
            raise _differs(f"{name} is {'missing' if b is None else 'made up'}")
        if a is not None and a.numel() and not float((a - b).abs().max()) <= floor:
            worst = max(worst, difference(name, a, b))
    return worst


def buffer_differences(expected: nn.Module, found: nn.Module) -> float:
    """Return the largest relative difference of two models' buffers.

    Raises:
        CaptureError: If one differs by more than rounding.
    """
    pairs = zip(named_tensors(expected), named_tensors(found), strict=True)
    return max(
        (difference(f"the buffer {name!r}", a, b) for (name, a, parameter), (_, b, _) in pairs if not parameter),
        default=0.0,
    )


def changed_buffer(before: nn.Module, after: nn.Module) -> str:
    """Return the name of the first buffer that differs at all between two states of a model; "" if none does."""
    for (name, a, parameter), (_, b, _) in zip(named_tensors(before), named_tensors(after), strict=True):
        if not parameter and (a.shape != b.shape or relative_error(a, b) > 0):
            return name
    return ""


def _weighted_sum(results: list[Any]) -> torch.Tensor | None:
    """Return one scalar through which every differentiable result feels a gradient of its own."""
    total = None
    for leaf in results:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = (
                torch.linspace(0.5, 1.5, max(leaf.numel(), 1), dtype=torch.float64).reshape(leaf.shape).to(leaf.device)
            )
            part = (leaf * weights.to(leaf.dtype)).sum()
            part = part.real if part.is_complex() else part
            total = part if total is None else total + part.to(total.dtype)
    return total
