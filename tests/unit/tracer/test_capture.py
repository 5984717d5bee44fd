"""Capturing: meta models, examples of every form, models kept whole, and no trace left on the user's model."""

import copy
import random

import pytest
import torch
from torch import nn

import partita
from partita.tracer.capture import capture_model, examples_of
from tests.unit.tracer.traces import WIDTH, Model, rows
from tests.zoo import CASES


@pytest.mark.parametrize("name", ["tied_words", "skips", "structured", "gated"])
def test_a_model_without_weights_gives_the_same_graph(name):
    case = CASES[name]
    with torch.device("meta"):
        bare = case.make().double()
    found = capture_model(bare, case.example().args).graph
    real = capture_model(case.build(), case.example().args).graph
    assert found.fingerprint == real.fingerprint
    assert found.batch_rows == real.batch_rows
    assert any("no weights to try it" in note for note in found.notes)


@pytest.mark.parametrize(
    "example",
    [
        (rows(),),
        {"x": rows()},
        partita.Example(kwargs={"x": rows()}),
        rows(),
        [(rows(),), (rows(3),)],
    ],
    ids=["tuple", "dict", "Example", "tensor", "list"],
)
def test_examples_of_every_form(example):
    captured = capture_model(Named(), example)
    assert captured.rows is not None
    assert len(examples_of(example)) in {1, 2}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("example", ["text", [], [1], 3.0])
def test_something_else_is_no_example(example):
    with pytest.raises(TypeError, match="an example is a tuple of arguments"):
        capture_model(Named(), example)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class Doubting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else x + y


def test_a_class_that_branches_on_values_is_kept_whole():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(), nn.Linear(WIDTH, WIDTH))
    captured = capture_model(model, (rows(),))
    assert [step.name for step in captured.traced.program.steps] == ["0#0", "1#0", "2#0"]
    assert any("Branching are kept whole" in note for note in captured.graph.notes)


def test_a_root_that_branches_on_what_it_computed_is_one_block_and_never_cut():
    captured = capture_model(Doubting(), (rows(),))
    assert captured.rows is None
    assert len(captured.graph.items) == 1
    assert any(note.startswith("the model is kept whole") for note in captured.graph.notes)


def test_the_mode_of_the_model_decides():
    model = Model(lambda self, x: torch.dropout(self.linear(x), 0.5, self.training))
    assert capture_model(model, (rows(),)).graph.training
    graph = capture_model(model.eval(), (rows(),)).graph
    assert not graph.training
    assert not any(item.random for item in graph.items)


class Busy(nn.Module):
    """Everything that a careless capture could leave traces in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count = 0
        self.cache = {}

    def forward(self, x):
        self.count += 1
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        self.last = x
        return x + torch.rand(())


def fingerprint(model):
    """Everything about a model that a user could see."""
    hooks = [
        len(table)
        for module in model.modules()
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "versions": [tensor._version for tensor in (*model.parameters(), *model.buffers())],
        "grads": [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": hooks,
        "attributes": {name: copy.copy(value) for name, value in vars(model).items() if not name.startswith("_")},
        "random": (torch.get_rng_state(), random.getstate()),
        "grad mode": torch.is_grad_enabled(),
        "forward": type(model).forward,
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("outcome", ["captured", "kept whole"])
def test_a_capture_leaves_no_trace_on_the_model(outcome):
    model = nn.Sequential(Busy(), Branching()) if outcome == "kept whole" else Busy()
    busy = model[0] if outcome == "kept whole" else model
    busy.blocks[0].weight.grad = torch.ones_like(busy.blocks[0].weight)
    busy.blocks[2].eval()
    busy.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    x = rows()
    before, given = fingerprint(model), x.clone()
    capture_model(model, (x,))
    after = fingerprint(model)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert torch.equal(x, given)
    assert x._version == 0
    assert not any(issubclass(kind, torch._subclasses.FakeTensor) for kind in map(type, vars(busy).values()))
