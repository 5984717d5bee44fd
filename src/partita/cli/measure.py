"""``partita profile``: measuring a model."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from partita.cli.make import load_model
from partita.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from partita.cost.profile_table import ProfileTable


def configure_profile(parser: ArgumentParser) -> None:
    """Add the options of ``profile``."""
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="returns the model, or (model, example)")
    parser.add_argument("--example", metavar="MODULE:FUNCTION", help="returns the example: a tuple or dict of inputs")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; by default the GPU if there is one")
    parser.add_argument("--cluster", metavar="TEXT", help="also plan for it: how much of a step is measured?")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to save the measurements, besides the cache")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="whose update to measure")
    parser.add_argument("--rows", metavar="N[,N]", help="rows of a microbatch; by default the example's and fewer")
    parser.add_argument("--operators", action="store_true", help="also measure every distinct item by itself")
    parser.add_argument("--split", action="store_true", help="also measure gradients of inputs and weights apart")
    parser.add_argument("--anew", action="store_true", help="measure what is in the cache again")
    parser.add_argument("--json", action="store_true", help="write the measurements as JSON")


def run_profile(arguments: Namespace) -> int:
    """Measure a model's distinct blocks."""
    from partita import api

    model, example = load_model(arguments.model, arguments.example)
    try:
        table = api.profile(
            model,
            example,
            device=arguments.device,
            rows=tuple(int(word) for word in arguments.rows.split(",")) if arguments.rows else None,
            optimizer=arguments.optimizer,
            operators=arguments.operators,
            split=arguments.split,
            cache=not arguments.anew,
            progress=None if arguments.json or not sys.stderr.isatty() else _progress,
        )
    except KeyboardInterrupt:
        print("partita: interrupted; what was measured is kept, the same command goes on from there", file=sys.stderr)
        return 130
    if arguments.anew:
        table.save()
    if arguments.out:
        table.save(arguments.out)
    figures = _planned(model, example, arguments.cluster, arguments.optimizer, table) if arguments.cluster else {}
    if arguments.json:
        # The timings by what they are called; the file of --out has the digests that a planner looks for.
        timings = [{"rows": rows, **asdict(timing)} for (_, rows), timing in sorted(table.timings.items())]
        shown = {"environment": table.environment, "timings": timings, "skipped": dict(table.skipped), **figures}
        sys.stdout.write(json.dumps({"schema": "partita.profile.view", "version": 1} | shown, indent=1) + "\n")
        return 0
    print("\n".join(_lines(table)))
    for name, value in figures.items():
        print(f"{name}: {value}")
    if arguments.out:
        print(f"saved as {arguments.out}; use it with partita.plan(..., cost={str(arguments.out)!r})")
    return 0


def _progress(done: int, total: int, what: str) -> None:
    sys.stderr.write(f"\r\x1b[K{done}/{total} {what}" + ("\n" if done == total else ""))
    sys.stderr.flush()


def _planned(model: object, example: object, cluster: str, optimizer: str, table: ProfileTable) -> dict[str, str]:
    from partita import api

    plan = api.plan(model, example, cluster=cluster, optimizer=optimizer, cost=table)  # type: ignore[arg-type]
    share = f"{100 * plan.predicted.measured_share:.0f} % of the blocks' time"
    return {"measured": share, f"step on {cluster}": format_seconds(plan.predicted.step_time_s)}


def _lines(table: ProfileTable) -> Iterator[str]:
    """Yield the table as text."""
    yield table.environment
    for (_, rows), timing in sorted(table.timings.items(), key=lambda entry: (entry[1].label, entry[0][1])):
        spread = f"{timing.forward.outliers + timing.backward.outliers} outliers" if timing.forward.outliers else ""
        both = f"{format_seconds(timing.forward.value)} + {format_seconds(timing.backward.value)}"
        yield f"  {timing.label:40} {rows:4} rows  {both:24} {spread}".rstrip()
    for name, curve in table.links.items():
        for part in curve.ranges():
            rate = "any" if part.seconds_per_byte <= 0 else format_bandwidth(1 / part.seconds_per_byte)
            yield f"  link {name} from {part.from_bytes} B: {format_seconds(max(0.0, part.latency_s))}, {rate}"
    for why in table.skipped.values():
        yield f"  not measured: {why}"
