"""What has to be found out by running a capture: one rank tries, every rank gets the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError
from partita.ir.report import Comparison
from partita.tracer.batch import find_rows
from partita.tracer.rows import CoupledError
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.trials import PATIENCE_S, Verify, try_call
from partita.tracer.verify import rows_apart

Agree = Callable[[Callable[[], Any]], Any]
"""Runs what has to be tried on numbers on one rank and gives every rank its answer."""


def decide_alone(decide: Callable[[], Any]) -> Any:
    """Decide without asking other ranks."""
    return decide()


@dataclass(frozen=True, slots=True)
class Decision:
    """What one rank found out by trying a call.

    Attributes:
        comparisons: What was compared with the model.
        refusal: Why the capture was rejected ("" if it was not).
        tied: Input axes that are taken to have one size.
        axis: The batch axis, or None.
        reason: Why there is none.
        quick: Trying took little time.
    """

    comparisons: tuple[Comparison, ...] = ()
    refusal: str = ""
    tied: tuple[tuple[int, int], ...] = ()
    axis: tuple[int, int] | None = None
    reason: str = ""
    quick: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class Settings:
    """How captures are tried.

    Attributes:
        tracer: Traces calls.
        live: The model with real weights, or None if there are none.
        verify: How much is compared with it.
        agree: See `Agree`.
    """

    tracer: Tracer
    live: nn.Module | None
    verify: Verify
    agree: Agree


def settle_call(
    settings: Settings, traced: Traced, tensors: tuple[torch.Tensor, ...], name: str = "the example"
) -> tuple[Traced, Decision]:
    """Verify a traced call and find its rows.

    Args:
        settings: How.
        traced: The call.
        tensors: Its tensors.
        name: What to call it.

    Returns:
        The traced call to use, with tied axes if that lets the batch be cut, and the decision.
    """
    best = traced
    tracer, live, begin = settings.tracer, settings.live, time.perf_counter()

    def decide() -> Decision:
        nonlocal best
        comparisons: tuple[Comparison, ...] = ()
        try:
            if live is not None and settings.verify != "off" and not traced.kept_whole:
                comparisons = try_call(live, traced, tensors, settings.verify, name)
            best, rows, reason = find_rows(tracer, traced, tensors, live)
            if live is not None and comparisons and best is not traced:
                comparisons = try_call(live, best, tensors, settings.verify, name)
        except CaptureError as error:
            return Decision(refusal=str(error))
        axis = None if rows is None else rows.axis
        quick = settings.verify == "always" or time.perf_counter() - begin < PATIENCE_S
        return Decision(comparisons=comparisons, tied=best.tied, axis=axis, reason=reason, quick=quick)

    decision: Decision = settings.agree(decide)
    if not decision.refusal and decision.tied != best.tied:
        best = tracer.trace(traced.signature, tensors, tied=decision.tied, live=live)
    return best, decision


def rows_along(
    traced: Traced, axis: tuple[int, int] | None, tensors: tuple[torch.Tensor, ...], live: nn.Module | None
) -> tuple[Rows | None, str]:
    """Return the rows of a call whose batch axis is known from another call, or the reason why it is not cut."""
    if axis is None or traced.kept_whole:
        return None, "the example's batch is not cut either"
    try:
        rows = traced.rows(axis)
    except CoupledError as error:
        return None, str(error)
    problem = "" if live is None else rows_apart(live, traced.program, tensors, rows.dims, rows.joins)
    return (None, problem) if problem else (rows, "")
