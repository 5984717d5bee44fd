"""Hold a capture against the real model before anything trusts it.

`check_equal` runs the user's model and the captured program from the same state and random numbers and compares
results, every gradient and every buffer.  `rows_apart` runs the program on the whole example and on parts of it and
compares the joined parts with the whole: the numerical half of the question whether the batch may be cut.  Both work
on a shadow of the model that shares its weights, so neither leaves a trace on the user's object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from partita.errors import CaptureError
from partita.tracer.control import plainly
from partita.tracer.program import Environment, Program, refs
from partita.tracer.rows import Join
from partita.tracer.signature import Signature
from partita.tracer.skeleton import copy_model, named_tensors
from partita.tracer.tree import leaves, path_text, structure

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 3e-2
"""Relative tolerance for 16-bit and smaller types, whose sums depend on the order of additions."""


def shadow(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters' memory and has buffers of its own."""
    parameters = {id(p) for p in model.parameters()}
    return copy_model(
        model, lambda _name, tensor: tensor.detach() if id(tensor) in parameters else tensor.detach().clone()
    )


class _NoChance(TorchDispatchMode):
    """Replaces random draws by fixed values, so that dropout keeps everything and noise is a constant."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return plainly(func, args, kwargs, no_chance)
        name = func._schema.name.removeprefix("aten::")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "bernoulli_":
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(p) if isinstance(p, torch.Tensor) else args[0].fill_(p)
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = func(*args, **kwargs)
            return result.fill_(0.5) if isinstance(result, torch.Tensor) and result.is_floating_point() else result
        return func(*args, **kwargs)


def no_chance() -> contextlib.AbstractContextManager[Any]:
    """Replace random draws by fixed values."""
    return _NoChance()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def same_chance() -> Iterator[None]:
    """Leave the global random state as it was."""
    with torch.random.fork_rng():
        yield


def copies(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return copies that a forward may change in place."""
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)


def environment(program: Program, model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Environment:
    """Return an environment that runs a program on a whole model."""
    named = {name: tensor for name, tensor, _ in named_tensors(model)}
    return Environment(
        program=program,
        modules=model.get_submodule,
        tensors=named.__getitem__,
        shapes=tuple(tuple(t.shape) for t in tensors),
        values=dict(zip(program.inputs, tensors, strict=True)),
    )


def run_program(program: Program, model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Environment:
    """Run every step on a whole model; write back the buffers that the forward replaces."""
    env = environment(program, model, tensors)
    env.run(program.steps)
    for name, value in program.buffer_writes.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = env.value(value).detach()
    return env


def _run_checked(program: Program, model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Environment:
    """Run a program that is on trial: whatever goes wrong in it is the capture's fault, not the model's."""
    try:
        return run_program(program, model, copies(tensors))
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise CaptureError(f"the captured program fails: {type(error).__name__}: {text}") from error


def check_equal(model: nn.Module, program: Program, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> float:
    """Compare one captured call with the real one: results, gradients, buffers.

    Args:
        model: The user's model with real weights.
        program: The capture.
        signature: The call's structure.
        tensors: The example's tensors.

    Returns:
        The largest relative difference of any result or gradient.

    Raises:
        CaptureError: If they differ, naming the first result, parameter or buffer that does.
    """
    with same_chance():
        torch.manual_seed(0)
        first = shadow(model)
        expected = signature.call(first, copies(tensors))
        torch.manual_seed(0)
        second = shadow(model)
        found = _run_checked(program, second, tensors)
    result = found.fill(program.result)
    worst = 0.0
    if structure(expected) != structure(result):
        raise CaptureError("the capture differs from the model: the result has another structure")
    pairs = list(zip(leaves(expected), leaves(result), strict=True))
    for (path, a), (_, b) in pairs:
        worst = max(worst, _difference(f"the result {path_text(path)}", a, b))
    worst = max(
        worst, *_gradient_differences(first, [a for (_, a), _ in pairs], second, [b for _, (_, b) in pairs]), 0.0
    )
    for (name, a, is_parameter), (_, b, _) in zip(named_tensors(first), named_tensors(second), strict=True):
        if not is_parameter:
            _difference(f"the buffer {name!r}", a, b)
    return worst


def _difference(what: str, a: Any, b: Any) -> float:
    """Return the relative difference of two leaves; raise if it is no rounding error."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = (
            type(a) is type(b) and (a == b or a is b) if isinstance(a, bool | int | float | str | type(None)) else True
        )
        if not same:
            raise CaptureError(f"the capture differs from the model: {what} is {b!r}, should be {a!r}")
        return 0.0
    if a.shape != b.shape or a.dtype != b.dtype:
        raise CaptureError(
            f"the capture differs from the model: {what} is {b.dtype}{tuple(b.shape)}, "
            f"should be {a.dtype}{tuple(a.shape)}"
        )
    error = relative_error(a, b)
    if error > _TOLERANCE.get(a.dtype, _COARSE if a.is_floating_point() else 0.0):
        raise CaptureError(f"the capture differs from the model: {what} is off by {error:.1e} relative")
    return error


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


def _gradients(model: nn.Module, results: list[Any]) -> dict[str, torch.Tensor | None]:
    total = _weighted_sum(results)
    names = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if total is None or not names:
        return {}
    for _, parameter in names:  # a shadow's own; the user's hooks on finished gradients are not for trials
        (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).clear()
    total.backward()  # not autograd.grad, which reentrant checkpoints refuse
    return {n: p.grad for n, p in names}


def _gradient_differences(first: nn.Module, expected: list[Any], second: nn.Module, found: list[Any]) -> list[float]:
    with same_chance():
        torch.manual_seed(1)
        a = _gradients(first, expected)
        torch.manual_seed(1)
        b = _gradients(second, found)
    differences = [0.0]
    floor = max((float(g.abs().max()) for g in a.values() if g is not None and g.numel()), default=0.0) * 1e-6
    for name, grad in a.items():
        other = b.get(name)
        if (grad is None) != (other is None):
            raise CaptureError(
                f"the capture differs from the model: the gradient of {name!r} is "
                f"{'missing' if other is None else 'made up'}"
            )
        if grad is None or other is None:
            continue
        if float((grad - other).abs().max() if grad.numel() else 0.0) > floor:
            differences.append(_difference(f"the gradient of {name!r}", grad, other))
    return differences


def cut(
    tensors: tuple[torch.Tensor, ...], dims: tuple[int | None, ...], start: int, stop: int
) -> tuple[torch.Tensor, ...]:
    """Return rows ``start`` to ``stop`` of the tensors that carry rows, the others as they are."""
    return tuple(t if d is None else t.narrow(d, start, stop - start) for t, d in zip(tensors, dims, strict=True))


def weight_of(join: Join, env: Environment, rows: int) -> float:
    """Return a part's weight in its join, before normalisation: rows, counted targets, or 1."""
    if join.how == "count":
        return float((env.value(join.targets) != join.ignored).sum())
    return float(rows) if join.how == "mean" else 1.0


def trial_inputs(tensors: tuple[torch.Tensor, ...], dims: tuple[int | None, ...]) -> tuple[torch.Tensor, ...] | None:
    """Return inputs whose rows differ, so that a trial can see whether they are mixed; None if there are none.

    Floating inputs with equal rows get noise (the same on every rank); other inputs stay as they are.

    Args:
        tensors: A call's inputs.
        dims: For each the dim of its rows, or None.
    """
    generator = torch.Generator().manual_seed(0)
    found, telling = [], False
    for tensor, dim in zip(tensors, dims, strict=True):
        given = tensor
        if dim is not None and tensor.numel():
            differ = bool((tensor != tensor.narrow(dim, 0, 1)).any())
            if not differ and tensor.is_floating_point():
                scale = float(tensor.abs().max()) or 1.0
                noise = torch.rand(tensor.shape, generator=generator).to(tensor) * scale
                given, differ = (tensor.detach() + noise).requires_grad_(tensor.requires_grad), True
            telling = telling or differ
        found.append(given)
    return tuple(found) if telling else None


def within_rounding(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype differ by rounding only."""
    return relative_error(a, b) <= _TOLERANCE.get(a.dtype, _COARSE if a.is_floating_point() else 0.0)


def rows_apart(
    model: nn.Module,
    program: Program,
    tensors: tuple[torch.Tensor, ...],
    dims: tuple[int | None, ...],
    joins: Mapping[str, Join],
) -> str:
    """Run the whole example and its parts; say what differs ("" if the joined parts equal the whole).

    Args:
        model: The user's model with real weights.
        program: A capture whose sizes hold for parts of the batch.
        tensors: The example's tensors.
        dims: For each input the dim of its rows, or None.
        joins: For each value of the result how parts are put together.
    """
    rows = next(t.shape[d] for t, d in zip(tensors, dims, strict=True) if d is not None)
    varied = trial_inputs(tensors, dims)
    if varied is None:
        return "the rows of the example are all alike, so nothing can be tried; give rows that differ"
    tensors = varied
    if rows < 4:
        tensors = tuple(
            t if d is None else torch.cat([t, t.flip(d)], d).detach().requires_grad_(t.requires_grad)
            for t, d in zip(tensors, dims, strict=True)
        )
        rows *= 2
    first = max(2, rows * 2 // 5)
    parts = [cut(tensors, dims, 0, first), cut(tensors, dims, first, rows)]
    if any(not program.sizes.holds(tuple(tuple(t.shape) for t in part)) for part in (tensors, *parts)):
        return "the model takes another path for a part of the batch"
    try:
        with same_chance(), torch.no_grad(), no_chance():
            whole = _run_checked(program, shadow(model), tensors)
            halves = [_run_checked(program, shadow(model), part) for part in parts]
    except CaptureError as failure:
        return str(failure).splitlines()[0]
    for name in dict.fromkeys(refs(program.result)):
        join, a = joins[name], whole.value(name)
        if not isinstance(a, torch.Tensor):
            continue
        joined = _joined(
            join,
            [h.value(name) for h in halves],
            [weight_of(join, h, n) for h, n in zip(halves, (first, rows - first), strict=True)],
        )
        if joined is None or joined.shape != a.shape:
            return f"the parts of {name} do not fit together"
        error = relative_error(a, joined)
        if error > _TOLERANCE.get(a.dtype, _COARSE if a.is_floating_point() else 0.0):
            return f"{name} of the whole batch differs from its parts by {error:.1e} relative"
    return ""


def _joined(join: Join, parts: list[torch.Tensor], weights: list[float]) -> torch.Tensor | None:
    if join.how == "rows":
        same = all(
            p.shape[: join.dim] + p.shape[join.dim + 1 :] == parts[0].shape[: join.dim] + parts[0].shape[join.dim + 1 :]
            for p in parts
        )
        return torch.cat(parts, join.dim) if same else None
    if join.how == "whole":
        return parts[0] if relative_error(parts[0], parts[1]) < _COARSE else None
    total = sum(weights) if join.how in {"mean", "count"} else 1.0
    scale = [w / total for w in weights] if total else [0.0] * len(weights)
    return (
        sum((p * s for p, s in zip(parts, scale, strict=True)), start=torch.zeros_like(parts[0]))
        if join.how != "sum"
        else parts[0] + parts[1]
    )
