"""The user's forward hooks on modules that are opened: recorded as calls, so that they run on live values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as module_code

from partita.errors import CaptureError

TABLES = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, slots=True)
class UserHook:
    """One of a module's forward hooks, found on the live module when it is called.

    Attributes:
        table: The module's table of hooks.
        index: Its position there.
    """

    table: str
    index: int

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """Call the hook; one that was removed since does nothing."""
        hooks = list(getattr(module, self.table).values())
        return hooks[self.index](module, *given) if self.index < len(hooks) else None


@contextlib.contextmanager
def wrapped_hooks(model: nn.Module, wrap: Callable[[str, UserHook, Any], Any]) -> Iterator[None]:
    """Put wrappers around the forward hooks of a model's modules.

    Args:
        model: The model.
        wrap: Gives the wrapper for a module's path, the hook's place and the hook.
    """
    tables = [(path, name, getattr(module, name)) for path, module in model.named_modules() for name in TABLES]
    before = [dict(table) for _, _, table in tables]
    for path, name, table in tables:
        for index, (key, hook) in enumerate(list(table.items())):
            table[key] = wrap(path, UserHook(name, index), hook)
    try:
        yield
    finally:
        for (_, _, table), old in zip(tables, before, strict=True):
            for key, hook in old.items():
                if key in table:
                    table[key] = hook


def check_no_global_hooks() -> None:
    """Keep a model whole while hooks on all modules are registered: opened modules would pass them by.

    Raises:
        CaptureError: If there are any.
    """
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    if any(getattr(module_code, f"_global_{name}") for name in names):
        raise CaptureError(
            "hooks on all modules are registered (torch.nn.modules.module.register_module_*_hook)",
            hint="remove them, or register hooks on the modules that they are meant for",
        )


@contextlib.contextmanager
def hooks_as_they_were(model: nn.Module) -> Iterator[None]:
    """Take back hooks that a forward registers inside: what notes that it did so is taken back as well."""
    tables = [t for m in model.modules() for n, t in vars(m).items() if "_hooks" in n and isinstance(t, dict)]
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, held in before:
            if table.keys() != held.keys():
                table.clear()
                table.update(held)
