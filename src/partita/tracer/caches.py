"""Memories that outlive a trace: caches of functions, and tables that modules and classes keep.

A user's ``functools.lru_cache`` around a function that makes a tensor, or a global table of masks by length, would keep
what it got while tracing, a tensor without values, and hand it to the real model later: wrong numbers, without an error
where the tensor is an index.  What such memories learn while the model runs without values is forgotten again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from partita.tracer.objects import holds_tensors, parts, put_back, same_parts

_NOT_THE_USERS = ("torch", "sympy", "mpmath", "numpy", "partita", "functools", "re", "typing", "inspect", "importlib")


def _is_users(module: str | None) -> bool:
    return str(module).partition(".")[0] not in _NOT_THE_USERS


def _caches() -> list[Any]:
    """Return every live function cache that may belong to a model."""
    kind = type(functools.lru_cache(_is_users))
    return [o for o in gc.get_objects() if type(o) is kind and _is_users(o.__module__)]


def _tables(model: nn.Module) -> list[tuple[Any, str, Any, Any]]:
    """Return the tables, tensors and empty places of the classes of a model and of the files they are written in.

    Returns:
        For each its owner (a module or class), its name there, itself, and a copy of what it holds.
    """
    classes = {base for m in model.modules() for base in type(m).__mro__ if _is_users(base.__module__)}
    owners = [*classes, *{id(f): f for c in classes if (f := sys.modules.get(c.__module__)) is not None}.values()]
    found = []
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if not name.startswith("__") and isinstance(value, dict | list | torch.Tensor | None):
                found.append((owner, name, value, parts(value) if isinstance(value, dict | list) else None))
    return found


def _forget(owner: Any, name: str, value: Any, held: Any) -> None:
    """Restore a table or a name if it has got tensors."""
    now = vars(owner).get(name)
    if now is not value and holds_tensors(now):
        setattr(owner, name, value)
    if held is not None and not same_parts(parts(value) or {}, held) and holds_tensors(value):
        put_back(value, held)


@contextlib.contextmanager
def forgetful(model: nn.Module) -> Iterator[None]:
    """Forget what caches and tables learn inside.

    Args:
        model: Its classes, and the files they are written in, are looked at; caches of functions are found anywhere.
    """
    before = {id(cache): cache.cache_info().misses for cache in _caches()}
    tables = _tables(model)
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != before.get(id(cache), 0):
                cache.cache_clear()
        for owner, name, value, held in tables:
            _forget(owner, name, value, held)
