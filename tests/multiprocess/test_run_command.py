"""`partita run` starts the processes as torchrun does, and reports the one that failed."""

import subprocess
import sys

SCRIPT = """
import os, pathlib, sys
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
pathlib.Path(sys.argv[1], rank).write_text(" ".join([world, *sys.argv[2:]]))
sys.exit(int(rank == "1" and "fail" in sys.argv))
"""


def run(tmp_path, *words):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "partita", "run", "--nproc", "2", str(script), str(tmp_path), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_every_rank_runs_the_script_with_its_arguments(tmp_path):
    done = run(tmp_path, "--json", "x")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text(encoding="utf-8") for rank in "01"] == ["2 --json x"] * 2


def test_a_failed_rank_is_named(tmp_path):
    done = run(tmp_path, "fail")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        f"partita run: rank 1 of {tmp_path / 'script.py'} ended with code 1",
        "hint: its own message is in the output above",
    ]
