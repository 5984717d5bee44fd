"""Memory by hand and against published formulas."""

from dataclasses import replace

import pytest

from partita.cost.memory import (
    OPTIMIZERS,
    optimizer_bytes,
    optimizer_bytes_per_parameter,
    process_bytes,
    stage_memory,
)
from partita.errors import CostError
from tests.unit.cost.tensors import tensor, weight


def memory(parameters, **changes):
    given = {"optimizer": "adamw", "saved_bytes": 0, "in_flight": 1, **changes}
    return stage_memory(parameters=parameters, **given)


def test_mixed_precision_adam_needs_sixteen_bytes_per_parameter():
    """ZeRO (arxiv 1910.02054), section 3.1: 2 + 2 + 12 bytes, 16 x parameters."""
    w = weight("w", 1000, 100, dtype="bfloat16")
    found = memory([w], precision="bf16")
    assert found.weights + found.gradients + found.optimizer == 16 * w.numel


def test_single_precision_adam_needs_sixteen_bytes_too_and_sgd_eight():
    w = weight("w", 1000, 100)
    assert memory([w]).total - memory([w]).transient == 16 * w.numel
    assert memory([w], optimizer="sgd").optimizer == 0
    assert memory([w], optimizer="sgd_momentum").optimizer == 4 * w.numel


def test_the_precision_matters_for_parameters_of_16_bits_only():
    assert optimizer_bytes_per_parameter("adam", "float32", "bf16") == 8
    assert optimizer_bytes_per_parameter("adam", "bfloat16", "as_is") == 4
    assert optimizer_bytes_per_parameter("adam", "bfloat16", "fp32") == 4
    assert optimizer_bytes_per_parameter("sgd", "float16", "fp16") == 4


def test_adafactor_keeps_rows_and_columns():
    assert optimizer_bytes(weight("w", 100, 50), "adafactor") == 4 * 150
    assert optimizer_bytes(weight("w", 3, 100, 50), "adafactor") == 4 * 3 * 150
    assert optimizer_bytes(weight("b", 50), "adafactor") == 4 * 50


def test_state_may_be_given_as_bytes():
    assert optimizer_bytes(weight("w", 10, 10), "12") == 1200


@pytest.mark.parametrize("name", ["adamm", "AdamW", "", "-3", "1.5", "²"])
def test_an_unknown_optimizer_is_refused_with_the_known_ones(name):
    with pytest.raises(CostError, match="unknown optimizer") as caught:
        optimizer_bytes_per_parameter(name, "float32")
    assert "adafactor" in caught.value.message
    if name == "adamm":
        assert "'adam'" in caught.value.hint


def test_an_unknown_precision_is_refused():
    with pytest.raises(CostError, match="unknown precision 'fp8'"):
        optimizer_bytes_per_parameter("adam", "float32", "fp8")


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "4"])
def test_frozen_parameters_and_buffers_are_weights_only(optimizer):
    frozen = weight("w", 10, 10, grad=False)
    buffer = tensor("b", 5, role="buffer", grad=False)
    found = memory([frozen, buffer], optimizer=optimizer)
    assert (found.weights, found.total) == (420, 420)


def test_a_shared_parameter_counts_once():
    w = weight("w", 10, 10)
    assert memory([w, w]) == memory([w])
    alias = tensor("alias", 10, 10, role="parameter", storage="w")
    assert memory([w, alias]).weights == 400


def test_activations_and_received_values_are_in_flight():
    found = memory([], saved_bytes=100, received_bytes=10, in_flight=4, buffer_bytes=7, transient_bytes=3)
    assert (found.activations, found.skips, found.buffers, found.transient, found.total) == (400, 40, 7, 3, 450)


def test_temporaries_of_the_optimizer_count_as_far_as_they_exceed_the_activations():
    parameters = [weight("a", 100), weight("b", 50)]  # 400 and 200 bytes
    assert memory(parameters).transient == 800  # loop: two of the largest
    assert memory(parameters, platform="cuda").transient == 600  # foreach: all trainable bytes
    assert memory(parameters, platform="cuda", optimizer="sgd").transient == 0
    assert memory(parameters, saved_bytes=300, transient_bytes=50, in_flight=2).transient == 200
    # The sum is the larger of both moments: 600 + 800 at the update, or 600 + 1000 + 50 in the backward.
    late = memory(parameters, saved_bytes=500, transient_bytes=50, in_flight=2)
    assert (late.transient, late.activations) == (50, 1000)


def test_inference_has_weights_and_activations_only():
    found = memory([weight("w", 100)], saved_bytes=0, transient_bytes=5, training=False)
    assert (found.weights, found.total) == (400, 405)


def test_a_process_needs_more_than_its_live_bytes():
    assert process_bytes(0) == 32 * 2**20
    assert process_bytes(10**9) == pytest.approx(1.03e9 + 32 * 2**20)


def test_zero_cuts_state_then_gradients_then_weights_but_no_buffer():
    w, buffer = weight("w", 1000, 100), replace(tensor("b", 8, grad=False), role="buffer")
    levels = [memory([w, buffer], zero=zero, data_degree=4) for zero in (0, 1, 2, 3)]
    assert [found.optimizer / w.bytes for found in levels] == [2, 0.5, 0.5, 0.5]
    assert [found.gradients / w.bytes for found in levels] == [1, 1, 0.25, 0.25]
    assert [(found.weights - buffer.bytes) / w.bytes for found in levels] == [1, 1, 1, 0.25]
    with pytest.raises(CostError, match="levels 0 to 3"):
        memory([w], zero=4)
    with pytest.raises(CostError, match="1 or more ranks"):
        memory([w], zero=1, data_degree=0)


def test_a_rank_of_zero_updates_its_part_only():
    w = weight("w", 1000, 100)
    loop, foreach = (memory([w], zero=1, data_degree=4, platform=platform).transient for platform in ("cpu", "cuda"))
    assert (loop, foreach) == (2 * w.bytes // 4, w.bytes // 4)
