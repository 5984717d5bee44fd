"""A capture as bytes: one rank traces, and every rank runs the very same program.

Tracing a model twice need not give the same program: a forward that walks through a set of names, say, takes another
order in every process.  Ranks whose programs differ would exchange the wrong values, so a program travels from the
rank that made it.  Modules and parameters travel by name, operators and classes by reference; objects of the caller's
own arguments are replaced by the ones of the receiving rank.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from partita.tracer.program import Program, Step
from partita.tracer.recorder import Ref
from partita.tracer.signature import Signature, Slot
from partita.tracer.sizes import Size
from partita.tracer.tree import PLAIN, leaves, map_leaves


class CannotTravelError(Exception):
    """Something in a capture has no name by which another process could find it."""


def _operator(name: str, overload: str) -> Any:
    """Return a torch operator by its qualified name."""
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload)


def _higher_order(name: str) -> Any:
    """Return a control-flow operator by its name."""
    return getattr(torch.ops.higher_order, name)


def _own_objects(signatures: Sequence[Signature]) -> list[Any]:
    """Return the objects among calls' arguments that have an identity, in an order that every rank shares."""
    found = [leaf for signature in signatures for _, leaf in leaves(signature.template)]
    return [leaf for leaf in found if not isinstance(leaf, (*PLAIN, Slot, torch.dtype))]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, signatures: Sequence[Signature]) -> None:
        super().__init__(file)
        self._own = {id(own): i for i, own in enumerate(_own_objects(signatures))}
        self._signatures = [signature.key for signature in signatures]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Signature):
            return "signature", self._signatures.index(value.key)
        return self._own.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value._schema.name, value._overloadname)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return _higher_order, (value.name(),)
        if isinstance(value, fx.GraphModule):  # a body of a control-flow operator: its code says everything
            rebuild, (state, imports) = value.__reduce__()
            return rebuild, ({k: v for k, v in state.items() if k not in {"_tracer_cls", "meta"}}, imports)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, signatures: Sequence[Signature]) -> None:
        super().__init__(file)
        self._own = _own_objects(signatures)
        self._signatures = signatures

    def persistent_load(self, key: Any) -> Any:
        return self._signatures[key[1]] if isinstance(key, tuple) else self._own[key]


def pack(value: Any, *signatures: Signature) -> bytes:
    """Turn something that holds captured programs into bytes.

    Args:
        value: Anything; without recordings.
        signatures: The structures of the captured calls.

    Raises:
        CannotTravelError: If a part of it cannot be found by name in another process.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, signatures)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise CannotTravelError(str(error)) from error
    return file.getvalue()


def unpack(data: bytes, *signatures: Signature) -> Any:
    """Turn bytes back.

    Args:
        data: What `pack` made.
        signatures: The structures of this process' calls, in the same order.

    Raises:
        CannotTravelError: If a class or function is not there in this process.
    """
    unpickler = _Unpickler(io.BytesIO(data), signatures)
    try:
        return unpickler.load()
    except Exception as error:  # whatever a class says when it cannot be made here
        raise CannotTravelError(str(error)) from error


def digest(program: Program) -> str:
    """Return a text that two programs share only if they have the same steps, operands and results, in one order."""
    found = hashlib.sha256()

    def leaf(path: object, value: Any) -> None:
        kind = (Ref, Size, int, float, str, bool, type(None))
        found.update(repr((path, value if isinstance(value, kind) else type(value).__qualname__)).encode())

    def add(step: Step) -> None:
        target = getattr(step.target, "__qualname__", str(step.target))
        head = (step.kind, step.name, step.path, target, step.reads, step.writes, step.moved, step.replicable)
        found.update(repr(head).encode())
        map_leaves(leaf, (step.args, step.kwargs, step.result))

    for step in (*program.steps, *program.checks):
        add(step)
    map_leaves(leaf, program.result)
    return found.hexdigest()
