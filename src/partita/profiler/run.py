"""`partita.profile`: cache, blocks, update and links in one call."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partita.cost.profile_table import Curve, ProfileTable
from partita.errors import CostError, TransportError
from partita.ir.cluster import Cluster
from partita.ir.graph import ModelGraph
from partita.profiler.clock import Clock, device_clock
from partita.profiler.cpu import loopback_points
from partita.profiler.links import live_curves
from partita.profiler.profile import Options, Profile, Progress, distinct_units, empty_table
from partita.profiler.updates import update_curve
from partita.tracer.capture import capture_model, examples_of
from partita.tracer.decide import Agree, decide_alone
from partita.tracer.signature import signature_of
from partita.tracer.skeleton import named_tensors


def target_device(device: torch.device | str | None) -> torch.device:
    """Return the device that a user means; None is the current GPU if there is one, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    chosen: int | None = found.index  # its stub says int
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and chosen is None else found


def known_of(graph: ModelGraph, device: torch.device) -> ProfileTable:
    """Return what the cache knows of a graph.

    Raises:
        CostError: If that is nothing.
    """
    digests = {unit.digest for unit in distinct_units(graph, operators=True)}
    table = empty_table(device)
    found = table.only(key for key in table.timings if key[0] in digests)
    if not found.timings:
        raise CostError(
            f"nothing is measured of {graph.name!r} on {table.environment}",
            hint="a graph cannot be run: call partita.profile(model, example) once, then its graph is known",
        )
    return found


def profile_model(
    model: nn.Module,
    example: Any,
    device: torch.device,
    *,
    options: Options,
    cache: bool,
    progress: Progress | None,
    clock: Clock | None = None,
    job: Cluster | None = None,
    agree: Agree = decide_alone,
) -> ProfileTable:
    """Measure a model; see `partita.profile`.

    Args:
        model: The model.
        example: See `partita.tracer.capture.examples_of`.
        device: Where to measure.
        options: What to measure.
        cache: Read and write the cache.
        progress: Called with (units done, all units, what is measured).
        clock: Measures; by default the device's own.
        job: The devices of all ranks, if there are several: then their links are measured too.
        agree: Lets rank 0 measure and gives every rank the table, or the error.
    """
    if job is None:
        return _alone(model, example, device, options, cache=cache, progress=progress, clock=clock)
    apart = replace(options, links=False)
    table: ProfileTable = agree(
        lambda: _alone(model, example, device, apart, cache=cache, progress=progress, clock=clock)
    )
    if options.links:
        messages, reductions = live_curves(job, device)
        table = replace(table, links={**table.links, **messages}, reductions={**table.reductions, **reductions})
        if cache and dist.get_rank() == 0:
            table.save()
    return table


def _alone(
    model: nn.Module,
    example: Any,
    device: torch.device,
    options: Options,
    *,
    cache: bool,
    progress: Progress | None,
    clock: Clock | None,
) -> ProfileTable:
    first = examples_of(example)[0]
    _, tensors = signature_of(first.args, first.kwargs)
    table = empty_table(device)
    if not cache:
        table = replace(table, timings={}, skipped={}, links={}, reductions={}, updates={}, complete=())
    key = _request_key(model, tensors, options)
    if key in table.complete:
        return table
    keep = (lambda made: made.save()) if cache else (lambda _made: None)
    captured = capture_model(model, example, device=str(device))
    work = Profile(model, captured, tensors, device, table, options=options, clock=clock, keep=keep)
    table = work.run(progress) if progress else work.run()
    if options.optimizer not in table.updates:
        specs = [(tuple(p.shape), p.dtype) for p in model.parameters() if p.requires_grad]
        curve = update_curve(specs, options.optimizer, device, clock or device_clock(device))
        table = table if curve is None else replace(table, updates={**table.updates, options.optimizer: curve})
    if options.links and device.type == "cpu" and "host" not in table.links:
        with contextlib.suppress(TransportError):  # the built-in values serve; `partita doctor` says why
            table = replace(table, links={**table.links, "host": Curve(loopback_points())})
    table = replace(table, complete=tuple(sorted({*table.complete, key})))
    keep(table)
    return table


def _request_key(model: nn.Module, tensors: Sequence[torch.Tensor], options: Options) -> str:
    """Return what a repeated call has in common with the first: modules and their code, shapes, and what is asked.

    Should two different models have one key, the second one's blocks are not found in the table and are priced by the
    analytic model: a key decides about time, never about correctness.
    """
    code = {cls: _code(cls) for cls in {type(module) for module in model.modules()}}
    parts: list[object] = [options, [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]]
    for path, module in model.named_modules():
        parts.append((path, type(module).__qualname__, module.training, module.extra_repr(), code[type(module)]))
    parts += [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t, _ in named_tensors(model)]
    return sha256(repr(parts).encode()).hexdigest()[:32]


def _code(cls: type) -> object:
    """Return the time and size of the file that defines a class."""
    try:
        facts = Path(inspect.getfile(cls)).stat()
    except (OSError, TypeError):  # defined in a console
        return None
    return facts.st_mtime_ns, facts.st_size
