"""Ranks that were not given the same: shared weights are aligned, another batch is refused on every rank by name."""

import torch
import torch.distributed as dist
from torch import nn

import partita
from partita.errors import ExecutionError

LIMIT_S = 30.0


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def train_from_own_seed():
    rank = dist.get_rank()
    x = torch.arange(24, dtype=torch.float64).reshape(6, 4) / 10
    module = partita.auto_parallelize(net(rank), (x,), search=partita.Search(pp=1, dp=2))
    module(x).square().mean().backward()
    return module.full_state_dict(), {n: p.grad for n, p in module.named_parameters()}


def test_replicas_start_from_the_owners_weights(pool):
    (state, grads), (_, others) = pool.run(train_from_own_seed, 2, seconds=LIMIT_S)
    plain = net(0)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert all(torch.equal(grads[name], others[name]) for name in grads)


def call_with_own_batch():
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = partita.auto_parallelize(
        net(0), (torch.randn(6, 4, dtype=torch.float64),), search=partita.Search(pp=2, dp=1)
    )
    try:
        module(torch.full((6, 4), float(rank), dtype=torch.float64))
    except ExecutionError as error:
        return str(error)
    return ""


def test_another_batch_on_another_rank_is_refused(pool):
    for text in pool.run(call_with_own_batch, 2, seconds=LIMIT_S):
        assert "rank 1" in text
        assert "args[0]" in text
