"""Measure a model's distinct blocks on the target device.

Theory of operation.

1. Blocks that repeat an earlier one are measured once (`partita.ir.structure`).  What the cache has is not measured
   again, so an interrupted profile goes on where it stopped.
2. Sizes are checked before anything runs: a unit whose predicted need exceeds the free memory is skipped and named.
3. Units are measured in groups and *interleaved*, one run of each per round, so that caches, allocator and neighbours
   are as in a step: isolated hot loops are 6-22 % too fast.  The first rounds warm up.
4. Every group that is done is kept on disk at once; Ctrl-C keeps what has enough repeats.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from os import cpu_count, sched_getaffinity
from typing import Any

import torch
from torch import nn

from partita.cost.analytic import AnalyticModel
from partita.cost.clusters import default_cluster
from partita.cost.profile_table import ProfileTable, Spread, Timing
from partita.errors import CostError
from partita.ir.cluster import DeviceSpec
from partita.ir.graph import ModelGraph
from partita.ir.structure import structure_digest
from partita.partitioner.coarsen import coarsen
from partita.profiler.clock import Clock, device_clock, free_bytes
from partita.profiler.cpu import cpu_name
from partita.profiler.units import Sample, Unit, UnitRunner, at_rows
from partita.tracer.capture import Captured
from partita.tracer.skeleton import copy_model, named_tensors
from partita.units import format_bytes

WARM_UP = 2
"""First rounds, which are not counted."""
REPEATS = 10
"""Counted rounds."""
ENOUGH = 3
"""Repeats that an interrupted measurement must have to be kept."""
GROUP = 24
"""Units that are interleaved."""
MEMORY_SHARE = 0.7
"""Share of the free memory that a measurement may be predicted to need."""

Progress = Callable[[int, int, str], None]
"""Told (units done, all units, what is measured now)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure, and how.

    Attributes:
        rows: Rows of a microbatch; None: those of the example and its halves, quarters, ... down to one.
        operators: Also measure every distinct item by itself, not only blocks.
        split: Also measure the gradients of the inputs alone.
        optimizer: Whose update to measure.
        links: Also measure messages, and all-reduces in a job.
        repeats: Counted rounds.
    """

    rows: tuple[int, ...] | None = None
    operators: bool = False
    split: bool = False
    optimizer: str = "adamw"
    links: bool = True
    repeats: int = REPEATS


def environment_of(device: torch.device) -> tuple[str, str]:
    """Return the catalogue's name of a device, and what its measurements hold for."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        cluster = default_cluster(platform="cuda", device_name=facts.name, memory_bytes=facts.total_memory)
        settings = f"CUDA {torch.version.cuda}, matmul {torch.get_float32_matmul_precision()}"
        return cluster.kinds[0].name, f"{facts.name}; torch {torch.__version__}; {settings}"
    settings = f"{torch.get_num_threads()} thread(s), {platform.machine()}"
    return "cpu", f"{cpu_name()}; torch {torch.__version__}; {settings}"


def empty_table(device: torch.device) -> ProfileTable:
    """Return what the cache has for a device, with today's date."""
    table = ProfileTable.cached(*environment_of(device))
    cores = len(sched_getaffinity(0)) if platform.system() == "Linux" else cpu_count() or 1
    return replace(table, date=datetime.now(UTC).date().isoformat(), cores=cores)


def distinct_units(graph: ModelGraph, *, operators: bool) -> tuple[Unit, ...]:
    """Return the distinct blocks of a graph, and its distinct items if asked for."""
    tensors = graph.tensor_map()
    sets = [(block.label, block.items) for block in coarsen(graph) if block.repeat_of is None]
    if operators:
        sets += [(item.name, (item.id,)) for item in graph.items]
    found: dict[str, Unit] = {}
    for label, items in sets:
        digest = structure_digest(graph, tensors, items)
        found.setdefault(digest, Unit(digest, label, items))
    return tuple(found.values())


@dataclass(slots=True)
class _Group:
    """Units that are measured together at one number of rows."""

    rows: int
    units: list[Unit]
    samples: dict[str, list[Sample]] = field(default_factory=dict)


class Profile:
    """Measures one captured model.

    Args:
        model: The user's model; it is not changed.
        captured: Its capture.
        tensors: Input tensors of the example.
        device: Where to measure.
        table: What is known already; `table` grows.
        options: What to measure.
        clock: Times what is run; None for the device's own.
        keep: Called with the table whenever a group is done.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        table: ProfileTable,
        *,
        options: Options,
        clock: Clock | None = None,
        keep: Callable[[ProfileTable], object] = lambda _table: None,
    ) -> None:
        self.table = table
        self._user, self._captured, self._tensors = model, captured, tuple(tensors)
        self._device, self._options, self._keep = device, options, keep
        self._clock = device_clock(device) if clock is None else clock
        self._spec = _spec(device)
        self._analytic = AnalyticModel()

    def run(self, progress: Progress = lambda _done, _all, _what: None) -> ProfileTable:
        """Measure what the table lacks.

        Returns:
            The table.

        Raises:
            CostError: If the weights do not fit into the device's memory.
            KeyboardInterrupt: Ctrl-C; what was measured is in `table` and was kept.
        """
        units = distinct_units(self._captured.graph, operators=self._options.operators)
        missing = {rows: self._missing(units, rows) for rows in self._rows()}
        total, done = sum(map(len, missing.values())), 0
        if not total:
            return self.table
        with torch.random.fork_rng():
            model = self._on_device()
            for rows, group in _groups(missing):
                work = _Group(rows, list(group))
                try:
                    self._measure(work, model, lambda what, at=done: progress(at, total, what))  # type: ignore[misc]
                except KeyboardInterrupt:
                    self._take(work, ENOUGH)
                    raise
                self._take(work, 1)
                done += len(group)
        progress(total, total, "")
        return self.table

    # -- what to measure -----------------------------------------------------------------------------------------------
    def _rows(self) -> tuple[int, ...]:
        """Return the rows at which the capture holds; 1 stands for a call that is not cut."""
        count = self._captured.graph.batch_rows
        if count is None or self._captured.rows is None:
            return (1,)
        halves = [count >> shift for shift in range(count.bit_length())]
        wanted = halves if self._options.rows is None else list(self._options.rows)
        sizes = self._captured.traced.program.sizes
        return tuple(rows for rows in wanted if sizes.holds(tuple(tuple(t.shape) for t in self._inputs(rows, "cpu"))))

    def _inputs(self, rows: int, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        found = self._captured.rows
        dims = (None,) * len(self._tensors) if found is None else found.dims
        return at_rows(self._tensors, dims, rows, torch.device(device))

    def _missing(self, units: Iterable[Unit], rows: int) -> list[Unit]:
        def known(unit: Unit) -> bool:
            timing = self.table.timings.get((unit.digest, rows))
            return timing is not None and (not self._options.split or timing.input_backward is not None)

        return [unit for unit in units if not known(unit) and self._fits(unit, rows)]

    def _fits(self, unit: Unit, rows: int) -> bool:
        """Whether a unit's predicted need fits; one that does not is noted."""
        graph = self._captured.graph
        cost = self._analytic.items(graph, unit.items, self._spec, rows)
        tensors = graph.tensor_map()
        reads = {name: tensors[name] for item in unit.items for name in graph.items[item].reads}
        scale = rows / (graph.batch_rows or rows)
        inputs = sum(spec.bytes * scale for spec in reads.values() if spec.role == "activation")
        gradients = sum(tensors[name].bytes for name in cost.parameters if tensors[name].requires_grad)
        need, free = cost.saved_bytes + cost.transient_bytes + 2 * inputs + gradients, free_bytes(self._device)
        if need <= MEMORY_SHARE * free:
            return True
        why = f"{unit.label} at {rows} rows needs {format_bytes(int(need))}, {format_bytes(free)} are free"
        self.table = replace(self.table, skipped={**self.table.skipped, unit.digest: why})
        return False

    # -- measuring -----------------------------------------------------------------------------------------------------
    def _on_device(self) -> nn.Module:
        """Return a copy of the model on the device; weights that are not there get random values."""
        shared = self._device.type == "cpu"
        moved = {
            id(tensor): tensor
            for _, tensor, is_parameter in named_tensors(self._user)
            if tensor.is_meta or not (shared and is_parameter)
        }
        need, free = sum(tensor.nbytes for tensor in moved.values()), free_bytes(self._device)
        if need > MEMORY_SHARE * free:
            raise CostError(
                f"the model's weights need {format_bytes(need)} on {self._device}, {format_bytes(free)} are free",
                hint="profile a model with fewer layers of the same size: repeated blocks are measured once anyway",
            )

        def place(_name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return _random_like(tensor, self._device)
            data = tensor.detach().to(self._device)
            return data if id(tensor) not in moved or data.data_ptr() != tensor.data_ptr() else data.clone()

        return copy_model(self._user, place)

    def _measure(self, work: _Group, model: nn.Module, tell: Callable[[str], None]) -> None:
        runner = UnitRunner(
            self._captured.graph,
            self._captured.traced.program,
            model,
            self._inputs(work.rows, self._device),
            self._clock,
            split=self._options.split,
        )
        what = f"{len(work.units)} blocks at {work.rows} rows"
        tell(what)
        values = runner.collect(work.units)
        for number in range(WARM_UP + self._options.repeats):
            for unit in work.units:
                sample = runner.run(unit, values[unit.digest])
                if number >= WARM_UP:
                    work.samples.setdefault(unit.digest, []).append(sample)
            tell(f"{what}, round {number + 1}")
        for parameter in model.parameters():
            parameter.grad = None

    def _take(self, work: _Group, least: int) -> None:
        """Put a group's samples into the table and keep it."""
        timings: dict[tuple[str, int], Timing] = dict(self.table.timings)
        for unit in work.units:
            samples = work.samples.get(unit.digest, [])
            if len(samples) >= least:
                timings[unit.digest, work.rows] = _timing(unit.label, samples)
        self.table = replace(self.table, timings=timings)
        self._keep(self.table)


def _groups(missing: Mapping[int, Sequence[Unit]]) -> Iterator[tuple[int, Sequence[Unit]]]:
    for rows, units in missing.items():
        for start in range(0, len(units), GROUP):
            yield rows, units[start : start + GROUP]


def _timing(label: str, samples: Sequence[Sample]) -> Timing:
    inputs = [(sample.input_backward, sample.backward) for sample in samples if sample.input_backward is not None]
    return Timing(
        label=label,
        forward=Spread.of([sample.forward for sample in samples]),
        backward=Spread.of([sample.backward for sample in samples]),
        input_backward=Spread.of([some for some, _ in inputs]) if inputs else None,
        weight_backward=Spread.of([max(0.0, whole - some) for some, whole in inputs]) if inputs else None,
    )


def _random_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return plausible weights: small numbers for matrices, ones for vectors, zeros for whole numbers."""
    made: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if not tensor.is_floating_point():
        return made.zero_()  # type: ignore[no-any-return]
    return made.normal_(0.0, 0.02) if tensor.ndim > 1 else made.fill_(1.0)  # type: ignore[no-any-return]


def _spec(device: torch.device) -> DeviceSpec:
    if device.type != "cuda":
        return default_cluster(platform="cpu").kinds[0]
    facts = torch.cuda.get_device_properties(device)
    return default_cluster(platform="cuda", device_name=facts.name, memory_bytes=facts.total_memory).kinds[0]
