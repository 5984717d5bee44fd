"""A lean trace records what torch's own records, and leaves torch as it was."""

import contextlib
import dataclasses
import gc

import pytest
import torch
from torch import nn
from torch.fx.experimental.sym_node import SymNode
from torch.fx.proxy import TracerBase

from partita.tracer import record
from partita.tracer.capture import capture_model
from partita.tracer.lean import lean_tracing


def doubled(x):
    return x + x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        rows, columns = x.shape[:2]
        return doubled(self.linear(x)).view(rows * columns, -1).view(rows, columns, -1)[:, : columns // 2 + 1]


def model():
    return nn.Sequential(Layer(), nn.Dropout(0.1), Layer())


def captured(monkeypatch, *, lean):
    if not lean:
        monkeypatch.setattr(record, "lean_tracing", contextlib.nullcontext)
    return capture_model(model(), (torch.randn(4, 6, 8),), verify="off").graph


def test_the_graph_is_the_same_as_without(monkeypatch):
    def without_source(graph):
        return dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, source="") for op in graph.ops))

    lean = captured(monkeypatch, lean=True)
    assert without_source(lean) == without_source(captured(monkeypatch, lean=False))


def test_an_operator_knows_the_users_innermost_line(monkeypatch):
    graph = captured(monkeypatch, lean=True)
    (added, *_) = [op for op in graph.ops if op.target == "aten.add.Tensor"]
    assert added.source == f"{__file__}:{doubled.__code__.co_firstlineno + 1}"


def patched():
    return (TracerBase.create_node, SymNode._mul, torch.fx.config.do_not_emit_stack_traces, gc.isenabled())


def fail_inside():
    with lean_tracing():
        raise KeyError(patched())


def test_torch_is_left_as_it_was():
    before = patched()
    with pytest.raises(KeyError) as inside:
        fail_inside()
    assert all(one != other for one, other in zip(before, inside.value.args[0], strict=True))
    assert patched() == before
