"""The analytic cost model: rooflines for operators, alpha-beta for links, traffic for optimisers.

Theory of operation. An operator takes the longer of its arithmetic and its traffic, plus its start::

    forward  = start + max(flops / (peak * e_kind), bytes / (bandwidth * e_memory))   matmul, convolution, ...
    forward  = start + max(flops / peak, bytes / (bandwidth * e_kind))                everything else

A product on a device of known multiprocessors also takes its waves of tiles, which count where the result is small, and
a start that nothing hides (`partita.cost.tiles`).

On a CPU the start is added (Python and the dispatcher run before the kernel); on CUDA it is a lower bound (they run
while earlier kernels do) and views are free. With ``r`` rows instead of the graph's ``R``, an operator that touches a
tensor of the batch does ``r / R`` of its arithmetic and of that traffic which is not its weights.

Planners ask for many (items, rows, device) of one graph with thousands of operators, so a graph is reduced to a table
of items once per (device, rows), and a question is a sum over its items. The tables live in the model instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from partita.cost.collectives import Collective, collective_time_s, transfer_time_s
from partita.cost.formulas import cpu_workspace
from partita.cost.memory import optimizer_cost
from partita.cost.model import ItemsCost
from partita.cost.ops.call import is_floating, owner
from partita.cost.tiles import FILL_S, Product, product_of, tiled_s
from partita.errors import CostError
from partita.ir.cluster import Cluster, DeviceSpec, Link
from partita.ir.graph import Item, ModelGraph, Op, OpKind, TensorSpec
from partita.ir.plan import ZERO, Estimate

RELATIVE_ERROR = {"cpu": 0.40, "cuda": 0.20}
"""Half-width of an operator's credible range. CUDA: 90th percentile of transformer layers of 512 tokens and more on a
known device. CPU: even fitted in-sample rooflines are off by that much."""
COMMUNICATION_ERROR = 0.40
"""Half-width of a message's and a collective's credible range, inside a host and above 8 MB."""
SMALL_BYTES, LARGE_BYTES = 10**6, 8 * 10**6
SMALL_FACTOR = 2.5
"""Up to 1 MB a message or collective takes up to this times what is modelled; to 8 MB the range is between the two."""
NETWORK_FACTOR = 4.0
"""Between hosts a collective takes up to this times what the datasheet's rate says (6-20 GB/s measured for 20)."""

OPTIMIZER_ERROR = 0.40
"""Half-width of an update's credible range."""

_COMPUTE_KINDS: frozenset[OpKind] = frozenset({"matmul", "attention", "convolution", "scan"})
_SPARSE_KINDS: frozenset[OpKind] = frozenset({"embedding", "view"})
_MAX_TABLES = 64
_MAX_GRAPHS = 4


@dataclass(frozen=True, slots=True)
class _Work:
    """One operator, reduced to what a roofline needs; the shares are of the part that scales with the rows."""

    op: Op
    product: Product | None
    dtype: str
    scales: bool
    fixed_share: float  # of the bytes: weights, which are read whatever the rows
    kept: tuple[int, ...]  # storages that autograd keeps
    workspace_cpu: int
    transient_fixed: int
    transient_rows: int


@dataclass(frozen=True, slots=True)
class _GraphTable:
    """One graph, reduced; ``storages`` are (bytes, scales with the rows)."""

    graph: ModelGraph
    storages: tuple[tuple[int, bool], ...]
    items: tuple[tuple[_Work, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    parameters: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _ItemRow:
    """One item on one device at one number of rows."""

    forward_s: float
    backward_s: float
    workspace: int
    transient: int


@dataclass(slots=True)
class AnalyticModel:
    """Prices a graph from the devices' published or measured rates; implements `partita.cost.model.CostModel`.

    Attributes:
        name: The model's name in reports.

    Example:
        >>> from partita.cost.catalogue import LINKS
        >>> AnalyticModel().transfer_s(0, LINKS["NVLink4"]).value
        5e-06
    """

    name: str = "analytic"
    _graphs: dict[int, _GraphTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tables: dict[tuple[int, DeviceSpec, int], tuple[_ItemRow, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _sizes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def items(self, graph: ModelGraph, items: Sequence[int], device: DeviceSpec, rows: int) -> ItemsCost:
        """Price items, see `CostModel.items`.

        Complexity: linear in the items; the first question for a (graph, device, rows) is linear in the graph.

        Raises:
            CostError: ``rows`` is below 1, or an item is not in the graph.
        """
        if rows < 1:
            raise CostError(f"a cost needs at least one row of the batch, not {rows}", rows=rows)
        wrong = next((item for item in items if not 0 <= item < len(graph.items)), None)
        if wrong is not None:
            raise CostError(f"graph {graph.name!r} has items 0 to {len(graph.items) - 1}, not {wrong}", item=wrong)
        reduced = self._reduced(graph)
        table = self._table(reduced, device, rows)
        sizes = self._storage_sizes(reduced, rows)
        parameters: dict[str, None] = {}
        kept: set[int] = set()
        forward_s = backward_s = 0.0
        workspace = transient = 0
        for item in items:
            row = table[item]
            forward_s += row.forward_s
            backward_s += row.backward_s
            workspace += row.workspace
            transient = max(transient, row.transient)
            kept.update(reduced.kept[item])
            parameters.update(dict.fromkeys(reduced.parameters[item]))
        return ItemsCost(
            forward_s=modelled(forward_s, RELATIVE_ERROR[device.platform]),
            backward_s=modelled(backward_s, RELATIVE_ERROR[device.platform]),
            parameters=tuple(parameters),
            saved_bytes=sum(sizes[storage] for storage in kept) + workspace,
            transient_bytes=transient,
        )

    def transfer_s(self, num_bytes: int, link: Link) -> Estimate:
        """Price one message over one link."""
        return _communicated(transfer_time_s(num_bytes, link), num_bytes, inside=True)

    def all_reduce_s(self, num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> Estimate:
        """Price the sum of ``num_bytes`` over ``ranks``; nothing for one rank."""
        return self.collective_s("all_reduce", num_bytes, ranks, cluster)

    def collective_s(self, collective: Collective, num_bytes: int, ranks: Sequence[int], cluster: Cluster) -> Estimate:
        """Price a collective of ``num_bytes`` over ``ranks``; nothing for one rank.

        Raises:
            CostError: A rank is not in the cluster, or no level connects the ranks.
        """
        seconds = collective_time_s(collective, num_bytes, ranks, cluster)
        if not seconds:
            return ZERO
        host = cluster.levels[0].group_size
        return _communicated(seconds, num_bytes, inside=len({rank // host for rank in ranks}) == 1)

    def optimizer_s(self, parameter_bytes: int, optimizer: str, device: DeviceSpec, *, fused: bool = False) -> Estimate:
        """Price the update: its traffic (one kernel's, if ``fused``) at the bandwidth that streaming kernels reach."""
        if parameter_bytes == 0:
            return ZERO
        cost = optimizer_cost(optimizer)
        traffic = (cost.fused_traffic if fused else cost.traffic) * parameter_bytes
        reached = device.memory_bandwidth * _efficiency(device, "memory")
        return modelled(device.launch_s + traffic / reached, OPTIMIZER_ERROR)

    def _reduced(self, graph: ModelGraph) -> _GraphTable:
        """Return the graph's table; the table holds the graph, so that its id stays taken."""
        found = self._graphs.get(id(graph))
        if found is None:
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.clear()
                self._tables.clear()
                self._sizes.clear()
            found = self._graphs[id(graph)] = _reduce(graph)
        return found

    def _table(self, reduced: _GraphTable, device: DeviceSpec, rows: int) -> tuple[_ItemRow, ...]:
        key = (id(reduced.graph), device, rows)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            factor = _factor(reduced.graph, rows)
            rates = _Rates(device)
            found = tuple(_price_item(works, rates, factor) for works in reduced.items)
            self._tables[key] = found
        return found

    def _storage_sizes(self, reduced: _GraphTable, rows: int) -> tuple[int, ...]:
        key = (id(reduced.graph), rows)
        found = self._sizes.get(key)
        if found is None:
            factor = _factor(reduced.graph, rows)
            found = tuple(ceil(size * factor) if scales else size for size, scales in reduced.storages)
            self._sizes[key] = found
        return found


def modelled(value: float, relative_error: float) -> Estimate:
    """Return an estimate with a symmetric relative range."""
    return Estimate(
        value=value, low=value * (1.0 - relative_error), high=value * (1.0 + relative_error), source="modelled"
    )


def _communicated(seconds: float, num_bytes: int, *, inside: bool) -> Estimate:
    """Return a message's or a collective's estimate, the wider the smaller it is and the farther it goes."""
    slower = 1.0 + COMMUNICATION_ERROR
    if num_bytes <= LARGE_BYTES:
        slower = SMALL_FACTOR if num_bytes <= SMALL_BYTES else 2 * slower - 1.0
    low = seconds * (1.0 - COMMUNICATION_ERROR)
    return Estimate(
        value=seconds, low=low, high=seconds * (slower if inside else max(slower, NETWORK_FACTOR)), source="modelled"
    )


def _factor(graph: ModelGraph, rows: int) -> float:
    """Return rows over the example's rows; 1 if the graph has no batch axis."""
    return rows / graph.batch_rows if graph.batch_rows else 1.0


def _efficiency(device: DeviceSpec, kind: str) -> float:
    return next((value for name, value in device.efficiency if name == kind), 1.0)


class _Rates:
    """A device's reached rates, looked up once."""

    def __init__(self, device: DeviceSpec) -> None:
        self.cpu = device.platform == "cpu"
        self.launch_s = device.launch_s
        self.bandwidth = device.memory_bandwidth
        self.peaks = dict(device.peak_flops)
        self.efficiency = dict(device.efficiency)
        self.units = device.units if "tile" in self.efficiency else 0
        self._tiled: dict[tuple[Product, str], float] = {}
        if not self.peaks or min(self.peaks.values()) <= 0 or self.bandwidth <= 0:
            raise CostError(f"device {device.name!r} has no positive peak or bandwidth", device=device.name)
        # A dtype that the datasheet leaves out is computed in float32.
        self.vector_peak = self.peaks.get("float32", min(self.peaks.values()))

    def seconds(self, kind: OpKind, dtype: str, flops: float, num_bytes: float) -> float:
        """Return the roofline without the floor of starting."""
        if kind in _COMPUTE_KINDS:
            peak = self.peaks.get(dtype, self.vector_peak) * self.efficiency.get(kind, 1.0)
            bandwidth = self.bandwidth * self.efficiency.get("memory", 1.0)
        else:
            peak = self.vector_peak
            bandwidth = self.bandwidth * self.efficiency.get(kind, self.efficiency.get("memory", 1.0))
        return max(flops / peak, num_bytes / bandwidth)

    def products(self, products: Sequence[Product], dtype: str, num_bytes: float) -> float | None:
        """Return the seconds of products by their tiles; None if there are none or the device's tiles are not known."""
        if not products or not self.units:
            return None
        tiles = sum(self._tiles(product, dtype) for product in products)
        memory = num_bytes / (self.bandwidth * self.efficiency.get("memory", 1.0))
        return max(tiles, memory) + len(products) * FILL_S

    def _tiles(self, product: Product, dtype: str) -> float:
        """Return the seconds of a product's waves, at no more than what the largest products reach."""
        found = self._tiled.get((product, dtype))  # layers repeat
        if found is None:
            peak = self.peaks.get(dtype, self.vector_peak)
            reached = peak * self.efficiency.get("matmul", 1.0)
            waves = tiled_s(product, peak * self.efficiency["tile"], self.units)
            found = self._tiled[product, dtype] = max(product.flops / reached, waves)
        return found

    def started(self, seconds: float, kernels: int, *, view: bool = False) -> float:
        """Return the seconds with the floor of starting ``kernels`` kernels."""
        if self.cpu:
            return seconds + kernels * self.launch_s
        return 0.0 if view and seconds == 0.0 else max(seconds, kernels * self.launch_s)


def _price_item(works: tuple[_Work, ...], rates: _Rates, factor: float) -> _ItemRow:
    forward_s = backward_s = 0.0
    workspace = transient = 0
    for work in works:
        op = work.op
        scale = factor if work.scales else 1.0
        traffic = work.fixed_share + (1.0 - work.fixed_share) * scale
        product = _scaled(work.product, scale)
        forward = rates.products((product,) if product else (), work.dtype, op.bytes * traffic)
        if forward is None:
            forward = rates.seconds(op.kind, work.dtype, op.flops * scale, op.bytes * traffic)
        forward_s += rates.started(forward, 1, view=op.kind == "view")
        if op.backward_bytes or op.backward_flops:
            gradients = _gradients(product, op) if op.backward_flops else ()
            backward = rates.products(gradients, work.dtype, op.backward_bytes * traffic)
            if backward is None:
                flops = op.backward_flops * scale
                backward = rates.seconds(op.kind, work.dtype, flops, op.backward_bytes * traffic)
            backward_s += rates.started(backward, 2 if op.backward_flops > op.flops else 1)
        kept = ceil((op.workspace + (work.workspace_cpu if rates.cpu else 0)) * scale)
        workspace += kept
        transient = max(transient, work.transient_fixed + ceil(work.transient_rows * scale) + kept)
    return _ItemRow(forward_s, backward_s, workspace, transient)


def _scaled(product: Product | None, scale: float) -> Product | None:
    """Return a product at another number of rows of the batch."""
    if product is None or scale == 1.0:
        return product
    if product.batch > 1:
        return replace(product, batch=ceil(product.batch * scale))
    return replace(product, rows=ceil(product.rows * scale))


def _gradients(product: Product | None, op: Op) -> tuple[Product, ...]:
    """Return the products of the backward: the gradient of the left factor, and if both need one that of the right."""
    if product is None:
        return ()
    left = replace(product, columns=product.inner, inner=product.columns)
    right = replace(product, rows=product.inner, inner=product.rows)
    return (left, right) if op.backward_flops > op.flops else (left,)


def _reduce(graph: ModelGraph) -> _GraphTable:
    """Look every tensor up once and keep numbers only."""
    tensors = graph.tensor_map()
    storages: list[tuple[int, bool]] = []
    index: dict[str, int | None] = {}

    def storage(tensor_id: str) -> int | None:
        """Return the index of the storage of a tensor, None if it is resident anyway (parameter, buffer, input)."""
        tensor = tensors[tensor_id]
        name = owner(tensor)
        if name not in index:
            held = tensors.get(name, tensor)
            if held.role == "activation":
                index[name] = len(storages)
                storages.append((held.bytes, held.batch_dim is not None))
            else:
                index[name] = None
        return index[name]

    items: list[tuple[_Work, ...]] = []
    kept: list[tuple[int, ...]] = []
    for item in graph.items:
        works: list[_Work] = []
        held: dict[int, None] = {}
        for op in graph.ops[item.ops[0] : item.ops[1]]:
            saved = tuple(found for name in op.saved if (found := storage(name)) is not None)
            held.update(dict.fromkeys(saved))
            works.append(_work(op, tensors, saved))
        items.append(tuple(works))
        kept.append(tuple(held))
    return _GraphTable(
        graph=graph,
        storages=tuple(storages),
        items=tuple(items),
        kept=tuple(kept),
        parameters=tuple(_parameters(item, tensors) for item in graph.items),
    )


def _parameters(item: Item, tensors: dict[str, TensorSpec]) -> tuple[str, ...]:
    return tuple(name for name in item.reads if tensors[name].role in {"parameter", "buffer"})


def _work(op: Op, tensors: dict[str, TensorSpec], saved: tuple[int, ...]) -> _Work:
    touched = {name: tensors[name] for name in (*op.reads, *op.writes)}
    scales = any(tensor.batch_dim is not None for tensor in touched.values())
    fixed = sum(tensor.bytes for tensor in touched.values() if tensor.batch_dim is None)
    dense = scales and op.kind not in _SPARSE_KINDS and op.bytes > 0
    dtype = next((tensors[name].dtype for name in op.writes if is_floating(tensors[name])), "float32")
    transient_fixed, transient_rows = _transient(op, tensors)
    return _Work(
        op=op,
        product=product_of(op, tensors),
        dtype=dtype,
        scales=scales,
        fixed_share=min(1.0, fixed / op.bytes) if dense else 0.0,
        kept=saved,
        workspace_cpu=cpu_workspace(op, tensors),
        transient_fixed=transient_fixed,
        transient_rows=transient_rows,
    )


def _transient(op: Op, tensors: dict[str, TensorSpec]) -> tuple[int, int]:
    """Return the larger of the forward's and the backward's short-lived bytes, as (fixed, scaling with the rows).

    Forward: results that own memory and are not kept. Backward: gradients of the results and of the operands, those
    of parameters included (a new one exists beside the accumulated one). What the operator keeps inside (its
    workspace) has gradients too, added by the caller.
    """
    kept = {owner(tensors[name]) for name in op.saved}
    read = {owner(tensors[name]) for name in op.reads}
    made = [tensors[name] for name in dict.fromkeys(op.writes)]
    forward = [tensor for tensor in made if owner(tensor) not in kept | read]
    backward: list[TensorSpec] = []
    if op.backward_bytes or op.backward_flops:
        operands = [tensors[name] for name in dict.fromkeys(op.reads)]
        backward = [tensor for tensor in operands if tensor.requires_grad]
        backward += [tensor for tensor in made if is_floating(tensor)]
    largest = max(forward, backward, key=lambda group: sum(tensor.bytes for tensor in group))
    fixed = sum(tensor.bytes for tensor in largest if tensor.batch_dim is None)
    return fixed, sum(tensor.bytes for tensor in largest if tensor.batch_dim is not None)
