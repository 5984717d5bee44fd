"""From a graph of blocks and a cost model to the `PipelineProblem` of one configuration.

Every distinct block is costed once per number of rows (``Block.repeat_of``).  Collectives and updates are priced as
straight lines through two points (`_line`), so that their seconds add up over parameters; the plan itself asks the cost
model again for each stage's real sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf

from partita.cost.memory import optimizer_bytes, optimizer_cost
from partita.cost.model import CostModel, ItemsCost
from partita.ir.cluster import Cluster, DeviceSpec, Link
from partita.ir.plan import Estimate
from partita.partitioner.blockgraph import BlockGraph, Holding
from partita.partitioner.bounds import lower_bound
from partita.partitioner.problem import Net, ParameterGroup, PipelineProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Everything that is decided before blocks are assigned to stages.

    Attributes:
        ranks: For each stage its devices, one per replica.
        num_microbatches: Microbatches per step and replica.
        schedule: Name of the schedule.
        rows: Rows of the largest microbatch.
    """

    ranks: tuple[tuple[int, ...], ...]
    num_microbatches: int
    schedule: str
    rows: int

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @property
    def data_degree(self) -> int:
        """Replicas of every stage."""
        return len(self.ranks[0])

    def __str__(self) -> str:
        """Return the degrees in one line."""
        degrees = f"pp={self.num_stages} dp={self.data_degree}"
        return f"{degrees}, {self.num_microbatches} microbatches of {self.rows} rows, {self.schedule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lot:
    """Parameters and buffers that the same blocks read, added up.

    Attributes:
        readers: The blocks; none for what nothing reads.
        static_bytes: Weights, gradients and optimiser state.
        trained_bytes: Weights that get a gradient.
        largest_bytes: The largest of those.
    """

    readers: tuple[int, ...]
    static_bytes: int
    trained_bytes: int
    largest_bytes: int


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices configurations of one graph on one cluster; `dataclasses.replace` gives one for other conditions.

    Attributes:
        blocks: The graph of blocks.
        cluster: The devices.
        cost: The cost model.
        optimizer: Name of the optimiser, or bytes of state per parameter as text.
        precision: Precision that the optimiser's state follows.
        limits: Bytes that each rank may use.
        pins: For each block its stage, or None; empty if none is pinned.
    """

    blocks: BlockGraph
    cluster: Cluster
    cost: CostModel
    optimizer: str
    precision: str
    limits: tuple[int, ...]
    pins: tuple[int | None, ...] = ()
    _costs: dict[tuple[int, int], tuple[ItemsCost, ...]] = field(default_factory=dict, init=False, repr=False)
    _traffic: dict[tuple[int, int, Link | None], tuple[tuple[Net, ...], tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _lots: tuple[_Lot, ...] = field(init=False, repr=False)
    _work: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        by_readers: dict[tuple[int, ...], list[Holding]] = {}
        for holding in self.blocks.holdings:
            by_readers.setdefault(holding.readers, []).append(holding)
        training = self.blocks.graph.training
        self._lots = tuple(
            _Lot(
                readers=readers,
                static_bytes=sum(map(self.static_bytes, found)),
                trained_bytes=sum(h.tensor.bytes for h in found if h.trainable and training),
                largest_bytes=max((h.tensor.bytes for h in found if h.trainable and training), default=0),
            )
            for readers, found in by_readers.items()
        )

    def block_costs(self, kind: int, rows: int) -> tuple[ItemsCost, ...]:
        """Return what each block costs on one kind of device."""
        if (kind, rows) not in self._costs:
            device, found = self.cluster.kinds[kind], dict[int, ItemsCost]()
            for block in self.blocks.blocks:
                if block.repeat_of is None:
                    found[block.id] = self.cost.items(self.blocks.graph, block.items, device, rows)
            order = (block.id if block.repeat_of is None else block.repeat_of for block in self.blocks.blocks)
            self._costs[kind, rows] = tuple(found[block] for block in order)
        return self._costs[kind, rows]

    def work(self, kind: int, rows: int) -> tuple[float, ...]:
        """Return the prefix sums of the blocks' seconds for one microbatch, the shortest first."""
        if (kind, rows) not in self._work:
            costs = self.block_costs(kind, rows)
            seconds = sorted(cost.forward_s.value + cost.backward_s.value for cost in costs)
            self._work[kind, rows] = tuple(accumulate(seconds))
        return self._work[kind, rows]

    def slowest_kind(self, ranks: Sequence[int], rows: int) -> int:
        """Return the kind of device, among those of the ranks, that takes longest for the whole model."""
        kinds = sorted({self.cluster.device_kinds[rank] for rank in ranks})
        return max(kinds, key=lambda kind: self.work(kind, rows)[-1])

    def kind_of(self, configuration: Configuration) -> int:
        """Return the kind of device that a configuration is priced on: the slowest that it uses."""
        return self.slowest_kind([rank for ranks in configuration.ranks for rank in ranks], configuration.rows)

    def problem(self, configuration: Configuration) -> PipelineProblem:
        """Return the pipeline problem of a configuration."""
        kind = self.kind_of(configuration)
        costs = self.block_costs(kind, configuration.rows)
        nets, own = self._priced_nets(kind, configuration.rows, self.slowest_link(configuration))
        groups, once_s = self._groups(configuration, self.cluster.kinds[kind])
        return PipelineProblem(
            num_stages=configuration.num_stages,
            num_microbatches=configuration.num_microbatches,
            schedule=configuration.schedule,
            capacities=tuple(min(self.limits[rank] for rank in ranks) for ranks in configuration.ranks),
            forward_s=tuple(cost.forward_s.value for cost in costs),
            backward_s=tuple(cost.backward_s.value for cost in costs),
            saved_bytes=own,
            transient_bytes=tuple(cost.transient_bytes for cost in costs),
            edges=self.blocks.edges,
            nets=nets,
            parameters=groups,
            base_bytes=sum(lot.static_bytes for lot in self._lots if not lot.readers),
            stage_s=once_s,
            update_in_turn=self.cluster.kinds[kind].platform == "cpu",
            pins=self.pins,
        )

    def bound(self, configuration: Configuration) -> float:
        """Return a lower bound of a configuration's objective, infinity if it cannot fit: a quick `work_bound`."""
        kind = self.kind_of(configuration)
        held = sum(lot.static_bytes for lot in self._lots)
        if held > sum(min(self.limits[rank] for rank in ranks) for ranks in configuration.ranks):
            return inf
        (rate_s, once_s), trained = self._rates(configuration, self.cluster.kinds[kind]), self._trained_bytes
        return lower_bound(
            self.work(kind, configuration.rows),
            num_stages=configuration.num_stages,
            num_microbatches=configuration.num_microbatches,
            once_s=rate_s * trained,
            stage_s=once_s,
        )

    def message(self, num_bytes: int, gradient_bytes: int, link: Link) -> Estimate:
        """Return the seconds of a forward message and, if there is one, of the gradients on the way back."""
        forward = self.cost.transfer_s(num_bytes, link)
        return forward + self.cost.transfer_s(gradient_bytes, link) if gradient_bytes else forward

    def slowest_link(self, configuration: Configuration) -> Link | None:
        """Return the slowest link between neighbouring stages; None with one stage."""
        pairs = zip(configuration.ranks, configuration.ranks[1:], strict=False)
        links = {self.cluster.link(a, b) for one, other in pairs for a, b in zip(one, other, strict=True)}
        return max(links, key=lambda link: (link.latency_s + 2**20 / link.bandwidth, link.latency_s), default=None)

    def _priced_nets(self, kind: int, rows: int, link: Link | None) -> tuple[tuple[Net, ...], tuple[int, ...]]:
        """Return the nets, and the bytes that each block saves besides them."""
        key = (kind, rows, link)
        if key not in self._traffic:
            nets = self._nets(rows, link)
            own = [cost.saved_bytes for cost in self.block_costs(kind, rows)]
            for net in nets:
                for block in net.savers:
                    own[block] = max(0, own[block] - net.bytes)
            self._traffic[key] = nets, tuple(own)
        return self._traffic[key]

    def _nets(self, rows: int, link: Link | None) -> tuple[Net, ...]:
        """Merge the values with the same producer, readers and savers; a merged net is one message."""
        merged: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
        for value in self.blocks.values:
            size = self.blocks.bytes_at(value.tensor, rows)
            key = (value.producer, value.readers, value.savers)
            total, gradients = merged.get(key, (0, 0))
            merged[key] = (total + size, gradients + (size if value.gradient else 0))
        return tuple(
            Net(
                producer=producer,
                readers=readers,
                bytes=size,
                gradient_bytes=gradients,
                seconds=self.message(size, gradients, link).value if link else 0.0,
                savers=savers,
            )
            for (producer, readers, savers), (size, gradients) in merged.items()
        )

    def static_bytes(self, holding: Holding) -> int:
        """Return weights, gradients and optimiser state of one parameter or buffer."""
        size = holding.tensor.bytes
        if not (holding.trainable and self.blocks.graph.training):
            return size
        return 2 * size + optimizer_bytes(holding.tensor, self.optimizer, self.precision)

    @property
    def _trained_bytes(self) -> int:
        return sum(lot.trained_bytes for lot in self._lots)

    def _rates(self, configuration: Configuration, device: DeviceSpec) -> tuple[float, float]:
        """Return the seconds of reduction and update, by trained byte and once per stage."""
        total = self._trained_bytes
        reduce_s, reduce_once_s = _line(lambda size: self._reduction_s(size, configuration), total)
        update_s, update_once_s = _line(lambda n: self.cost.optimizer_s(n, self.optimizer, device).value, total)
        return reduce_s + update_s, reduce_once_s + update_once_s

    def _groups(self, configuration: Configuration, device: DeviceSpec) -> tuple[tuple[ParameterGroup, ...], float]:
        """Return the parameter groups, and the seconds that each stage spends once whatever it holds."""
        rate_s, once_s = self._rates(configuration, device)
        needs, ends = optimizer_cost(self.optimizer), (configuration.ranks[0][0], configuration.ranks[-1][0])
        groups = []
        for lot in self._lots:
            shared = len(lot.readers) > 1 and configuration.num_stages > 1 and lot.trained_bytes > 0
            in_turn = needs.loop_temporaries * lot.largest_bytes
            at_once = needs.foreach_temporaries * lot.trained_bytes
            group = ParameterGroup(
                readers=lot.readers,
                bytes=lot.static_bytes,
                seconds=rate_s * lot.trained_bytes,
                split_s=self.cost.all_reduce_s(lot.trained_bytes, ends, self.cluster).value if shared else 0.0,
                update_bytes=ceil(in_turn if device.platform == "cpu" else at_once),
            )
            groups += [group] if lot.readers else []
        return tuple(groups), once_s

    def _reduction_s(self, size: int, configuration: Configuration) -> float:
        """Return the seconds of the slowest stage's reduction of ``size`` bytes."""
        if configuration.data_degree == 1:
            return 0.0
        return max(self.cost.all_reduce_s(size, ranks, self.cluster).value for ranks in configuration.ranks)


def _line(price: Callable[[int], float], size: int) -> tuple[float, float]:
    """Return slope and intercept, neither negative, of the line through the prices of ``size`` and of half of it."""
    if size < 2:
        return 0.0, 0.0
    whole, half = price(size), price(size // 2)
    slope = max(0.0, (whole - half) / (size - size // 2))
    return slope, max(0.0, whole - slope * size)
