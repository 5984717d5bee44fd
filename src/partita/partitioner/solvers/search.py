"""How a CP-SAT search is run and what it answers, alike for all models of the bare problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Literal, TypeVar

from ortools.sat.python import cp_model

from partita.partitioner.maxload.result import Limits

Answer = TypeVar("Answer")
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Answer]):
    """What a search found.

    Attributes:
        answer: The best found, None if nothing was.
        bound: A lower bound; ``inf`` if there is provably no answer.
        status: ``optimal``: proven, up to the rounding of the model's integers.
        deterministic_time: CP-SAT's measure of its work.
        wall_limit: The wall limit ended it, so another run may answer differently.
    """

    answer: Answer | None
    bound: float
    status: Status
    deterministic_time: float = 0.0
    wall_limit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What CP-SAT said, in the model's own terms."""

    status: Status
    bound: float
    deterministic_time: float
    wall_limit: bool
    values: list[int] = field(default_factory=list)

    def translate(self, answer: Answer | None, scale: float) -> Outcome[Answer]:
        """Return it in the problem's terms, for a model of ``scale`` units per unit of time."""
        return Outcome(
            answer=answer,
            bound=self.bound / scale,
            status=self.status,
            deterministic_time=self.deterministic_time,
            wall_limit=self.wall_limit,
        )


def run_cp_sat(model: cp_model.CpModel, limits: Limits, wanted: Sequence[cp_model.IntVar]) -> Search:
    """Minimise a model; return the values of the wanted variables too.

    An interrupt from the keyboard ends the search with the best so far: CP-SAT catches it.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_time_in_seconds = max(limits.time_s, 0.1)
    solver.parameters.max_deterministic_time = limits.deterministic_time
    result = solver.solve(model)
    status: Status = "unknown"
    if result == cp_model.OPTIMAL:
        status = "optimal"
    elif result == cp_model.FEASIBLE:
        status = "feasible"
    elif result == cp_model.INFEASIBLE:
        status = "infeasible"
    work = solver.response_proto.deterministic_time
    found = status in {"optimal", "feasible"}
    return Search(
        status=status,
        bound=inf if status == "infeasible" else max(0.0, solver.best_objective_bound),
        deterministic_time=work,
        wall_limit=status in {"feasible", "unknown"} and work < limits.deterministic_time,
        values=[int(solver.value(variable)) for variable in wanted] if found else [],
    )
