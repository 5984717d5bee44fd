"""Profiling and measuring in a job: every rank gets the same."""

import torch
from torch import nn

import partita
from tests.multiprocess.pool import Pool


def profile_and_measure():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x = torch.randn(8, 8)
    table = partita.profile(model, (x,), cache=False)
    search, limits = partita.Search(pp=2, schedule="gpipe"), partita.Limits(num_microbatches=2)
    module = partita.auto_parallelize(model, (x,), cost=table, search=search, limits=limits, verify="off")
    report = module.measure(1)
    return table, module.plan.predicted.measured_share, report


def test_every_rank_gets_one_table_and_one_report(pool: Pool):
    (first, share, report), (second, _, other) = pool.run(profile_and_measure, 2, seconds=60)
    assert first == second
    assert set(first.links) == {"host"}
    assert set(first.reductions) == {"2"}
    assert share == 1.0
    assert report == other
    assert [stage.index for stage in report.stages] == [0, 1]
    assert [memory.rank for memory in report.memory] == [0, 1]


def profile_what_cannot_be_called():
    """An example that the model does not take: rank 0 finds out, and no rank waits for it."""
    try:
        partita.profile(torch.nn.Linear(4, 4), (torch.zeros(2, 4), torch.zeros(2)), links=False, cache=False)
    except partita.PartitaError as error:
        return str(error)
    return ""


def test_an_error_while_rank_0_profiles_reaches_every_rank(pool: Pool):
    first, second = pool.run(profile_what_cannot_be_called, 2, seconds=60)
    assert first
    assert first == second
