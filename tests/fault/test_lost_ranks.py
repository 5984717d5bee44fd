"""A rank that is gone ends the job within seconds, and the others say which one it was."""

import os
import signal
import time

import pytest

from partita.runtime import pulse
from tests.training import SETUPS, Setup, loop_a, loop_b, loop_c, parallelize
from tests.zoo import CASES, Inside

ENDED_S = 25.0
PIPELINE = Setup(pp=2, dp=2, microbatches=2)
FAST = 0.2
"""Seconds between signs of life here; silence is noticed after ten times as long."""


def lose(loop, lost, told):
    """Train a step, then one rank ends without a word; the others write down their errors."""
    pulse.BEAT_S, pulse.SILENCE_S = FAST, 10 * FAST
    case = CASES["chain"]
    batch = case.example()
    module = parallelize(
        Inside(case.build(), case.loss) if loop == "B" else case.build(),
        batch,
        PIPELINE if loop != "idle" else SETUPS["pp2"],
        inside=loop == "B",
        loss_fn=case.loss if loop == "C" else None,
    )
    step = {"A": loop_a, "B": loop_b, "C": loop_c, "idle": loop_a}[loop]
    step(module, batch, case.loss)
    rank, start = module._world.rank, time.monotonic()
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(module, batch, case.loss)
        text = "went on"
    except BaseException as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
    (told / f"{rank}").write_text(f"{time.monotonic() - start:.1f} {text}")


@pytest.mark.parametrize(("loop", "lost"), [("A", 2), ("B", 0), ("C", 3), ("idle", 1)])
def test_survivors_name_the_lost_rank(pool, tmp_path, loop, lost):
    size = 2 if loop == "idle" else PIPELINE.ranks
    with pytest.raises(Exception, match="ended without an answer"):
        pool.run(lose, size, loop, lost, tmp_path, seconds=ENDED_S, grace=ENDED_S)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(found) == {str(rank) for rank in range(size) if rank != lost}, found
    for text in found.values():
        seconds, _, message = text.partition(" ")
        assert message.startswith(f"RankFailedError: rank {lost} was lost"), found
        assert float(seconds) < ENDED_S
