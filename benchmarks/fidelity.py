"""Do plans keep what they promise?  Many plans of three models, planned from measured costs, run on gloo.

The ranks stay alive for the whole benchmark.  For each model they profile together (blocks on rank 0, links on all),
rank 0 makes the plans, and every plan trains a few steps on all ranks: with the allocator pinned for the memory, then
freely for the time.  Reported are mean and worst error of the step time and of each rank's peak, the correlation of
predicted and measured step times, and the regret: how much slower the plan chosen by prediction is than the best one.

    python benchmarks/fidelity.py [--ranks 2] [--quick] [--models gpt,unet,bert] [--steps 8] [--out FILE]

The result is written to ``benchmarks/results/fidelity.json`` with the machine and its load.  Exit code 1 if a target is
missed; on a loaded machine only the ranking is worth anything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

TARGETS = {"mean_error": 0.10, "worst_error": 0.25, "rank_correlation": 0.95, "regret": 0.03}
MEMORY_ABOVE = {"large": 0.10, "small": 0.35}
LARGE_BYTES = 256 * 2**20
WARM_UP = 3
ROWS = 8


# ---------------------------------------------------------------- models


def build(name: str) -> tuple[Any, Any, Any]:
    """Return a model, its example and its loss function (None: the loss is in the model)."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    ids = torch.randint(3, 512, (ROWS, 64))
    if name == "gpt":
        config = hf.GPT2Config(
            vocab_size=512, n_positions=64, n_embd=384, n_layer=6, n_head=6, use_cache=False, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, None
    if name == "bert":
        config = hf.BertConfig(
            vocab_size=512, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return hf.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}, None
    return make_unet(), (torch.randn(ROWS, 3, 64, 64),), torch.nn.functional.mse_loss


def make_unet() -> Any:
    from torch import nn

    class Double(nn.Sequential):
        def __init__(self, c_in: int, c_out: int) -> None:
            convs = [nn.Conv2d(c_in, c_out, 3, padding=1), nn.Conv2d(c_out, c_out, 3, padding=1)]
            super().__init__(convs[0], nn.GroupNorm(4, c_out), nn.SiLU(), convs[1], nn.GroupNorm(4, c_out), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
            super().__init__()
            self.down = nn.ModuleList(Double(a, b) for a, b in pairwise((3, *widths)))
            self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
            self.merge = nn.ModuleList(Double(2 * a, a) for a in widths[:-1])
            self.pool, self.out = nn.MaxPool2d(2), nn.Conv2d(widths[0], 3, 1)

        def forward(self, x: Any) -> Any:
            import torch

            skips = []
            for level, block in enumerate(self.down):
                x = block(x if level == 0 else self.pool(x))
                skips.append(x)
            for level in reversed(range(len(self.up))):
                x = self.merge[level](torch.cat([skips[level], self.up[level](x)], 1))
            return self.out(x)

    return UNet()


# ---------------------------------------------------------------- plans


def requests(ranks: int, *, quick: bool) -> list[dict[str, Any]]:
    """Return what to ask the planner for: degrees, microbatches, schedules, and other cuts than the best."""
    found = []
    degrees = [(pp, dp) for pp in (1, 2, 4) for dp in (1, 2, 4) if pp * dp <= ranks]
    for pp, dp in degrees:
        for microbatches in (1, 2, 4):
            if ROWS // dp // microbatches < 2:  # one row runs another program
                continue
            for schedule in ("gpipe", "1f1b") if pp > 1 else ("gpipe",):
                methods = ("dp", "uniform", "greedy", "skewed") if pp > 1 else ("dp",)
                fixed = {"pp": pp, "dp": dp, "m": microbatches, "schedule": schedule}
                found += [fixed | {"method": method} for method in methods]
    return found[:: max(2, len(found) // 9) | 1] if quick else found  # an odd stride meets every kind


def make_plans(graph: Any, table: Any, ranks: int, loss: str, *, quick: bool) -> list[tuple[str, Any]]:
    """Return the plans with a text each, without repetitions."""
    from partita.cost.clusters import parse_cluster
    from partita.cost.profiled import ProfiledModel
    from partita.errors import PlanError
    from partita.ir.request import Limits, Search
    from partita.planner import make_plan

    plans: dict[Any, tuple[str, Any]] = {}
    for want in requests(ranks, quick=quick):
        model = ProfiledModel(table)
        cluster = model.cluster(parse_cluster(f"{want['pp'] * want['dp']}xcpu"))
        # Left alone the planner balances; a block of the second half pinned to the first stage makes an uneven plan.
        skewed = want["method"] == "skewed"
        options: dict[str, Any] = {"pins": {pin_of(graph): 0}} if skewed else {}
        try:
            plan = make_plan(
                graph, cluster, cost=model, optimizer="adamw", loss=loss, method="dp" if skewed else want["method"],
                limits=Limits(num_microbatches=want["m"], global_batch=ROWS),
                search=Search(pp=want["pp"], dp=want["dp"], schedule=want["schedule"], **options),
            )  # fmt: skip
        except PlanError:
            continue
        cuts = (plan.schedule.name, plan.num_microbatches, tuple((s.blocks, s.ranks) for s in plan.stages))
        title = f"pp={want['pp']} dp={want['dp']} m={want['m']} {want['schedule']} {want['method']}"
        plans.setdefault(cuts, (title, plan))
    return list(plans.values())


def pin_of(graph: Any) -> str:
    """Return the module path of the call two thirds down the model."""
    calls = [item.module_path for item in graph.items if item.kind == "call" and item.module_path]
    return calls[2 * len(calls) // 3]


# ---------------------------------------------------------------- one rank


def rank_main(rank: int, count: int, folder: str, arguments: argparse.Namespace, results: Any) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    try:
        for name in arguments.models.split(","):
            measure_model(name, arguments, results)
        if rank == 0:
            results.put(None)
    except Exception:
        results.put(f"rank {rank} failed\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()


def measure_model(name: str, arguments: argparse.Namespace, results: Any) -> None:
    import torch.distributed as dist

    import partita
    from partita.cost.memory import process_bytes
    from partita.runtime.sharing import capture_together
    from partita.runtime.world import join_world

    world = join_world()
    model, example, loss_fn = build(name)
    table = partita.profile(model, example, cache=False)
    train(*plain(model), example, loss_fn)  # loads the libraries' code, which is not the plans'
    captured = capture_together(model, example, world, verify=False)
    place = "model" if loss_fn is None else "fused"
    box = [make_plans(captured.graph, table, world.size, place, quick=arguments.quick) if world.rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    for title, plan in box[0]:
        seconds, peaks, compute = measure_plan(model, example, loss_fn, captured, plan, world, arguments.steps)
        if world.rank == 0:
            used = [r for r in range(world.size) if r < plan.num_ranks and plan.predicted.peak_bytes[r]]
            stage_of = {rank: stage for stage in plan.stages for rank in stage.ranks}
            row = {
                "model": name,
                "plan": title,
                "predicted_s": plan.predicted.step_time_s,
                "measured_s": seconds,
                "measured_share": plan.predicted.measured_share,
                "live_bytes": [plan.predicted.peak_bytes[r] for r in used],
                "predicted_bytes": [process_bytes(plan.predicted.peak_bytes[r]) for r in used],
                "measured_bytes": [peaks[r] for r in used],
                "predicted_compute_s": [stage_of[r].time_s * plan.num_microbatches for r in used],
                "measured_compute_s": [compute[r] for r in used],
                "load": os.getloadavg()[0],
            }
            results.put(row)


def measure_plan(
    model: Any, example: Any, loss_fn: Any, captured: Any, plan: Any, world: Any, steps: int
) -> tuple[float, list[int], list[float]]:
    """Train a few steps; return the step's seconds, and each rank's peak bytes and seconds of compute."""
    import torch

    from partita.runtime.build import build as build_module
    from partita.runtime.meter import MemoryMeter, free_at_once, give_back, keep_freed

    free_at_once()
    give_back()  # of the plan before
    module = build_module(model, captured, plan, world, loss_fn=loss_fn, show=lambda _plan: "")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    held = sum(t.nbytes for t in [*module.parameters(), *module.buffers()] if not t.is_meta)
    meter = MemoryMeter()
    for _ in range(WARM_UP):
        train(module, optimizer, example, loss_fn)
    growth = meter.growth_bytes() or 0
    peaks = world.gather(held + growth)
    keep_freed()
    times = []
    for number in range(steps + 1):
        world.gather(None)
        start = time.perf_counter()
        train(module, optimizer, example, loss_fn)
        times.append(max(world.gather(time.perf_counter() - start)) if number else 0.0)
    return min(times[1:]), peaks, world.gather(compute_s(module, optimizer, example, loss_fn))


def compute_s(module: Any, optimizer: Any, example: Any, loss_fn: Any) -> float:
    """Return this rank's own seconds in forwards and backwards: processor time, whatever else the machine does."""
    found = []
    for _ in range(3):
        module.engine.log, module.engine.clock = [], time.thread_time
        train(module, optimizer, example, loss_fn)
        found.append(sum(end - begin for action, begin, end in module.engine.log if action.kind in {"F", "B"}))
    return min(found)


def plain(model: Any) -> tuple[Any, Any]:
    """Return a copy of the model, and its optimizer."""
    import copy

    import torch

    made = copy.deepcopy(model)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-4)


def train(module: Any, optimizer: Any, example: Any, loss_fn: Any) -> None:
    if loss_fn is None:
        module(**example).loss.backward()
    elif hasattr(module, "train_step"):
        module.train_step(args=example, target=example[0])
    else:
        loss_fn(module(*example), example[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def end_with_parent() -> None:
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


# ---------------------------------------------------------------- the whole


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return errors, correlation and regret of one model's plans; an error is predicted / measured - 1."""
    errors = [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
    memory = [
        (predicted / measured - 1, measured)
        for row in rows
        for predicted, measured in zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
    ]
    compute = [
        predicted / measured - 1
        for row in rows
        for predicted, measured in zip(row["predicted_compute_s"], row["measured_compute_s"], strict=True)
        if measured > 0  # a single rank with one microbatch runs the plain model, without actions
    ]
    chosen = min(rows, key=lambda row: row["predicted_s"])["measured_s"]
    return {
        "plans": len(rows),
        "mean_error": sum(map(abs, errors)) / len(errors),
        "worst_error": max(errors, key=abs),
        "rank_correlation": rank_correlation([(row["predicted_s"], row["measured_s"]) for row in rows]),
        "regret": chosen / min(row["measured_s"] for row in rows) - 1,
        "compute_mean_error": sum(map(abs, compute)) / max(1, len(compute)),
        "compute_worst_error": max(compute, key=abs, default=0.0),
        "memory_lowest": min(error for error, _ in memory),
        "memory_highest_large": max((e for e, size in memory if size >= LARGE_BYTES), default=0.0),
        "memory_highest_small": max((e for e, size in memory if size < LARGE_BYTES), default=0.0),
    }


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Return Spearman's coefficient; 1 for fewer than three pairs."""
    if len(pairs) < 3:
        return 1.0

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    first, second = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    mean = (len(pairs) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return covariance / spread**0.5 if spread else 1.0


def missed(found: dict[str, float]) -> list[str]:
    """Return the targets that a summary misses."""
    wrong = [name for name in ("mean_error", "worst_error", "regret") if abs(found[name]) > TARGETS[name]]
    wrong += ["rank_correlation"] if found["rank_correlation"] < TARGETS["rank_correlation"] else []
    wrong += ["memory_lowest"] if found["memory_lowest"] < 0 else []
    return wrong + [
        f"memory_highest_{size}" for size, most in MEMORY_ABOVE.items() if found[f"memory_highest_{size}"] > most
    ]


def machine() -> dict[str, Any]:
    import torch

    from partita.profiler.cpu import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", default="gpt,unet,bert")
    parser.add_argument("--quick", action="store_true", help="six plans per model")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which it is given up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fidelity.json")
    arguments = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"})
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    result: dict[str, Any] = {"machine": machine(), "ranks": arguments.ranks, "quick": arguments.quick}
    rows = collect(arguments)
    names = list(dict.fromkeys(row["model"] for row in rows))
    result["models"] = {name: summary([row for row in rows if row["model"] == name]) for name in names}
    result["plans"] = rows
    result["machine"]["load_after"] = os.getloadavg()[0]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = 0
    for name, found in result["models"].items():
        figures = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
        print(f"{name}: {figures}; missed: {', '.join(missed(found)) or 'nothing'}")
        wrong += len(missed(found))
    print(f"load average {result['machine']['load_before']:.1f} before, {result['machine']['load_after']:.1f} after")
    return 1 if wrong else 0


def collect(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks and return their rows, each printed as it comes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory(prefix="partita-fidelity-") as folder:
        ranks = [
            context.Process(target=rank_main, args=(r, arguments.ranks, folder, arguments, results), daemon=True)
            for r in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        try:
            while (row := results.get(timeout=max(1.0, deadline - time.monotonic()))) is not None:
                if isinstance(row, str):
                    sys.exit(row)
                rows.append(row)
                sizes = zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
                memory = " ".join(f"{100 * (p / m - 1):+.0f} % of {m >> 20} MiB" for p, m in sizes)
                times = f"{1e3 * row['predicted_s']:7.1f} {1e3 * row['measured_s']:7.1f} ms"
                error = 100 * (row["predicted_s"] / row["measured_s"] - 1)
                print(f"{row['model']:5} {row['plan']:36} {times} {error:+5.0f} %  memory {memory}", flush=True)
        finally:
            for process in ranks:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
    return rows


if __name__ == "__main__":
    sys.exit(main())
