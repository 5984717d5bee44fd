"""Our formulas against `torch.utils.flop_counter`: forward and backward of real runs, over small random shapes.

Where torch's counter leaves the count of the mathematics, the difference is stated in the test:

* it counts the weight gradient of a grouped convolution as if every pair of channels met (`groups` times too much);
* it knows attention by the kernels of CUDA only, so the formulas are compared through torch's own shape functions, and
  a real run on a CPU is compared through the math path, which is made of products.
"""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tests.unit.cost.exported import export_graph
from tests.unit.cost.tensors import price, tensor

sizes = st.integers(2, 5)
few = settings(max_examples=25, deadline=None)


def counted(function, values):
    """Return what torch counts forward and backward, and the shape of the result."""
    with FlopCounterMode(display=False) as forward:
        result = function(*values)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops(), tuple(result.shape)


def priced(name, values, shape, **literals):
    """Return what our formula counts forward and backward."""
    reads = [tensor(f"x{i}", *value.shape, grad=value.requires_grad) for i, value in enumerate(values)]
    cost = price(name, reads, (tensor("y", *shape),), **literals)
    return cost.flops, cost.backward_flops


def randoms(data, shapes):
    """Return tensors of which any, but not none, need gradients."""
    needs = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)).filter(any))
    return [torch.randn(shape, requires_grad=need) for shape, need in zip(shapes, needs, strict=True)]


def product_shapes(b, m, k, n):
    return {
        "mm": (torch.mm, ((m, k), (k, n))),
        "bmm": (torch.bmm, ((b, m, k), (b, k, n))),
        "addmm": (torch.addmm, ((n,), (m, k), (k, n))),
        "baddbmm": (torch.baddbmm, ((b, m, n), (b, m, k), (b, k, n))),
        "linear": (functional.linear, ((b, m, k), (n, k), (n,))),
        "matmul": (torch.matmul, ((b, m, k), (b, k, n))),
        "matmul folded": (torch.matmul, ((b, m, k), (k, n))),
        "matmul batched twice": (torch.matmul, ((b, 3, m, k), (b, 3, k, n))),
        "tensordot": (lambda x, y: torch.tensordot(x, y, 1), ((b, m, k), (k, n))),
    }


@pytest.mark.parametrize("case", product_shapes(1, 1, 1, 1))
@few
@given(data=st.data(), b=sizes, m=sizes, k=sizes, n=sizes)
def test_products(case, data, b, m, k, n):
    function, shapes = product_shapes(b, m, k, n)[case]
    values = randoms(data, shapes)
    forward, backward, shape = counted(function, values)
    assert priced(case.split()[0], values, shape) == (forward, backward)


EQUATIONS = ["bij,bjk->bik", "bij,bkj->bik", "bthd,bshd->bhts", "bhts,bshd->bthd", "ij,jk", "i,j->ij", "bsd,de->bse"]


@pytest.mark.parametrize("equation", [*EQUATIONS, "bsd,bte->bsd", "becd,edf->becf"])
@few
@given(data=st.data(), sizes=st.lists(sizes, min_size=8, max_size=8))
def test_einsum(equation, data, sizes):
    left, _, _ = equation.partition("->")
    size = dict(zip(sorted(set(left) - {","}), sizes, strict=False))
    values = randoms(data, [tuple(size[label] for label in term) for term in left.split(",")])
    forward, backward, shape = counted(lambda *operands: torch.einsum(equation, *operands), values)
    ours = priced("einsum", values, shape, equation=equation)
    if forward:
        assert ours == (forward, backward)
    else:  # no label is summed over a pair: torch multiplies, which it does not count
        assert ours[0] == prod(shape)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@few
@given(data=st.data(), batch=st.integers(1, 3), groups=st.integers(1, 3), ins=st.integers(1, 3), outs=st.integers(1, 3))
def test_convolutions(dims, transposed, data, batch, groups, ins, outs):
    kernel = tuple(data.draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims)))
    extent = tuple(data.draw(st.lists(st.integers(3, 5), min_size=dims, max_size=dims)))
    stride, padding = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    weight = (groups * ins, outs, *kernel) if transposed else (groups * outs, ins, *kernel)
    values = randoms(data, [(batch, groups * ins, *extent), weight])
    function = getattr(functional, name)
    more = {"stride": stride, "padding": padding if not transposed or min(kernel) > 1 else 0, "groups": groups}
    forward, backward, shape = counted(lambda x, w: function(x, w, **more), values)
    torchs_surplus = (groups - 1) * forward if values[1].requires_grad else 0
    ours = priced(name, values, shape, groups=groups)
    assert ours[0] == forward
    assert ours[1] + torchs_surplus == backward


heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)])


@few
@given(batch=sizes, heads=heads, queries=sizes, keys=sizes, width=sizes, values=sizes, causal=st.booleans())
def test_attention_counts_as_torchs_kernels_of_cuda_do(batch, heads, queries, keys, width, values, causal):
    """Causal attention is not halved, by neither; the backward computes the scores again."""
    shapes = (
        (batch, heads[0], queries, width),
        (batch, heads[1], keys, width),
        (batch, heads[1], keys, values),
    )
    result = (batch, heads[0], queries, values)
    reads = [tensor(name, *shape) for name, shape in zip("qkv", shapes, strict=True)]
    more = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    cost = price("scaled_dot_product_attention", reads, (tensor("o", *result),), **more)
    assert cost.flops == sdpa_flop_count(*shapes)
    assert cost.backward_flops == sdpa_backward_flop_count(result, *shapes)


@few
@given(batch=sizes, heads=heads, queries=sizes, width=sizes, causal=st.booleans())
def test_attention_of_a_real_run_is_two_products_forward_and_four_backward(batch, heads, queries, width, causal):
    """The math path keeps its scores: its backward is twice the forward, ours for a fused kernel half as much more."""
    shapes = [(batch, count, queries, width) for count in (heads[0], heads[1], heads[1])]
    values = [torch.randn(shape, requires_grad=True) for shape in shapes]
    gqa = heads[0] != heads[1]

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    forward, backward, shape = counted(attend, values)
    ours, ours_backward = priced("scaled_dot_product_attention", values, shape, is_causal=causal, enable_gqa=gqa)
    assert (ours, ours_backward) == (forward, backward + forward // 2)


class Decoder(nn.Module):
    """A GPT with untied head: width D, L layers, T positions, vocabulary V."""

    def __init__(self, width=256, layers=3, vocabulary=96, positions=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for norm, qkv, out, up, down in zip(self.norms, self.qkv, self.out, self.up, self.down, strict=True):
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).flatten(2))
            x = x + down(functional.gelu(up(norm(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def test_a_decoder_costs_six_flops_per_parameter_and_token():
    """The identity, exactly, for N the entries of all matrices but the embeddings, and per token:

    matmul FLOPs = 6 N (2 N forward, 4 N backward), and attention = (4 + 10) x L x T x D, of which a kernel's second
    computation of the scores is 2: the text book's 12 x L x T x D is what is left.

    With norms and biases in N too, which make no products, 6 N + 12 L T D per token holds within 0.5 %; embeddings are
    left out of N (they are looked up), the head is not.
    """
    model, ids = Decoder(), torch.zeros(2, 32, dtype=torch.long)
    graph = export_graph(model, (ids,))
    flops = {kind: sum(op.flops + op.backward_flops for op in graph.ops if op.kind == kind) for kind in GEMMS}
    tokens, layers, positions, width = ids.numel(), 3, ids.shape[1], 256
    embedded = {id(model.tokens.weight), id(model.places.weight)}
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embedded)
    everything = sum(p.numel() for p in model.parameters() if id(p) not in embedded)
    scores = layers * positions * width
    assert flops["matmul"] == 6 * matrices * tokens
    assert flops["attention"] == (12 + 2) * scores * tokens
    text_book = (6 * everything + 12 * scores) * tokens
    assert flops["matmul"] + flops["attention"] - 2 * scores * tokens == pytest.approx(text_book, rel=0.005)


GEMMS = ("matmul", "attention")
