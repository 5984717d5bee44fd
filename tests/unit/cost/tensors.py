"""Short ways to write tensors and graphs of operators."""

from collections.abc import Mapping, Sequence

from partita.cost.formulas import OpPrice, price_op
from partita.ir.graph import Item, ModelGraph, Op, TensorSpec


def tensor(name, *shape, grad=True, dtype="float32", role="activation", storage="", batch_dim=None) -> TensorSpec:
    return TensorSpec(
        id=name,
        shape=shape,
        dtype=dtype,
        role=role,
        requires_grad=grad,
        storage=storage or name,
        batch_dim=batch_dim,
    )


def weight(name, *shape, grad=True, dtype="float32") -> TensorSpec:
    return tensor(name, *shape, grad=grad, dtype=dtype, role="parameter")


def price(name: str, reads: Sequence[TensorSpec], writes: Sequence[TensorSpec], **literals: object) -> OpPrice:
    return price_op(f"aten.{name}.default", reads, writes, literals=literals)


Call = tuple[str, Sequence[TensorSpec], Sequence[TensorSpec], Mapping[str, object]]


def graph_of(calls: Sequence[Call], *, batch_rows: int | None = None) -> ModelGraph:
    """A graph with one item per call."""
    ops = tuple(_op(number, *call) for number, call in enumerate(calls))
    specs = {spec.id: spec for _, reads, writes, _ in calls for spec in (*reads, *writes)}
    items = tuple(
        Item(
            id=op.id, kind="op", name=op.name, module_path="", ops=(op.id, op.id + 1), reads=op.reads, writes=op.writes
        )
        for op in ops
    )
    return ModelGraph(
        name="Toy", tensors=tuple(specs.values()), ops=ops, items=items, outputs=ops[-1].writes, batch_rows=batch_rows
    )


def _op(number, name, reads, writes, literals) -> Op:
    target = f"aten.{name}.default"
    cost = price_op(target, reads, writes, literals=literals)
    return Op(
        id=number,
        name=f"{name}_{number}",
        target=target,
        kind=cost.kind,
        reads=tuple(spec.id for spec in reads),
        writes=tuple(spec.id for spec in writes),
        flops=cost.flops,
        backward_flops=cost.backward_flops,
        bytes=cost.bytes,
        backward_bytes=cost.backward_bytes,
        saved=cost.saved,
        workspace=cost.workspace,
        random=cost.kind == "random" or bool(literals.get("dropout_p")),
    )
