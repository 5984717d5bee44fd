"""Find the axis of the batch: by structure, and by trying."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

import sympy
import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.rows import CoupledError, batch_symbols
from partita.tracer.signature import Signature
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
    said = _said_axes(tracer, traced)
    if said is not None:
        return _rows_as_said(tracer, traced, said, tensors, model)
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


def check_batch_dims(
    batch_dims: Mapping[str, int] | None, signature: Signature, tensors: tuple[torch.Tensor, ...]
) -> None:
    """Check the user's word on the batch against the call that it was given with.

    Raises:
        ValueError: If the call has no such argument, the argument no such dim, or the dims different sizes.
    """
    shapes = dict(zip(signature.names, (tuple(tensor.shape) for tensor in tensors), strict=True))
    for name, dim in (batch_dims or {}).items():
        if name not in shapes:
            raise ValueError(f"batch_dims names {name!r}; the tensors of the example are {', '.join(shapes)}")
        if not 0 <= dim < len(shapes[name]):
            raise ValueError(f"batch_dims says dim {dim} of {name!r}, whose shape is {list(shapes[name])}")
    counts = {name: shapes[name][dim] for name, dim in (batch_dims or {}).items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the dims that batch_dims names have different sizes: {counts}")


def _said_axes(tracer: Tracer, traced: Traced) -> tuple[tuple[int, int], ...] | None:
    """Return the input axes that the user called the batch, or None if this call has none of those arguments."""
    if tracer.batch_dims is None:
        return None
    names = traced.signature.names
    axes = tuple((names.index(name), dim) for name, dim in tracer.batch_dims.items() if name in names)
    return axes if axes or not tracer.batch_dims else None


def _rows_as_said(
    tracer: Tracer,
    traced: Traced,
    axes: tuple[tuple[int, int], ...],
    tensors: tuple[torch.Tensor, ...],
    model: nn.Module | None,
) -> tuple[Traced, Rows | None, str]:
    """Cut along the axes that the user named and no other; his word does not make dependent rows independent."""
    if not axes:
        return traced, None, "the example says that the batch is not to be cut"
    assert traced.recording is not None
    if len({traced.recording.sizes.axes[i][d] for i, d in axes}) > 1:
        traced = tracer.trace(traced.signature, tensors, tied=axes, whole=False)
    rows, problem, _ = _try_axis(traced, axes[0], tensors, model)
    return traced, rows, problem and f"dim {axes[0][1]} of {traced.signature.names[axes[0][0]]}, as said: {problem}"


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
