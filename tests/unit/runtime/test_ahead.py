"""Calls that were captured ahead are found when they occur, and refused if they differ from the model."""

from dataclasses import replace

import pytest
import torch

import partita
from partita.errors import CaptureError
from partita.runtime.variants import Variants
from partita.tracer.ahead import Forecast
from tests.unit.tracer.traces import Model, rows


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


def test_an_evaluation_that_differs_is_refused_by_name(model, monkeypatch):
    note = Forecast._note

    def differing(self, *args, **options):
        note(self, *args, **options)
        self.found[-1] = replace(self.found[-1], refusal="the result is off by 1.0 relative (in eval())")

    monkeypatch.setattr(Forecast, "_note", differing)
    pm = build(model, (rows(),))
    pm(rows())
    pm.eval()
    with torch.no_grad(), pytest.raises(CaptureError, match="the result is off by"):
        pm(rows())
