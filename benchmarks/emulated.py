"""How well does the simulator predict a real execution?  Eight processes, slept compute, real messages.

Every stage sleeps its planned time (40 ms and more, so that two cores are enough for eight ranks) and sends messages of
its planned size over gloo; schedule, executor and transport are those of a training.  The plan's links are measured
first.  A row compares the simulated step with the fastest of a few measured ones.

    python benchmarks/emulated.py [--ranks 8] [--repeats 3] [--json]

Exit code 1 if any step is off by more than the tolerance (10 %), or if the whole takes longer than ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

from partita.ir.cluster import Cluster, DeviceSpec, Level, Link
from partita.ir.plan import Edge, Estimate, Plan, Prediction, SolveReport, StagePlan
from partita.schedules.makers import make_schedule
from partita.schedules.passes import add_communication, add_reduction
from partita.simulator import simulate_plan
from partita.units import format_bandwidth, format_seconds

MESSAGE_BYTES = 2**20
FORWARD_S, BACKWARD_S = 0.040, 0.080
TOLERANCE = 0.10
UNEVEN = (1.0, 1.5, 1.0, 2.0, 1.0, 1.25, 1.0, 1.75)


def estimate(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value, source="measured")


def make_plan(schedule: str, num_microbatches: int, factors: tuple[float, ...], link: Link, *, skip: bool) -> Plan:
    """Fabricate a plan of one rank per stage; with ``skip`` stage 0 also sends to the last one."""
    count = len(factors)
    pairs = [(stage, stage + 1) for stage in range(count - 1)] + ([(0, count - 1)] if skip and count > 2 else [])
    edges = tuple(
        Edge(source=a, target=b, tensors=(f"t{a}_{b}",), bytes=MESSAGE_BYTES, backward_bytes=MESSAGE_BYTES)
        for a, b in pairs
    )
    bare = make_schedule(schedule, count, num_microbatches)
    device = DeviceSpec(
        name="sleeper", platform="cpu", memory_bytes=2**30, peak_flops=(("float32", 1e9),), memory_bandwidth=1e9,
        launch_s=1e-6,
    )  # fmt: skip
    return Plan(
        model="Sleepers",
        graph_fingerprint="",
        cluster=Cluster(
            name=f"{count}xsleeper",
            kinds=(device,),
            device_kinds=(0,) * count,
            levels=(Level(name="host", link=link, group_size=count),),
        ),
        memory_limits=(2**30,) * count,
        global_batch=num_microbatches,
        data_degree=1,
        schedule=add_reduction(add_communication(bare, [(a, b, True) for a, b in pairs])),
        blocks=(),
        stages=tuple(
            StagePlan(
                index=stage,
                blocks=(),
                items=(),
                ranks=(stage,),
                schedule_position=stage,
                forward_s=estimate(FORWARD_S * factor),
                backward_s=estimate(BACKWARD_S * factor),
            )
            for stage, factor in enumerate(factors)
        ),
        edges=edges,
        parameter_plans=(),
        optimizer="sgd",
        precision="as_is",
        loss="fused",
        predicted=Prediction(step_time=estimate(0.0), peak_bytes=(0,) * count, bubble_fraction=0.0, measured_share=1.0),
        solve=SolveReport(method="given", status="given", objective=0.0, bound=0.0),
    )


def cases(count: int, link: Link) -> list[tuple[str, Plan]]:
    shapes = {"equal": (1.0,) * count, "uneven": tuple(UNEVEN[i % len(UNEVEN)] for i in range(count))}
    wanted = [(m, "equal", False) for m in (1, 4, 8, 16)]
    wanted += [(4, "uneven", False), (16, "uneven", False), (8, "uneven", True)]
    return [
        (
            f"{schedule:5} m={microbatches:<2} {shape}{', skip' if skip else ''}",
            make_plan(schedule, microbatches, shapes[shape], link, skip=skip),
        )
        for schedule in ("gpipe", "1f1b")
        for microbatches, shape, skip in wanted
    ]


# ---------------------------------------------------------------- one rank


def rank_main(rank: int, count: int, folder: str, repeats: int, results) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    link = measure_link(rank)
    for name, plan in cases(count, link):
        times = [measure_step(plan, rank) for _ in range(repeats + 1)][1:]  # the first one tells the messages' forms
        if rank == 0:
            results.put((name, simulate_plan(plan).step_time_s, min(times)))
    if rank == 0:
        results.put(link)
    dist.destroy_process_group()


def measure_link(rank: int) -> Link:
    """Time messages there and back between ranks 0 and 1; every rank gets the link."""
    import torch
    import torch.distributed as dist

    found = []
    for size in (1, MESSAGE_BYTES):
        message, samples = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(100):
            start = time.perf_counter()
            if rank == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            elif rank == 1:
                dist.recv(message, 0)
                dist.send(message, 0)
            samples.append((time.perf_counter() - start) / 2)
        found.append(sorted(samples)[len(samples) // 10])  # the others waited for a core, not for the link
    box = [found]
    dist.broadcast_object_list(box, src=0)
    latency, large = box[0]
    return Link(latency_s=latency, bandwidth=MESSAGE_BYTES / max(large - latency, 1e-9), source="measured here")


_TRANSPORTS: dict = {}


def measure_step(plan: Plan, rank: int) -> float:
    """Execute one step together; return the seconds from the common start to the last rank's end."""
    import torch
    import torch.distributed as dist

    from partita.runtime.emulated import EmulatedWorker
    from partita.runtime.executor import execute
    from partita.runtime.transport import ProcessGroupTransport

    device = torch.device("cpu")
    transport = _TRANSPORTS.setdefault(plan, ProcessGroupTransport([s.ranks[0] for s in plan.stages], {}, device))
    worker = EmulatedWorker(plan, device)
    dist.barrier()
    start = time.perf_counter()
    execute(plan.schedule.ranks[rank], worker, transport)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def end_with_parent() -> None:
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)


# ---------------------------------------------------------------- the whole


def run(count: int, repeats: int, limit_s: float) -> tuple[Link, list[tuple[str, float, float]]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    results, rows, deadline = context.Queue(), [], time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="partita-emulated-") as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, count, folder, repeats, results), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            while True:
                found = receive(results, processes, deadline)
                if isinstance(found, Link):
                    return found, rows
                rows.append(found)
        finally:
            for process in processes:
                process.join(5.0)
                process.kill()
                process.join()


def receive(results, processes, deadline: float):
    import queue

    while time.monotonic() < deadline:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("emulated: a rank failed; its message is above")
    sys.exit("emulated: the time limit is over")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8, help="processes, one stage each")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of which the fastest counts")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--json", action="store_true", help="write the figures as JSON")
    arguments = parser.parse_args()
    link, rows = run(arguments.ranks, arguments.repeats, arguments.limit)
    worst = max(abs(measured / simulated - 1) for _, simulated, measured in rows)
    if arguments.json:
        table = [{"case": name, "simulated_s": s, "measured_s": m, "ratio": m / s} for name, s, m in rows]
        figures = {"ranks": arguments.ranks, "latency_s": link.latency_s, "bandwidth": link.bandwidth}
        print(json.dumps({**figures, "worst": worst, "cases": table}, indent=2))
    else:
        latency, bandwidth = format_seconds(link.latency_s), format_bandwidth(link.bandwidth)
        print(f"{arguments.ranks} ranks; measured link: {latency} and {bandwidth}")
        print(f"{'case':24} {'simulated':>10} {'measured':>10} {'ratio':>7}")
        for name, simulated, measured in rows:
            print(f"{name:24} {simulated * 1e3:7.1f} ms {measured * 1e3:7.1f} ms {measured / simulated:7.3f}")
        verdict = "within" if worst <= TOLERANCE else "NOT within"
        print(f"largest error {100 * worst:.1f} %, {verdict} {100 * TOLERANCE:.0f} %")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
