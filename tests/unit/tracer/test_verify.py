"""The gate: a capture that differs from the model in anything is found."""

import pytest
import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.compare import relative_error
from partita.tracer.recorder import Ref, refs
from partita.tracer.rows import Join
from partita.tracer.signature import signature_of
from partita.tracer.tree import map_leaves
from partita.tracer.verify import check_equal, rows_apart
from tests.unit.tracer.traces import WIDTH, Model, rows, trace


def forward(self, x):
    """Glue of every kind: a random operator, a constant, a buffer that is replaced, a reduction."""
    x = torch.dropout(self.linear(x), 0.5, self.training)
    x = x + 0.25 * torch.ones(WIDTH)
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return {"y": x.cumsum(0), "first": x.mean(1), "number": x.shape[0]}


def case():
    torch.manual_seed(3)
    model = Model(forward)
    model.register_buffer("mean", torch.zeros(WIDTH))
    signature, tensors = signature_of((rows(),), {})
    return model, trace(model, rows()).program, signature, tensors


def step(program, part):
    return next(step for step in program.steps if step.kind == "op" and part in step.name)


def test_a_right_capture_passes_exactly():
    model, program, signature, tensors = case()
    assert check_equal(model, program, signature, tensors) == 0.0


def drop_the_training_flag(program):
    dropout = step(program, "dropout")
    dropout.args = (*dropout.args[:2], False)


def change_a_constant(program):
    product = step(program, "mul")
    product.args = (product.args[0], 0.26)


def forget_the_buffer(program):
    program.buffer_writes = {}


def sum_along_another_dim(program):
    step(program, "cumsum").args = (step(program, "cumsum").args[0], 1)


def detach(program):
    x = step(program, "cumsum").args[0]
    step(program, "cumsum").args = (x, 0)
    step(program, "cumsum").grad_enabled = False


def skip_a_step(program):
    dropout = step(program, "dropout")
    dropped = dropout.writes[0]

    def around(_path, leaf):
        return dropout.args[0] if isinstance(leaf, Ref) and leaf.name == dropped else leaf

    program.steps = tuple(s for s in program.steps if s is not dropout)
    for other in program.steps:
        other.args = map_leaves(around, other.args)


def return_another_number(program):
    program.result = program.result | {"number": 7}


def return_another_value(program):
    program.result = program.result | {"first": program.result["y"]}


def return_nothing_for_a_tensor(program):
    program.result = program.result | {"y": None}


def swap_results(program):
    program.result = {"y": program.result["first"], "first": program.result["y"], "number": 6}


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (drop_the_training_flag, "the result y is off"),
        (change_a_constant, "off by"),
        (forget_the_buffer, "the buffer 'mean' is off"),
        (sum_along_another_dim, "the result y is off"),
        (detach, "the gradient of 'linear"),
        (skip_a_step, "the result y is off"),
        (return_another_number, "the result number is 7, should be 6"),
        (return_another_value, "the result first is torch.float32"),
        (return_nothing_for_a_tensor, "the gradient of 'linear"),
        (swap_results, "the result y is torch.float32"),
    ],
)
def test_a_wrong_capture_is_refused(spoil, complaint):
    model, program, signature, tensors = case()
    spoil(program)
    with pytest.raises(CaptureError, match=complaint):
        check_equal(model, program, signature, tensors)


@pytest.mark.parametrize("result", ["without number", "renamed"])
def test_another_structure_of_the_result_is_refused(result):
    model, program, signature, tensors = case()
    right = program.result
    program.result = {
        "without number": {"y": right["y"], "first": right["first"]},
        "renamed": {"x": right["y"], "first": right["first"], "number": right["number"]},
    }[result]
    with pytest.raises(CaptureError):
        check_equal(model, program, signature, tensors)


def test_the_comparison_changes_nothing():
    model, program, signature, tensors = case()
    before, generator = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    check_equal(model, program, signature, tensors)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_relative_errors(a, b, expected):
    assert relative_error(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)


def test_a_nan_or_a_wrong_integer_is_an_error():
    assert not relative_error(torch.tensor([1.0]), torch.tensor([float("nan")])) <= 1e3
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1.0


def test_a_wrong_weight_gradient_of_an_own_backward_is_found():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient

    model = Model(lambda self, x: Odd.apply(self.linear(x)), other=nn.Identity())
    signature, tensors = signature_of((rows(),), {})
    program = trace(model, rows()).program
    check_equal(model, program, signature, tensors)
    program.steps[-1].target = torch.clone
    with pytest.raises(CaptureError, match="the gradient of 'linear"):
        check_equal(model, program, signature, tensors)


def test_a_buffer_that_moves_unseen_by_the_trace_keeps_the_batch_whole():
    model = Model(lambda self, x: self.norm(x), norm=nn.InstanceNorm1d(3, track_running_stats=True))
    example = torch.randn(6, 3, 5)
    program = trace(model, example).program
    joins = {name: Join("rows") for name in refs(program.result)}
    before = model.norm.running_mean.clone()
    assert "norm.running_mean" in rows_apart(model, program, (example,), (0,), joins)
    assert torch.equal(model.norm.running_mean, before)
    assert rows_apart(model.eval(), trace(model, example).program, (example,), (0,), joins) == ""
