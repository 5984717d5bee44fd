"""How the operators of a stage are divided over the ranks of one tensor-parallel axis.

Theory of operation.  Every use of a tensor has two sides: how the value lies on the ranks, and how the gradient that
comes back for it lies.  Four pairs cover tensor, sequence, class and expert parallelism:

==============  ===========================  ==============================================
value           gradient                     meaning
==============  ===========================  ==============================================
`Replicate`     `Replicate`                  every rank computes all of it
`Replicate`     `Partial`                    whole value, used in a divided operator: the gradients are summands
`Shard` (d)     `Shard` (d)                  every rank has its part
`Partial`       `Replicate`                  summands of the value; each has the whole gradient
==============  ===========================  ==============================================

An operator's strategy says which pair it needs for each tensor that it reads and which it makes for each that it
writes.  Where what was made is not what is needed, a conversion (a collective, or a local slice) goes between.
"""

from __future__ import annotations

from partita.ir.frozen import dataclass
from partita.ir.layout import Partial, Placement, Replicate, Shard

__all__ = ["DIVIDED", "SUMMAND", "WHOLE", "Edge", "OpSharding", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One side of a tensor's way between two operators.

    Attributes:
        value: How the value lies on the ranks of the axis.
        gradient: How its gradient lies.
    """

    value: Placement
    gradient: Placement


WHOLE = Edge(value=Replicate(), gradient=Replicate())
"""Every rank computes all of it."""
DIVIDED = Edge(value=Replicate(), gradient=Partial())
"""The whole value, used by an operator that each rank does a part of."""
SUMMAND = Edge(value=Partial(), gradient=Replicate())
"""Each rank has a summand."""


def shard(dim: int) -> Edge:
    """Return the pair of a tensor that is cut along ``dim`` (counted from 0)."""
    return Edge(value=Shard(dim=dim), gradient=Shard(dim=dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSharding:
    """How one operator is divided.

    Attributes:
        op: Name of the operator, ``Op.name``.
        reads: What it needs for each tensor of ``Op.reads``, in that order.
        writes: What it makes for each tensor of ``Op.writes``.
    """

    op: str
    reads: tuple[Edge, ...]
    writes: tuple[Edge, ...]
