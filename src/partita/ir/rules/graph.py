"""Rules of captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from partita.ir.graph import ITEM_SIZE, ModelGraph
from partita.ir.rules import Findings, Rule


def _tensor_ids_unique(graph: ModelGraph) -> Findings:
    counts = Counter(tensor.id for tensor in graph.tensors)
    for index, tensor in enumerate(graph.tensors):
        if not tensor.id or counts[tensor.id] > 1:
            yield f"tensors[{index}].id", f"{tensor.id!r} occurs {counts[tensor.id]} times" if tensor.id else "is empty"


def _op_ids_are_positions(graph: ModelGraph) -> Findings:
    for index, op in enumerate(graph.ops):
        if op.id != index:
            yield f"ops[{index}].id", f"is {op.id}"


def _item_ids_are_positions(graph: ModelGraph) -> Findings:
    for index, item in enumerate(graph.items):
        if item.id != index:
            yield f"items[{index}].id", f"is {item.id}"


def _named_tensors_exist(graph: ModelGraph) -> Findings:
    known = {tensor.id for tensor in graph.tensors}

    def unknown(place: str, ids: Iterable[str]) -> Findings:
        for index, name in enumerate(ids):
            if name not in known:
                yield f"{place}[{index}]", f"there is no tensor {name!r}"

    for op in graph.ops:
        for field in ("reads", "writes", "saved"):
            yield from unknown(f"ops[{op.id}].{field}", getattr(op, field))
    for item in graph.items:
        for field in ("reads", "writes"):
            yield from unknown(f"items[{item.id}].{field}", getattr(item, field))
    yield from unknown("outputs", graph.outputs)


def _ranges_ascend(graph: ModelGraph) -> Findings:
    # An operator outside every range is dead code: rules G009 to G012 show that nothing needs its values.
    end = 0
    for item in graph.items:
        if not end <= item.ops[0] <= item.ops[1] <= len(graph.ops):
            yield f"items[{item.id}].ops", f"{list(item.ops)} is not within {end}..{len(graph.ops)}"
        end = max(end, item.ops[1])


def _sizes_known(graph: ModelGraph) -> Findings:
    for index, tensor in enumerate(graph.tensors):
        if tensor.dtype not in ITEM_SIZE:
            yield f"tensors[{index}].dtype", f"{tensor.dtype!r} is no known dtype"
        if any(size < 0 for size in tensor.shape):
            yield f"tensors[{index}].shape", f"{list(tensor.shape)} has a negative size"


def _ops_read_what_exists(graph: ModelGraph) -> Findings:
    made = {tensor.id for tensor in graph.tensors if tensor.role != "activation"}
    for op in graph.ops:
        for name in op.reads:
            if name not in made:
                yield f"ops[{op.id}].reads", f"{name!r} is not made before"
        made.update(op.writes)


def _written_once(graph: ModelGraph) -> Findings:
    changeable = {tensor.id for tensor in graph.tensors if tensor.role in {"parameter", "buffer", "constant"}}
    counts = Counter(name for op in graph.ops for name in op.writes if name not in changeable.intersection(op.reads))
    for index, tensor in enumerate(graph.tensors):
        count = counts[tensor.id]
        if count > int(tensor.role == "activation"):
            yield f"tensors[{index}]", f"{tensor.role} {tensor.id!r} is written {count} times"


def _items_read_what_exists(graph: ModelGraph) -> Findings:
    made = {tensor.id for tensor in graph.tensors if tensor.role != "activation"}
    for item in graph.items:
        for name in item.reads:
            if name not in made:
                yield f"items[{item.id}].reads", f"{name!r} is not made by an item before"
        made.update(item.writes)


def _items_write_their_own(graph: ModelGraph) -> Findings:
    for item in graph.items:
        own = {name for op in graph.ops[slice(*item.ops)] for name in op.writes}
        for name in item.writes:
            if name not in own:
                yield f"items[{item.id}].writes", f"{name!r} is not made by its operators"


def _items_state_all_reads(graph: ModelGraph) -> Findings:
    for item in graph.items:
        ops = graph.ops[slice(*item.ops)]
        known = set(item.reads).union(*(op.writes for op in ops))
        for op in ops:
            for name in op.reads:
                if name not in known:
                    yield f"items[{item.id}].reads", f"misses {name!r}, which its operator {op.name} reads"


def _outputs_made(graph: ModelGraph) -> Findings:
    made = {tensor.id for tensor in graph.tensors if tensor.role != "activation"}
    made.update(name for item in graph.items for name in item.writes)
    for index, name in enumerate(graph.outputs):
        if name not in made:
            yield f"outputs[{index}]", f"no item makes {name!r}"


def _batch_dims_fit(graph: ModelGraph) -> Findings:
    for index, tensor in enumerate(graph.tensors):
        dim = tensor.batch_dim
        if dim is None:
            continue
        if not 0 <= dim < len(tensor.shape):
            yield f"tensors[{index}].batch_dim", f"{dim} is no dim of the shape {list(tensor.shape)}"
        elif not graph.batch_rows:
            yield f"tensors[{index}].batch_dim", f"is {dim}, but the graph knows no batch rows"


def _batch_rows_positive(graph: ModelGraph) -> Findings:
    if graph.batch_rows is not None and graph.batch_rows < 1:
        yield "batch_rows", f"{graph.batch_rows} is not positive"


def _storage_owned(graph: ModelGraph) -> Findings:
    owners = {tensor.id: tensor.storage or tensor.id for tensor in graph.tensors}
    for index, tensor in enumerate(graph.tensors):
        owner = owners[tensor.id]
        if owner not in owners:
            yield f"tensors[{index}].storage", f"there is no tensor {owner!r}"
        elif owners[owner] != owner:
            yield f"tensors[{index}].storage", f"{owner!r} is itself a view of {owners[owner]!r}"


def _names_unique(graph: ModelGraph) -> Findings:
    seen: dict[str, str] = {}
    for index, tensor in enumerate(graph.tensors):
        if tensor.role not in {"parameter", "buffer", "input"}:
            continue
        if not tensor.names:
            yield f"tensors[{index}].names", f"{tensor.role} {tensor.id!r} has no name"
        for name in tensor.names:
            key = f"{tensor.role == 'input'} {name}"  # an argument may have the name of a parameter
            if seen.setdefault(key, tensor.id) != tensor.id:
                yield f"tensors[{index}].names", f"{name!r} names {seen[key]!r} too"


def _costs_not_negative(graph: ModelGraph) -> Findings:
    for op in graph.ops:
        for field in ("flops", "backward_flops", "bytes", "backward_bytes"):
            if getattr(op, field) < 0:
                yield f"ops[{op.id}].{field}", f"{getattr(op, field)} is negative"


def _groups_disjoint(graph: ModelGraph) -> Findings:
    seen: dict[int, int] = {}
    for index, group in enumerate(graph.colocated):
        for item in group:
            if not 0 <= item < len(graph.items):
                yield f"colocated[{index}]", f"there is no item {item}"
            elif seen.setdefault(item, index) != index:
                yield f"colocated[{index}]", f"item {item} is in group {seen[item]} too"


def _replicable_is_pure(graph: ModelGraph) -> Findings:
    tensors = graph.tensor_map()
    for item in graph.items:
        if not item.replicable:
            continue
        if item.random:
            yield f"items[{item.id}]", "is replicable and draws random numbers"
        if any(tensors[name].role == "parameter" for name in item.reads):
            yield f"items[{item.id}]", "is replicable and reads a parameter"
        if any(tensors[name].requires_grad for name in item.writes):
            yield f"items[{item.id}]", "is replicable and a gradient flows through it"


def _random_items_say_so(graph: ModelGraph) -> Findings:
    for item in graph.items:
        drawing = [op.name for op in graph.ops[slice(*item.ops)] if op.random]
        if drawing and not item.random:
            yield f"items[{item.id}].random", f"is false, but its operator {drawing[0]} draws random numbers"


def _unknown_listed(graph: ModelGraph) -> Findings:
    unknown = {op.target for op in graph.ops if op.kind == "unknown"}
    if wrong := sorted(unknown ^ set(graph.unknown_ops)):
        yield "unknown_ops", f"differs from the operators of unknown cost by {', '.join(wrong)}"


def _loss_is_scalar(graph: ModelGraph) -> Findings:
    tensors = graph.tensor_map()
    if graph.scalar_loss and not any(tensors[name].shape == () for name in graph.outputs):
        yield "scalar_loss", "is true, but no output is 0-dimensional"


STRUCTURE = (
    Rule("G001", "every tensor has an id of its own", _tensor_ids_unique),
    Rule("G002", "an operator's id is its position", _op_ids_are_positions),
    Rule("G003", "an item's id is its position", _item_ids_are_positions),
    Rule("G004", "every tensor that is read, written, saved or returned is listed", _named_tensors_exist),
    Rule("G005", "the items' ranges of operators ascend and do not overlap", _ranges_ascend),
    Rule("G006", "every tensor has a known dtype and no negative size", _sizes_known),
)
MEANING = (
    Rule("G007", "an operator reads what is made before", _ops_read_what_exists),
    Rule("G008", "an operator makes activations, each of them once, or changes what it reads in place", _written_once),
    Rule("G009", "an item reads what items before it make", _items_read_what_exists),
    Rule("G010", "an item writes what its own operators make", _items_write_their_own),
    Rule("G011", "an item's reads name all that its operators need from outside", _items_state_all_reads),
    Rule("G012", "the outputs are made by items or given", _outputs_made),
    Rule("G013", "a batch dim is a dim of its tensor, and the graph knows the rows", _batch_dims_fit),
    Rule("G014", "a batch has rows", _batch_rows_positive),
    Rule("G015", "the owner of a tensor's memory is a tensor that is no view", _storage_owned),
    Rule("G016", "parameters, buffers and inputs have names, each for one tensor", _names_unique),
    Rule("G017", "no cost is negative", _costs_not_negative),
    Rule("G018", "groups of colocated items are disjoint and hold items that exist", _groups_disjoint),
    Rule("G019", "a replicable item has no parameter, no gradient and no randomness", _replicable_is_pure),
    Rule("G020", "an item with a random operator is random", _random_items_say_so),
    Rule("G021", "the operators of unknown cost are listed", _unknown_listed),
    Rule("G022", "a graph that returns its loss returns a 0-dimensional tensor", _loss_is_scalar),
)
