"""Modules that the trace cannot enter, kept whole.

Value-dependent branches, loops and the like stop the trace inside some module.  All modules of that class are then
replaced, in the weightless copy and for the time of the trace, by one operator that says nothing but the shapes of
their results; the fold turns it back into a call of the user's own module, which takes its real branch at run time.

The shapes are observed in one eager run of the real model: a dim of a result that has the size of an argument's dim is
taken to follow it, any other dim to be constant.  Verification then runs the real modules on the example and on parts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.tracer.objects import Snapshot
from partita.tracer.signature import Signature, Slot
from partita.tracer.tree import map_leaves, tensors_in

Rule = list[dict[str, Any]]
"""For each result tensor its dtype and dims; a dim is a number, or [input, dim]."""

_LIBRARY = torch.library.Library("partita", "FRAGMENT")
_LIBRARY.define("opaque(Tensor[] inputs, str rule) -> Tensor[]")


@torch.library.register_fake("partita::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _opaque_fake(inputs: list[torch.Tensor], rule: str) -> list[torch.Tensor]:
    device = inputs[0].device if inputs else None
    results = []
    for spec in json.loads(rule):
        shape = [inputs[d[0]].shape[d[1]] if isinstance(d, list) else d for d in spec["dims"]]
        results.append(torch.empty(shape, dtype=getattr(torch, spec["dtype"]), device=device))
    return results


@dataclass(frozen=True, eq=False, slots=True)
class Observation:
    """What one eager run showed of a module's first call.

    Attributes:
        template: Structure of the result with `Slot` for its tensors.
        rule: How the shapes of the result follow from the arguments.
        changes: What it changed in the lists, dicts and objects that it was given ("" if nothing).
    """

    template: Any
    rule: Rule
    changes: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Observations:
    """What one eager run showed.

    Attributes:
        calls: By module path.
        changed: Qualified names of the buffers that the run changed.
    """

    calls: Mapping[str, Observation]
    changed: frozenset[str]


def _rule(arguments: list[torch.Tensor], result: torch.Tensor) -> dict[str, Any]:
    dims: list[Any] = []
    for d, size in enumerate(result.shape):
        same_place: list[Any] = [[i, d] for i, a in enumerate(arguments) if a.ndim > d and a.shape[d] == size]
        any_place: list[Any] = [[i, e] for i, a in enumerate(arguments) for e in range(a.ndim) if a.shape[e] == size]
        dims.append((same_place or any_place or [size])[0] if size > 1 else size)
    return {"dtype": str(result.dtype).removeprefix("torch."), "dims": dims}


def observe(model: nn.Module, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> Observations:
    """Run a model once and note every module's first call.

    Args:
        model: A copy with real weights; its buffers may change.
        signature: The call's structure.
        tensors: The call's tensors.

    Returns:
        The observations.
    """
    calls: dict[str, Observation] = {}
    paths = {id(module): path for path, module in model.named_modules()}

    held: dict[str, Snapshot] = {}

    def hold(module: nn.Module, args: Any, kwargs: Any) -> None:
        held[paths[id(module)]] = Snapshot((args, kwargs))

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        path = paths[id(module)]
        if path not in calls:
            arguments = tensors_in((args, dict(kwargs)))
            count = iter(range(len(tensors_in(result))))
            template = map_leaves(
                lambda _p, leaf: Slot(next(count)) if isinstance(leaf, torch.Tensor) else leaf, result
            )
            calls[path] = Observation(template, [_rule(arguments, t) for t in tensors_in(result)], held[path].changed())

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    handles += [m.register_forward_pre_hook(hold, prepend=True, with_kwargs=True) for m in model.modules()]
    try:
        with torch.no_grad():
            signature.call(model, tensors)
    finally:
        for handle in handles:
            handle.remove()
    changed = frozenset(
        name for name, buffer in model.named_buffers() if not torch.equal(buffer, before.get(name, buffer))
    )
    return Observations(calls, changed)


@contextlib.contextmanager
def kept_whole(model: nn.Module, classes: set[type], observations: Observations | None) -> Iterator[None]:
    """Replace the forwards of all modules of some classes by the opaque operator.

    Args:
        model: The weightless copy that is traced.
        classes: Classes that are kept whole.
        observations: Shapes of their results; modules that were not called keep their forward.
    """
    changed: list[nn.Module] = []
    for path, module in model.named_modules():
        known = None if observations is None else observations.calls.get(path)
        if type(module) in classes and known is not None:
            object.__setattr__(module, "forward", _stand_in(known))
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            object.__delattr__(module, "forward")


def _stand_in(known: Observation) -> Any:
    text = json.dumps(known.rule)

    def forward(*args: Any, **kwargs: Any) -> Any:
        results = torch.ops.partita.opaque(tensors_in((args, kwargs)), text)
        return map_leaves(lambda _path, leaf: results[leaf.index] if isinstance(leaf, Slot) else leaf, known.template)

    forward.changes = known.changes  # type: ignore[attr-defined]
    return forward
