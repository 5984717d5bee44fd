"""Calls that were captured ahead are found when they occur, and keep the model whole if they differ from it."""

import pytest
import torch
from torch import nn

import partita
from partita.errors import CaptureError
from partita.runtime.variants import Variants
from partita.tracer import verify
from partita.tracer.capture import capture_model
from partita.tracer.verify import weights_as_they_were
from tests.unit.tracer.traces import WIDTH, Model, rows


def dropping(self, x, *, scale=1.0):
    return torch.dropout(self.linear(x), 0.5, self.training) * scale


@pytest.fixture
def model():
    return Model(dropping)


def build(model, *examples):
    return partita.auto_parallelize(model, list(examples), limits=partita.Limits(num_microbatches=2))


def no_capture(*_):
    raise AssertionError("a call was captured that had been captured ahead")


def test_evaluation_and_examples_need_no_further_capture(model, monkeypatch):
    pm = build(model, (rows(),), partita.Example(args=(rows(),), kwargs={"scale": 2.0}))
    monkeypatch.setattr(Variants, "_capture", no_capture)
    torch.manual_seed(0)
    pm(rows(), scale=2.0)
    pm.eval()
    with torch.no_grad():
        torch.testing.assert_close(pm(rows(4)), model.eval()(rows(4)))
    pm.train()
    pm(rows())


class Rescaling(nn.Module):
    """Halves its weights when it is evaluated, and doubles them when it is trained again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.halved = False

    def forward(self, x):
        if self.halved == self.training:
            with torch.no_grad():
                for layer in self.layers:
                    layer.weight.mul_(2.0 if self.training else 0.5)
            self.halved = not self.training
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_model_that_changes_its_weights_for_evaluation_is_kept_whole_and_unharmed():
    model = Rescaling()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    captured = capture_model(model, (rows(),))
    assert captured.traced.kept_whole
    assert "Rescaling" in captured.traced.refusal
    assert not model.halved
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_weights_that_trials_have_changed_are_put_back(monkeypatch):
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    with weights_as_they_were(layer), torch.no_grad():
        layer.weight.data.mul_(2)
    assert torch.equal(layer.weight, before)
    monkeypatch.setattr(verify, "KEPT_BYTES", 8)
    with pytest.raises(CaptureError, match="changes its own weight 'weight'"), weights_as_they_were(layer):  # noqa: SIM117
        with torch.no_grad():
            layer.weight.mul_(2)
