"""What a planner may ask of a cost model, as one Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from partita.ir.cluster import Cluster, DeviceSpec, Link
from partita.ir.graph import ModelGraph
from partita.ir.plan import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsCost:
    """What one microbatch of a set of items costs on one device.

    Attributes:
        forward_s: Seconds of the forward.
        backward_s: Seconds of the backward (0 where nothing is trainable upstream).
        parameters: Ids of the parameters and buffers read.
        saved_bytes: Bytes kept from the forward for the backward, each storage once; parameters and inputs are not
            counted, received activations are.
        transient_bytes: Largest short-lived need of one operator on top (outputs and gradients in flight).
    """

    forward_s: Estimate
    backward_s: Estimate
    parameters: tuple[str, ...]
    saved_bytes: int
    transient_bytes: int


class CostModel(Protocol):
    """Seconds and bytes for items, messages, reductions and updates.

    Implementations are deterministic, monotone in rows and bytes, and state a source in every `Estimate`.
    """

    name: str

    def items(self, graph: ModelGraph, items: Sequence[int], device: DeviceSpec, rows: int) -> ItemsCost:
        """Price the items at ``rows`` rows of the batch (the graph's own sizes if it has no batch axis)."""
        ...

    def transfer_s(self, num_bytes: int, link: Link) -> Estimate:
        """Price one message over one link."""
        ...

    def all_reduce_s(self, num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> Estimate:
        """Price the sum of ``num_bytes`` over ``ranks``."""
        ...

    def optimizer_s(self, parameter_bytes: int, optimizer: str, device: DeviceSpec) -> Estimate:
        """Price the update of trainable parameters of ``parameter_bytes`` bytes."""
        ...
