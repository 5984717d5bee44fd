"""Find the axis of the batch: by structure, and by trying."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.rows import CoupledError, batch_symbols
from partita.tracer.sizes import Binding
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.verify import rows_apart

MAX_TIED_SETS = 6
"""How many sets of equally many tied inputs are tried; each costs a trace."""


def find_rows(
    tracer: Tracer, traced: Traced, tensors: tuple[torch.Tensor, ...], model: nn.Module | None
) -> tuple[Traced, Rows | None, str]:
    """Find the batch axis of a call.

    Candidates are the symbols of the inputs' axes, leading axes first.  A candidate is accepted if the structure allows
    to put parts together and, where the weights are at hand, the parts of the example really give what the whole gives.
    Inputs that the model never combines in one operator have symbols of their own; for them leading axes of equal size
    are tried as one, as a condition of the capture that every call has to meet.

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
    reasons = []
    for symbol in batch_symbols(traced.recording):
        axis = next(
            (i, d)
            for i, axes in enumerate(traced.recording.sizes.axes)
            for d, axis in enumerate(axes)
            if axis == symbol
        )
        rows, problem = _try_axis(traced, axis, tensors, model)
        if rows is not None:
            return traced, rows, ""
        reasons.append(f"dim {axis[1]} of {traced.signature.names[axis[0]]}: {problem}")
    for tied in _tied_axes(traced.shapes):
        try:
            again = tracer.trace(traced.signature, tensors, tied=tied, whole=False)
        except CaptureError:
            continue
        rows, _ = _try_axis(again, tied[0], tensors, model)
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
) -> tuple[Rows | None, str]:
    try:
        rows = traced.rows(axis)
    except CoupledError as error:
        return None, str(error)
    problem = "" if model is None else rows_apart(model, traced.program, tensors, rows.dims, rows.joins)
    return (None, problem) if problem else (rows, "")


def _tied_axes(shapes: Binding) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield sets of at least two inputs with leading axes of one size, largest sets first."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for i, shape in enumerate(shapes):
        if shape and shape[0] > 1:
            by_size.setdefault(shape[0], []).append((i, 0))
    for axes in by_size.values():
        for size in range(len(axes), 1, -1):
            yield from itertools.islice(itertools.combinations(axes, size), MAX_TIED_SETS)
