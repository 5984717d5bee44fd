"""Every error that partita raises on purpose.

::

    PartitaError
    ├── CaptureError               the model cannot be captured faithfully
    ├── CostError                  a cost is missing, or makes no sense
    ├── PlanError
    │   ├── InfeasibleError        proved: no plan meets the limits and restrictions
    │   ├── SolverLimitError       not proved: the limit ended the search before any plan was found
    │   ├── InvalidPlanError       a plan breaks a rule that every plan must keep
    │   │   └── ScheduleSyntaxError    a schedule's text cannot be read
    │   └── PlanMismatchError      a valid plan, for another model or cluster
    └── ExecutionError
        ├── DeadlockError          ranks wait for each other
        ├── RankFailedError        another rank failed
        └── TransportError         data could not be sent, received or reduced

A message says what happened and where (module path, the user's file and line) with figures and units; ``hint`` says
what to try; keyword data carries the same figures for programs. A wrong argument is a ``ValueError`` or ``TypeError``
as everywhere in Python, and an ``AssertionError`` is a defect of partita.

Errors cross processes, so each can be pickled as long as its data can.
"""

from __future__ import annotations

from types import MappingProxyType

TYPE_CHECKING = False  # spares the import of `typing`; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = [
    "CaptureError",
    "CostError",
    "DeadlockError",
    "ExecutionError",
    "InfeasibleError",
    "InvalidPlanError",
    "PartitaError",
    "PlanError",
    "PlanMismatchError",
    "RankFailedError",
    "ScheduleSyntaxError",
    "SolverLimitError",
    "TransportError",
]


class PartitaError(Exception):
    """The root of all errors that partita raises on purpose.

    Args:
        message: What happened, where, with figures and units.
        hint: What to try; empty if there is nothing to say.
        **data: The figures of the message for programs, each readable as an attribute too. Numbers carry their unit
            in the name, as in ``needed_bytes=...``.

    Attributes:
        message: As given.
        hint: As given.
        data: The keyword data, read-only.

    Example:
        >>> error = PartitaError("rank 3 needs 91.2 GiB, the device has 80.0 GiB", hint="try zero=1", rank=3)
        >>> error.rank
        3
        >>> print(error)
        rank 3 needs 91.2 GiB, the device has 80.0 GiB
        hint: try zero=1
    """

    message: str
    hint: str
    data: Mapping[str, Any]

    def __init__(self, message: str, *, hint: str = "", **data: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.data = MappingProxyType(data)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __getattr__(self, name: str) -> Any:
        # Only called for names not found otherwise. `data` itself is missing while an error is being rebuilt.
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        known = f"; its data: {', '.join(data)}" if data else ""
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{known}")

    def __reduce__(self) -> tuple[Callable[..., PartitaError], tuple[object, ...], dict[str, object]]:
        # __init__ is keyword-only, which BaseException's own __reduce__ cannot express; notes travel as state.
        state = {name: value for name, value in self.__dict__.items() if name not in {"message", "hint", "data"}}
        return _rebuild, (type(self), self.message, self.hint, dict(self.data)), state


def _rebuild(cls: type[PartitaError], message: str, hint: str, data: dict[str, object]) -> PartitaError:
    return cls(message, hint=hint, **data)


class CaptureError(PartitaError):
    """A model cannot be captured faithfully; names the module, the user's line and the construct."""


class CostError(PartitaError):
    """A cost is missing (an unknown device, no profile entry) or makes no sense (negative, not finite)."""


class PlanError(PartitaError):
    """Planning failed, or a plan cannot be used; one of the classes below says how."""


class InfeasibleError(PlanError):
    """It is proved that no plan meets the limits and restrictions; says which could be relaxed, and to what."""


class SolverLimitError(PlanError):
    """The solver's limit ended the search before any plan was found; nothing is proved about feasibility."""


class InvalidPlanError(PlanError):
    """A plan, or a part of it, breaks a rule that every plan must keep; names the rule and the place."""


class ScheduleSyntaxError(InvalidPlanError):
    """A schedule's text cannot be read; names the rank, the position and the token."""


class PlanMismatchError(PlanError):
    """A plan is valid, but was made for another model, cluster or example; names both fingerprints."""


class ExecutionError(PartitaError):
    """Running a plan failed; one of the classes below says how where it is known."""


class DeadlockError(ExecutionError):
    """Ranks wait for each other; names each waiting rank and the action it waits for."""


class RankFailedError(ExecutionError):
    """Another rank failed, so this one cannot go on; carries that rank's number and message."""


class TransportError(ExecutionError):
    """Data could not be sent, received or reduced; names both ranks and the tensor."""
