"""``partita demo``: tell the whole way, and check it.

The parent measures the machine, captures and plans; the processes, which import their libraries meanwhile, get the plan
as a file and train it.  Then one plain process takes the same steps, and the two are compared.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from partita import api
from partita.demo.progress import Progress
from partita.demo.ranks import METERED, Done, Ranks, Ready, Step
from partita.ir.cluster import Cluster
from partita.ir.graph import ModelGraph
from partita.ir.plan import Plan
from partita.ir.request import Limits, Search
from partita.units import format_bandwidth, format_bytes, format_flops, format_seconds

STEPS = 60
"""Steps by default: enough to pass `TARGET_LOSS`."""
TARGET_LOSS = 3.0
"""What the loss has to fall below, on average over the last steps, in `STEPS` steps."""
LAST = 10
"""Steps over which the final loss is averaged."""
LARGEST_DIFFERENCE = 1e-4
"""Allowed difference of a step's loss between one process and all, relative."""
WARM_UP = METERED + 1
"""First steps that do not count as step times: the memory is measured in them."""
EXPLANATION = f"""\
Step time: the median from step {WARM_UP + 1} on. Memory: predicted are the live tensors at the peak; measured are this
rank's weights plus the growth of its process in the first {METERED} steps (VmHWM: with buffers of the allocator and the
libraries, without what torch and the capture held before)."""
"""What stands below the figures."""
MICROBATCH_ROWS = 2
"""Rows of a microbatch: GPT-2 of transformers runs another program for a single one."""
MEMORY_BYTES = 64 * 2**20
"""What the demo's devices have: less than the model needs to be trained on one of them."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training showed.

    Attributes:
        losses: Of every step.
        seconds: Of every step.
        done: What each rank had to say at its end; empty for the plain process.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    done: tuple[Done, ...] = ()

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(self.seconds[WARM_UP:] or self.seconds)

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps."""
        return fmean(self.losses[-min(LAST, math.ceil(len(self.losses) / 2)) :])


def main(arguments: Namespace) -> int:
    """Run the demo.

    Args:
        arguments: ``out``, ``nproc`` and ``steps`` (None: `STEPS`).

    Returns:
        0 if the loss fell and one process computed the same; 1 otherwise.
    """
    started = time.monotonic()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is built from a configuration, nothing is fetched
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    steps = STEPS if arguments.steps is None else arguments.steps
    load = os.getloadavg()[0]  # before we add to it
    with tempfile.TemporaryDirectory(prefix="partita-demo-") as meeting:
        cluster = describe_machine(arguments.nproc, folder, load)
        with Ranks(arguments.nproc, steps, Path(meeting)) as ranks:
            plan = _plan(cluster, folder)
            together = train_together(ranks, folder / "plan.json", steps)
    alone = train_alone(steps)
    failures = compare(plan, together, alone)
    _tell("6", f"results, after {format_seconds(time.monotonic() - started)}")
    print(f"in {folder}: plan.json, trace.json (open it at https://ui.perfetto.dev), report.html")
    print(f"next: partita inspect {folder / 'plan.json'} | partita explain {folder / 'plan.json'}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _tell(number: str, title: str) -> None:
    print(f"\n── {number}. {title} ".ljust(100, "─"), flush=True)


# ---------------------------------------------------------------- before training


def describe_machine(num_ranks: int, folder: Path, load: float) -> Cluster:
    """Measure the machine's CPU and describe the demo's processes as devices.

    Processes beyond the number of cores share them, so every rate is scaled by cores per process.

    Args:
        num_ranks: Processes.
        folder: Where the measurement is kept, so that the user's own (of `partita doctor`) stays as it is.
        load: The load average before the demo.
    """
    from partita.cost.clusters import parse_cluster
    from partita.cost.measure_file import save_measurement
    from partita.profiler.cpu import measure_cpu

    _tell("1", "the machine, measured (a few seconds)")
    os.environ["PARTITA_CACHE"] = str(folder)
    save_measurement(measure_cpu())
    whole = parse_cluster(f"{num_ranks}xcpu")
    kind, cores = whole.kinds[0], count_cores()
    share = min(1.0, cores / num_ranks)
    flops = format_flops(dict(kind.peak_flops)["float32"])
    print(f"{cores} cores; one process reaches {flops}/s in products and {format_bandwidth(kind.memory_bandwidth)}")
    if share < 1.0:
        print(f"{num_ranks} processes share them: each is planned as {share:.2g} of a core")
    if load > cores / 2:
        print(f"other work runs here (load average {load:.1f}): steps will take longer than planned")
    return shared_cores(whole, share)


def count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(cluster: Cluster, share: float) -> Cluster:
    """Return the cluster with every rate scaled to a share of a core."""
    kinds = tuple(
        replace(
            kind,
            memory_bytes=min(kind.memory_bytes, MEMORY_BYTES) if cluster.num_devices > 1 else kind.memory_bytes,
            peak_flops=tuple((dtype, peak * share) for dtype, peak in kind.peak_flops),
            memory_bandwidth=kind.memory_bandwidth * share,
            launch_s=kind.launch_s / share,
            source=f"{kind.source}; x {share:.2g} (processes share cores)",
        )
        for kind in cluster.kinds
    )
    levels = tuple(
        replace(
            level,
            link=replace(level.link, latency_s=level.link.latency_s / share, bandwidth=level.link.bandwidth * share),
        )
        for level in cluster.levels
    )
    return replace(cluster, kinds=kinds, levels=levels)


def _plan(cluster: Cluster, folder: Path) -> Plan:
    """Capture and plan the model; show and save the plan."""
    from partita.demo import task
    from partita.report import report
    from partita.report.text import colour_wanted, terminal_width

    _tell("2", "the model, captured as it is")
    model = task.make_model()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{type(model).__name__} of transformers, {count / 1e6:.2f} M parameters; it learns to write Python's own "
        f"documentation,\n{len(task.text()):,} characters, from a vocabulary of {len(task.characters())} "
        f"(a loss of ln {len(task.characters())} = {math.log(len(task.characters())):.2f} is blind guessing)"
    )
    started = time.monotonic()
    graph = api.capture(model, task.example())
    print(f"{capture_summary(graph)}; {format_seconds(time.monotonic() - started)}, compared with the real model")
    _tell("3", "the plan")
    limit = cluster.kinds[0].memory_bytes
    need = count * 16
    if need > limit:
        print(
            f"Say that each of the {cluster.num_devices} processes may use {format_bytes(limit)}. Weights, gradients "
            f"and AdamW's state alone take {format_bytes(need)}:\nthe model cannot be trained on one of them."
        )
    search = Search(dp=2) if cluster.num_devices in {4, 6, 8} else Search()
    microbatches = task.ROWS // MICROBATCH_ROWS // (2 if search.dp else 1)
    limits = Limits(global_batch=task.ROWS, num_microbatches=microbatches)
    wish = "2 replicas, to show pipeline and data parallelism at once, and " if search.dp else ""
    print(f"Asked for: {wish}{microbatches} microbatches; the rest is the planner's choice.\n")
    plan = api.plan(graph, cluster=cluster, optimizer="adamw", limits=limits, search=search)
    shown = report(plan)
    print(shown.text(colour=colour_wanted(sys.stdout, os.environ), width=terminal_width(sys.stdout)), flush=True)
    plan.save(folder / "plan.json")
    api.simulate(plan).save_trace(folder / "trace.json")
    shown.save_html(folder / "report.html")
    return plan


def capture_summary(graph: ModelGraph) -> str:
    """Say in one line what the capture found."""
    calls = [item for item in graph.items if item.kind == "call"]
    inputs = [tensor for tensor in graph.tensors if tensor.role == "input" and tensor.batch_dim is not None]
    names = ", ".join(name for tensor in inputs for name in tensor.names[:1])
    rows = f"{graph.batch_rows} rows along dim {inputs[0].batch_dim} of {names}" if inputs else "none"
    folded = sum(item.ops[1] - item.ops[0] for item in calls)
    return (
        f"recorded export: {len(graph.ops)} operators, {folded} of them folded into {len(calls)} calls of the model's "
        f"own modules, {len(graph.items) - len(calls)} between them;\nbatch axis: {rows}"
    )


# ---------------------------------------------------------------- training


def train_together(ranks: Ranks, plan: Path, steps: int) -> Trained:
    """Train on all processes, with a progress bar."""
    losses: list[float] = []
    seconds: list[float] = []
    done: dict[int, Done] = {}
    _tell("4", "training, all processes together")
    print("every process calls partita.auto_parallelize(model, example, plan='plan.json') ...", flush=True)
    with Progress(steps) as progress:
        for rank, event in ranks.train(plan):
            if isinstance(event, Ready) and rank == 0:
                progress.start()
            elif isinstance(event, Step):
                losses.append(event.loss)
                seconds.append(event.seconds)
                progress.step(event.loss)
            elif isinstance(event, Done):
                done[rank] = event
    return Trained(tuple(losses), tuple(seconds), tuple(done[rank] for rank in sorted(done)))


def train_alone(steps: int) -> Trained:
    """Train the plain model in this process, with one thread, the same seed and the same batches."""
    from partita.demo import script, task

    _tell("5", "the same steps without partita, in one process")
    losses: list[float] = []
    seconds: list[float] = []
    model = task.make_model()
    with _one_thread(), Progress(steps) as progress:
        progress.start()
        before = time.perf_counter()
        for loss in script.train(model, task.make_optimizer(model), task.batches(steps)):
            now = time.perf_counter()
            losses.append(loss)
            seconds.append(now - before)
            before = now
            progress.step(loss)
    return Trained(tuple(losses), tuple(seconds))


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- afterwards


def largest_difference(together: Trained, alone: Trained) -> float:
    """Return the largest difference of a step's loss, relative to one process'; infinite if a loss is not a number."""
    pairs = zip(together.losses, alone.losses, strict=True)
    found = [abs(ours - plain) / abs(plain) for ours, plain in pairs]
    return math.inf if any(math.isnan(difference) for difference in found) else max(found)


def compare(plan: Plan, together: Trained, alone: Trained) -> list[str]:
    """Print predicted against measured, and the losses against one process'.

    Returns:
        What went wrong, as sentences.
    """
    from partita.report.text import render_table

    difference, steps = largest_difference(together, alone), len(together.losses)
    title = ("", "predicted", "measured", "prediction is")
    print()
    print("\n".join(render_table(title, list(_figures(plan, together)), right=(1, 2, 3))))
    print(EXPLANATION)
    print(
        f"One plain process with one thread, as each of the processes, takes {format_seconds(alone.step_s)} per step.\n"
    )
    print(f"loss {together.losses[0]:.3f} -> {together.final_loss:.3f} in {steps} steps (mean of the last ones)")
    print(
        f"largest difference to one process, over all steps: {difference:.1e} relative (at most {LARGEST_DIFFERENCE:g})"
    )
    return list(judge(together, difference))


def _figures(plan: Plan, together: Trained) -> Iterator[tuple[str, ...]]:
    predicted, measured = plan.predicted.step_time_s, together.step_s
    yield "step time", format_seconds(predicted), format_seconds(measured), _error(predicted, measured)
    for rank, done in enumerate(together.done):
        size = plan.predicted.peak_bytes[rank]
        if done.growth_bytes is None:
            yield f"memory of rank {rank}", format_bytes(size), "not measurable", "-"
        elif size:
            used = done.held_bytes + done.growth_bytes
            yield f"memory of rank {rank}", format_bytes(size), format_bytes(used), _error(size, used)


def _error(predicted: float, measured: float) -> str:
    """Return e.g. ``12 % low``."""
    error = round(100 * (predicted / measured - 1))
    return f"{abs(error)} % {'low' if error < 0 else 'high'}" if error else "exact"


def judge(together: Trained, difference: float) -> Iterator[str]:
    """Yield what is wrong with the training, as sentences."""
    steps = len(together.losses)
    if not together.final_loss < together.losses[0]:
        yield f"the loss did not fall: {together.losses[0]:.3f} to {together.final_loss:.3f}"
    if steps >= STEPS and not together.final_loss < TARGET_LOSS:
        yield f"the loss is {together.final_loss:.3f} after {steps} steps, not below {TARGET_LOSS:g}"
    if not difference <= LARGEST_DIFFERENCE:
        yield f"a loss differs from one process' by {difference:.1e}, relative; at most {LARGEST_DIFFERENCE:g} may be"
