"""Turn a torch.export graph into a ModelGraph with prices, one item per operator: a small stand-in for the tracer."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from partita.cost.formulas import price_op
from partita.ir.graph import Item, ModelGraph, Op, TensorSpec


def export_graph(model: nn.Module, args: tuple[torch.Tensor, ...], *, batch_rows: int | None = None) -> ModelGraph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, args, strict=False)
    signature = program.graph_signature
    trainable = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    roles = {
        **dict.fromkeys(signature.inputs_to_parameters, "parameter"),
        **dict.fromkeys(signature.inputs_to_buffers, "buffer"),
        **dict.fromkeys(signature.user_inputs, "input"),
    }
    specs: dict[str, TensorSpec] = {}
    owners: dict[int, str] = {}

    def add(name, value, role, requires_grad):
        key = value.untyped_storage()._cdata
        rows = batch_rows is not None and role in {"input", "activation"} and value.dim() > 0
        dims = [dim for dim, size in enumerate(value.shape) if rows and size and size % batch_rows == 0]
        specs[name] = TensorSpec(
            id=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            role=role,
            requires_grad=requires_grad,
            storage=owners.setdefault(key, name),
            batch_dim=dims[0] if dims else None,
        )

    ops: list[Op] = []
    parts: dict[str, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            role = roles.get(node.name, "constant")
            parameter = signature.inputs_to_parameters.get(node.name)
            add(node.name, value, role, role == "parameter" and parameter in trainable)
        elif node.op == "call_function":
            if "getitem" in str(node.target):
                source, index = node.args
                specs[node.name] = specs[parts[source.name][index]]
                continue
            reads = [specs[name] for arg in node.all_input_nodes for name in parts.get(arg.name, (arg.name,))]
            values = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            detached = "detach" in str(node.target)
            grad = any(read.requires_grad for read in reads) and not detached
            names = [node.name] if isinstance(value, torch.Tensor) else [f"{node.name}.{i}" for i in range(len(values))]
            for name, leaf in zip(names, values, strict=True):
                add(name, leaf, "activation", grad and leaf.dtype.is_floating_point)
            parts[node.name] = tuple(names)
            literals = {}
            schema = getattr(node.target, "_schema", None)
            for argument, given in zip(schema.arguments if schema else (), node.args, strict=False):
                if isinstance(given, int | float | bool | str | list) and not _has_nodes(given):
                    literals[argument.name] = given
            literals.update({name: given for name, given in node.kwargs.items() if not _has_nodes(given)})
            price = price_op(str(node.target), reads, [specs[name] for name in names], literals=literals)
            ops.append(
                Op(
                    id=len(ops),
                    name=node.name,
                    target=str(node.target),
                    kind=price.kind,
                    reads=tuple(read.id for read in reads),
                    writes=tuple(names),
                    flops=price.flops,
                    backward_flops=price.backward_flops,
                    bytes=price.bytes,
                    backward_bytes=price.backward_bytes,
                    saved=price.saved,
                    workspace=price.workspace,
                    random=float(literals.get("dropout_p", literals.get("p", 0.0)) or 0.0) > 0.0,
                )
            )
    items = tuple(
        Item(
            id=op.id, kind="op", name=op.name, module_path="", ops=(op.id, op.id + 1), reads=op.reads, writes=op.writes
        )
        for op in ops
    )
    return ModelGraph(
        name=type(model).__name__,
        tensors=tuple({spec.id: spec for spec in specs.values()}.values()),
        ops=tuple(ops),
        items=items,
        outputs=(),
        batch_rows=batch_rows,
        unknown_ops=tuple(sorted({op.target for op in ops if op.kind == "unknown"})),
    )


def _has_nodes(value: object) -> bool:
    return any(isinstance(leaf, torch.fx.Node) for leaf in torch.utils._pytree.tree_leaves(value))


def real_saved_bytes(model: nn.Module, args: tuple[torch.Tensor, ...]) -> int:
    """Bytes that autograd keeps in a real forward, each storage once, without parameters, buffers and inputs."""
    resident = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *args)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in resident:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args)
    return sum(storage.nbytes() for storage in kept.values())
