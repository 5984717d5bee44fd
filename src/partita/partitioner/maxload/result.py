"""What a solve of the bare problem answers, and the limits it runs under."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

OPTIMALITY = 1e-6
"""Relative gap within which an answer counts as optimal: the rounding of the integer models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one search.

    Attributes:
        time_s: Wall seconds, a safety net: an answer that hits it may differ from run to run.
        deterministic_time: CP-SAT's own measure of work, about a second each on an idle core.
        workers: Threads.
        seed: Of everything drawn.
    """

    time_s: float = inf
    deterministic_time: float = 60.0
    workers: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionResult:
    """The answer to a bare partition problem.

    Attributes:
        objective: What the best assignment costs, in the unit of the problem; ``inf`` if none was found.
        bound: No assignment costs less.
        status: ``OPTIMAL``, ``FEASIBLE``, ``INFEASIBLE`` (proven) or ``UNKNOWN``.
        assignment: Device of each node, or the stages of a replicated problem; empty if none was found.
        method: Which method answered.
        seed: As given.
        wall_s: Seconds it took.
        deterministic_time: CP-SAT's measure of its part of the work.
        limit: What ended the search before a proof: ``""``, ``deterministic``, ``wall``, ``interrupted``
            or ``solver fault``.
        loads: Load of each device.
        details: Further figures of the method.
    """

    objective: float
    bound: float
    status: str
    assignment: tuple[Any, ...]
    method: str
    seed: int = 0
    wall_s: float = 0.0
    deterministic_time: float = 0.0
    limit: str = ""
    loads: tuple[float, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; ``inf`` without an answer."""
        if not isfinite(self.objective):
            return inf
        return (self.objective - self.bound) / self.objective if self.objective > 0 else 0.0

    @property
    def report(self) -> str:
        """One paragraph for people."""
        lines = [f"{self.method}: {self.status}, objective {self.objective:.6g}, bound {self.bound:.6g}"]
        lines[0] += f" (gap {self.gap:.2%}), {self.wall_s:.2f} s, seed {self.seed}"
        if self.limit:
            lines.append(f"stopped by: {self.limit}")
        lines += [f"device {d}: load {load:.6g}" for d, load in enumerate(self.loads)]
        return "\n".join((*lines, *self.details))
