"""Frozen dataclasses that are cheap to define.

Why this exists.  ``partita inspect plan.json`` must answer at once, and the standard library's ``dataclass`` writes and
compiles the source of six methods when a class is defined: 0.8 ms per noun, and 10 ms more to import ``dataclasses``
and ``inspect``.  For the 20 nouns of a plan that is three times the start of the interpreter.  This decorator installs
shared methods instead: 0.05 ms per class.

To a type checker it *is* ``dataclasses.dataclass``.  At run time the classes answer ``dataclasses.fields``,
``replace``, ``asdict`` and ``is_dataclass``, and pickle and copy, like the original
(``tests/unit/ir/test_frozen.py`` compares the two).  It knows exactly one form,
``@dataclass(frozen=True, slots=True, kw_only=True)``; ``field`` takes ``default``, ``default_factory``, ``compare`` and
``metadata``.
"""

from __future__ import annotations

from operator import attrgetter

TYPE_CHECKING = False  # spares the import of `typing`; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import dataclass, field
    from typing import Any

__all__ = ["dataclass", "field", "fields_of"]

_MISSING: Any = object()


class Field:
    """What one field of a noun declares.

    Attributes:
        name: The field's name.
        default: Its default, or the private mark of none.
        default_factory: Makes the default, or None.
        compare: Takes part in ``==`` and ``hash``.
        metadata: Free marks, e.g. ``{"volatile": True}``.
    """

    __slots__ = ("compare", "default", "default_factory", "metadata", "name")

    def __init__(
        self,
        *,
        default: Any = _MISSING,
        default_factory: Callable[[], Any] | None = None,
        compare: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = ""
        self.default = default
        self.default_factory = default_factory
        self.compare = compare
        self.metadata = metadata or {}

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is _MISSING and self.default_factory is None


class _StandardFields:
    """``__dataclass_fields__``, made by the standard library when somebody asks for it."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[str, Any] | None = None

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        if self._made is None:
            self._made = _standard_fields(owner)
        return self._made


def _standard_fields(owner: type) -> dict[str, Any]:
    import dataclasses

    specs: list[tuple[str, Any, Any]] = []
    for entry in fields_of(owner):
        options: dict[str, Any] = {"compare": entry.compare, "metadata": entry.metadata}
        if entry.default_factory is not None:
            options["default_factory"] = entry.default_factory
        elif entry.default is not _MISSING:
            options["default"] = entry.default
        specs.append((entry.name, owner.__annotations__[entry.name], dataclasses.field(**options)))
    made: Any = dataclasses.make_dataclass(owner.__name__, specs, kw_only=True, frozen=True)
    fields: dict[str, Any] = made.__dataclass_fields__
    return fields


def fields_of(cls: type) -> tuple[Field, ...]:
    """Return the declared fields of a noun, in order."""
    fields: tuple[Field, ...] = cls.__noun_fields__  # type: ignore[attr-defined]
    return fields


def _init(self: Any, **values: Any) -> None:
    cls = type(self)
    for entry, put in cls.__noun_setters__:
        value = values.pop(entry.name, entry.default)
        if value is _MISSING:
            if entry.default_factory is None:
                raise TypeError(f"{cls.__name__}() misses the required {entry.name!r}")
            value = entry.default_factory()
        put(self, value)
    if values:
        raise TypeError(f"{cls.__name__}() got unexpected {', '.join(values)}; it has {', '.join(cls.__slots__)}")


def _repr(self: Any) -> str:
    cls = type(self)
    return f"{cls.__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in cls.__slots__])})"


def _eq(self: Any, other: Any) -> Any:
    cls: Any = type(self)
    if cls is not type(other):
        return NotImplemented
    return cls.__noun_key__(self) == cls.__noun_key__(other)


def _hash(self: Any) -> int:
    return hash(type(self).__noun_key__(self))


def _refuse(self: object, name: str, value: object = None) -> None:  # noqa: ARG001  (the signature of __setattr__ and __delattr__)
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot change {name!r} of a {type(self).__name__}; use dataclasses.replace")


def _reduce(self: Any) -> tuple[Any, ...]:
    cls = type(self)
    return _restore, (cls, *(getattr(self, name) for name in cls.__slots__))


def _restore(cls: Any, *values: Any) -> Any:
    made = cls.__new__(cls)
    for (_, put), value in zip(cls.__noun_setters__, values, strict=True):
        put(made, value)
    return made


def _no_key(_: object) -> tuple[()]:
    return ()


def _define(cls: type) -> type:
    """Return ``cls`` anew, with slots and the shared methods."""
    names = tuple(cls.__annotations__)
    namespace = {key: value for key, value in cls.__dict__.items() if key not in {"__dict__", "__weakref__"}}
    entries = []
    for name in names:
        default = namespace.pop(name, _MISSING)
        entry = default if isinstance(default, Field) else Field(default=default)
        entry.name = name
        entries.append(entry)
    compared = [entry.name for entry in entries if entry.compare]
    shared = {"__init__": _init, "__repr__": _repr, "__eq__": _eq, "__hash__": _hash, "__reduce__": _reduce}
    for key, value in (shared | {"__setattr__": _refuse, "__delattr__": _refuse, "__match_args__": ()}).items():
        namespace.setdefault(key, value)
    namespace |= {"__slots__": names, "__noun_fields__": tuple(entries), "__dataclass_fields__": _StandardFields()}
    namespace["__noun_key__"] = attrgetter(*compared) if compared else _no_key
    made: Any = type(cls)(cls.__name__, cls.__bases__, namespace)
    made.__qualname__ = cls.__qualname__
    made.__noun_setters__ = tuple((entry, made.__dict__[entry.name].__set__) for entry in entries)
    noun: type = made
    return noun


def _dataclass(*, frozen: bool, slots: bool, kw_only: bool) -> Callable[[type], type]:
    if not (frozen and slots and kw_only):
        raise TypeError("a noun is frozen, has slots and takes keywords only")
    return _define


if not TYPE_CHECKING:
    dataclass = _dataclass
    field = Field
