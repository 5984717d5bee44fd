import subprocess
import sys
from pathlib import Path

import pytest

from partita.runtime.meter import _status

SCRIPT = """
import torch
from partita.runtime.meter import MemoryMeter, free_at_once, keep_freed
free_at_once()
torch.ones(2**18)
meter = MemoryMeter()
held = [torch.ones(2**20) for _ in range(8)]
held.clear()
torch.ones(2**20)
print(meter.growth_bytes())
keep_freed()
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts memory so")
def test_the_growth_is_the_peak_of_the_live_tensors():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(32 * 2**20, rel=0.1)


def test_an_unknown_figure_is_none():
    assert _status("NoSuchField") is None
