"""What crosses layers besides tensors: objects that they fill, checkpoint regions, attributes left on modules."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import partita
from partita.errors import CaptureError, ExecutionError
from partita.tracer.capture import capture_model
from partita.tracer.signature import signature_of
from partita.tracer.verify import check_equal, run_program
from tests.unit.tracer.test_fold import verified
from tests.unit.tracer.traces import WIDTH, Model, rows, trace


@dataclass
class Context:
    entries: list = field(default_factory=list)
    last: object = None
    count: int = 0


class Filling(nn.Module):
    """A layer that leaves what it made with the object that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, store):
        x = torch.tanh(self.linear(x))
        if isinstance(store, list):
            store.append(x.mean())
        elif isinstance(store, dict):
            store[len(store)] = x.mean()
        else:
            store.entries.append(x.mean())
            store.last, store.count = x, store.count + 1
        return x


def filled(make, result):
    def forward(self, x):
        store = make()
        for layer in self.layers:
            x = layer(x, store)
        return result(x, store)

    return Model(forward, layers=nn.ModuleList(Filling() for _ in range(3)))


def plain():
    return SimpleNamespace(entries=[], last=None, count=0)


@pytest.mark.parametrize(
    ("make", "result"),
    [
        (list, lambda x, s: x + sum(s) * len(s)),
        (list, lambda x, s: (x, s)),
        (dict, lambda x, s: (x, s)),
        (Context, lambda x, s: x * s.count + s.last + sum(s.entries)),
        (Context, lambda x, s: (x, s)),
        (plain, lambda x, s: x * s.count + s.last + sum(s.entries)),
        (plain, lambda x, s: (x, s)),
    ],
)
def test_layers_that_fill_an_object_are_opened_and_the_object_comes_back_filled(make, result):
    traced = verified(filled(make, result), rows())
    assert "it changes the" in traced.folded.opened["layers.0"]
    assert [s.name for s in traced.program.steps if s.kind == "call"] == [f"layers.{i}.linear#0" for i in range(3)]


@pytest.mark.parametrize("make", [list, dict, Context, plain])
def test_an_argument_that_the_forward_fills_is_refused_and_left_as_it_was(make):
    model = Model(lambda self, x, store: self.inner(x, store), inner=Filling())
    given = make()
    with pytest.raises(CaptureError, match="is given as an argument"):
        partita.capture(model, (rows(), given))
    assert given == make()


def test_tensors_inside_of_a_given_object_are_inputs():
    traced = verified(Model(lambda self, x, batch: self.linear(x) * batch.scale), rows(), SimpleNamespace(scale=rows()))
    assert traced.signature.names == ("args[0]", "args[1].scale")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        Counting.calls = getattr(Counting, "calls", 0) + 1
        return torch.tanh(self.linear(x))


def region(way, reentrant):
    def forward(self, x):
        x = self.linear(x)
        for layer in self.layers:
            function = layer if way == "module" else lambda y, layer=layer: layer(y) * 2
            x = checkpoint(function, x, use_reentrant=reentrant)
        return x

    return Model(forward, layers=nn.ModuleList(Counting() for _ in range(3)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["module", "closure"])
def test_calls_in_a_checkpoint_region_run_again_before_their_backward(way, reentrant):
    model = region(way, reentrant)
    traced = verified(model, rows())
    assert [s.recompute for s in traced.program.steps if s.kind == "call"] == [False, True, True, True]
    Counting.calls = 0
    env = run_program(traced.program, model, (rows(),))
    env.fill(traced.program.result).sum().backward()
    assert Counting.calls == 6


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_region_without_a_differentiable_argument_gives_no_gradients():
    model = Model(lambda self, x: self.linear(x) + checkpoint(self.inner, x, use_reentrant=True), inner=Counting())
    traced = verified(model, rows())
    assert [s.grad_enabled for s in traced.program.steps if s.kind == "call"] == [True, False]


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss, self.history = 0.0, []

    def forward(self, x):
        x = self.linear(x)
        self.loss = x.pow(2).mean()
        self.history.append(x.detach())
        return x


def test_what_a_forward_leaves_on_its_module_is_refused_when_read():
    model = nn.Sequential(Auxiliary(), nn.Linear(WIDTH, WIDTH))
    assert trace(model, rows()).program.stored == {"0": ("history", "loss")}
    pm = partita.auto_parallelize(model, (rows(),), limits=partita.Limits(num_microbatches=2))
    for _ in range(2):
        out, layer = pm(rows()), pm.get_submodule("0")
        for read in (
            lambda layer, out: out.sum() + layer.loss,
            lambda layer, _out: layer.loss + 1,
            lambda layer, _out: layer.loss.item(),
            lambda layer, _out: sum(layer.history),
            lambda layer, _out: float(layer.loss),
            lambda layer, _out: torch.stack([layer.loss]),
        ):
            with pytest.raises(ExecutionError, match=r"'0\.(loss|history)' is stored by a forward"):
                read(layer, out)
        out.sum().backward()
    assert model[0].loss == 0.0
    assert model[0].history == []


def test_hooks_of_opened_modules_run_on_live_values():
    seen, model = [], nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    model.register_forward_hook(lambda _module, _args, output: seen.append(output.detach()))
    traced = verified(model, rows())
    hooks = [s.name for s in traced.program.steps if "hook" in s.name]
    assert hooks == ["._forward_pre_hooks[0]#0", "._forward_hooks[0]#0"]
    seen.clear()
    result = run_program(traced.program, model, (rows(),)).fill(traced.program.result)
    assert torch.equal(seen[0], result)


def test_hooks_on_all_modules_keep_the_model_whole():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_given: None)
    try:
        graph = partita.capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), (rows(),))
    finally:
        handle.remove()
    assert len(graph.items) == 1
    assert any("hooks on all modules are registered" in note for note in graph.notes)


class Counter:
    def __init__(self):
        self.calls = 0

    def note(self, *_given):
        self.calls += 1


def test_a_hook_gathers_into_the_users_own_object():
    counter, model = Counter(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.register_forward_hook(counter.note)
    pm = partita.auto_parallelize(model, (rows(),), limits=partita.Limits(num_microbatches=2))
    counter.calls = 0
    pm(rows())
    assert counter.calls > 0


class HooksItself(nn.Module):
    """Registers hooks at its first forward, and notes that it has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.found = None

    def forward(self, x):
        if not getattr(self, "hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda _module, _args, output: self.found.append(output))
            self.hooked = True
        self.found = []
        for layer in self.layers:
            x = layer(x)
        found, self.found = tuple(self.found), None
        return {"x": x, "found": found}


def test_hooks_that_a_forward_registers_itself_are_there_once():
    model, x = HooksItself(), torch.randn(4, WIDTH)
    captured = capture_model(model, (x,))
    assert captured.traced.recording is not None
    signature, tensors = signature_of((x,), {})
    for training in (True, False, True):
        model.train(training)
        captured.tracer.follow(model)
        traced = captured.tracer.trace(signature, tensors)
        check_equal(model, traced.program, signature, tensors)
