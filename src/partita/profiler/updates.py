"""Measure an optimiser's update on tensors of the model's own shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from partita.cost.profile_table import Curve, Spread
from partita.profiler.clock import Clock, free_bytes

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd_momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}
"""Optimisers by the cost model's names."""
MOST_BYTES = 256 * 2**20
"""Parameters beyond this many bytes are left out: an update is linear long before."""
REPEATS = 8
_COPIES = 6
"""Parameter, gradient, two states and temporaries."""


def update_curve(
    specs: Sequence[tuple[tuple[int, ...], torch.dtype]], optimizer: str, device: torch.device, clock: Clock
) -> Curve | None:
    """Measure updates of an eighth, a quarter, a half and all of the parameters.

    Args:
        specs: Shape and dtype of each trainable parameter.
        optimizer: A name of `OPTIMIZERS`.
        device: Where.
        clock: Times an update.

    Returns:
        Seconds by bytes of the parameters; None if nothing is trainable, fits, or the optimiser is unknown.
    """
    make = OPTIMIZERS.get(optimizer)
    limit = min(MOST_BYTES, free_bytes(device) // (2 * _COPIES))
    tensors: list[torch.Tensor] = []
    for shape, dtype in specs:
        made: Any = torch.zeros(shape, dtype=dtype, device="meta")
        if sum(tensor.nbytes for tensor in tensors) + made.nbytes <= limit:
            tensors.append(torch.ones(shape, dtype=dtype, device=device))
    if make is None or not tensors:
        return None
    points: dict[int, float] = {}
    for share in (1, 2, 4, 8):
        part = tensors[::share]
        size = sum(tensor.nbytes for tensor in part)
        if all(1.3 * size < known for known in points):  # between near sizes a slope would be noise
            points[size] = _update_s(part, make, clock)
    return Curve(tuple(sorted(points.items())))


def _update_s(tensors: Sequence[torch.Tensor], make: Callable[..., torch.optim.Optimizer], clock: Clock) -> float:
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make(parameters)
    optimizer.step()  # makes the state
    return Spread.of([clock(optimizer.step) for _ in range(REPEATS)]).value
