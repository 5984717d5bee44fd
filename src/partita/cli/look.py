"""``partita inspect``, ``explain`` and ``diff``: reading a plan, without torch."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace

from partita.ir.plan import Plan


def configure_inspect(parser: ArgumentParser) -> None:
    """Add the options of ``inspect``."""
    parser.add_argument("plan", metavar="PLAN", help="file written by `partita plan` or `plan.save`")
    parser.add_argument("--json", action="store_true", help="write the figures as JSON instead")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained HTML page")
    parser.add_argument("--against", metavar="PLAN", help="compare with another plan")


def run_inspect(arguments: Namespace) -> int:
    """Show a plan."""
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
