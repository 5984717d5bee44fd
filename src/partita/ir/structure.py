"""What a set of items does, up to names: the key by which repeated blocks are found and measurements are kept."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256

from partita.ir.graph import ModelGraph, TensorSpec


def structure(graph: ModelGraph, tensors: Mapping[str, TensorSpec], items: Sequence[int]) -> Hashable:
    """Describe items up to names: operators in order, tensors by their first occurrence, shape and dtype.

    Args:
        graph: The captured graph.
        tensors: Its tensors by id, ``graph.tensor_map()``.
        items: Ids of the items.

    Returns:
        Nested tuples of text and numbers, equal for items that do the same.
    """
    numbers: dict[str, int] = {}
    same = _full_slices(graph, tensors, items)

    def local(name: str) -> Hashable:
        spec = tensors[same.get(name, name)]
        storage = f"storage of {spec.storage or spec.id}"
        known = (numbers.setdefault(spec.id, len(numbers)), numbers.setdefault(storage, len(numbers)))
        return (*known, spec.shape, spec.dtype, spec.role, spec.batch_dim, spec.requires_grad)

    parts: list[Hashable] = []
    for item in (graph.items[number] for number in items):
        ops = [op for op in graph.ops[slice(*item.ops)] if not same.keys() & set(op.writes)]
        if item.kind == "call" or ops:
            parts.append((item.kind, item.random, tuple(map(local, item.reads)), tuple(map(local, item.writes))))
        for op in ops:
            costs = (op.flops, op.backward_flops, op.bytes, op.backward_bytes, op.workspace)
            names = (tuple(map(local, op.reads)), tuple(map(local, op.writes)), tuple(map(local, op.saved)))
            parts.append((op.target, op.kind, op.random, costs, names))
    return tuple(parts)


def _full_slices(graph: ModelGraph, tensors: Mapping[str, TensorSpec], items: Sequence[int]) -> dict[str, str]:
    """Return what is sliced for every slice that takes everything.

    Torch records such slices in some layers and leaves them out in others, from the same line of the model.
    """
    same: dict[str, str] = {}
    for op in (op for number in items for op in graph.ops[slice(*graph.items[number].ops)]):
        if op.target.startswith("aten.slice.") and len(op.reads) == len(op.writes) == 1:
            source, result = op.reads[0], op.writes[0]
            if tensors[source].shape == tensors[result].shape:
                same[result] = same.get(source, source)
    return same


def structure_digest(graph: ModelGraph, tensors: Mapping[str, TensorSpec], items: Sequence[int]) -> str:
    """Return 32 hexadecimal digits for `structure` and the mode; equal in every process and version of Python."""
    text = repr((graph.training, graph.batch_rows, structure(graph, tensors, items)))
    return sha256(text.encode()).hexdigest()[:32]
