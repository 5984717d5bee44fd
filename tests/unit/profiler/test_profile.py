"""Measuring with a fake clock: what is measured, what the cache saves, what an interruption keeps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import partita
from partita.cost.profile_table import ProfileTable
from partita.errors import CostError
from partita.profiler import profile as profiling
from partita.profiler import run as running
from partita.profiler.profile import Options, distinct_units

CPU = torch.device("cpu")
OPTIONS = Options(links=False, repeats=4)
UPDATES = 3 * 8
"""Calls of the clock for the optimizer's update: three sizes, eight repeats."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.weight(x))


class Net(nn.Module):
    """Three equal layers behind an embedding: indices must be valid ones."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clock:
    """Runs what it is given; a forward takes 1 s, a backward 2 s, by the order of the calls."""

    def __init__(self, *, stop_at=None):
        self.calls, self.stop_at = 0, stop_at

    def __call__(self, run):
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        run()
        return float(1 + (self.calls - 1) % 2)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


IDS = torch.tensor([[0, 1, 4], [2, 3, 4], [4, 4, 4], [1, 1, 0]])


def _profile(model, clock, **options):
    cache = options.pop("cache", True)
    return running.profile_model(
        model, (IDS,), CPU, options=replace(OPTIONS, **options), cache=cache, progress=None, clock=clock
    )


def test_each_distinct_block_is_measured_at_each_size_forward_and_backward_apart(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    table = _profile(model, Clock())
    graph = partita.capture(model, (IDS,))
    units = distinct_units(graph, operators=False)
    assert len(units) == 3  # embedding, one of the layers, head
    assert set(table.timings) == {
        (unit.digest, rows) for unit in units for rows in (4, 2)
    }  # for one row a program of its own runs
    timing = next(iter(table.timings.values()))
    assert (timing.forward.value, timing.backward.value, timing.forward.repeats) == (1.0, 2.0, 4)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_says_how_much_was_measured_and_uses_it(model, tmp_path):
    table = _profile(model, Clock())
    search = partita.Search(pp=1, dp=1)
    options = {"cluster": "1xcpu", "search": search, "limits": partita.Limits(num_microbatches=2)}
    plan = partita.plan(model, (IDS,), cost=table, **options)
    assert plan.predicted.measured_share == 1.0
    assert plan.stages[0].forward_s.value == pytest.approx(5.0)  # five blocks, 1 s each
    assert plan.stages[0].backward_s.value == pytest.approx(10.0)
    assert partita.plan(model, (IDS,), **options).predicted.measured_share == 0.0
    path = table.save(tmp_path / "costs.json")
    assert partita.plan(model, (IDS,), cost=path, **options).stages == plan.stages


def test_the_second_run_measures_and_captures_nothing(model, monkeypatch):
    first = _profile(model, Clock())
    monkeypatch.setattr(running, "capture_model", lambda *_args, **_options: pytest.fail("captured again"))
    clock = Clock()
    assert _profile(model, clock) == first
    assert clock.calls == 0


def test_another_model_measures_only_what_is_new(model):
    _profile(model, Clock())
    deeper, clock = Net(), Clock()
    deeper.layers.append(Layer())
    deeper.head = nn.Linear(6, 7)
    table = _profile(deeper, clock)
    assert clock.calls == 2 * 2 * (profiling.WARM_UP + OPTIONS.repeats)  # only the head, at two sizes
    assert len(table.timings) == 8


def test_an_interruption_keeps_what_has_enough_repeats_and_the_next_run_goes_on(model, monkeypatch):
    monkeypatch.setattr(profiling, "GROUP", 1)
    rounds = profiling.WARM_UP + OPTIONS.repeats
    with pytest.raises(KeyboardInterrupt):
        _profile(model, Clock(stop_at=2 * rounds + 5))  # in the second group, after two rounds of warm-up
    table = ProfileTable.cached(*profiling.environment_of(CPU))
    assert len(table.timings) == 1
    assert table.complete == ()
    clock = Clock()
    assert len(_profile(model, clock).timings) == 6
    assert clock.calls == 5 * 2 * rounds + UPDATES


def test_what_does_not_fit_is_named_and_not_run(model, monkeypatch):
    graph = partita.capture(model, (IDS,))
    calls = []

    def free(_device):
        calls.append(1)
        return 10**9 if len(calls) > 3 * len(distinct_units(graph, operators=False)) else 0

    monkeypatch.setattr(profiling, "free_bytes", free)
    clock = Clock()
    table = _profile(model, clock)
    assert not table.timings
    assert len(table.skipped) == 3
    assert all("are free" in why for why in table.skipped.values())


def test_weights_that_do_not_fit_are_refused(model, monkeypatch):
    monkeypatch.setattr(profiling.Profile, "_fits", lambda *_: True)
    monkeypatch.setattr(profiling, "free_bytes", lambda _device: 0)
    with pytest.raises(CostError, match="weights need"):
        _profile(model.to("meta"), Clock())


def test_a_model_without_weights_is_measured_with_random_ones(model):
    assert len(_profile(model.to("meta"), Clock()).timings) == 6


def test_gradients_of_inputs_and_weights_apart(model):
    table = _profile(model, Clock(), split=True, cache=False)
    timings = [timing for timing in table.timings.values() if timing.label.startswith("layers")]
    assert all(timing.input_backward is not None and timing.weight_backward is not None for timing in timings)


def test_a_graph_has_what_is_cached_of_it(model):
    graph = partita.capture(model, (IDS,))
    with pytest.raises(CostError, match="nothing is measured"):
        partita.profile(graph, device="cpu")
    _profile(model, Clock())
    assert len(partita.profile(graph, device="cpu").timings) == 6


class InPlace(nn.Module):
    """A layer that changes what it receives."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.first(x)
        x.add_(1.0)
        return self.second(self.norm(x)).relu_()


def test_in_place_operators_and_buffers_can_be_repeated():
    torch.manual_seed(0)
    model = InPlace()
    count = int(model.norm.num_batches_tracked)
    table = running.profile_model(
        model, (torch.randn(4, 4),), CPU, options=OPTIONS, cache=False, progress=None, clock=Clock()
    )
    assert table.timings
    assert int(model.norm.num_batches_tracked) == count
