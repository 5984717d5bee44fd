"""The pool itself: results by rank, errors with their rank, hanging ranks with their stacks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess.pool import PoolTimeoutError, RankEndedError


def total(number):
    value = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value


def process():
    return os.getpid()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise LookupError(f"no luck on {rank}")
    dist.barrier()


def nap_in_a_named_place(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def leave(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def test_results_come_by_rank_and_every_run_has_its_own_group(pool):
    assert pool.run(total, 3, 10) == [(rank, 3, torch.tensor([33.0])) for rank in range(3)]
    assert pool.run(total, 2, 1) == [(rank, 2, torch.tensor([3.0])) for rank in range(2)]


def test_ranks_stay_alive_between_runs(pool):
    assert pool.run(process, 2) == pool.run(process, 2)


def test_an_error_is_raised_here_with_its_rank_and_traceback(pool):
    with pytest.raises(LookupError, match="no luck on 1") as caught:
        pool.run(fail_on, 2, 1)
    assert "on rank 1 of 2" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]
    assert pool.run(total, 2, 0)[1][2] == 1.0


def test_a_hanging_rank_is_shown_with_its_stack_and_replaced(pool):
    before = pool.run(process, 2)
    with pytest.raises(PoolTimeoutError, match=r"ranks \[1\] of 2 did not answer within 0.5 s") as caught:
        pool.run(nap_in_a_named_place, 2, 1, seconds=0.5)
    assert "in nap_in_a_named_place" in str(caught.value)
    assert not set(before) & set(pool.run(process, 2))


def test_a_rank_that_ends_is_named(pool):
    with pytest.raises(RankEndedError, match="rank 0 of 2 ended without an answer"):
        pool.run(leave, 2, 0)
