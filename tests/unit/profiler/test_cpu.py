"""Measuring this machine gives figures that make sense; how good they are is not a test's to judge."""

import pytest
import torch

from partita.cost.measure_file import Measurement, load_measurement, save_measurement
from partita.errors import TransportError
from partita.profiler import cpu


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(cpu, "BUDGET_S", 0.01)


def test_the_whole_measurement_can_be_kept(tmp_path):
    threads = torch.get_num_threads()
    measured = cpu.measure_cpu()
    assert isinstance(measured, Measurement)
    assert torch.get_num_threads() == threads
    assert {dtype for dtype, _ in measured.gemm_flops} == {"float32", "float64", "bfloat16"}
    assert all(1e6 < rate < 1e14 for _, rate in measured.gemm_flops)
    assert 1e7 < measured.memory_bandwidth < 1e13
    assert 1e-8 < measured.launch_s < 1e-2
    assert 1e-7 < measured.loopback_latency_s < 1.0
    assert 1e6 < measured.loopback_bandwidth < 1e13
    assert not torch.distributed.is_initialized()
    kept = load_measurement(save_measurement(measured, tmp_path / "cpu.json"))
    assert kept is not None
    assert dict(kept.gemm_flops) == dict(measured.gemm_flops)


def test_a_median_takes_at_least_three_calls():
    calls = []
    assert cpu._median_s(lambda: calls.append(1)) >= 0
    assert len(calls) >= 4


def test_a_silent_peer_is_an_error(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no route")

    monkeypatch.setattr(cpu, "_group", refuse)
    monkeypatch.setattr(cpu, "_OTHER", "pass")
    with pytest.raises(TransportError, match=r"cannot talk over 127\.0\.0\.1: no route"):
        cpu.loopback_link()


def test_the_processor_has_a_name():
    assert cpu.cpu_name()
