"""A capture with something of its example burnt in is found by one of the trials, which names it."""

import pytest
import sympy
import torch
from torch import nn

from partita.errors import CaptureError
from partita.tracer.capture import capture_model
from partita.tracer.recorder import Ref
from partita.tracer.rows import Join
from partita.tracer.signature import signature_of
from partita.tracer.sizes import Size, SizeRules
from partita.tracer.tree import map_leaves
from partita.tracer.trials import other_calls, try_call, try_once
from partita.tracer.verify import rows_apart, shadow
from tests.unit.tracer.traces import WIDTH, Model, rows, trace


def mean_of_rows(self, x):
    return self.linear(x).sum(0) / x.shape[0]


def shifted(self, x):
    return self.linear(x) + x.mean()


def running(self, x):
    self.total = self.total + x.detach().sum(0)
    return self.linear(x) * self.total


def dropping(self, x):
    return torch.dropout(self.linear(x), 0.5, self.training)


def through_a_view(self, x):
    y = self.linear(x)
    y[0].add_(1.0)
    return y * 2


def plain(self, x):
    return self.linear(x)


def along_the_row(self, x):
    return torch.cumsum(x, 1)


def make(function):
    torch.manual_seed(1)
    model = Model(function)
    model.register_buffer("total", torch.zeros(WIDTH))
    return model


def case(function, x=None):
    """Return a model, its capture and its tensors."""
    model = make(function)
    x = rows() if x is None else x
    traced = trace(model, x)
    return model, traced, (x,)


def rewrite(program, change):
    for step in program.steps:
        step.args = map_leaves(lambda _path, leaf: change(leaf), step.args)


def burn_in_the_size(model, traced, tensors):
    rewrite(traced.program, lambda leaf: 6 if isinstance(leaf, Size) else leaf)


def burn_in_the_input(model, traced, tensors):
    mean = next(step for step in traced.program.steps if "mean" in step.name)
    traced.program.constants = {**traced.program.constants, "burnt": tensors[0].clone()}
    mean.args = map_leaves(lambda _path, leaf: Ref("burnt") if isinstance(leaf, Ref) else leaf, mean.args)


def burn_in_the_state(model, traced, tensors):
    name = next(value for value, names in traced.program.tensors.items() if "total" in names)
    traced.program.constants = {**traced.program.constants, "burnt": model.total.clone()}
    rewrite(traced.program, lambda leaf: Ref("burnt") if isinstance(leaf, Ref) and leaf.name == name else leaf)


def lose_the_alias(model, traced, tensors):
    step = next(step for step in traced.program.steps if step.moved)
    step.target = torch.ops.aten.add.Tensor


def lose_the_hook(model, traced, tensors):
    def without_hooks(x):
        return nn.functional.linear(x, model.linear.weight, model.linear.bias)

    next(step for step in traced.program.steps if step.kind == "call").target = without_hooks


WRONG = [
    (mean_of_rows, burn_in_the_size, r"the result .* is off by .*\(in another size"),
    (shifted, burn_in_the_input, r"the result .* is off by .*\(in another size"),
    (running, burn_in_the_state, r"the result .* is off by .*\(in a second call\)"),
    (through_a_view, lose_the_alias, "the result .* is off by"),
    (plain, lose_the_hook, "the result .* is off by"),
]


@pytest.mark.parametrize(("function", "spoil", "complaint"), WRONG, ids=[spoil.__name__ for _, spoil, _ in WRONG])
def test_what_is_burnt_in_is_found(function, spoil, complaint):
    model, traced, tensors = case(function)
    if spoil is lose_the_hook:
        model.linear.register_forward_hook(lambda module, args, output: output * 1.5)
        traced = trace(model, *tensors)
    assert all(not comparison.problem for comparison in try_call(model, traced, tensors, "always"))
    spoil(model, traced, tensors)
    with pytest.raises(CaptureError, match=complaint):
        try_call(model, traced, tensors, "always")


def test_values_are_tried_where_every_size_is_fixed():
    model, traced, tensors = case(shifted)
    traced.program.sizes = type(traced.program.sizes)(axes=((6, 4),), conditions=(), lower={}, upper={})
    (others,) = other_calls(traced.program.sizes, tensors)
    assert others[0].shape == tensors[0].shape
    burn_in_the_input(model, traced, tensors)
    with pytest.raises(CaptureError, match="in other values"):
        try_call(model, traced, tensors, "always")


def test_a_training_flag_that_is_burnt_in_is_found_in_evaluation():
    model, _, tensors = case(dropping)
    evaluated = shadow(model).eval()
    with torch.no_grad():
        traced = trace(evaluated, *tensors)
        assert try_once(evaluated, traced, tensors, "eval()").compared == ("results", "buffers")
        step = next(step for step in traced.program.steps if "dropout" in step.name)
        step.args = (*step.args[:2], True)
        with pytest.raises(CaptureError, match=r"the result .* is off by .* \(in eval\(\)\)"):
            try_once(evaluated, traced, tensors, "eval()")


def test_a_wrong_batch_axis_is_found():
    model, traced, tensors = case(along_the_row)
    (name,) = [step.writes[0] for step in traced.program.steps]
    assert rows_apart(model, traced.program, tensors, (0,), {name: Join("rows", dim=0)}) == ""
    assert "differs from its parts" in rows_apart(model, traced.program, tensors, (1,), {name: Join("rows", dim=1)})


def test_the_gradient_of_an_input_is_compared():
    model, traced, tensors = case(plain, rows().requires_grad_())
    (step,) = traced.program.steps
    step.target = lambda x: nn.functional.linear(x.detach(), model.linear.weight, model.linear.bias)
    with pytest.raises(CaptureError, match="gradient of"):
        try_once(model, traced, tensors, "the example")


def test_a_model_that_refuses_other_sizes_is_not_to_blame():
    def six_rows(self, x):
        return self.linear(x) + self.six

    model = make(six_rows)
    model.register_buffer("six", torch.zeros(6, WIDTH))
    tensors = (rows(),)
    found = try_call(model, trace(model, *tensors), tensors, "always")
    assert [comparison.call for comparison in found] == ["the example", "a second call", "other values"]


def test_evaluation_and_further_examples_are_captured_ahead():
    def flagged(self, x, *, twice=False):
        return torch.dropout(self.linear(x), 0.5, self.training) * (2 if twice else 1)

    captured = capture_model(Model(flagged), [{"x": rows()}, {"x": rows(4)}, {"x": rows(), "twice": True}])
    calls = [comparison.call for comparison in captured.graph.report.comparisons]
    assert calls[:4] == ["the example", "a second call", "another size", "example 2"]
    assert calls[-1] == "eval()"
    assert all(not comparison.problem for comparison in captured.graph.report.comparisons)
    keys = [ahead.traced.signature.key for ahead in captured.ahead]
    assert keys == [signature_of((), {"x": rows(), "twice": True})[0].key, captured.traced.signature.key]
    assert all(ahead.tried and ahead.rows is not None for ahead in captured.ahead)
    assert "example 3 is a capture of its own: it is called in another way" in captured.graph.report.remarks


def test_a_second_example_of_a_fixed_size_is_a_capture_of_its_own():
    def branch(self, x):
        return self.linear(x) if x.shape[0] > 5 else x

    captured = capture_model(Model(branch), [(rows(6),), (rows(3),)])
    (example, _evaluation) = captured.ahead
    assert example.traced.program.sizes.holds(((3, WIDTH),))
    assert not captured.traced.program.sizes.holds(((3, WIDTH),))


def test_nothing_is_tried_on_request():
    captured = capture_model(Model(plain), (rows(),), verify="off")
    assert captured.graph.report.comparisons == ()
    assert not captured.graph.report.verified
    assert captured.ahead == ()


def test_rows_that_do_not_match_are_not_tried():
    free, width = sympy.symbols("s0 s1", integer=True, positive=True)
    axes = ((sympy.Integer(4), width), (free, width))  # the rows of the first input are fixed, those of the second free
    rules = SizeRules(axes=axes, conditions=(), lower={}, upper={})
    tried = [tuple(map(tuple, (a.shape, b.shape))) for a, b in other_calls(rules, (torch.ones(4, 8), torch.ones(4, 8)))]
    assert all(a[0] == b[0] for a, b in tried)
    assert tried
