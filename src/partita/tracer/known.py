"""Run a weightless model with the values that follow from sizes and constants, and no others.

Every tensor is on the meta device.  Beside those that were made from sizes and constants alone (a range of positions,
a causal mask) stands a real tensor with their values, kept per memory, so that views and in-place operations need no
rules of their own.  A forward that asks for a value (a branch, a number) gets it where it is known.  A question of yes
or no that an input, a parameter or chance decides is answered as a script says, so that both answers can be tried; any
other question ends the run.  What all answers lead to is so for *all* values of inputs and parameters, and every rank
finds the same, whatever weights it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from partita.tracer.tree import map_leaves, tensors_in

MAX_KNOWN_ELEMENTS = 2**22
"""Values of larger tensors are not computed: branches on them end the run."""

MAX_TRIED_ELEMENTS = 2**20
"""An operator without a rule for shapes is tried on zeros if its operands are not larger."""


class UnknownValueError(Exception):
    """The forward asks for a number that sizes and constants do not decide."""


class KnownValues(TorchDispatchMode):
    """Computes on the meta device, and beside it what sizes and constants decide.

    Args:
        script: Answers to the first questions (yes or no) that sizes and constants do not decide.

    Attributes:
        answers: Every answer that was given to such a question: the script's, then no.
    """

    def __init__(self, script: Sequence[bool] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[bool] = []
        self._script = script
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run one operator."""
        originals: dict[int, torch.Tensor] = {}

        def on_meta(_path: object, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                stand_in = self._stand_in(leaf)
                originals[id(stand_in)] = leaf
                return stand_in
            return leaf

        args, kwargs = map_leaves(on_meta, tuple(args)), map_leaves(on_meta, dict(kwargs or {}))
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
        given = tensors_in((args, kwargs))
        known = all(self._is_known(t) for t in given) and not _has_chance(func)
        if torch.Tag.data_dependent_output in func.tags:
            return func(*self._values(args), **self._values(kwargs)) if known else self._answer(func, given)
        result = self._shaped(func, args, kwargs, known=known)
        self._note(func, args, kwargs, given, result, known=known)
        return map_leaves(lambda _path, leaf: originals.get(id(leaf), leaf), result)

    def _answer(self, func: Any, given: list[torch.Tensor]) -> bool:
        """Answer a question that values decide as the script says."""
        if func is not torch.ops.aten.equal.default and given[0].dtype is not torch.bool:
            raise UnknownValueError(f"the forward reads a number by {func}")
        at = len(self.answers)
        self.answers.append(self._script[at] if at < len(self._script) else False)
        return self.answers[-1]

    def _shaped(self, func: Any, args: Any, kwargs: Any, *, known: bool) -> Any:
        """Return an operator's result on the meta device."""
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if func._schema.is_mutable or (torch.Tag.dynamic_output_shape in func.tags and not known):
                raise
        if not known and any(t.numel() > MAX_TRIED_ELEMENTS for t in tensors_in((args, kwargs))):
            raise UnknownValueError(f"{func} has no rule for shapes on the meta device")
        given = self._values(args), self._values(_on(kwargs, "cpu"))  # zeros stand for what is not known
        return map_leaves(self._to_meta, func(*given[0], **given[1]))

    @staticmethod
    def _to_meta(_path: object, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def _note(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], result: Any, *, known: bool) -> None:
        """Compute the values of new memory and of memory that was written into, or forget them."""
        made = tensors_in(result)
        read = {_memory_of(t) for t in given}
        new = [t for t in made if _memory_of(t) not in read]
        mutable = bool(func._schema.is_mutable)
        if known and (new or mutable) and all(t.numel() <= MAX_KNOWN_ELEMENTS for t in made):
            values = func(*self._values(args), **self._values(_on(kwargs, "cpu")))
            for meta, value in zip(made, tensors_in(values), strict=True):
                if _memory_of(meta) not in read:
                    self._remember(meta, value)
        elif mutable:
            for tensor in _written(func, args, kwargs):
                self._memory.pop(_memory_of(tensor), None)

    # -- values --------------------------------------------------------------------------------------------------------
    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _memory_of(tensor) in self._memory or tensor.numel() == 0

    def _remember(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        real = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        real.copy_(value)
        self._memory[_memory_of(meta)] = (meta.untyped_storage(), real.untyped_storage())

    def _value(self, meta: torch.Tensor) -> torch.Tensor:
        if _memory_of(meta) not in self._memory:
            return torch.zeros(meta.shape, dtype=meta.dtype)
        storage = self._memory[_memory_of(meta)][1]
        real = torch.empty(0, dtype=meta.dtype)
        return real.set_(storage, meta.storage_offset(), meta.shape, meta.stride())

    def _values(self, tree: Any) -> Any:
        return map_leaves(lambda _path, leaf: self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    def _stand_in(self, real: torch.Tensor) -> torch.Tensor:
        """Return the meta tensor that stands for a tensor with data (a constant of the model's own)."""
        if id(real) not in self._stand_ins:
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
            if real.numel() <= MAX_KNOWN_ELEMENTS:
                self._remember(meta, real.detach())
            self._stand_ins[id(real)] = (real, meta)
        return self._stand_ins[id(real)][1]


def _has_chance(func: Any) -> bool:
    """Whether an operator's values are not decided by its operands: random numbers, memory that nobody wrote."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the operands that an operator writes into."""
    schema = func._schema.arguments
    given = {a.name: value for a, value in zip(schema, args, strict=False)} | dict(kwargs)
    return tensors_in([given[a.name] for a in schema if a.name in given and a.is_write])


def _on(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if "device" in kwargs else kwargs
