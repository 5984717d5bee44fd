"""What a call of the model looks like: its structure and constants, apart from its tensors.

Two calls with the same signature differ in the values and shapes of their tensors only; everything else (flags,
numbers, strings, None, which keywords are present, dtypes, the modes of the modules) is part of the signature, so
that nothing of an example is ever frozen silently.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.tracer.objects import Snapshot
from partita.tracer.tree import PLAIN, Marker, Path, map_leaves, path_text, structure


@dataclass(frozen=True, slots=True)
class Slot(Marker):
    """Stands for the input tensor number ``index`` inside a signature's template."""

    index: int


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """The structure of one call.

    Attributes:
        key: Equal for calls that differ in tensor values and shapes only.
        template: ``(args, kwargs)`` with `Slot` in place of tensors.
        paths: For each input tensor its place in the call.
    """

    key: Hashable
    template: Any
    paths: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """For each input tensor its place as text, e.g. ``input_ids`` or ``args[0]``."""
        return tuple(path_text(path[1:]) if path[0] == 1 else f"args{path_text(path[1:])}" for path in self.paths)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments around the given tensors."""
        args, kwargs = map_leaves(
            lambda _path, leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, self.template
        )
        return args, kwargs

    def call(self, model: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Call a model with the given tensors in this structure; the caller's own objects stay as they are."""
        args, kwargs = self.arguments(tensors)
        held = Snapshot((args, kwargs))
        try:
            return model(*args, **kwargs)
        finally:
            held.restore()


def _constant_key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)


def signature_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Signature, tuple[torch.Tensor, ...]]:
    """Split a call into its signature and its tensors.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The signature and the tensors in leaf order.
    """
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []
    key: list[Hashable] = []

    def leaf(path: Path, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            key.append((path, _constant_key(value)))
            return value
        key.append((path, str(value.dtype), value.ndim, value.requires_grad))
        tensors.append(value)
        paths.append(path)
        return Slot(len(tensors) - 1)

    template = map_leaves(leaf, (tuple(args), dict(kwargs)))
    return Signature(key=(structure(template), tuple(key)), template=template, paths=tuple(paths)), tuple(tensors)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's own attributes that are plain constants (``training`` among them)."""
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}


def attributes_of(modules: Mapping[str, nn.Module], paths: Iterable[str]) -> Hashable:
    """Return the plain attributes of some modules in a form that can be compared; unknown paths are left out."""
    return tuple(tuple(plain_attributes(modules[path]).items()) for path in sorted(paths) if path in modules)


def mode_of(model: nn.Module) -> Hashable:
    """Return what besides the arguments decides the path through a forward: training flags, trainability, grad mode."""
    flags = tuple(module.training for module in model.modules())
    trainable = tuple(parameter.requires_grad for parameter in model.parameters())
    return (flags, trainable, torch.is_grad_enabled())
