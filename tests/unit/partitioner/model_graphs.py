"""Made-up captured graphs: a language model with skips, ties, a mask and an unread parameter; chains; branches."""

from dataclasses import dataclass, field
from itertools import pairwise

from partita.ir.graph import Item, ModelGraph, Op, TensorSpec


@dataclass
class Builder:
    """Collects tensors, operators and items; each item is one operator."""

    rows: int | None = 8
    tensors: dict = field(default_factory=dict)
    ops: list = field(default_factory=list)
    items: list = field(default_factory=list)

    def tensor(self, name, shape, role="activation", *, batch=False, grad=True, dtype="float32", storage=""):
        self.tensors[name] = TensorSpec(
            id=name,
            shape=shape,
            dtype=dtype,
            role=role,
            names=(name,) if role in {"parameter", "buffer"} else (),
            batch_dim=0 if batch and self.rows is not None else None,
            requires_grad=grad,
            storage=storage,
        )
        return name

    def parameter(self, name, *shape, grad=True):
        return self.tensor(name, shape, "parameter", grad=grad)

    def item(
        self, name, reads, writes, *, flops=0, kind="call", saved=(), replicable=False, target="aten.linear.default"
    ):
        number = len(self.items)
        op_kind = "matmul" if flops else "pointwise"
        size = sum(self.tensors[name].bytes for name in (*reads, *writes))
        self.ops.append(
            Op(
                id=number,
                name=f"op{number}",
                target=target,
                module_path=name,
                kind=op_kind,
                reads=reads,
                writes=writes,
                flops=flops,
                backward_flops=2 * flops,
                bytes=size,
                backward_bytes=2 * size,
                saved=saved,
            )
        )
        self.items.append(
            Item(
                id=number,
                kind=kind,
                name=f"{name}#0" if kind == "call" else name,
                module_path=name,
                ops=(number, number + 1),
                reads=reads,
                writes=writes,
                replicable=replicable,
            )
        )
        return writes[0]

    def build(self, outputs, *, name="Model", **changes):
        return ModelGraph(
            name=name,
            tensors=tuple(self.tensors.values()),
            ops=tuple(self.ops),
            items=tuple(self.items),
            outputs=outputs,
            batch_rows=self.rows,
            fingerprint=f"{name}-{len(self.ops)}",
            **changes,
        )


def chain_graph(widths, *, rows=8, **changes):
    """A chain of linear layers: layer i maps widths[i] to widths[i + 1]."""
    b = Builder(rows=rows)
    batch = rows or 8
    x = b.tensor("x", (batch, widths[0]), "input", batch=True, grad=False)
    for i, (wide, narrow) in enumerate(pairwise(widths)):
        weight = b.parameter(f"layers.{i}.weight", wide, narrow)
        y = b.tensor(f"h{i}", (batch, narrow), batch=True)
        x = b.item(f"layers.{i}", (x, weight), (y,), flops=2 * batch * wide * narrow, saved=(x, weight))
    return b.build((x,), **changes)


def transformer_graph(*, layers=6, width=64, vocabulary=512, tokens=16, rows=8, tied=True, unread=True, **changes):
    """Embedding, ``layers`` x (attention, add, mlp, add), head with the embedding's weight; a replicable mask."""
    b = Builder(rows=rows)
    ids = b.tensor("ids", (rows, tokens), "input", batch=True, grad=False, dtype="int64")
    mask = b.item(
        "mask",
        (ids,),
        (b.tensor("mask", (rows, tokens, tokens), batch=True, grad=False, dtype="bool"),),
        kind="op",
        replicable=True,
        target="aten.ne.Scalar",
    )
    embedding = b.parameter("embed.weight", vocabulary, width)
    if unread:
        b.parameter("unread.weight", 10, 10)
    shape, work = (rows, tokens, width), 2 * rows * tokens * width
    h = b.item("embed", (ids, embedding), (b.tensor("h", shape, batch=True),), target="aten.embedding.default")
    for i in range(layers):
        for part, reads in (("attention", (mask,)), ("mlp", ())):
            path = f"layers.{i}.{part}"
            weight = b.parameter(f"{path}.weight", 4 * width, width)
            y = b.tensor(f"{path}.y", shape, batch=True)
            y = b.item(path, (h, weight, *reads), (y,), flops=4 * work * width, saved=(h, weight))
            total = b.tensor(f"{path}.sum", shape, batch=True)
            h = b.item(f"layers.{i}", (h, y), (total,), kind="op", target="aten.add.Tensor")
    head = embedding if tied else b.parameter("head.weight", vocabulary, width)
    logits = b.tensor("logits", (rows, tokens, vocabulary), batch=True)
    b.item("head", (h, head), (logits,), flops=work * vocabulary, saved=(h, head))
    return b.build(("logits",), name="LM", **changes)


def branches_graph(length=4, *, rows=8):
    """Two independent branches interleaved in execution order, joined at the end."""
    b = Builder(rows=rows)
    ends = [b.tensor("x", (rows, 32), "input", batch=True, grad=False)] * 2
    for i in range(length):
        for side in (0, 1):
            weight = b.parameter(f"{'ab'[side]}.{i}.weight", 32, 32)
            y = b.tensor(f"{'ab'[side]}{i}", (rows, 32), batch=True)
            ends[side] = b.item(f"{'ab'[side]}.{i}", (ends[side], weight), (y,), flops=2 * rows * 32 * 32)
    out = b.tensor("out", (rows, 32), batch=True)
    b.item("join", tuple(ends), (out,), kind="op", target="aten.add.Tensor")
    return b.build(("out",))
