"""The book of gradients: this backward's apart from earlier ones, sums over those who hold a parameter together."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partita.runtime import gradients
from partita.runtime.gradients import GradientBook, Shared
from partita.runtime.norms import global_norm, local_power_sum
from partita.runtime.transport import LoopbackTransport, Mailbox, ProcessGroupTransport
from partita.runtime.world import World

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)


def parameter(*values, dtype=torch.float64):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_a_backward_is_kept_apart_and_put_on_top():
    weight, other = parameter(1.0, 2.0), parameter(3.0)
    weight.grad = torch.tensor([10.0, 10.0], dtype=torch.float64)
    book = GradientBook({"weight": weight, "other": other}, [])
    book.open()
    assert weight.grad is None
    weight.square().sum().backward()
    fresh = book.close(scale=0.5)
    assert fresh["weight"].tolist() == [1.0, 2.0]
    assert "other" not in fresh
    assert weight.grad.tolist() == [10.0, 10.0], "nothing is added before the loss' backward"
    book.accumulate(fresh, torch.tensor(3.0))
    assert weight.grad.tolist() == [13.0, 16.0]
    book.accumulate(fresh)
    assert weight.grad.tolist() == [14.0, 18.0]
    assert other.grad is None


def test_gradients_that_are_taken_over_are_scaled_in_their_own_memory():
    weight, other = parameter(1.0, 2.0), parameter(3.0)
    other.grad = torch.ones(1, dtype=torch.float64)
    fresh = {"weight": torch.ones(2, dtype=torch.float64), "other": torch.ones(1, dtype=torch.float64)}
    memory = fresh["weight"].data_ptr()
    GradientBook({"weight": weight, "other": other}, []).take_over(fresh, torch.tensor(3.0))
    assert not fresh
    assert weight.grad.data_ptr() == memory
    assert (weight.grad.tolist(), other.grad.tolist()) == ([3.0, 3.0], [4.0])


def test_half_precision_gradients_stay_half_when_scaled():
    weight = parameter(1.0, dtype=torch.bfloat16)
    book = GradientBook({"weight": weight}, [])
    book.accumulate({"weight": torch.ones(1, dtype=torch.bfloat16)}, torch.tensor(2.0))
    assert weight.grad.dtype == torch.bfloat16
    book.accumulate({"weight": torch.ones(1, dtype=torch.bfloat16)}, torch.tensor(2.0))
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.item() == 4


def add_up(bucket_bytes):
    """Sum over two ranks: dense, missing on one, missing on both, frozen, complex, of two dtypes."""
    rank = dist.get_rank()
    named = {
        "both": parameter(0.0, 0.0),
        "first": parameter(0.0),
        "none": parameter(0.0),
        "frozen": parameter(0.0),
        "single": parameter(0.0, dtype=torch.float32),
        "complex": parameter(0j, dtype=torch.complex128),
        "scalar": nn.Parameter(torch.tensor(0.0, dtype=torch.float64)),
        "own": parameter(0.0),
    }
    named["frozen"].requires_grad_(False)
    for name, value in named.items():
        if name not in {"none", "frozen"} and (name != "first" or rank == 0):
            value.grad = torch.full_like(value, (rank + 1) * (1j if name == "complex" else 1))
    shared = [
        Shared((0, 1), ("both", "first", "none", "frozen", "single", "complex", "scalar")),
        Shared((rank,), ("own",)),
    ]
    with mock.patch.object(gradients, "BUCKET_BYTES", bucket_bytes):
        GradientBook(named, shared).reduce(ProcessGroupTransport([0, 1], {(0, 1): None}, CPU), rank)
    return {name: None if value.grad is None else value.grad.flatten().tolist() for name, value in named.items()}


@pytest.mark.parametrize("bucket_bytes", [1, 2**20], ids=["small buckets", "one bucket"])
def test_gradients_are_summed_over_their_holders(pool, bucket_bytes):
    for rank, found in enumerate(pool.run(add_up, 2, bucket_bytes, seconds=20)):
        assert found == {
            "both": [3.0, 3.0],
            "first": [1.0],
            "none": None,
            "frozen": None,
            "single": [3.0],
            "complex": [3j],
            "scalar": [3.0],
            "own": [rank + 1.0],
        }


def test_a_parameter_held_alone_needs_no_messages():
    weight = parameter(1.0)
    weight.grad = torch.ones(1, dtype=torch.float64)
    GradientBook({"weight": weight}, [Shared((0,), ("weight",))]).reduce(LoopbackTransport(Mailbox()), 0)
    assert weight.grad.item() == 1


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_norm_on_one_process_is_torchs(order, dtype):
    torch.manual_seed(0)
    found = [torch.randn(shape).to(dtype) for shape in [(3, 4), (5,), (), (0,)]]
    parts = [part.to(torch.complex128 if dtype.is_complex else torch.float64) for part in found if part.numel()]
    expected = torch.nn.utils.get_total_norm(parts, order)
    norm = global_norm([part for part in found if part.numel()], order, ALONE)
    torch.testing.assert_close(norm, expected.real.double(), rtol=1e-6, atol=0)


def test_the_norm_of_nothing_is_zero():
    assert local_power_sum([], 2.0, CPU).item() == 0
    assert global_norm([], float("inf"), ALONE).item() == 0
