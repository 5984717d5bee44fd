"""How a CP-SAT search is run and what it answers, alike for all models of the bare problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from ortools.sat.python import cp_model

from partita.partitioner.maxload.result import Limits

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Answer]):
    """What a search found.

    Attributes:
        answer: The best found, None if nothing was.
        bound: A lower bound; ``inf`` if there is provably no answer.
        status: ``optimal``, ``feasible``, ``infeasible`` or ``unknown``.
        deterministic_time: Of CP-SAT.
    """

    answer: Answer | None
    bound: float
    status: str
    deterministic_time: float = 0.0


def run_cp_sat(
    model: cp_model.CpModel, limits: Limits, wanted: Sequence[cp_model.IntVar]
) -> tuple[str, float, list[int]]:
    """Solve a model that minimises; return status, bound in the model's units and the wanted values."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_time_in_seconds = max(limits.time_s, 0.1)
    solver.parameters.max_deterministic_time = limits.deterministic_time
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return "infeasible", inf, []
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return "unknown", solver.best_objective_bound, []
    values = [solver.value(variable) for variable in wanted]
    return ("optimal" if status == cp_model.OPTIMAL else "feasible"), solver.best_objective_bound, values
