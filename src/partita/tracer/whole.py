"""The last rung: a model that cannot be traced runs as the user wrote it, as one block."""

from __future__ import annotations

import hashlib

import sympy
from torch import nn

from partita.ir.graph import Item, ModelGraph, Op, Role, TensorSpec
from partita.tracer.program import Program, Step
from partita.tracer.recorder import Ref
from partita.tracer.signature import Signature, Slot
from partita.tracer.sizes import Binding, SizeRules
from partita.tracer.skeleton import named_tensors
from partita.tracer.tree import map_leaves

RESULT = "result"


def whole_program(model: nn.Module, signature: Signature, inputs: tuple[str, ...], shapes: Binding) -> Program:
    """Return a program whose one step calls the model itself."""
    names: dict[int, tuple[str, ...]] = {}
    parameters = set()
    for name, tensor, is_parameter in named_tensors(model):
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
        if is_parameter:
            parameters.add(id(tensor))
    tensors = {f"{'p' if key in parameters else 'b'}:{value[0]}": value for key, value in names.items()}
    args, kwargs = map_leaves(
        lambda _path, leaf: Ref(inputs[leaf.index]) if isinstance(leaf, Slot) else leaf, signature.template
    )
    step = Step(
        id=0,
        kind="call",
        name="#0",
        path="",
        target=None,
        args=args,
        kwargs=kwargs,
        result=Ref(RESULT),
        reads=(*inputs, *tensors),
        writes=(RESULT,),
        moved=(),
        nodes=(0, 0),
        random=True,
    )
    rules = SizeRules(
        axes=tuple(tuple(sympy.Symbol(f"s{i}_{d}") for d in range(len(s))) for i, s in enumerate(shapes)),
        conditions=(),
        lower={},
        upper={},
    )
    return Program(
        steps=(step,),
        inputs=inputs,
        tensors=tensors,
        parameters=frozenset(name for name in tensors if name.startswith("p:")),
        constants={},
        sizes=rules,
        result=Ref(RESULT),
        buffer_writes={},
        changed=frozenset(),
        storage={},
        differentiable=frozenset({RESULT}),
        dynamic=True,
    )


def whole_graph(model: nn.Module, program: Program, shapes: Binding) -> ModelGraph:
    """Return the graph of a model kept whole: one item, one operator whose cost is unknown."""
    specs = [
        TensorSpec(id=i, shape=s, dtype="float32", role="input", names=(i,), storage=i)
        for i, s in zip(program.inputs, shapes, strict=True)
    ]
    by_name = {n: t for n, t, _ in named_tensors(model)}
    for value, names in program.tensors.items():
        tensor = by_name[names[0]]
        role: Role = "parameter" if value in program.parameters else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(
            TensorSpec(
                id=value,
                shape=tuple(tensor.shape),
                dtype=dtype,
                role=role,
                names=names,
                requires_grad=tensor.requires_grad,
                storage=value,
            )
        )
    specs.append(
        TensorSpec(id=RESULT, shape=(), dtype="float32", role="activation", requires_grad=True, storage=RESULT)
    )
    reads = tuple(s.id for s in specs if s.id != RESULT)
    weights = sum(s.numel for s in specs if s.role == "parameter")
    op = Op(
        id=0,
        name="model",
        target="model",
        kind="unknown",
        reads=reads,
        writes=(RESULT,),
        flops=2 * weights,
        backward_flops=4 * weights,
        random=True,
    )
    item = Item(id=0, kind="call", name="#0", module_path="", ops=(0, 1), reads=reads, writes=(RESULT,), random=True)
    digest = hashlib.sha256(repr([(s.id, s.shape, s.dtype) for s in specs]).encode()).hexdigest()[:16]
    order = {"parameter": 0, "buffer": 1, "input": 2}
    return ModelGraph(
        name=type(model).__name__,
        tensors=tuple(sorted(specs, key=lambda s: order.get(s.role, 4))),
        ops=(op,),
        items=(item,),
        outputs=(RESULT,),
        training=model.training,
        unknown_ops=("model",),
        fingerprint=digest,
    )
