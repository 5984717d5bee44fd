"""The lifted graph: valid, with sources and ties, and with the flops that the textbook gives."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from partita.ir.verify import check
from partita.tracer.capture import capture_model
from tests.unit.tracer.traces import WIDTH, Model, rows
from tests.zoo import CASES


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows == 8])
def test_every_graph_of_the_zoo_is_valid_and_stable(name):
    case = CASES[name]
    batch = case.example()
    graph = capture_model(case.build(), _example(batch)).graph
    check(graph)
    again = capture_model(case.build(), _example(batch)).graph
    assert again == graph
    assert {name for tensor in graph.parameters for name in tensor.names} == {
        name for name, _ in case.build().named_parameters(remove_duplicate=False)
    }


def _example(batch):
    from partita import Example

    return Example(args=batch.args, kwargs=batch.kwargs)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width, depth, heads):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_flops_of_a_gpt_are_six_per_weight_and_token():
    rows_, length, vocabulary, width, depth = 4, 16, 512, 128, 3
    with torch.device("meta"):
        model = Gpt(vocabulary, width, depth, heads=4)
    graph = capture_model(model, (torch.zeros(rows_, length, dtype=torch.long),)).graph
    check(graph)
    tokens = rows_ * length
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embed.weight")
    attention = depth * 3 * 2 * 2 * rows_ * length * length * width  # scores and values, forward and twice backward
    matmuls = sum(op.flops + op.backward_flops for op in graph.ops if op.kind in {"matmul", "attention"})
    assert matmuls == pytest.approx(6 * matrices * tokens + attention, rel=0.05)
    everything = sum(op.flops + op.backward_flops for op in graph.ops)
    assert everything == pytest.approx(6 * matrices * tokens + attention, rel=0.10)
    assert not graph.unknown_ops


def test_operators_name_their_module_and_line():
    graph = capture_model(Model(lambda self, x: self.linear(x).tanh()), (rows(),)).graph
    linear, tanh = graph.ops
    assert (linear.module_path, tanh.module_path) == ("linear", "")
    assert "test_lift.py:" in tanh.source


def test_tensors_know_their_rows_roles_and_gradients():
    model = Model(lambda self, x, y: self.linear(x) * y.to(x.dtype))
    model.linear.bias.requires_grad_(False)
    graph = capture_model(model, (rows(), torch.arange(WIDTH))).graph
    specs = graph.tensor_map()
    assert graph.batch_rows == 6
    assert (specs["in:args[0]"].role, specs["in:args[0]"].batch_dim) == ("input", 0)
    assert (specs["in:args[1]"].dtype, specs["in:args[1]"].batch_dim) == ("int64", None)
    assert not specs["p:linear.bias"].requires_grad
    assert specs["p:linear.weight"].requires_grad
    (output,) = graph.outputs
    assert (specs[output].shape, specs[output].batch_dim, specs[output].requires_grad) == ((6, WIDTH), 0, True)


def test_views_share_storage_and_a_scalar_loss_is_known():
    graph = capture_model(Model(lambda self, x: self.linear(x).view(-1).mean()), (rows(),)).graph
    specs = graph.tensor_map()
    assert specs["view"].storage == specs["linear"].storage
    assert graph.scalar_loss
    assert not capture_model(Model(lambda self, x: self.linear(x)), (rows(),)).graph.scalar_loss


def test_another_shape_width_or_tie_is_another_fingerprint():
    def fingerprint(width=8, tie=False, count=6):
        model = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, width), nn.Linear(width, width))
        if tie:
            model[2].weight = model[1].weight
        return capture_model(model, (rows(count),)).graph.fingerprint

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(width=6), fingerprint(tie=True), fingerprint(count=4)}) == 4
