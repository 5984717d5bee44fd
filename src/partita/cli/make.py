"""``partita plan`` and ``simulate``: computing."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from importlib import import_module
from typing import Any

from partita.errors import PartitaError
from partita.units import parse_bytes, parse_seconds

PRECISIONS = ("fp32", "bf16", "fp16", "as_is")
"""What ``partita.plan`` takes."""


def _numbers(text: str) -> int | tuple[int, ...]:
    """Read one number, or several with commas, for a restriction of the search."""
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number or several like 2,4: {text!r}") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive whole number: {text!r}")
    return int(text)


def _quantity(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return convert


def configure_plan(parser: ArgumentParser) -> None:
    """Add the options of ``plan``."""
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="returns the model, or (model, example)")
    parser.add_argument("--example", metavar="MODULE:FUNCTION", help="returns the example: a tuple or dict of inputs")
    parser.add_argument("--cluster", required=True, metavar="TEXT", help="4xcpu, 2x8xH100-80GB, or a cluster file")
    parser.add_argument("--out", metavar="FILE", help="where to save the plan")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="optimizer, or state bytes per parameter")
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS, help="numbers that the costs assume")
    for flag, what in (("pp", "stages"), ("dp", "replicas"), ("tp", "tensor parts"), ("zero", "ZeRO levels")):
        parser.add_argument(f"--{flag}", type=_numbers, metavar="N[,N]", help=f"allow only these numbers of {what}")
    parser.add_argument("--schedule", type=_words, metavar="NAME[,NAME]", help="allow only these schedules")
    parser.add_argument("--microbatches", type=_positive, metavar="N", help="microbatches per step and replica")
    parser.add_argument("--memory", type=_quantity(parse_bytes), metavar="SIZE", help="limit per device, e.g. 40GiB")
    parser.add_argument("--batch", type=_positive, metavar="N", help="rows per step over all replicas")
    parser.add_argument(
        "--solve-time", type=_quantity(parse_seconds), metavar="TIME", help="limit of the search, e.g. 30s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the search")
    parser.add_argument("--costs", metavar="FILE", help="measurements of `partita profile`, used where they apply")
    parser.add_argument("--json", action="store_true", help="write the plan itself instead of its report")


def _words(text: str) -> str | tuple[str, ...]:
    words = tuple(text.split(","))
    return words[0] if len(words) == 1 else words


def run_plan(arguments: Namespace) -> int:
    """Plan a model."""
    import os

    from partita import api
    from partita.ir.request import Limits, Search
    from partita.report.build import report
    from partita.report.text import colour_wanted, terminal_width

    model, example = load_model(arguments.model, arguments.example)
    limits = {"memory_bytes": arguments.memory, "num_microbatches": arguments.microbatches}
    limits |= {"global_batch": arguments.batch, "solve_s": arguments.solve_time}
    search = {name: getattr(arguments, name) for name in ("pp", "dp", "tp", "zero", "schedule")}
    plan = api.plan(
        model,
        example,
        cluster=arguments.cluster,
        optimizer=arguments.optimizer,
        precision=arguments.precision,
        limits=Limits(**{name: value for name, value in limits.items() if value is not None}),
        search=Search(**search),
        seed=arguments.seed,
        cost=arguments.costs,
    )
    if arguments.out:
        plan.save(arguments.out)
    if arguments.json:
        from partita.ir.serde import to_json

        sys.stdout.write(to_json(plan))
        return 0
    print(report(plan).text(colour=colour_wanted(sys.stdout, os.environ), width=terminal_width(sys.stdout)))
    if arguments.out:
        print(f"\nsaved as {arguments.out}")
    return 0


def resolve(reference: str) -> Any:
    """Import ``module:name`` or ``path/file.py:name``, with the current directory (or the file's) on the path.

    Raises:
        PartitaError: If there is no such module, file or name.
    """
    module_name, colon, name = reference.rpartition(":")
    if not colon or not module_name or not name:
        raise PartitaError(f"{reference!r} does not name a function", hint="write it as mymodule:build")
    if module_name.endswith(".py"):
        module_name = _module_of_file(module_name)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        value: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = "run it in the module's directory, or install the module"
        raise PartitaError(f"there is no module {error.name!r} (looked for {reference!r})", hint=hint) from None
    for part in name.split("."):
        if not hasattr(value, part):
            raise PartitaError(f"{reference!r}: {module_name} has no {name!r}", hint="check the function's name")
        value = getattr(value, part)
    return value


def _module_of_file(path: str) -> str:
    """Put a file's folder on the path; return the name by which the file is imported."""
    import os.path

    folder, file = os.path.split(os.path.abspath(path))  # noqa: PTH100  (pathlib costs the CLI 4 ms)
    if not os.path.isfile(path):  # noqa: PTH113  (as above)
        raise PartitaError(f"there is no file {path!r}", hint="write it as path/to/file.py:build")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return file.removesuffix(".py")


def load_model(reference: str, example_reference: str | None) -> tuple[Any, Any]:
    """Call the user's functions; return the model and its example.

    Raises:
        PartitaError: If no example is given.
    """
    built = resolve(reference)()
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if example_reference:
        example = resolve(example_reference)()
    if example is None and type(model).__name__ != "ModelGraph":
        hint = "let it return (model, example), or name a function with --example mymodule:example"
        raise PartitaError(f"{reference!r} returns a model without an example call", hint=hint)
    return model, example


def configure_simulate(parser: ArgumentParser) -> None:
    """Add the options of ``simulate``."""
    parser.add_argument("plan", metavar="PLAN", help="file written by `partita plan` or `plan.save`")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--json", action="store_true", help="write the figures as JSON")


def run_simulate(arguments: Namespace) -> int:
    """Predict a step of a plan."""
    from partita import api
    from partita.ir.plan import Plan
    from partita.units import format_seconds

    plan = Plan.load(arguments.plan)
    timeline = api.simulate(plan)
    if arguments.trace:
        timeline.save_trace(arguments.trace)
    if arguments.json:
        from partita.ir.serde import layout_json

        events = [[event.position, str(event.action), event.start_s, event.end_s] for event in timeline.events]
        figures = {"step_time_s": timeline.step_time_s, "bubble_fraction": timeline.bubble_fraction, "events": events}
        sys.stdout.write(layout_json({"schema": "partita.timeline", "version": 1} | figures))
        return 0
    print(f"step {format_seconds(timeline.step_time_s)}, bubble {100 * timeline.bubble_fraction:.0f} %")
    if arguments.trace:
        print(f"trace in {arguments.trace}: open it at https://ui.perfetto.dev")
    return 0
