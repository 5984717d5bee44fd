"""``partita inspect``, ``explain`` and ``diff``: reading a plan or a captured graph, without torch.

``inspect`` of a model captures it first, which is the only case that needs torch.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace

from partita.errors import PartitaError
from partita.ir.plan import Plan

TYPE_CHECKING = False  # spares the import of `typing`; type checkers know the name
if TYPE_CHECKING:
    from partita.ir.graph import ModelGraph

HEAD = 200
"""Characters at the start of a document in which its schema is looked for."""


def configure_inspect(parser: ArgumentParser) -> None:
    """Add the options of ``inspect``."""
    what = "a plan file, a graph file, or mymodule:build (file.py:build) to capture a model"
    parser.add_argument("plan", metavar="WHAT", help=what)
    parser.add_argument("--json", action="store_true", help="write the figures as JSON instead")
    parser.add_argument("--html", metavar="FILE", help="of a plan: also write one self-contained HTML page")
    parser.add_argument("--against", metavar="PLAN", help="of a plan: compare with another plan")
    parser.add_argument(
        "--example", metavar="MODULE:FUNCTION", help="of a model: returns the example or a list of them"
    )
    parser.add_argument("--out", metavar="FILE", help="of a model: where to save the captured graph")


def run_inspect(arguments: Namespace) -> int:
    """Show a plan, or what a capture found out."""
    if _is_reference(arguments.plan):
        return _inspect_model(arguments)
    if arguments.example or arguments.out:
        _refuse("--example and --out", "a model, given as mymodule:build", arguments.plan)
    if _is_graph(arguments.plan):
        return _inspect_graph(arguments)
    return _inspect_plan(arguments)


def _is_reference(text: str) -> bool:
    """Whether a text names a function rather than a file (a file may stand on drive C:)."""
    return ":" in text and text.rpartition(":")[2].replace(".", "").isidentifier() and not os.path.exists(text)  # noqa: PTH110  (pathlib costs the CLI 4 ms)


def _is_graph(path: str) -> bool:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  (pathlib costs the CLI 4 ms)
        return '"partita.graph"' in file.read(HEAD)


def _refuse(options: str, what: str, given: str) -> None:
    raise PartitaError(f"{options} only go with {what}; {given!r} is none", hint="leave them out")


def _inspect_model(arguments: Namespace) -> int:
    from partita.cli.make import load_model

    if arguments.html or arguments.against:
        _refuse("--html and --against", "a plan file", arguments.plan)
    model, example = load_model(arguments.plan, arguments.example)
    if type(model).__name__ == "ModelGraph":
        graph = model
    else:
        from partita import api

        graph = api.capture(model, example)
    if arguments.out:
        graph.save(arguments.out)
    _show_report(graph, as_json=arguments.json)
    if arguments.out and not arguments.json:
        print(f"\nsaved as {arguments.out}")
    return 0


def _inspect_graph(arguments: Namespace) -> int:
    from partita.ir.graph import ModelGraph

    if arguments.html or arguments.against:
        _refuse("--html and --against", "a plan file", arguments.plan)
    _show_report(ModelGraph.load(arguments.plan), as_json=arguments.json)
    return 0


def _show_report(graph: ModelGraph, *, as_json: bool) -> None:
    if as_json:
        from partita.ir.serde import to_json

        sys.stdout.write(to_json(graph.report))
    else:
        print(f"{graph.name}, {'training' if graph.training else 'evaluation'}\n\n{graph.report}")


def _inspect_plan(arguments: Namespace) -> int:
    from partita.report.build import report
    from partita.report.text import colour_wanted, terminal_width

    plan = Plan.load(arguments.plan)
    shown = report(plan, Plan.load(arguments.against) if arguments.against else None)
    if arguments.html:
        shown.save_html(arguments.html)
    if arguments.json:
        sys.stdout.write(shown.to_json())
    else:
        colour = colour_wanted(sys.stdout, os.environ)
        print(shown.text(colour=colour, width=terminal_width(sys.stdout)))
    return 0


def configure_explain(parser: ArgumentParser) -> None:
    """Add the options of ``explain``."""
    parser.add_argument("plan", metavar="PLAN", help="file written by `partita plan` or `plan.save`")


def run_explain(arguments: Namespace) -> int:
    """Say why a plan is as it is."""
    print(Plan.load(arguments.plan).explain())
    return 0


def configure_diff(parser: ArgumentParser) -> None:
    """Add the options of ``diff``."""
    parser.add_argument("first", metavar="FIRST", help="a plan")
    parser.add_argument("second", metavar="SECOND", help="the plan to compare with it")


def run_diff(arguments: Namespace) -> int:
    """Compare two plans."""
    from partita.report.compare import diff

    print(diff(Plan.load(arguments.first), Plan.load(arguments.second)))
    return 0
