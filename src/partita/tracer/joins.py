"""Put the parts of a result together: the arithmetic that trials and the runtime share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partita.tracer.program import Environment
from partita.tracer.rows import Join


def part_weight(join: Join | None, env: Environment, rows: int | None) -> float:
    """Return a part's weight in its join, before normalisation: rows, counted targets, or 1.

    Args:
        join: How the result is put together, or None if it is not cut.
        env: The part's values.
        rows: Its rows; None for a call that is not cut.
    """
    if join is None or rows is None:
        return 1.0
    if join.how == "count":
        return float((env.value(join.targets) != join.ignored).sum())
    return float(rows) if join.how == "mean" else 1.0


def join_parts(parts: Sequence[torch.Tensor], join: Join, weights: Sequence[float]) -> torch.Tensor:
    """Concatenate rows; take the first of equal parts; otherwise sum by weight, to be normalised at the end."""
    if join.how == "rows":
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), join.dim)
    if join.how == "whole":
        return parts[0]
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            total = total + part * weight
    return total
