"""Folding: which calls stay calls of the user's modules, and what keeps one from it."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita.errors import CaptureError
from partita.tracer.opaque import observe
from partita.tracer.recorder import refs
from partita.tracer.signature import signature_of
from partita.tracer.traced import Tracer
from partita.tracer.verify import check_equal, shadow
from tests.unit.tracer.traces import WIDTH, Model, names, rows, trace


def verified(model, *args, **kwargs):
    """Trace a call and hold it against the model."""
    traced = trace(model, *args, **kwargs)
    signature, tensors = signature_of(args, kwargs)
    check_equal(model, traced.program, signature, tensors)
    return traced


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def layers(count=3):
    return nn.ModuleList(Layer() for _ in range(count))


def one_by_one(self, x):
    for layer in self.layers:
        x = layer(x)
    return x


def test_layers_are_whole_and_nothing_stands_between():
    traced = verified(Model(one_by_one, layers=layers()), rows())
    assert names(traced) == ["layers.0#0", "layers.1#0", "layers.2#0"]
    assert names(traced, "op") == []
    assert traced.folded.opened == {}


def test_a_module_outside_of_lists_is_whole():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.b(self.a(x))

    traced = verified(Model(lambda self, x: self.tower(self.linear(x)), tower=Tower()), rows())
    assert names(traced) == ["linear#0", "tower#0"]


def test_a_module_called_twice_is_two_calls_of_one_module():
    traced = verified(Model(lambda self, x: self.linear(self.linear(x))), rows())
    assert names(traced) == ["linear#0", "linear#1"]
    assert [step.path for step in traced.program.steps] == ["linear", "linear"]
    assert all("p:linear.weight" in step.reads for step in traced.program.steps)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias=None, *, scale, mask=None, times=1):
        x = self.linear(x) * scale * times
        x = x if bias is None else x + bias
        return x if mask is None else x * mask


def test_keywords_none_and_numbers_reach_the_module_as_they_were():
    model = Model(lambda self, x: self.inner(x, None, scale=x.mean(), times=x.shape[0], mask=None), inner=Scaled())
    traced = verified(model, rows())
    (step,) = (step for step in traced.program.steps if step.kind == "call")
    assert step.args[1] is None
    assert list(step.kwargs) == ["scale", "times", "mask"]
    assert step.kwargs["mask"] is None
    assert str(step.kwargs["times"]).startswith("Size(")


@dataclass
class Pair:
    first: object
    second: object


class Splitting(nn.Module):
    def forward(self, x):
        return Pair(x.sin(), {"cos": x.cos(), "none": None})


def test_structured_results_of_modules_are_named_part_by_part():
    model = Model(lambda self, x: self.inner(self.linear(x)).second["cos"] + 1, inner=Splitting())
    traced = verified(model, rows())
    assert "inner#0" in names(traced)


def test_identities_do_not_merge_their_result_with_their_argument():
    def multiply(self, x):
        x = self.linear(x)
        return self.drop(x) * x

    model = Model(multiply, drop=nn.Identity())
    traced = verified(model, rows())
    drop = next(step for step in traced.program.steps if step.name == "drop#0")
    product = traced.program.steps[-1]
    (dropped,), (linear,) = drop.writes, drop.reads
    assert set(product.reads) == {dropped, linear}


class Stashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        inner = self.linear(x)
        self.stash = inner.sigmoid()
        return inner.tanh()


def test_a_side_channel_opens_the_call_and_says_why():
    model = Model(lambda self, x: self.inner(x) * self.inner.stash, inner=Stashing())
    traced = verified(model, rows())
    assert "sigmoid inside is read outside by mul" in traced.folded.opened["inner"]
    assert names(traced) == ["inner.linear#0"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_autograd_functions_keep_their_own_backward():
    traced = verified(Model(lambda self, x: Doubled.apply(self.linear(x))), rows())
    assert [name.rpartition(".")[2] for name in names(traced)] == ["linear#0", "Doubled#0"]


class Step(torch.autograd.Function):
    """A step forward, whose operators have no gradient of their own."""

    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_what_an_autograd_function_returns_has_a_gradient_whatever_its_forward_does():
    traced = verified(Model(lambda self, x: Step.apply(self.linear(x)) + 1.0), rows())
    step = next(s for s in traced.program.steps if s.name.endswith("Step#0"))
    assert set(step.writes) <= traced.program.differentiable
    no_gradient = trace(Model(lambda self, x: (self.linear(x) > 0).to(x.dtype)), rows())
    assert not set(no_gradient.program.steps[-1].writes) & no_gradient.program.differentiable


def test_backward_hooks_keep_a_module_whole():
    model = Model(one_by_one, layers=layers())
    model.layers[2].register_full_backward_hook(lambda module, grad_in, grad_out: tuple(2 * g for g in grad_in))
    traced = verified(model, rows())
    assert names(traced)[:3] == ["layers.0#0", "layers.1#0", "layers.2#0"]


def test_a_closed_module_with_a_side_channel_is_refused():
    model = Model(lambda self, x: self.inner(x) * self.inner.stash, inner=Stashing())
    model.inner.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    with pytest.raises(CaptureError, match=r"'inner' must run as one piece \(it has backward hooks\)"):
        trace(model, rows())


def test_checkpoints_are_exact():
    model = Model(lambda self, x: checkpoint(self.linear, x, use_reentrant=False) + x)
    verified(model, rows().requires_grad_())


def test_regions_without_gradients_and_with_autocast_are_kept():
    def regions(self, x):
        with torch.no_grad():
            scale = self.linear(x).abs().amax()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.other(x)
        return y.float() / scale

    traced = verified(Model(regions, other=nn.Linear(WIDTH, WIDTH)), rows())
    steps = {step.name: step for step in traced.program.steps}
    assert not steps["linear#0"].grad_enabled
    assert steps["other#0"].grad_enabled
    assert steps["other#0"].autocast == (("cpu", True, torch.bfloat16),)


def test_a_training_flag_of_glue_is_that_of_the_trace_and_random():
    model = Model(lambda self, x: torch.dropout(self.linear(x), 0.5, self.training))
    (dropout,) = (step for step in trace(model, rows()).program.steps if step.kind == "op")
    assert dropout.random
    model.eval()
    assert not any(step.random for step in trace(model, rows()).program.steps)


def test_cheap_values_of_inputs_are_recomputed_where_they_are_needed():
    def masked(self, x):
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
        return (self.linear(x).T @ mask.to(x.dtype)).T

    replicable = {step.name: step.replicable for step in verified(Model(masked), rows()).program.steps}
    assert replicable["tril"]
    assert replicable["ones"]
    assert not replicable["matmul"]
    assert not replicable["linear#0"]


def test_unused_operators_are_dropped_and_unused_calls_stay():
    def wasteful(self, x):
        x.exp()
        self.other(x)
        return self.linear(x)

    assert names(verified(Model(wasteful, other=nn.Linear(WIDTH, WIDTH)), rows())) == ["other#0", "linear#0"]


def test_tied_parameters_are_one_value_with_all_their_names():
    model = Model(lambda self, x: self.linear(x) + self.other(x), other=nn.Linear(WIDTH, WIDTH))
    model.other.weight = model.linear.weight
    program = verified(model, rows()).program
    assert program.tensors["p:linear.weight"] == ("linear.weight", "other.weight")
    assert "p:other.weight" not in program.tensors


def test_sizes_that_the_data_decide_make_the_program_dynamic():
    chosen = verified(Model(lambda self, x: self.linear(x[x[:, 0] > 0])), rows())
    assert chosen.program.dynamic
    assert not verified(Model(lambda self, x: self.linear(x)), rows()).program.dynamic


class Folds(nn.Module):
    """A layer that uses the number of its rows, which the data decide, over and over."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        count = x.shape[0]
        return self.linear(x.reshape(count, 2, -1).flip(1).reshape(count, -1)) + torch.ones(count, 1)


def picked(self, x):
    x = x[x[:, 0] > 0]
    for layer in self.layers:
        x = layer(x)
    return x.new_full((x.shape[0] * 2,), 0.5).sum() + x.sum() / max(1, x.shape[0])


def test_numbers_that_the_data_decide_are_computed_where_they_are_read():
    traced = verified(Model(picked, layers=nn.ModuleList(Folds() for _ in range(3))), rows())
    assert names(traced) == ["layers.0#0", "layers.1#0", "layers.2#0"]
    assert any(name.startswith("sym_size") for name in names(traced, "op"))


class Clamped(nn.Module):
    """A layer that bounds its own weight through ``.data`` before it uses it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return self.linear(x)


def test_a_layer_that_changes_its_weights_behind_the_trace_runs_as_it_is():
    torch.manual_seed(0)
    model = Model(one_by_one, layers=nn.ModuleList(Clamped() for _ in range(2)))
    signature, tensors = signature_of((rows(),), {})
    traced = Tracer(model, "cpu").trace(signature, tensors, live=model)
    assert names(traced) == ["layers.0#0", "layers.1#0"]
    check_equal(model, traced.program, signature, tensors)


class Doubtful(nn.Module):
    """An embedding that the trace cannot enter and whose argument has no gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, ids):
        return ids.cumsum(0), self.table(ids) * (1.0 if ids.sum() > 0 else 0.5)


def test_what_an_untraced_module_computes_from_its_weights_has_a_gradient():
    torch.manual_seed(0)
    model = Model(lambda self, ids: self.linear(self.embedding(ids)[1]), embedding=Doubtful())
    signature, tensors = signature_of((torch.arange(6),), {})
    tracer = Tracer(model, "cpu")
    tracer.opaque[Doubtful] = "it branches on values"
    tracer.observations = observe(shadow(model), signature, tensors)
    program = tracer.trace(signature, tensors, live=model).program
    ids, rows_of = refs(program.steps[0].result)
    assert rows_of in program.differentiable
    assert ids not in program.differentiable
    check_equal(model, program, signature, tensors)


class Board(UserDict):
    """An object through which layers pass each other values."""


class Posting(nn.Module):
    """A layer that the trace cannot enter; it leaves a value for the next one on a board."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, board):
        y = self.linear(x) + board.get("last", 0.0)
        board["last"] = y if y.sum() > 0 else -y
        return y


class Posters(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Posting() for _ in range(3))

    def forward(self, x):
        board = Board()
        for layer in self.layers:
            x = layer(x, board)
        return x


def test_untraced_layers_that_share_an_object_stay_together():
    torch.manual_seed(0)
    model = Model(lambda self, x: self.linear(self.tower(self.linear(x))), tower=Posters())
    signature, tensors = signature_of((rows(),), {})
    traced = Tracer(model, "cpu").trace(signature, tensors, live=model)
    assert names(traced) == ["linear#0", "tower#0", "linear#1"]
    check_equal(model, traced.program, signature, tensors)


def test_a_branch_on_values_in_the_root_is_refused_with_its_line():
    model = Model(lambda self, x: x if self.linear(x).sum() > 0 else -x)
    with pytest.raises(CaptureError, match=r"test_fold.py:\d+"):
        trace(model, rows())
