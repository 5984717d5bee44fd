r"""The bare partition problem: nodes of a graph onto devices, so that the busiest device is least busy.

Other people's graphs are stated in these terms (`partita.partitioner.maxload.readers`), so planners can be compared
without a model or a cluster.  An assignment maps every node to a device.  The load of a device d is (`evaluate`)::

    (1)  load_d = sum_{v on d} time_d(v) + [d communicates] sum_{nets n cut at d} cost(n)
    (2)  net n = {u} and all readers of u; cut at d: some of its nodes are on d, some are not
    (3)  sum_{v on d} size(v) <= memory_d

A net is paid once per device, by the sender and by every reading device.  The objective is the largest load.  The
*contiguous* problem also wants the devices in one line, such that no edge of `PartitionProblem.order` leads backwards.
Without it a device may hold several chunks, which then run interleaved.

The unit of time is that of the input; nothing here converts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any

import networkx as nx

if TYPE_CHECKING:
    from partita.partitioner.maxload.replicated import ReplicatedProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that do not differ.

    Attributes:
        name: What reports call them.
        count: How many there are.
        times: Time of each node on one of them; ``inf`` where it cannot run.
        memory_bytes: Bytes that fit on each; None: no limit.
        communicates: Cut nets cost time here; a processor next to the host's memory has none to pay.
    """

    name: str
    count: int
    times: tuple[float, ...]
    memory_bytes: int | None = None
    communicates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Which device runs which node, for the least maximum load.

    Attributes:
        nodes: Names of the nodes.
        classes: The devices. They are numbered through: all of the first class, then all of the second, and so on.
        sizes: Bytes of each node.
        edges: (producer, reader).
        costs: Time to move the output of each node to or from a device.
        order: (before, after): in a contiguous partition, ``after`` is on no earlier device of the line.
        colocated: Groups of nodes that stay on one device.
        unit: Unit of the times, for reports.

    Raises:
        ValueError: If the parts do not fit together.
    """

    nodes: tuple[str, ...]
    classes: tuple[DeviceClass, ...]
    sizes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    costs: tuple[float, ...]
    order: tuple[tuple[int, int], ...]
    colocated: tuple[tuple[int, ...], ...] = ()
    unit: str = "ms"
    nets: tuple[tuple[float, tuple[int, ...]], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.nodes)
        rows = [("sizes", self.sizes), ("costs", self.costs), *((c.name, c.times) for c in self.classes)]
        for name, row in rows:
            if len(row) != n:
                raise ValueError(f"{name} has {len(row)} entries for {n} nodes")
            if not all(value >= 0 for value in row):
                raise ValueError(f"{name} has a negative entry or one that is not a number")
        if not all(map(isfinite, self.costs)):
            raise ValueError("costs has an entry that is not finite")
        if n == 0 or self.num_devices < 1 or any(c.count < 0 for c in self.classes):
            raise ValueError(f"a partition needs a node and a device; got {n} nodes and {self.num_devices} devices")
        for v in (v for group in (*self.edges, *self.order, *self.colocated) for v in group):
            if not 0 <= v < n:
                raise ValueError(f"node {v} does not exist; nodes are 0 to {n - 1}")
        readers: defaultdict[int, set[int]] = defaultdict(set)
        for u, v in self.edges:
            readers[u] |= {u, v}
        merged: defaultdict[tuple[int, ...], float] = defaultdict(float)
        for u, members in readers.items():
            if self.costs[u] > 0 and len(members) > 1:
                merged[tuple(sorted(members))] += self.costs[u]
        object.__setattr__(self, "nets", tuple((cost, members) for members, cost in merged.items()))

    @property
    def num_devices(self) -> int:
        """Number of devices of all classes."""
        return sum(c.count for c in self.classes)

    @property
    def devices(self) -> tuple[int, ...]:
        """Class of each device."""
        return tuple(index for index, c in enumerate(self.classes) for _ in range(c.count))

    @staticmethod
    def from_json(source: str | PathLike[str] | dict[str, Any]) -> PartitionProblem:
        """Read the public dnn-partitioning format; see `partita.partitioner.maxload.readers.read_json`."""
        from partita.partitioner.maxload.readers import read_json

        return read_json(source)

    @staticmethod
    def from_pipedream(
        source: str | PathLike[str], *, accelerators: int, bandwidth_bytes_per_s: float, memory_bytes: int
    ) -> PartitionProblem:
        """Read a PipeDream profile; see `partita.partitioner.maxload.readers.read_pipedream`."""
        from partita.partitioner.maxload.readers import read_pipedream

        return read_pipedream(
            source, accelerators=accelerators, bandwidth_bytes_per_s=bandwidth_bytes_per_s, memory_bytes=memory_bytes
        )

    @staticmethod
    def from_piper(
        source: str | PathLike[str] | dict[str, Any],
        *,
        devices: int,
        memory_bytes: int,
        bandwidth_bytes_per_s: float,
        microbatches: int,
    ) -> ReplicatedProblem:
        """Read Piper's format: stages with replicas, tensor degrees and recompute, see `read_piper` of the readers."""
        from partita.partitioner.maxload.readers import read_piper

        return read_piper(
            source,
            devices=devices,
            memory_bytes=memory_bytes,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            microbatches=microbatches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an assignment costs.

    Attributes:
        objective: Largest load; ``inf`` if the assignment is not allowed.
        loads: Load of each device.
        used_bytes: Bytes on each device.
        violations: Why it is not allowed; empty if it is.
    """

    objective: float
    loads: tuple[float, ...]
    used_bytes: tuple[int, ...]
    violations: tuple[str, ...]


def evaluate(problem: PartitionProblem, assignment: Sequence[int], *, contiguous: bool) -> Evaluation:
    """Return what an assignment costs: the one place that says so.

    Args:
        problem: The problem.
        assignment: Device of each node.
        contiguous: Whether the devices have to form a line.

    Raises:
        ValueError: If the assignment does not name a device for every node.
    """
    if len(assignment) != len(problem.nodes) or not all(0 <= d < problem.num_devices for d in assignment):
        raise ValueError(f"an assignment names one of {problem.num_devices} devices for {len(problem.nodes)} nodes")
    devices = problem.devices
    loads, used = [0.0] * len(devices), [0] * len(devices)
    for v, d in enumerate(assignment):
        loads[d] += problem.classes[devices[d]].times[v]
        used[d] += problem.sizes[v]
    for cost, members in problem.nets:
        on = {assignment[v] for v in members}
        for d in on if len(on) > 1 else ():
            if problem.classes[devices[d]].communicates:
                loads[d] += cost
    violations = [
        f"device {d} holds {size} bytes of {limit}"
        for d, size in enumerate(used)
        if (limit := problem.classes[devices[d]].memory_bytes) is not None and size > limit
    ]
    violations += [f"device {d} cannot run all its nodes" for d, load in enumerate(loads) if load == inf]
    for group in problem.colocated:
        if len({assignment[v] for v in group}) > 1:
            violations.append(f"{', '.join(problem.nodes[v] for v in group[:3])} are apart")
    if contiguous and not _in_line(problem, assignment):
        violations.append("the devices depend on each other in a circle")
    objective = inf if violations else max(loads)
    return Evaluation(objective=objective, loads=tuple(loads), used_bytes=tuple(used), violations=tuple(violations))


def _in_line(problem: PartitionProblem, assignment: Sequence[int]) -> bool:
    """Return whether the devices can be put in one line."""
    graph = nx.DiGraph((assignment[u], assignment[v]) for u, v in problem.order if assignment[u] != assignment[v])
    return bool(nx.is_directed_acyclic_graph(graph))
