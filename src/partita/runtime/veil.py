"""Attributes that a forward leaves on its modules: not to be read after a parallel call.

A layer may keep an auxiliary loss or its last attention on itself.  After a parallel call such an attribute holds what
one microbatch left on one rank, or nothing at all, so reading it is refused by name.  While stages run, the modules see
the real values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from partita.errors import ExecutionError


class Elsewhere:
    """Stands for an attribute that only the plain model could show; any use of it raises."""

    def __init__(self, place: str) -> None:
        object.__setattr__(self, "_place", place)

    def __getattr__(self, name: str) -> Any:
        """Refuse, except what interpreters and copiers ask of every object."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        _refuse(self)

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an operand of a tensor operation."""
        flat = [*args, *(kwargs or {}).values()]
        flat += [inner for value in flat if isinstance(value, list | tuple) for inner in value]
        _refuse(next(value for value in flat if isinstance(value, Elsewhere)))

    def __repr__(self) -> str:
        """Say what it is."""
        return f"<{object.__getattribute__(self, '_place')}: not available after a parallel call>"


def _refuse(stand_in: Any, *_args: Any) -> NoReturn:
    place = object.__getattribute__(stand_in, "_place")
    raise ExecutionError(
        f"{place!r} is stored by a forward, and after a parallel call no rank has its value for the whole batch",
        hint="return the value from the model's forward (an auxiliary loss: add it to the loss there)",
    )


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs", "pow", "matmul", "rmatmul"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "float", "int", "len", "iter", "getitem", "setitem", "contains"),
    "format",
):
    setattr(Elsewhere, f"__{_name}__", _refuse)
Elsewhere.__hash__ = object.__hash__  # type: ignore[method-assign]


class Veil:
    """Hides what forwards store on the modules of a live tree.

    Args:
        root: The live module tree.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._real: dict[tuple[str, str], Any] = {}
        self._known: set[tuple[str, str]] = set()

    def hide(self, stored: Mapping[str, tuple[str, ...]]) -> None:
        """Hide attributes, by module path, from now on."""
        self._known |= {(path, name) for path, names in stored.items() for name in names}
        self._draw()

    def _draw(self) -> None:
        for path, name in self._known:
            attributes = vars(self._root.get_submodule(path))
            if not isinstance(attributes.get(name), Elsewhere):
                if name in attributes:
                    self._real[path, name] = attributes[name]
                attributes[name] = Elsewhere(f"{path}.{name}" if path else name)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Show the modules their real attributes while they run."""
        for path, name in self._known:
            attributes = vars(self._root.get_submodule(path))
            if isinstance(attributes.get(name), Elsewhere):
                del attributes[name]
                if (path, name) in self._real:
                    attributes[name] = self._real.pop((path, name))
        try:
            yield
        finally:
            self._draw()
