"""Capture a zoo of architectures and cut each on the loopback: what is captured how, how exact, how fast.

    python benchmarks/capture.py [--only NAME,...] [--large] [--json FILE] [--markdown FILE]

Every model is built small from its configuration (no download).  A row shows the rung of the ladder, items and how many
of them are calls of the model's own modules, operators, seconds, and the largest relative difference of loss and
gradients between the plain model and the model cut in 2 and in 4 stages, run with all stages in this process.  *MB* is
what resident memory rose above where it stood when the capture (with its verification) began, libraries warm, each
model in a fork of its own; "-" where the system does not tell.  ``--large`` captures models of 10^11 parameters instead
(`large.py`).
Exit status: number of models that differ (more than 1e-5 relative) or fail without a named refusal.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch
from large import measure_all
from loopback import run_on_loopback
from models import ZOO

from partita.errors import PartitaError
from partita.tracer.capture import capture_model
from partita.tracer.compare import relative_error

LIMIT = 1e-5


def loss_of(output):
    """Return a scalar through which every floating result is felt."""
    from partita.tracer.tree import leaves

    tensors = [
        t for _, t in leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad
    ]
    return sum((t.float() ** 2).mean() for t in tensors)


def grads_of(model):
    """Return the gradients by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(found, expected):
    """Return the largest relative difference, against the largest gradient where a gradient is all but zero."""
    floor = max(float(g.abs().max()) for g in expected.values()) * 1e-6
    gaps = [1.0 for _ in expected.keys() ^ found.keys()]
    common = [name for name in expected if name in found]
    telling = [name for name in common if float((found[name] - expected[name]).abs().max()) > floor]
    gaps += [relative_error(expected[name], found[name]) for name in telling]
    return max(gaps, default=0.0)


class PeakGrowth:
    """How far resident memory rises above its level at `start`, by the high-water mark that Linux keeps."""

    def start(self):
        """Give freed memory back to the system and lower the mark to what is resident now."""
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._level_kb = self._status("VmRSS")
        except (OSError, AttributeError):
            self._level_kb = None

    def megabytes(self):
        """Return the rise of the mark since, in MB, or "-" where the system does not tell."""
        if self._level_kb is None:
            return "-"
        return round((self._status("VmHWM") - self._level_kb) * 1024 / 1e6)

    @staticmethod
    def _status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def warm_up():
    """Capture a module once: what torch imports when it first traces belongs to no model's row."""
    capture_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (torch.ones(2, 4),))


def measure(name):
    """Return one model's row."""
    torch.manual_seed(0)
    model, example = ZOO[name]()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    memory = PeakGrowth()
    memory.start()
    start = time.process_time()
    captured = capture_model(model, example)
    seconds, megabytes = time.process_time() - start, memory.megabytes()
    graph = captured.graph
    row = {
        "model": name,
        "rung": "whole"
        if captured.traced.recording is None
        else "classes kept"
        if captured.tracer.opaque
        else "recorded",
        "items": len(graph.items),
        "calls": sum(item.kind == "call" for item in graph.items),
        "ops": len(graph.ops),
        "rows": graph.batch_rows,
        "seconds": round(seconds, 2),
        "MB": megabytes,
        "note": re.sub(r" \(/[^)]*\)", "", graph.notes[0])[:100] if graph.notes else "",  # without this machine's paths
    }
    output = model(*example.args, **example.kwargs)
    loss_of(output).backward()
    expected = grads_of(model)
    for stages in (2, 4):
        row[f"cut in {stages}"] = cut(captured, model, example, stages, expected, loss_of(output))
    return row


def cut(captured, model, example, stages, expected, loss):
    """Return the largest difference of a cut, or the reason why there is none."""
    if sum(not item.replicable for item in captured.graph.items) < stages:
        return "too few items"
    try:
        value, found = run_on_loopback(captured, model, example, stages, loss_of)
    except PartitaError as error:
        return f"refused: {str(error).splitlines()[0][:80]}"
    return max(relative_error(loss.detach(), value.detach()), worst(found, expected))


def show(rows):
    """Return the rows as a Markdown table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = lambda value: f"{value:.1e}" if isinstance(value, float) and value < LIMIT * 10 else str(value)  # noqa: E731
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(text(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def main():
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,...")
    parser.add_argument("--large", action="store_true", help="capture large models on the meta device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, bad = measure_all() if arguments.large else measure_zoo(arguments.only)
    print(f"{len(rows) - bad} passed, {bad} failed")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(show(rows) + "\n")
    return min(bad, 99)


def measure_zoo(only):
    """Measure the models of the zoo, each in a fork of this process; return the rows and how many are wrong."""
    warm_up()
    names = [n for n in ZOO if not only or n in only.split(",")]
    rows, bad = [], 0
    # A fork starts from the same heap for every model: none is captured into memory that another one left free.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure_or_say_why, names):
            wrong = row["rung"] == "failed" or any(
                isinstance(row.get(k), float) and row[k] > LIMIT for k in ("cut in 2", "cut in 4")
            )
            bad += wrong
            rows.append(row)
            print("BAD " if wrong else "ok  ", *(f"{k}={v}" for k, v in row.items()), flush=True)
    return rows, bad


def measure_or_say_why(name):
    """Return one model's row, or a row that says how it failed."""
    try:
        return measure(name)
    except Exception as error:
        note = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
        return {"model": name, "rung": "failed", "note": note}


if __name__ == "__main__":
    sys.exit(main())
