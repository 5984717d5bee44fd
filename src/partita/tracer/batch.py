"""Find the axis of the batch: by structure, and by trying."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

import sympy
import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.rows import CoupledError, batch_symbols
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.verify import rows_apart

MAX_TIED_SETS = 6
"""How many sets of equally many tied inputs are tried; each costs a look at every operator."""


def find_rows(
    tracer: Tracer, traced: Traced, tensors: tuple[torch.Tensor, ...], model: nn.Module | None
) -> tuple[Traced, Rows | None, str]:
    """Find the batch axis of a call.

    Candidates are the symbols of the inputs' axes, leading axes first.  A candidate is accepted if the structure allows
    to put parts together and, where the weights are at hand, the parts of the example really give what the whole gives.
    Inputs that the model never combines in one operator have symbols of their own; for them leading axes of equal size
    are tried as one, as a condition of the capture that every call has to meet. The call is traced again only if the
    structure says that this helps.

    Args:
        tracer: Traces the call again with tied axes.
        traced: The traced call.
        tensors: The example's tensors.
        model: The model with real weights, or None if there are none.

    Returns:
        The traced call to use, its rows or None, and the reasons why an axis may not be cut.
    """
    if traced.recording is None:
        return traced, None, traced.refusal
    hooked = gradient_hooks(tracer.model)
    if hooked:
        return traced, None, f"{hooked} has gradient hooks, which see the gradient of the whole batch"
    reasons, hopeless = [], set()
    for symbol in batch_symbols(traced.recording):
        axis = next(
            (i, d)
            for i, axes in enumerate(traced.recording.sizes.axes)
            for d, axis in enumerate(axes)
            if axis == symbol
        )
        rows, problem, final = _try_axis(traced, axis, tensors, model)
        if rows is not None:
            return traced, rows, ""
        reasons.append(f"dim {axis[1]} of {traced.signature.names[axis[0]]}: {problem}")
        hopeless |= {symbol} if final else set()
    for tied in filter(traced.cut_if_tied, _tied_axes(traced, hopeless)):
        try:
            again = tracer.trace(traced.signature, tensors, tied=tied, whole=False)
        except CaptureError:
            continue
        rows, _, _ = _try_axis(again, tied[0], tensors, model)
        if rows is not None:
            return again, rows, ""
    return traced, None, "; ".join(reasons) or "no input has an axis of variable size"


def gradient_hooks(model: nn.Module) -> str:
    """Return the name of the first module or parameter with backward hooks, or ""."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return path or "the model"
    return next(
        (
            n
            for n, p in model.named_parameters()
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
        ),
        "",
    )


def _try_axis(
    traced: Traced, axis: tuple[int, int], tensors: tuple[torch.Tensor, ...], model: nn.Module | None
) -> tuple[Rows | None, str, bool]:
    """Return the rows of an axis, or None with the reason and whether other inputs could not change it."""
    try:
        rows = traced.rows(axis)
    except CoupledError as error:
        return None, str(error), error.final
    problem = "" if model is None else rows_apart(model, traced.program, tensors, rows.dims, rows.joins)
    return (None, problem, False) if problem else (rows, "", False)


def _tied_axes(traced: Traced, hopeless: Collection[sympy.Symbol]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield sets of leading axes of one size that the trace holds for different ones, largest sets first.

    Args:
        traced: The traced call.
        hopeless: Symbols of axes that cannot be cut whatever they are tied to.
    """
    assert traced.recording is not None
    by_size: dict[int, dict[sympy.Basic, tuple[int, int]]] = {}
    for i, (shape, axes) in enumerate(zip(traced.shapes, traced.recording.sizes.axes, strict=True)):
        if shape and shape[0] > 1 and isinstance(axes[0], sympy.Symbol) and axes[0] not in hopeless:
            by_size.setdefault(shape[0], {}).setdefault(axes[0], (i, 0))
    for apart in by_size.values():
        for size in range(len(apart), 1, -1):
            yield from itertools.islice(itertools.combinations(apart.values(), size), MAX_TIED_SETS)
