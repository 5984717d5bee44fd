"""`partita demo`, shortened, and its processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from partita.demo import ranks
from partita.errors import RankFailedError


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_trains_as_one_process_does(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "partita", "demo", "--out", str(out), "--nproc", "2", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"plan.json", "trace.json", "report.html"} <= {path.name for path in out.iterdir()}
    for part in ("recorded export", "stage  blocks", "step    4 of 4", "prediction is", "largest difference"):
        assert part in done.stdout


def test_a_failure_of_a_rank_is_raised_with_its_reason(tmp_path):
    missing = tmp_path / "missing.json"
    with pytest.raises(RankFailedError, match=r"missing\.json"), ranks.Ranks(1, 1, tmp_path) as processes:
        list(processes.train(missing))


def test_a_killed_rank_is_noticed(tmp_path):
    with ranks.Ranks(1, 1, tmp_path) as processes:
        os.kill(processes.pids[0], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="ended without a word"):
            list(processes.train(Path("plan.json")))
