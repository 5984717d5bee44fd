"""What a user asks for: examples, limits and restrictions of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ScheduleName = str


@dataclass(frozen=True, slots=True)
class Example:
    """One call of the model: positional and keyword arguments.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        batch_dims: Where the rows of the batch are, if you want to say it: argument, written as in reports
            (``input_ids``, ``args[0]``), to its dim; all of them count the same rows.  Empty: the batch is never cut.
            None: partita finds out.  What is said of the first example holds for every call.

    Example:
        >>> Example(args=(1, 2), batch_dims={"args[0]": 1}).batch_dims
        {'args[0]': 1}
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_dims: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan has to respect.

    Attributes:
        memory_bytes: Bytes that one device may use: one number for all, one per rank (0 excludes the device), or None
            for the devices' own memory.
        num_microbatches: Microbatches per step and replica, or None to let the planner choose.
        global_batch: Rows per step over all replicas, or None for the example's.
        solve_s: Seconds that the search may take.
        batch: ``"global"``: every rank passes the same whole batch; ``"local"``: each data rank passes its own part.
    """

    memory_bytes: int | tuple[int, ...] | None = None
    num_microbatches: int | None = None
    global_batch: int | None = None
    solve_s: float = 30.0
    batch: Literal["global", "local"] = "global"


Choice = int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Restrictions of the search: None is free, a value or a tuple of values restricts.

    Attributes:
        pp: Pipeline degrees (number of stages).
        dp: Data-parallel degrees (replicas of each stage).
        tp: Tensor-parallel degrees.
        cp: Context-parallel degrees.
        ep: Expert-parallel degrees.
        zero: ZeRO levels, 0 to 3.
        recompute: ``"none"``, ``"full"`` or a tuple of them.
        schedule: Schedule names.
        pins: Module path to stage index.
    """

    pp: Choice = None
    dp: Choice = None
    tp: Choice = None
    cp: Choice = None
    ep: Choice = None
    zero: Choice = None
    recompute: str | tuple[str, ...] | None = None
    schedule: str | tuple[str, ...] | None = None
    pins: Mapping[str, int] | None = None


def choices(value: object) -> tuple[Any, ...] | None:
    """Return a restriction as a tuple of allowed values, or None if it is free."""
    if value is None:
        return None
    return tuple(value) if isinstance(value, tuple | list) else (value,)
