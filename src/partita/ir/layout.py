"""How one tensor lies on a mesh: a placement for each mesh axis."""

from __future__ import annotations

from partita.ir.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The tensor is cut along ``dim``; each rank of the axis holds one part."""

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Every rank of the axis holds a summand; the tensor is their sum."""


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One placement per named mesh axis, outermost axis first.

    Attributes:
        axes: Axis names (``pp dp tp cp ep``).
        placements: One placement per axis.
    """

    axes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()

    def __str__(self) -> str:
        """Return e.g. ``dp:R tp:S(0)``; ``whole`` without axes."""
        texts = {Replicate: "R", Partial: "P"}
        marks = [f"S({p.dim})" if isinstance(p, Shard) else texts[type(p)] for p in self.placements]
        return " ".join(f"{axis}:{mark}" for axis, mark in zip(self.axes, marks, strict=True)) or "whole"
