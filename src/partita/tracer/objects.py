"""Plain Python objects that a forward makes, passes down to its layers and fills: caches, contexts, accumulators.

``state_of`` opens an object as a mapping of its attributes.  A ``Snapshot`` remembers what lists, dicts and objects
held, so that it can be said what a call changed in them, and so that what a trace did to them can be undone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from partita.errors import PartitaError

ATOMS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, nn.Module, enum.Enum, type, bool, int, float, str)
"""Types whose values are never looked into."""


def state_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object, slots included; None for values that are no plain objects.

    Modules, tensors, enum members, functions and other callables are not plain objects, nor are exceptions.
    """
    if value is None or isinstance(value, ATOMS) or callable(value) or isinstance(value, BaseException):
        return None
    if isinstance(value, dict | list | tuple) or not _is_simple(type(value)):
        return None
    slots = [s for c in type(value).__mro__ for s in _slots(c) if hasattr(value, s)]
    if not hasattr(value, "__dict__"):
        return {s: getattr(value, s) for s in slots} if slots else None
    return {**{s: getattr(value, s) for s in slots}, **vars(value)}


def _is_simple(cls: type) -> bool:
    """Whether objects of a class consist of their attributes and nothing else."""
    new: Any = cls.__new__
    return new is object.__new__ or issubclass(cls, SimpleNamespace)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(n for n in names if not n.startswith("__"))


def rebuilt(value: Any, state: dict[str, Any]) -> Any:
    """Return an object of the same class with other attributes; no constructor runs."""
    cls: Any = type(value)
    new = cls.__new__(cls)
    for name, child in state.items():
        object.__setattr__(new, name, child)
    return new


def parts(value: Any) -> dict[Any, Any] | None:
    """Return what a list, tuple, dict or plain object consists of; None for anything else."""
    if isinstance(value, ATOMS):
        return None
    if isinstance(value, dict):
        return dict(dict.items(value))  # what it holds, not what a class of the user's makes of it when asked
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return state_of(value)


class Snapshot:
    """What some values, and everything that they lead to, held at one moment.

    Args:
        values: Lists, dicts, objects, or anything else (which has nothing to remember).
    """

    def __init__(self, values: Any) -> None:
        self._held: dict[int, tuple[Any, dict[Any, Any]]] = {}
        pending = [values]
        while pending:
            value = pending.pop()
            inside = None if id(value) in self._held else parts(value)
            if inside is not None:
                self._held[id(value)] = (value, inside)
                pending += inside.values()

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (holder, key, new value) for every entry that is new or another one; removed entries do not count."""
        for value, before in self._held.values():
            for key, now in (parts(value) or {}).items():
                if key not in before or not _same(before[key], now):
                    yield value, key, now

    def handed_back(self) -> str:
        """Say what has been put into the values, for an error ("" if nothing has)."""
        return next((f"puts {key!r} into the {type(holder).__name__}" for holder, key, _ in self.changes()), "")

    def changed(self) -> str:
        """Say what has changed since, by type ("" if nothing has)."""
        for value, before in self._held.values():
            now = parts(value) or {}
            if now.keys() != before.keys() or not all(_same(before[k], now[k]) for k in now):
                return f"the {type(value).__name__} that it is given"
        return ""

    def restore(self) -> None:
        """Put everything back as it was."""
        for value, before in self._held.values():
            put_back(value, before)


def check_handed_back(what: str, error: type[PartitaError]) -> None:
    """Refuse a call that gives results by way of its arguments.

    Args:
        what: What `Snapshot.handed_back` says.
        error: The class of the refusal.
    """
    if what:
        raise error(
            f"the model's forward {what} that it is given as an argument, which a parallel call does not hand back",
            hint="return it instead (for a cache: call the model without past_key_values, with use_cache=False), "
            "or let the forward change a copy",
            refused=True,
        )


def guarded(function: Callable[..., Any], error: type[PartitaError]) -> Callable[..., Any]:
    """Return a function that refuses to give results by way of its arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        held = Snapshot((args, kwargs))
        result = function(*args, **kwargs)
        check_handed_back(held.handed_back(), error)
        return result

    return call


_MODULE = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module's class keeps on it beside parameters, buffers, submodules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE}


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor or leads to one."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            return True
        if id(value) not in seen:
            seen.add(id(value))
            pending += (parts(value) or {}).values()
    return False


def put_back(value: Any, before: dict[Any, Any]) -> None:
    """Let a list, dict or plain object consist of what it did before.

    Args:
        value: The list, dict or object; a tuple stays as it is.
        before: Its `parts` then.
    """
    if isinstance(value, tuple) or same_parts(parts(value) or {}, before):
        return
    if isinstance(value, list):
        list.__setitem__(value, slice(None), list(before.values()))
    elif isinstance(value, dict):
        _restore_dict(value, before)
    else:
        _restore_object(value, before)


def _restore_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    base: Any = next(c for c in type(value).__mro__ if c.__module__ in {"builtins", "collections"})  # no user's methods
    for key in list(value):
        base.__delitem__(value, key)
    for key, child in before.items():
        base.__setitem__(value, key, child)


def _restore_object(value: Any, before: dict[Any, Any]) -> None:
    for name in [n for n in state_of(value) or {} if n not in before]:
        object.__delattr__(value, name)
    for name, child in before.items():
        object.__setattr__(value, name, child)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, bool | int | float | str) and repr(a) == repr(b)


def same_parts(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether two tables hold the very same objects under the same keys."""
    return now.keys() == before.keys() and all(now[key] is before[key] for key in now)
