"""Try a capture on more than the example: a second call, other sizes and values, evaluation.

A capture that is right on the example may still have burnt something of it in: a size, a number, a tensor, the state
before the first call, a training flag.  Each trial here changes one of these and compares with the real model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Literal

import sympy
import torch
from torch import nn

from partita.errors import CaptureError
from partita.ir.report import Comparison
from partita.tracer.assume import holds_for
from partita.tracer.sizes import SizeRules, evaluate
from partita.tracer.traced import Traced
from partita.tracer.verify import Twins

Verify = Literal["off", "auto", "always"]
PATIENCE_S = 20.0
"""With ``verify="auto"`` further trials are left out when a trace or a comparison has taken longer (seconds)."""
EVERYTHING = ("results", "gradients", "buffers")
_DAMPING = 7 / 8
"""Factor of floating inputs in a call with other values: masks, probabilities and targets stay legal."""


def try_call(
    model: nn.Module, traced: Traced, tensors: tuple[torch.Tensor, ...], verify: Verify, name: str = "the example"
) -> tuple[Comparison, ...]:
    """Compare a capture with the model: on its example, once more, and with other sizes and values.

    Args:
        model: The user's model with real weights, in the mode of the capture.
        traced: The capture.
        tensors: The call's tensors.
        verify: ``always`` makes every trial; ``auto`` leaves out what comes after a slow one.
        name: What to call the example.

    Returns:
        What was compared.

    Raises:
        CaptureError: If the capture differs, naming the call and what differs.
    """
    begin = time.perf_counter()
    twins = Twins(model, traced.program, traced.signature)
    found = [_compare(name, twins, tensors)]
    elapsed = time.perf_counter() - begin
    if verify == "auto" and elapsed > PATIENCE_S:
        why = f"not tried, the first comparison took {elapsed:.0f} s; verify='always' tries it"
        return (*found, *(Comparison(call=c, problem=why) for c in ("a second call", "another size")))
    found.append(_compare("a second call" if name == "the example" else f"{name} once more", twins, tensors))
    found.append(_try_another_size(model, traced, tensors, name))
    return tuple(found)


def try_once(model: nn.Module, traced: Traced, tensors: tuple[torch.Tensor, ...], name: str) -> Comparison:
    """Compare a capture with the model on one call.

    Raises:
        CaptureError: If it differs.
    """
    return _compare(name, Twins(model, traced.program, traced.signature), tensors)


def _compare(name: str, twins: Twins, tensors: tuple[torch.Tensor, ...]) -> Comparison:
    try:
        difference = twins.compare(tensors)
    except CaptureError as error:
        raise _in_call(name, error) from error
    return _equal(name, tensors, difference)


def _equal(name: str, tensors: tuple[torch.Tensor, ...], difference: float) -> Comparison:
    compared = EVERYTHING if torch.is_grad_enabled() else ("results", "buffers")
    return Comparison(
        call=name, compared=compared, shapes=tuple(tuple(t.shape) for t in tensors), difference=difference
    )


def _in_call(name: str, error: CaptureError) -> CaptureError:
    where = "" if name == "the example" else f" (in {name})"
    return CaptureError(f"{error.message}{where}", hint=error.hint, **error.data)


def _try_another_size(model: nn.Module, traced: Traced, tensors: tuple[torch.Tensor, ...], example: str) -> Comparison:
    shapes = tuple(tuple(t.shape) for t in tensors)
    reason, name = "not tried, the call has no tensors", ""
    for others in other_calls(traced.program.sizes, tensors):
        if not holds_for(traced.program, others):
            reason = "not tried, the model takes another path for the values that were tried"
            continue
        resized = tuple(tuple(t.shape) for t in others) != shapes
        name = ("another size" if resized else "other values") + ("" if example == "the example" else f" of {example}")
        twins = Twins(model, traced.program, traced.signature)
        try:
            expected, given = twins.call_model(others)
        except Exception as error:  # noqa: BLE001  (the model's own refusal of a call that the user never made)
            reason = f"not tried, the model refuses what was tried: {(str(error).splitlines() or [''])[0][:120]}"
            continue
        try:
            return _equal(name, others, twins.compare_with(expected, given, others))
        except CaptureError as error:
            sizes = ", ".join(str(tuple(t.shape)) for t in others)
            raise _in_call(f"{name}: {sizes}", error) from error
    return Comparison(call=name or "another size", problem=reason)


def other_calls(rules: SizeRules, tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield inputs of other sizes and values for which a capture holds, the most telling first; last the same sizes.

    Values are taken from the example, so that indices stay legal where rows are only left out or repeated; floating
    values are damped.  Away from the CPU, where an index out of range ends the process's device, only rows of the
    leading axis are repeated.

    Args:
        rules: When the capture holds.
        tensors: The example's inputs.
    """
    known: dict[sympy.Symbol, int] = {}
    for tensor, axes in zip(tensors, rules.axes, strict=True):
        known |= {axis: size for size, axis in zip(tensor.shape, axes, strict=True) if isinstance(axis, sympy.Symbol)}
    yield from _other_sizes(rules, tensors, known)
    if any(tensor.ndim for tensor in tensors):
        yield tuple(_damped(t.detach().flip(0) if t.ndim else t.detach(), like=t) for t in tensors)


def _other_sizes(
    rules: SizeRules, tensors: tuple[torch.Tensor, ...], known: dict[sympy.Symbol, int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    if not known:
        return
    first = next(iter(known))
    fewer = {symbol: size * 3 // 4 if size > 2 else size + 1 for symbol, size in known.items()}
    more = {first: known[first] + max(1, known[first] // 2)}
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    for change in [fewer, {first: fewer[first]}, more] if on_cpu else [more]:
        values = known | change
        for turned in (True, False):
            made = _resized(rules, tensors, values, first if turned else None)
            if made is None or not rules.holds(tuple(tuple(t.shape) for t in made)):
                continue
            if _as_many_rows(tensors, made):
                yield made


def _as_many_rows(tensors: tuple[torch.Tensor, ...], made: tuple[torch.Tensor, ...]) -> bool:
    """Whether inputs that had one leading size still have one: a call with rows that do not match is no call."""
    pairs = {(t.shape[0], m.shape[0]) for t, m in zip(tensors, made, strict=True) if t.ndim}
    return len(pairs) == len({before for before, _ in pairs})


def _resized(
    rules: SizeRules,
    tensors: tuple[torch.Tensor, ...],
    values: Mapping[sympy.Symbol, int],
    turned: sympy.Symbol | None,
) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors with these sizes; rows of the axis ``turned`` in reverse, floating values damped."""
    found = []
    for tensor, axes in zip(tensors, rules.axes, strict=True):
        made = tensor.detach()
        for dim, axis in enumerate(axes):
            size, old = evaluate(axis, dict(values)), tensor.shape[dim]
            if not isinstance(size, int) or size < 1 or old < 1:
                return None
            if size != old or axis == turned:
                at = torch.arange(size, device=tensor.device)
                made = made.index_select(dim, ((old - 1 - at) if axis == turned else at) % old)
        found.append(
            made.clone().requires_grad_(tensor.requires_grad) if turned is None else _damped(made, like=tensor)
        )
    return tuple(found)


def _damped(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return a copy with damped floating values, as a leaf that requires a gradient if ``like`` does."""
    made = tensor * _DAMPING if tensor.is_floating_point() else tensor.clone()
    return made.requires_grad_(like.requires_grad)
