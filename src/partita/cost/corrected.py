"""A cost model whose figures are multiplied by what a run has shown to be wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partita.cost.model import CostModel, ItemsCost
from partita.ir.cluster import Cluster, DeviceSpec, Link
from partita.ir.graph import ModelGraph
from partita.ir.plan import Estimate


@dataclass(slots=True, kw_only=True)
class CorrectedModel:
    """Implements `partita.cost.model.CostModel`.

    Attributes:
        base: The model to correct.
        compute: Measured over predicted seconds of the stage that ran an item; the mean for items of no stage.
        reduction: The same for reductions.
        update: The same for updates.
        name: The model's name in reports.
    """

    base: CostModel
    compute: Mapping[int, float] = field(default_factory=dict)
    reduction: float = 1.0
    update: float = 1.0
    name: str = "corrected"

    def items(self, graph: ModelGraph, items: Sequence[int], device: DeviceSpec, rows: int) -> ItemsCost:
        """Price items, see `CostModel.items`."""
        cost = self.base.items(graph, items, device, rows)
        known = [self.compute[item] for item in items if item in self.compute] or list(self.compute.values()) or [1.0]
        factor = sum(known) / len(known)
        return replace(cost, forward_s=cost.forward_s.scaled(factor), backward_s=cost.backward_s.scaled(factor))

    def transfer_s(self, num_bytes: int, link: Link) -> Estimate:
        """Price one message: as before, because a run shows waiting and sending only together."""
        return self.base.transfer_s(num_bytes, link)

    def all_reduce_s(self, num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> Estimate:
        """Price the sum of ``num_bytes`` over ``ranks``."""
        return self.base.all_reduce_s(num_bytes, ranks, cluster).scaled(self.reduction)

    def optimizer_s(self, parameter_bytes: int, optimizer: str, device: DeviceSpec) -> Estimate:
        """Price the update of trainable parameters of ``parameter_bytes`` bytes."""
        return self.base.optimizer_s(parameter_bytes, optimizer, device).scaled(self.update)
