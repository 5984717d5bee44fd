"""A cost model that uses measurements where it has them, and another model elsewhere.

* Items measured at the rows asked for are ``measured``; at other rows they are ``interpolated``, linearly in the rows,
  between (or beyond) the nearest measured ones.  Bytes are the other model's: they are exact, not measured.
* Ranks of one host that are more than the cores share them: what is computed there takes longer in proportion.
* Messages and reductions follow the measured curves; `ProfiledModel.cluster` puts the links' lines into a cluster, from
  where the simulator takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from partita.cost.analytic import AnalyticModel
from partita.cost.model import CostModel, ItemsCost
from partita.cost.profile_table import Curve, ProfileTable, Spread, Timing
from partita.ir.cluster import Cluster, DeviceSpec, Link
from partita.ir.graph import ModelGraph, TensorSpec
from partita.ir.plan import ZERO, Estimate, Source
from partita.ir.structure import structure_digest

INTERPOLATION_ERROR = 0.15
"""Half-width added to the range of an interpolated time."""
_TYPICAL_BYTES = 2**20
"""Size at which a link's curve is turned into one latency and bandwidth."""


@dataclass(slots=True)
class ProfiledModel:
    """Prices with a `ProfileTable` first; implements `partita.cost.model.CostModel`.

    Attributes:
        table: The measurements.
        other: Prices what was not measured, and all bytes.
        sharing: Processes that share a core; 1 unless `cluster` found more ranks on a host than cores.
        name: The model's name in reports.
    """

    table: ProfileTable
    other: CostModel = field(default_factory=AnalyticModel)
    sharing: float = 1.0
    name: str = "profiled"
    _graphs: dict[int, tuple[ModelGraph, dict[str, TensorSpec]]] = field(default_factory=dict, init=False, repr=False)
    _digests: dict[tuple[int, tuple[int, ...]], str] = field(default_factory=dict, init=False, repr=False)
    _curves: dict[Link, Curve] = field(default_factory=dict, init=False, repr=False)

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return a cluster with the measured links, and note how many of its ranks share a core."""
        levels = []
        for level in cluster.levels:
            curve = self.table.links.get(level.name)
            link = level.link if curve is None else _line(curve, f"measured on {self.table.date}")
            if curve is not None:
                self._curves[link] = curve
            levels.append(replace(level, link=link))
        on_host = cluster.levels[0].group_size if cluster.levels else cluster.num_devices
        cpu = any(kind.platform == "cpu" for kind in cluster.kinds)
        self.sharing = max(1.0, on_host / self.table.cores) if cpu else 1.0
        return replace(cluster, levels=tuple(levels))

    def items(self, graph: ModelGraph, items: Sequence[int], device: DeviceSpec, rows: int) -> ItemsCost:
        """Price items, see `CostModel.items`."""
        cost = self.other.items(graph, items, device, rows)
        if device.name != self.table.device:
            return cost
        digest = self._digest(graph, items)
        known = self.table.rows(digest)
        if not known:
            return cost
        forward = self._at(digest, known, rows, "forward")
        backward = self._at(digest, known, rows, "backward")
        return replace(cost, forward_s=forward.scaled(self.sharing), backward_s=backward.scaled(self.sharing))

    def transfer_s(self, num_bytes: int, link: Link) -> Estimate:
        """Price one message over one link."""
        curve = self._curves.get(link)
        return self.other.transfer_s(num_bytes, link) if curve is None else _on_curve(curve, num_bytes)

    def all_reduce_s(self, num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> Estimate:
        """Price the sum of ``num_bytes`` over ``ranks``."""
        if len(set(ranks)) < 2:
            return ZERO
        curve = self.table.reductions.get(reduction_layout(ranks, cluster))
        return self.other.all_reduce_s(num_bytes, ranks, cluster) if curve is None else _on_curve(curve, num_bytes)

    def optimizer_s(self, parameter_bytes: int, optimizer: str, device: DeviceSpec) -> Estimate:
        """Price the update of trainable parameters of ``parameter_bytes`` bytes."""
        curve = self.table.updates.get(optimizer) if device.name == self.table.device else None
        if curve is None or parameter_bytes == 0:
            return self.other.optimizer_s(parameter_bytes, optimizer, device)
        return _on_curve(curve, parameter_bytes).scaled(self.sharing)

    def _digest(self, graph: ModelGraph, items: Sequence[int]) -> str:
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = graph, graph.tensor_map()  # holding the graph keeps its id taken
        key = (id(graph), tuple(items))
        if key not in self._digests:
            self._digests[key] = structure_digest(graph, self._graphs[id(graph)][1], items)
        return self._digests[key]

    def _at(self, digest: str, known: Sequence[int], rows: int, part: str) -> Estimate:
        def spread(at: int) -> Spread:
            timing: Timing = self.table.timings[digest, at]
            found: Spread = getattr(timing, part)
            return found

        if rows in known:
            found = spread(rows)
            return Estimate(value=found.value, low=found.low, high=max(found.value, found.high), source="measured")
        if len(known) == 1:
            return _widened(spread(known[0]).value * rows / known[0])
        upper = next((at for at in known[1:] if at > rows), known[-1])
        lower = known[known.index(upper) - 1]
        slope = max(0.0, (spread(upper).value - spread(lower).value) / (upper - lower))
        # A smaller microbatch never takes less than its share: what is fixed does not shrink.
        least = spread(known[0]).value * min(1.0, rows / known[0])
        return _widened(max(least, spread(lower).value + slope * (rows - lower)))


def reduction_layout(ranks: Sequence[int], cluster: Cluster) -> str:
    """Return how ranks lie over the levels: the most parts that one group of each level joins, outermost first.

    Example:
        Eight ranks on each of two hosts are ``"2x8"``, four on one host are ``"4"``.
    """
    groups, inner, counts = set(ranks), 1, []
    for level in cluster.levels:
        outer = [group * inner // level.group_size for group in groups]
        counts.append(max(outer.count(group) for group in set(outer)))
        groups, inner = set(outer), level.group_size
        if len(groups) == 1:
            break
    return "x".join(str(count) for count in reversed(counts)) or "1"


def _line(curve: Curve, source: str) -> Link:
    """Return one latency and bandwidth for a curve: its smallest message, and the line from there to a typical size."""
    size, latency = curve.points[0]
    typical = max(_TYPICAL_BYTES, 2 * size)
    return Link(
        latency_s=latency,
        bandwidth=(typical - size) / max(curve.seconds(typical) - latency, 1e-12),
        source=source,
    )


def _on_curve(curve: Curve, num_bytes: int) -> Estimate:
    source: Source = "measured" if any(size == num_bytes for size, _ in curve.points) else "interpolated"
    return _widened(curve.seconds(num_bytes), source)


def _widened(value: float, source: Source = "interpolated") -> Estimate:
    return Estimate(
        value=value, low=value * (1 - INTERPOLATION_ERROR), high=value * (1 + INTERPOLATION_ERROR), source=source
    )
