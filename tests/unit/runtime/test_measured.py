"""Measuring a plan: the figures add up, nothing is changed, and the plan is held against another one."""

import pytest
import torch
from torch import nn

import partita
from partita.runtime.measured import Alternative, StepReport, Times, cuts_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.layers(x)).square().mean()


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    """Without a batch norm, so that the batch can be cut."""

    def __init__(self):
        super().__init__()
        self.layers = Net().layers

    def forward(self, x):
        return self.layers(x).square().mean()


def parallel(make=Plain, **options):
    torch.manual_seed(0)
    limits = partita.Limits(num_microbatches=options.pop("microbatches", 2))
    return partita.auto_parallelize(make(), (X,), cluster="1xcpu", limits=limits, verify="off", **options)


def test_nothing_is_changed():
    module = parallel(Net, microbatches=1)
    module(X).backward()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    state = torch.random.get_rng_state()
    module.measure(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(torch.equal(gradients[name], parameter.grad) for name, parameter in module.named_parameters())


def test_the_terms_add_up_and_another_plan_is_tried():
    report = parallel().measure(2)
    assert isinstance(report, StepReport)
    (stage,) = report.stages
    assert stage.measured.compute > 0
    assert stage.measured.total == pytest.approx(report.measured_s)
    assert stage.predicted.total == pytest.approx(report.predicted_s)
    assert set(report.residuals) == {"compute", "reduction", "waiting", "rest"}
    assert isinstance(report.alternative, Alternative)
    assert report.alternative.other_s <= report.alternative.current_s * (1 + 1e-6)
    assert "stage 0: compute predicted" in str(report)


def test_the_costs_of_the_second_planning_are_the_measured_ones():
    module = parallel()
    report = module.measure(1)
    ratio = report.stages[0].measured.compute / report.stages[0].predicted.compute
    other = report.alternative.plan
    now = sum(stage.time_s for stage in module.plan.stages)
    if cuts_of(other) == cuts_of(module.plan):
        assert sum(stage.time_s for stage in other.stages) == pytest.approx(ratio * now, rel=1e-6)


def test_a_loss_function_and_plain_results_can_be_measured():
    module = parallel(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), loss_fn=nn.functional.mse_loss)
    assert module.measure(1, args=(X,), target=torch.zeros(8, 2)).measured_s > 0
    assert module.measure(1).measured_s > 0


def test_without_a_batch_it_is_refused():
    module = parallel()
    module.remember(None, None)
    with pytest.raises(partita.ExecutionError, match="no batch"):
        module.measure(1)
    assert module.measure(1, args=(X,)).alternative is None


def test_times_have_a_total():
    assert Times(compute=1.0, reduction=2.0, waiting=3.0, rest=4.0).total == 10.0


def test_a_loss_that_is_kept_holds_no_gradients():
    module = parallel()
    loss = module(X)
    loss.backward()
    assert loss.grad_fn.gradients is None
    with pytest.raises(RuntimeError, match="has run already"):
        loss.backward()


def test_a_loss_can_go_backward_twice_when_its_graph_is_retained():
    module = parallel()
    loss = module(X)
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * once[name]) for name, parameter in module.named_parameters())
