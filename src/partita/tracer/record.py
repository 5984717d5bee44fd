"""Record one traced call of a model: the ATen operators, and the real call of every submodule.

`torch.export.export` traces a weightless copy; hooks outside the user's own hooks note for every submodule call where
in the operator list it begins and ends, what it was given and what it gave back, with every tensor replaced by the
operator node that made it.  The trace is left by an exception as soon as the root returns: the raw operator list
needs none of export's later passes, so their refusals do not matter.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita.errors import CaptureError
from partita.tracer.assume import Reading
from partita.tracer.caches import forgetful
from partita.tracer.fakes import register_fakes
from partita.tracer.hooks import hooks_as_they_were
from partita.tracer.lean import lean_tracing
from partita.tracer.places import innermost_place
from partita.tracer.reconcile import foresee
from partita.tracer.recorder import (
    Entry,
    RecordedError,
    Recorder,
    Recording,
    hooked,
    patched_functions,
    quiet,
    restored_attributes,
)
from partita.tracer.skeleton import swap_tensors

FREEDOM = ("most", "leading", "none")
"""Which axes of the inputs get symbols: most, the leading ones, none.

``most`` is all axes of inputs of up to three dims and the first two of larger ones: the arithmetic that models do with
the height and width of images makes expressions that take minutes, and images rarely change their size.  Models that
do arithmetic which symbols cannot follow are traced with fewer; fixed sizes are conditions of the capture, and a call
with others is captured anew."""


MANY_MODULES = 500
"""From this size on, layers repeat so often that torch's cache of stand-in results pays.

A cached result is rebuilt with its symbolic strides, which is dearer than most first results: three layers of a
state-space model take 4.3 CPU s with the cache and 2.5 without, 20 wide decoder layers 3.1 with and 3.5 without.
"""


register_fakes()

MANY_DIMS = 3
"""Inputs of more dims get symbols for their first two only."""


def record(
    model: nn.Module,
    tensors: tuple[torch.Tensor, ...],
    call: Callable[[nn.Module, tuple[torch.Tensor, ...]], Any],
    device: str,
    *,
    tied: tuple[tuple[int, int], ...] = (),
    stateful: dict[str, str] | None = None,
    reading: Reading | None = None,
) -> Recording:
    """Trace one call of a weightless model.

    A forward that changes plain attributes is traced again: what it set up once (a cache flag, a hook) is then settled;
    what changes with every call is state, and its module must run as it is.

    Args:
        model: A `skeleton`; it keeps what its forward settles, and is otherwise left as it was.
        tensors: The input tensors of the example (only shapes, dtypes and flags matter).
        call: Calls the model with the user's arguments rebuilt around the given tensors.
        device: Where the parameters will be when the captured program runs.
        tied: Input axes (input, dim) that are taken to have one size, as a condition of the recording.
        stateful: Path to attribute of the modules whose forward is known to change it; more are added.
        reading: What the forward may read of the inputs' values; nothing by default.

    Returns:
        The recording.

    Raises:
        CaptureError: If the model's forward cannot be traced, with the user's file and line.
    """
    known = {} if stateful is None else stateful
    refusal: CaptureError | None = None
    for freedom in FREEDOM:
        trace = partial(_trace, model, tensors, call, device, tied, known, reading or Reading(), freedom)
        try:
            recording, changed = trace(settle=True)
            if changed.keys() - known.keys():
                recording, again = trace()
                known |= again
            if changed.keys() & known.keys():
                recording, _ = trace()
        except CaptureError as error:
            refusal = refusal or error
            if error.data.get("final") or error.data.get("unrolled"):
                break
        else:
            return recording
    assert refusal is not None
    raise refusal


def _trace(
    model: nn.Module,
    tensors: tuple[torch.Tensor, ...],
    call: Callable[[nn.Module, tuple[torch.Tensor, ...]], Any],
    device: str,
    tied: tuple[tuple[int, int], ...],
    stateful: Mapping[str, str],
    reading: Reading,
    freedom: str,
    *,
    settle: bool = False,
) -> tuple[Recording, dict[str, str]]:
    """Trace once; return the recording and the attributes that changed, by module path."""
    with quiet():
        foreseen = foresee(model, call, tensors)
    fake_mode = FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True, prefer_deferred_runtime_asserts_over_guards=False),
        allow_non_fake_inputs=True,
        export=True,
    )

    fake_mode.cache_enabled = sum(1 for _ in model.modules()) >= MANY_MODULES

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    restore = swap_tensors(model, fake)
    recorder = Recorder(model, fake_mode, stateful, foreseen)

    def entry_call(given: tuple[torch.Tensor, ...]) -> Any:
        recorder.input_tensors = given
        for (i, d), (j, e) in itertools.pairwise(tied):
            torch._check(given[i].shape[d] == given[j].shape[e])
        with reading.mode(recorder, tensors):
            return call(model, given)

    entry = Entry(model, entry_call)
    entry.training = model.training
    axes = tuple(
        {"most": t.ndim if t.ndim <= MANY_DIMS else 2, "leading": min(t.ndim, 1), "none": 0}[freedom] for t in tensors
    )
    dynamic = {"tensors": tuple(dict.fromkeys(range(count), torch.export.Dim.AUTO) for count in axes)}
    try:
        with (
            quiet(),
            lean_tracing(),
            forgetful(model),
            contextlib.nullcontext() if settle else hooks_as_they_were(model),
            restored_attributes(recorder, settle=settle),
            hooked(recorder),
            patched_functions(recorder),
            tracing(TracingContext(fake_mode)),
        ):
            torch.export.export(entry, _stand_ins(tensors, device), dynamic_shapes=dynamic, strict=False)
    except RecordedError:
        pass
    except CaptureError:
        raise
    except Exception as error:
        raise _refusal(model, recorder, error) from error
    finally:
        restore()
    if recorder.recording is None:
        raise CaptureError(
            f"{type(model).__name__} returned without a recorded call", hint="call the model through its forward"
        )
    return recorder.recording, recorder.changed


def _stand_ins(tensors: tuple[torch.Tensor, ...], device: str) -> tuple[torch.Tensor, ...]:
    """Return untouched memory of the example's shapes: export gives symbols to the sizes of real tensors only."""
    return tuple(
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device, requires_grad=t.requires_grad)
        for t in tensors
    )


def _refusal(model: nn.Module, recorder: Recorder, error: Exception) -> CaptureError:
    """Turn an error of the trace into one that names the module and the user's line."""
    where = recorder.stack[-1].path if recorder.stack else ""
    place = innermost_place(traceback.extract_tb(error.__traceback__))
    text = (str(error).splitlines() or [""])[0]
    return CaptureError(
        f"the forward of {where or type(model).__name__!r} cannot be traced at {place}: {type(error).__name__}: {text}",
        hint="a branch or loop on tensor values keeps its module from being cut; put it into a submodule of its own",
        module=where,
        place=place,
        final="data-dependent" in text or isinstance(error, DataDependentOutputException),
    )
