"""All ranks run one program, whatever order a forward takes in their processes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from partita.errors import CaptureError
from tests.training import SETUPS, different_maps, grads_of, loop_a, parallelize
from tests.zoo import WIDTH, Batch, Block, mean_loss, vectors

LIMIT_S = 60.0
PIPELINE = SETUPS["pp2"]


class Tables(nn.Module):
    """Makes two tables of one shape, in an order that each process has for itself, as walking through a set does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.make = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        backwards = dist.is_initialized() and dist.get_rank() == 1
        tables = {}
        for name in ("near", "far")[:: -1 if backwards else 1]:
            tables[name] = torch.tanh(self.make(x * (1.0 if name == "near" else 3.0)))
        for number, block in enumerate(self.blocks):
            x = block(x) + tables["near" if number % 2 else "far"]
        return x


def batch_of(count, seed=0):
    torch.manual_seed(seed)
    return vectors(0, count)


def walk(model=None):
    """The example's size, and sizes and modes that are captured when they come."""
    torch.manual_seed(4)
    plain = Tables().double()
    model = model or parallelize(plain, batch_of(8), PIPELINE)
    found = {}
    for number, count in enumerate((8, 6, 1)):
        loop_a(model, batch_of(count, number), mean_loss)
        found |= {f"{number} {n}": g for n, g in grads_of(model).items()}
    model.eval()
    with torch.no_grad():
        found["evaluated"] = model(*batch_of(5, 9).args)
    return found


def test_a_forward_with_an_order_of_its_own_in_every_process_is_exact(pool):
    torch.manual_seed(4)
    expected = walk(Tables().double())
    for rank, values in enumerate(pool.run(walk, PIPELINE.ranks, seconds=LIMIT_S)):
        assert list(different_maps(f"rank {rank}:", values, expected)) == []


def nameless(ordered):
    """A result of a class that no other process can find by name."""

    @dataclass
    class Result:
        value: torch.Tensor

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = Tables() if not ordered else nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x):
            return Result(self.tables(x))

    torch.manual_seed(4)
    plain = Wrapped().double()
    batch = batch_of(8)
    try:
        model = parallelize(plain, batch, PIPELINE)
    except CaptureError as error:
        return str(error)
    loop_a(model, Batch(batch.args, {}, batch.target), lambda output, target: mean_loss(output.value, target))
    grads = grads_of(model)
    loop_a(plain, Batch(batch.args, {}, batch.target), lambda output, target: mean_loss(output.value, target))
    return {
        n: float((g - p.grad).abs().max())
        for (n, g), (_, p) in zip(grads.items(), plain.named_parameters(), strict=True)
    }


def test_what_cannot_travel_is_captured_by_every_rank(pool):
    for gaps in pool.run(nameless, PIPELINE.ranks, True, seconds=LIMIT_S):
        assert max(gaps.values()) < 1e-12


def test_what_cannot_travel_and_differs_is_refused(pool):
    for text in pool.run(nameless, PIPELINE.ranks, False, seconds=LIMIT_S):
        assert "rank 1 captures another program than rank 0" in text
        assert "PYTHONHASHSEED" in text
