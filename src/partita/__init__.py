"""Automatic hybrid parallelism for unmodified PyTorch models.

The public surface is the names in ``__all__``. Each is resolved at its first use (PEP 562), because ``import partita``
must cost next to nothing: ``partita inspect plan.json`` answers on a laptop in a fraction of a second, while importing
torch takes seconds. Only the error classes, which import nothing, are here from the start.
"""

from partita.errors import (
    CaptureError,
    CostError,
    DeadlockError,
    ExecutionError,
    InfeasibleError,
    InvalidPlanError,
    PartitaError,
    PlanError,
    PlanMismatchError,
    RankFailedError,
    SolverLimitError,
    TransportError,
)

TYPE_CHECKING = False  # spares the import of `typing`; type checkers know the name
if TYPE_CHECKING:
    from partita.api import auto_parallelize, capture, inspect, plan, profile, simulate
    from partita.cost.profile_table import ProfileTable
    from partita.ir.cluster import Cluster
    from partita.ir.graph import ModelGraph
    from partita.ir.plan import Plan
    from partita.ir.request import Example, Limits, Search
    from partita.ir.schedule import Schedule
    from partita.partitioner.maxload.methods import solve
    from partita.partitioner.maxload.problem import PartitionProblem
    from partita.runtime.module import ParallelModule

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Cluster",
    "CostError",
    "DeadlockError",
    "Example",
    "ExecutionError",
    "InfeasibleError",
    "InvalidPlanError",
    "Limits",
    "ModelGraph",
    "ParallelModule",
    "PartitaError",
    "PartitionProblem",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "ProfileTable",
    "RankFailedError",
    "Schedule",
    "Search",
    "SolverLimitError",
    "TransportError",
    "auto_parallelize",
    "capture",
    "inspect",
    "plan",
    "profile",
    "simulate",
    "solve",
]

# Public name -> where it lives. No name equals the name of a module of this package: importing that module later would
# overwrite the function.
_HOMES = {
    "Cluster": "partita.ir.cluster:Cluster",
    "Example": "partita.ir.request:Example",
    "Limits": "partita.ir.request:Limits",
    "ModelGraph": "partita.ir.graph:ModelGraph",
    "ParallelModule": "partita.runtime.module:ParallelModule",
    "PartitionProblem": "partita.partitioner.maxload.problem:PartitionProblem",
    "Plan": "partita.ir.plan:Plan",
    "ProfileTable": "partita.cost.profile_table:ProfileTable",
    "Schedule": "partita.ir.schedule:Schedule",
    "Search": "partita.ir.request:Search",
    "auto_parallelize": "partita.api:auto_parallelize",
    "capture": "partita.api:capture",
    "inspect": "partita.api:inspect",
    "plan": "partita.api:plan",
    "profile": "partita.api:profile",
    "simulate": "partita.api:simulate",
    "solve": "partita.partitioner.maxload.methods:solve",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'partita' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = home.partition(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
