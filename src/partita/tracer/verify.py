"""Hold a capture against the real model before anything trusts it.

`Twins` runs the user's model and the captured program from the same state and random numbers and compares results,
every gradient and every buffer (`partita.tracer.compare`).  `rows_apart` runs the program on the whole example and on
parts of it and compares the joined parts with the whole: the numerical half of the question whether the batch may be
cut.  Both work on shadows of the model that share its weights, so neither leaves a trace on the user's object.
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
from partita.tracer.compare import (
    COARSE,
    buffer_differences,
    changed_buffer,
    difference,
    gradient_differences,
    gradients,
    relative_error,
    result_differences,
    within_rounding,
)
from partita.tracer.control import plainly
from partita.tracer.joins import join_parts, part_weight
from partita.tracer.program import Environment, Program
from partita.tracer.recorder import refs
from partita.tracer.rows import Join
from partita.tracer.signature import Signature
from partita.tracer.skeleton import copy_model, named_tensors


def shadow(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters' memory and has buffers of its own."""
    parameters = {id(p) for p in model.parameters()}
    return copy_model(
        model, lambda _name, tensor: tensor.detach() if id(tensor) in parameters else tensor.detach().clone()
    )


KEPT_BYTES = 2**29
"""Of models with more parameters no copy is kept while they are tried."""


@contextlib.contextmanager
def weights_as_they_were(model: nn.Module | None) -> Iterator[None]:
    """Undo what trials do to the weights of a model whose forward changes them.

    Args:
        model: The user's model, or None.

    Raises:
        CaptureError: If the weights were changed and the model is too large for a copy (more than `KEPT_BYTES`).
    """
    parameters = {} if model is None else dict(model.named_parameters())
    small = sum(p.numel() * p.element_size() for p in parameters.values()) <= KEPT_BYTES
    kept = {name: p.detach().clone() for name, p in parameters.items()} if small else {}
    versions = {name: p._version for name, p in parameters.items()}
    try:
        yield
    finally:
        for name, before in kept.items():
            if not torch.equal(parameters[name], before):
                parameters[name].data.copy_(before)
    changed = next((n for n, p in parameters.items() if not small and p._version != versions[n]), None)
    if changed is not None:
        raise CaptureError(
            f"the forward of {type(model).__name__} changes its own weight {changed!r}, which a trial has done to it",
            hint="build the model anew and pass verify='off', or change weights outside of the forward",
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
        return run_program(program, model, tensors)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise CaptureError(f"the captured program fails: {type(error).__name__}: {text}") from error


class Twins:
    """The model and a captured program, each on a shadow of its own, called one after the other.

    State that the calls change (buffers, lazily set attributes) stays between the calls of one `Twins`, so that a
    second call shows whether the program carries it on as the model does.

    Args:
        model: The user's model with real weights.
        program: The capture.
        signature: The call's structure.
    """

    def __init__(self, model: nn.Module, program: Program, signature: Signature) -> None:
        self._real, self._copy = shadow(model), shadow(model)
        self._program, self._signature = program, signature

    def call_model(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Call the real model; return its result and the tensors that it was given."""
        given = copies(tensors)
        with same_chance():
            torch.manual_seed(0)
            return self._signature.call(self._real, given), given

    def compare(self, tensors: tuple[torch.Tensor, ...]) -> float:
        """Call both and compare.

        Returns:
            The largest relative difference of any result or gradient.

        Raises:
            CaptureError: If they differ, naming the first result, input, gradient or buffer that does.
        """
        return self.compare_with(*self.call_model(tensors), tensors)

    def compare_with(self, expected: Any, given: tuple[torch.Tensor, ...], tensors: tuple[torch.Tensor, ...]) -> float:
        """Call the program and compare with what `call_model` returned for the same tensors.

        Raises:
            CaptureError: See `compare`.
        """
        mine = copies(tensors)
        with same_chance():
            torch.manual_seed(0)
            env = _run_checked(self._program, self._copy, mine)
        found = env.fill(self._program.result)
        named = self._signature.names
        worst = result_differences(expected, found)
        for name, a, b in zip(named, given, mine, strict=True):
            difference(f"the input {name!r} after the call", a, b)
        with same_chance():
            torch.manual_seed(1)
            wanted = gradients(self._real, list(zip(named, given, strict=True)), expected)
            torch.manual_seed(1)
            given_back = gradients(self._copy, list(zip(named, mine, strict=True)), found)
        worst = max(worst, gradient_differences(wanted, given_back))
        buffer_differences(self._real, self._copy)
        return worst


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
    return Twins(model, program, signature).compare(tensors)


def cut(
    tensors: tuple[torch.Tensor, ...], dims: tuple[int | None, ...], start: int, stop: int
) -> tuple[torch.Tensor, ...]:
    """Return rows ``start`` to ``stop`` of the tensors that carry rows, the others as they are."""
    return tuple(t if d is None else t.narrow(d, start, stop - start) for t, d in zip(tensors, dims, strict=True))


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
            copy = shadow(model)
            whole = _run_checked(program, copy, copies(tensors))
            halves = [_run_checked(program, shadow(model), copies(part)) for part in parts]
    except CaptureError as failure:
        return str(failure).splitlines()[0]
    moved = changed_buffer(model, copy)
    if moved:
        return f"the forward changes {moved!r}, once per step"
    for name in dict.fromkeys(refs(program.result)):
        join, a = joins[name], whole.value(name)
        if not isinstance(a, torch.Tensor):
            continue
        joined = _joined(
            join,
            [h.value(name) for h in halves],
            [part_weight(join, h, n) for h, n in zip(halves, (first, rows - first), strict=True)],
        )
        if joined is None or joined.shape != a.shape:
            return f"the parts of {name} do not fit together"
        if not within_rounding(a, joined):
            return f"{name} of the whole batch differs from its parts by {relative_error(a, joined):.1e} relative"
    return ""


def _joined(join: Join, parts: list[torch.Tensor], weights: list[float]) -> torch.Tensor | None:
    """Return the joined parts; None if they do not fit together."""
    if join.how == "rows" and len({(*p.shape[: join.dim], *p.shape[join.dim + 1 :]) for p in parts}) > 1:
        return None
    if join.how == "whole" and not relative_error(parts[0], parts[1]) < COARSE:
        return None
    joined, total = join_parts(parts, join, weights), sum(weights)
    return joined / total if join.how in {"mean", "count"} and total else joined
