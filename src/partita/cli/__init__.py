"""The command line: the verbs of the Python interface as commands.

A command is a row of `COMMANDS`: its name, one sentence, and the module that adds its options and runs it.  Only the
module of the command that is called is imported, so that ``partita inspect`` starts at once.

Exit codes: 0 done, 1 a clear error (no traceback unless ``--debug``), 2 wrong usage, 3 no feasible plan.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import partita
from partita.errors import InfeasibleError, PartitaError

DONE, FAILED, USAGE, INFEASIBLE = 0, 1, 2, 3
"""Exit codes."""
COMMANDS = (
    ("demo", "plan, explain and run a small model on CPU processes", "partita.cli.launch"),
    ("plan", "plan a model for a cluster", "partita.cli.make"),
    ("profile", "measure a model's blocks on this machine's devices", "partita.cli.measure"),
    ("inspect", "show a plan, or what the capture of a model found out", "partita.cli.look"),
    ("explain", "say in words why a plan is as it is", "partita.cli.look"),
    ("diff", "show what differs between two plans", "partita.cli.look"),
    ("simulate", "predict a step of a plan, with a trace on request", "partita.cli.make"),
    ("run", "start a training script on processes of this machine", "partita.cli.launch"),
    ("doctor", "show versions and devices, and measure this machine", "partita.cli.doctor"),
)
"""Name, what it does, and the module with ``configure_NAME(parser)`` and ``run_NAME(arguments) -> int``."""


class _Help(HelpFormatter):
    """Help of a fixed width: finding the terminal's width costs every start 3 ms."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def build_parser(names: Sequence[str] | None = None) -> ArgumentParser:
    """Return the parser; only the commands in ``names`` (None: all) get their options."""
    parser = ArgumentParser(prog="partita", description=partita.__doc__.split("\n")[0], formatter_class=_Help)
    parser.add_argument("--version", action="version", version=f"partita {partita.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="partita")
    for name, sentence, module in COMMANDS:
        command = commands.add_parser(
            name, help=sentence, description=f"{sentence[0].upper()}{sentence[1:]}.", formatter_class=_Help
        )
        command.add_argument("--debug", action="store_true", default=SUPPRESS, help="show the traceback of an error")
        if names is None or name in names:
            getattr(import_module(module), f"configure_{name}")(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None for the process's own.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parse(words)
    except SystemExit as end:  # argparse has printed the usage, the help or the version
        return end.code if isinstance(end.code, int) else USAGE
    if arguments.command is None:
        build_parser([]).print_help()
        return USAGE
    module = {name: module for name, _, module in COMMANDS}[arguments.command]
    run: Any = getattr(import_module(module), f"run_{arguments.command}")
    return _guarded(run, arguments)


def _parse(words: list[str]) -> Namespace:
    known = {name for name, _, _ in COMMANDS}
    command = next((word for word in words if not word.startswith("-")), "")
    return build_parser([command] if command in known else []).parse_args(words)


def _guarded(run: Any, arguments: Namespace) -> int:
    try:
        return int(run(arguments))
    except BrokenPipeError:  # the reader of our output has gone, as in `partita inspect plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("partita: interrupted", file=sys.stderr)
        return 130
    except (PartitaError, OSError, ValueError, TypeError) as error:
        if arguments.debug:
            raise
        print(f"partita {arguments.command}: {_message(error)}", file=sys.stderr)
        return INFEASIBLE if isinstance(error, InfeasibleError) else FAILED


def _message(error: Exception) -> str:
    if isinstance(error, PartitaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{error}\nhint: --debug shows where this was raised"
