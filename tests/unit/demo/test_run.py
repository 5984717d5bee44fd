import math
from dataclasses import replace

import pytest

from partita.demo.ranks import Done
from partita.demo.run import (
    LARGEST_DIFFERENCE,
    STEPS,
    WARM_UP,
    Trained,
    capture_summary,
    compare,
    judge,
    largest_difference,
    shared_cores,
)
from tests.plans import make_cluster, make_graph, make_plan

MIB = 2**20


def trained(*losses, seconds=0.04):
    return Trained(losses, (seconds,) * len(losses))


def falling(to):
    return trained(*(4.6 - (4.6 - to) * step / (STEPS - 1) for step in range(STEPS)))


def test_a_training_that_falls_and_agrees_is_good():
    assert list(judge(falling(2.0), LARGEST_DIFFERENCE)) == []


@pytest.mark.parametrize(
    ("together", "difference", "says"),
    [
        (falling(3.2), 0.0, "not below 3"),
        (trained(4.6, 4.7, 4.8), 0.0, "did not fall"),
        (trained(4.6, math.nan, math.nan), math.inf, "did not fall"),
        (falling(2.0), 2e-4, "differs from one process' by 2.0e-04"),
    ],
)
def test_what_is_wrong_is_said(together, difference, says):
    assert any(says in failure for failure in judge(together, difference))


def test_a_short_training_need_not_reach_the_target():
    assert list(judge(trained(4.6, 4.5, 4.4), 0.0)) == []


def test_the_largest_difference_is_relative_and_sees_what_is_no_number():
    assert largest_difference(trained(2.0, 4.0), trained(2.0, 4.4)) == pytest.approx(0.4 / 4.4)
    assert largest_difference(trained(2.0, math.nan), trained(2.0, 1.0)) == math.inf
    with pytest.raises(ValueError, match="longer"):
        largest_difference(trained(2.0), trained(2.0, 1.0))


def test_the_step_time_is_a_median_without_the_first_steps():
    assert Trained((1.0,) * 9, (*(9.0,) * WARM_UP, 1.0, 2.0, 6.0)).step_s == 2.0
    assert Trained((1.0, 1.0), (9.0, 3.0)).step_s == 6.0


def test_processes_that_share_cores_are_planned_slower():
    cluster = make_cluster()
    half = shared_cores(cluster, 0.5)
    device, whole = half.device(0), cluster.device(0)
    assert dict(device.peak_flops)["float32"] == dict(whole.peak_flops)["float32"] / 2
    assert device.memory_bandwidth == whole.memory_bandwidth / 2
    assert device.launch_s == 2 * whole.launch_s
    assert half.link(0, 1).latency_s == 2 * cluster.link(0, 1).latency_s
    assert device.memory_bytes == 64 * MIB


def test_one_process_has_the_machine_s_memory():
    alone = replace(make_cluster(), device_kinds=(0,))
    assert shared_cores(alone, 1.0).device(0).memory_bytes == alone.device(0).memory_bytes


def test_the_capture_is_summed_up():
    text = capture_summary(make_graph())
    assert "7 operators, 5 of them folded into 4 calls" in text
    assert "8 rows along dim 0 of args[0]" in text


def test_a_bad_prediction_is_shown(capsys):
    plan = make_plan()
    done = (Done(8 * MIB, 24 * MIB), Done(8 * MIB, None), *(Done(8 * MIB, 16 * MIB),) * 2, Done(0, MIB))
    together = replace(trained(4.6, 4.0, seconds=0.0824), done=done)
    assert compare(plan, together, trained(4.6, 4.0)) == []
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "step time 41.2 ms 82.4 ms 50 % low" in lines
    assert "memory of rank 0 16.0 MiB 32.0 MiB 50 % low" in lines
    assert "memory of rank 1 16.0 MiB not measurable -" in lines
    assert "memory of rank 2 24.0 MiB 24.0 MiB exact" in lines
    assert not any("rank 4" in line for line in lines), "an unused rank has no prediction"
