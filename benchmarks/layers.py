"""Transformer layers as graphs of operators, written by hand: what public tables measured, priced as captures are."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from partita.ir.graph import ModelGraph, TensorSpec
from tests.unit.cost.tensors import Call, graph_of, tensor

ROWS = 4096
"""Tokens of the graphs that are asked about at other numbers of tokens."""


class Layer:
    """Collects operator calls under names of parts, and makes a graph of them."""

    def __init__(self, dtype: str, *, trainable: bool) -> None:
        self.dtype, self.trainable = dtype, trainable
        self.calls: list[Call] = []
        self.names = count()
        self.gathered: list[TensorSpec] = []
        self.parts: dict[str, list[int]] = {}

    def value(self, *shape: int, grad: bool | None = None, dtype: str = ""):
        """Return a new activation; its first dim is the batch."""
        needs = self.trainable if grad is None else grad
        return tensor(f"t{next(self.names)}", *shape, grad=needs, dtype=dtype or self.dtype, batch_dim=0)

    def gather(self, *shape: int):
        """Return a new activation that is whole for a moment only: it is kept in parts and gathered again."""
        self.gathered.append(self.value(*shape))
        return self.gathered[-1]

    def weight(self, *shape: int):
        """Return a new parameter."""
        return tensor(f"w{next(self.names)}", *shape, grad=self.trainable, dtype=self.dtype, role="parameter")

    def add(self, part: str, name: str, reads, *shape: int, **literals: object):
        """Append an operator and return its result."""
        result = self.value(*shape)
        self.parts.setdefault(part, []).append(len(self.calls))
        self.calls.append((name, tuple(reads), (result,), literals))
        return result

    def linear(self, part: str, x, width: int):
        """Append a product with a new weight."""
        return self.add(part, "linear", (x, self.weight(width, x.shape[-1])), *x.shape[:-1], width)

    def graph(self, batch_rows: int | None = None) -> ModelGraph:
        """Return the graph; every operator is an item."""
        return graph_of(self.calls, batch_rows=batch_rows)


def served_layer(*, width: int, hidden: int, heads: int, kv_heads: int, degree: int, gated: bool) -> Layer:
    """Return one layer of a language model as a server runs it, without the attention's core, over ``ROWS`` tokens.

    Args:
        width: Size of the residual stream.
        hidden: Size inside the feed-forward network.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        degree: Tensor degree.
        gated: Whether the network has a gate beside it.
    """
    layer = Layer("float16", trainable=False)
    head = width // heads
    x = layer.value(ROWS, width)
    layer.add("input_layernorm", "rms_norm", (x, layer.weight(width)), ROWS, width)
    queries, keys = heads * head // degree, max(1, kv_heads // degree) * head
    layer.linear("attn_pre_proj", x, queries + 2 * keys)
    rotated = layer.value(ROWS, queries + keys)
    layer.add("attn_rope", "mul", (rotated,), ROWS, queries + keys)
    layer.linear("attn_post_proj", layer.value(ROWS, queries), width)
    layer.add("post_attention_layernorm", "rms_norm", (x, layer.weight(width)), ROWS, width)
    inner = hidden // degree
    layer.linear("mlp_up_proj", x, 2 * inner if gated else inner)
    halves = [layer.value(ROWS, inner) for _ in range(2 if gated else 1)]
    layer.add("mlp_act", "mul", halves, ROWS, inner)
    layer.linear("mlp_down_proj", layer.value(ROWS, inner), width)
    layer.add("add", "add", (x, layer.value(ROWS, width)), ROWS, width)
    return layer


def trained_layer(
    *,
    width: int,
    hidden: int,
    heads: int,
    rows: int,
    length: int,
    degree: int = 1,
    dtype: str = "float16",
    kv_heads: int = 0,
    gated: bool = False,
    flash: bool = False,
    dropout: bool = True,
    sequence_parallel: bool = False,
    norm: str = "layer_norm",
) -> Layer:
    """Return one layer as it is trained, forward and backward; ``attention_core`` is the part that selective
    recomputation runs twice.

    Args:
        width: Size of the residual stream.
        hidden: Size inside the feed-forward network.
        heads: Attention heads.
        rows: Sequences of the microbatch.
        length: Tokens of a sequence.
        degree: Tensor degree.
        dtype: Of everything.
        kv_heads: Heads of keys and values; 0 for as many as ``heads``.
        gated: Whether the feed-forward network has a gate (SiLU), else it has GELU.
        flash: Whether attention is one fused operator.
        dropout: Whether there is dropout after softmax, attention and feed-forward.
        sequence_parallel: Whether what the tensor degree does not cut is cut along the sequence.
        norm: Operator of the norms.
    """
    layer = Layer(dtype, trainable=True)
    outer = length // degree if sequence_parallel else length
    mine, head = heads // degree, width // heads
    theirs = (kv_heads or heads) // degree
    x = layer.value(rows, outer, width)
    normed = layer.add("norms", norm, (x, layer.weight(width)), rows, outer, width)
    whole = layer.gather(rows, length, width) if sequence_parallel else normed
    layer.linear("products", whole, (mine + 2 * theirs) * head)
    query, key, value = (layer.value(rows, mine, length, head) for _ in range(3))
    if flash:
        layer.add("attention_core", "scaled_dot_product_attention", (query, key, value), rows, mine, length, head)
    else:
        across = layer.value(rows, mine, head, length)
        scores = layer.add("attention_core", "matmul", (query, across), rows, mine, length, length)
        weights = layer.add("attention_core", "softmax", (scores,), rows, mine, length, length)
        if dropout:
            weights = layer.add("attention_core", "dropout", (weights,), rows, mine, length, length, p=0.1, train=True)
        layer.add("attention_core", "matmul", (weights, value), rows, mine, length, head)
    layer.linear("products", layer.value(rows, length, mine * head), width)
    attended = layer.value(rows, outer, width)
    if dropout:
        attended = layer.add("elementwise", "dropout", (attended,), rows, outer, width, p=0.1, train=True)
    x = layer.add("elementwise", "add", (x, attended), rows, outer, width)
    normed = layer.add("norms", norm, (x, layer.weight(width)), rows, outer, width)
    whole = layer.gather(rows, length, width) if sequence_parallel else normed
    inner = layer.linear("products", whole, hidden // degree)
    if gated:
        gate = layer.linear("products", whole, hidden // degree)
        active = layer.add("elementwise", "silu", (gate,), rows, length, hidden // degree)
        active = layer.add("elementwise", "mul", (inner, active), rows, length, hidden // degree)
    else:
        active = layer.add("elementwise", "gelu", (inner,), rows, length, hidden // degree)
    layer.linear("products", active, width)
    added = layer.value(rows, outer, width)
    if dropout:
        added = layer.add("elementwise", "dropout", (added,), rows, outer, width, p=0.1, train=True)
    layer.add("elementwise", "add", (x, added), rows, outer, width)
    return layer
