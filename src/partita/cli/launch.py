"""``partita run`` and ``demo``: starting processes."""

from __future__ import annotations

import os
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from partita.errors import PartitaError


def _processes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive number: {text!r}")
    return int(text)


def configure_run(parser: ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.add_argument("--nproc", type=_processes, default=1, metavar="N", help="processes on this machine")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="ARGUMENT", help="passed to the script")


def run_run(arguments: Namespace) -> int:
    """Start a script on processes of this machine, as ``torchrun --standalone`` does."""
    if not Path(arguments.script).is_file():
        raise PartitaError(f"there is no script {arguments.script!r}", hint="give the path of a Python file")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if arguments.nproc > 1:  # what torchrun would choose, without its warning
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={arguments.nproc}"]
    try:
        torchrun([*options, arguments.script, *arguments.arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        hint = "its own message is in the output above"
        raise PartitaError(
            f"rank {rank} of {arguments.script} ended with code {failure.exitcode}", hint=hint
        ) from error
    return 0


def configure_demo(parser: ArgumentParser) -> None:
    """Add the options of ``demo``."""
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where to put the results")
    parser.add_argument("--nproc", type=_processes, default=4, metavar="N", help="CPU processes")
    parser.add_argument("--steps", type=_processes, default=None, metavar="N", help="training steps")


def run_demo(arguments: Namespace) -> int:
    """Plan, explain and run a small model."""
    from partita.demo.run import main as demo_main

    return int(demo_main(arguments) or 0)
