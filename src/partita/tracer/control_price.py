"""What a control-flow operator costs: the operators of its bodies, as often as they run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from partita.cost.formulas import OpPrice, price_op
from partita.ir.graph import TensorSpec
from partita.tracer.control import ATTENTION, REPEATED, trips
from partita.tracer.nodes import arguments_of, bodies, packet

Sizer = Callable[[Any], int]
"""Evaluates a symbolic size at the example's shapes."""


def price_control(
    node: fx.Node, reads: Sequence[TensorSpec], writes: Sequence[TensorSpec], size: Sizer, unknown: set[str]
) -> OpPrice:
    """Price a control-flow operator at the example's shapes.

    A loop along a dim costs its body times the dim's length, a branch the more expensive side, and a loop whose end
    only the values decide one step. Only ``scan`` keeps what its body needs for the backward; the others keep their
    operands and compute the body again.

    Args:
        node: The operator.
        reads: Its tensor operands.
        writes: Its results.
        size: Evaluates sizes.
        unknown: Targets without a formula; those inside are added.

    Returns:
        The price; its kind is ``opaque``.
    """
    if packet(node.target) in ATTENTION:
        return price_op("aten.scaled_dot_product_attention.default", reads[:3], writes[:1], literals={})
    grad = any(tensor.requires_grad for tensor in writes)
    prices = [_price_body(graph, size, grad, unknown) for graph in bodies(node)]
    dearest = max(prices, key=lambda price: (price.flops, price.bytes))
    body = dearest if packet(node.target) == "cond" else _sum(prices)
    times, repeats = trips(node, size), packet(node.target) in REPEATED
    return OpPrice(
        kind="opaque",
        flops=body.flops * times,
        backward_flops=(body.backward_flops + (0 if repeats else body.flops * grad)) * times,
        bytes=body.bytes * times,
        backward_bytes=(body.backward_bytes + (0 if repeats else body.bytes * grad)) * times,
        saved=tuple(tensor.id for tensor in reads) if grad else (),
        workspace=body.workspace * times if repeats and grad else 0,
    )


def _sum(prices: Sequence[OpPrice]) -> OpPrice:
    return OpPrice(
        kind="opaque",
        flops=sum(p.flops for p in prices),
        backward_flops=sum(p.backward_flops for p in prices),
        bytes=sum(p.bytes for p in prices),
        backward_bytes=sum(p.backward_bytes for p in prices),
        workspace=sum(p.workspace for p in prices),
    )


def _price_body(graph: fx.GraphModule, size: Sizer, grad: bool, unknown: set[str]) -> OpPrice:  # noqa: FBT001
    """Return the price of one run of a body; its workspace is what the backward needs of it besides its arguments."""
    owners: dict[int, str] = {}
    specs: dict[str, TensorSpec] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            specs[node.name] = _spec(node.name, value, size, owners, grad)
    prices: list[OpPrice] = []
    saved: set[str] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        reads = [specs[n.name] for n in node.all_input_nodes if n.name in specs]
        parts = [node] if node.name in specs else [u for u in node.users if u.name in specs]
        writes = [specs[part.name] for part in parts]
        if not writes:
            continue
        if bodies(node):
            price = price_control(node, reads, writes, size, unknown)
        else:
            literals = {k: v for k, v in arguments_of(node).items() if not isinstance(v, fx.Node)}
            price = price_op(str(node.target), reads, writes, literals=literals)
        if price.kind == "unknown":
            unknown.add(str(node.target))
        prices.append(price)
        saved.update(price.saved)
    made = {specs[n.name].storage for n in graph.graph.nodes if n.op != "placeholder" and n.name in specs}
    kept = {specs[name].storage: specs[name].bytes for name in saved if specs[name].storage in made}
    total = _sum(prices)
    return OpPrice(
        kind="opaque",
        flops=total.flops,
        backward_flops=total.backward_flops,
        bytes=total.bytes,
        backward_bytes=total.backward_bytes,
        workspace=total.workspace + sum(kept.values()),
    )


def _spec(
    name: str,
    value: torch.Tensor,
    size: Sizer,
    owners: dict[int, str],
    grad: bool,  # noqa: FBT001
) -> TensorSpec:
    return TensorSpec(
        id=name,
        shape=tuple(size(s) for s in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        role="activation",
        requires_grad=grad and (value.dtype.is_floating_point or value.dtype.is_complex),
        storage=owners.setdefault(value.untyped_storage()._cdata, name),
    )
