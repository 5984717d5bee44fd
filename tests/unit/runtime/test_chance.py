"""Seeds of stages, replicas and microbatches."""

import itertools

import torch

from partita.runtime.chance import draw, fold, seeded

CPU = torch.device("cpu")


def test_no_two_coordinates_have_one_seed():
    seeds = [
        fold(base, *place) for base in (0, 1, 2**61) for place in itertools.product(range(16), range(8), range(64))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert fold(1, 2, 3) != fold(1, 3, 2) != fold(1, 23)


def test_seeds_are_the_same_in_every_run():
    assert fold(7, 0, 1, 2) == fold(7, 0, 1, 2) == 8638495911068473479


def test_a_call_draws_once_and_seeded_regions_leave_no_trace():
    torch.manual_seed(0)
    first = draw()
    after = torch.rand(3)
    torch.manual_seed(0)
    assert draw() == first
    with seeded(fold(first, 1), CPU):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), after)
    with seeded(fold(first, 1), CPU):
        assert torch.equal(torch.rand(3), inside)
    with seeded(None, CPU):
        plain = torch.rand(3)
    assert not torch.equal(plain, after)
