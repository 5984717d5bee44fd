"""Walk the nested arguments and results of users' modules.

Containers are tuples, named tuples, lists, dicts (with their subclasses), dataclasses, registered with anybody or not,
and plain objects that hold tensors (caches, batches); everything else is a leaf.  ``map_leaves`` rebuilds a container
without calling its constructor, so that types with checks in ``__init__`` or ``__post_init__`` can hold markers in
place of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from partita.tracer.objects import ATOMS, parts, rebuilt, state_of

Path = tuple[str | int, ...]
PLAIN = (bool, int, float, str, type(None))
"""Types of plain constants."""


class Marker:
    """Base of the leaves that stand for values inside recorded trees; never walked into."""

    __slots__ = ()


def _is_dataclass(tree: object) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type | Marker)


def _map_dict(function: Callable[[Path, Any], Any], tree: dict[Any, Any], path: Path) -> Any:
    cls = type(tree)
    values = {key: _map(function, value, (*path, key)) for key, value in tree.items()}
    if cls is dict:
        return values
    new = cls.__new__(cls)
    for key, value in getattr(tree, "__dict__", {}).items():
        object.__setattr__(new, key, values.get(key, value))
    base: Any = next(c for c in cls.__mro__ if c.__module__ in {"builtins", "collections"})  # skips users' __setitem__
    for key, value in values.items():
        base.__setitem__(new, key, value)
    return new


def _map_dataclass(function: Callable[[Path, Any], Any], tree: Any, path: Path) -> Any:
    new = object.__new__(type(tree))
    for key, value in getattr(tree, "__dict__", {}).items():
        object.__setattr__(new, key, value)
    for field in dataclasses.fields(tree):
        if hasattr(tree, field.name):
            object.__setattr__(new, field.name, _map(function, getattr(tree, field.name), (*path, field.name)))
    return new


def _map(function: Callable[[Path, Any], Any], tree: Any, path: Path) -> Any:
    if isinstance(tree, dict):
        return _map_dict(function, tree, path)
    if isinstance(tree, tuple):
        children = [_map(function, child, (*path, i)) for i, child in enumerate(tree)]
        if hasattr(tree, "_fields"):
            return type(tree)(*children)
        return tuple(children) if type(tree) in {tuple, torch.Size} else type(tree)(children)
    if type(tree) is list:
        return [_map(function, child, (*path, i)) for i, child in enumerate(tree)]
    if _is_dataclass(tree):
        return _map_dataclass(function, tree, path)
    state = object_state(tree)
    if state is not None:
        return rebuilt(tree, {name: _map(function, value, (*path, name)) for name, value in state.items()})
    return function(path, tree)


def object_state(tree: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object that holds tensors, or markers in their place; None for other values."""
    if isinstance(tree, (*ATOMS, Marker)):
        return None
    state = state_of(tree)
    return state if state and _holds_values(tree, ()) else None


_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, Marker)


def _holds_values(tree: Any, around: tuple[int, ...]) -> bool:
    """Whether an object leads to tensors; one that leads to itself cannot be rebuilt and is left a leaf."""
    if isinstance(tree, _VALUES):
        return True
    inside = None if isinstance(tree, ATOMS) else parts(tree)
    if inside is None:
        return False
    if id(tree) in around:
        raise RecursionError
    try:
        return any(_holds_values(child, (*around, id(tree))) for child in inside.values())
    except RecursionError:
        if around:
            raise
        return False


def map_leaves(function: Callable[[Path, Any], Any], tree: Any) -> Any:
    """Rebuild ``tree`` with ``function(path, leaf)`` in place of every leaf.

    Args:
        function: Called with the leaf's path (keys, indices, field names) and the leaf.
        tree: Any nesting of supported containers.

    Returns:
        A new tree of the same container types (``torch.Size`` becomes a tuple).
    """
    return _map(function, tree, ())


def leaves(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path, in a fixed order."""
    found: list[tuple[Path, Any]] = []
    map_leaves(lambda path, leaf: found.append((path, leaf)), tree)
    return iter(found)


def structure(tree: Any) -> Hashable:
    """Return what is the same for trees that differ in their leaves only: containers, keys, order."""
    if isinstance(tree, dict):
        return (type(tree), tuple((key, structure(value)) for key, value in tree.items()))
    if isinstance(tree, tuple | list):
        return (tuple if isinstance(tree, torch.Size) else type(tree), tuple(structure(child) for child in tree))
    if _is_dataclass(tree):
        fields = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        return (type(tree), tuple((name, structure(getattr(tree, name))) for name in fields))
    state = object_state(tree)
    if state is not None:
        return (type(tree), tuple((name, structure(value)) for name, value in state.items()))
    return None


def path_text(path: Path) -> str:
    """Return a path as a user would write it: ``kwargs.labels``, ``args[0][2].mask``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f"{'.' if text else ''}{key}"
    return text or "<value>"


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in leaf order."""
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
