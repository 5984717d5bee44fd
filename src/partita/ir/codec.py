"""From a type hint to a pair of functions: noun to JSON value, and back with every check.

A codec is made once per type from the noun's annotations, so a new field needs no code here.  Encoding and decoding
raise `Misfit` where a value does not fit; each container adds its own step on the way out, so a good value pays nothing
for the path.  The kinds of hints are few on purpose: int, float, bool, str, a literal, a noun, tuples, ``X | None`` and
the placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import repeat
from math import isnan
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from partita.errors import ScheduleSyntaxError
from partita.ir.frozen import fields_of
from partita.ir.layout import Partial, Replicate, Shard
from partita.ir.schedule import Schedule, parse_action

INFINITIES = {"inf": float("inf"), "-inf": float("-inf")}
"""Text of the two floats that JSON has no number for."""
WORDS: dict[str, Replicate | Partial] = {"replicate": Replicate(), "partial": Partial()}
"""Text of the placements without a dimension."""


class Codec(NamedTuple):
    """Both directions of one type."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Misfit(Exception):  # noqa: N818  (a signal between this module and `serde`, not an error that users see)
    """A value does not fit its type.

    Attributes:
        what: What was expected and what was found.
        hint: What to do, or "".
        path: The way to it, innermost step first.
    """

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.path: list[str | int] = []

    def place(self) -> str:
        """Return the JSON path, e.g. ``$.stages[2].ranks``."""
        return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in reversed(self.path))


def describe(value: object) -> str:
    """Name a JSON value for a message."""
    kinds = {dict: "an object", list: "an array", str: "text", bool: "a truth value", type(None): "null"}
    kind = kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
    return f"{kind} ({value!r})" if isinstance(value, str | int | float) and len(repr(value)) < 60 else kind


def codec(hint: Any) -> Codec:
    """Return the codec of a type hint; each is made once.

    Raises:
        TypeError: For a kind of hint that the format has no form for.
    """
    return _make(hint)


@cache
def _make(hint: Any) -> Codec:
    if hint is float:
        return Codec(_encode_float, _decode_float)
    if hint in {int, bool, str}:
        return _plain(hint)
    if hasattr(hint, "__noun_fields__"):
        return _noun(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(codec(arguments[0]), arguments[0] if arguments[0] in {int, str} else None)
    if origin is tuple:
        return _record(tuple(codec(argument) for argument in arguments))
    if origin is UnionType and set(arguments) == {Shard, Replicate, Partial}:
        return Codec(_encode_placement, _decode_placement)
    if origin is UnionType and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(codec(arguments[0]))
    raise TypeError(f"no JSON form for the type {hint}")


def _plain(kind: type) -> Codec:
    name = {int: "a whole number", bool: "true or false", str: "text"}[kind]

    def same(value: Any) -> Any:
        if type(value) is not kind:
            raise Misfit(f"expected {name}, found {describe(value)}")
        return value

    return Codec(same, same)


def _encode_float(value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misfit(f"expected a number, found {describe(value)}")
    if isnan(value):
        raise Misfit("NaN is no figure of a plan")
    if value in INFINITIES.values():
        return "inf" if value > 0 else "-inf"
    return float(value)


def _decode_float(value: Any) -> float:
    if type(value) is str and value in INFINITIES:
        return INFINITIES[value]
    if type(value) is not float and type(value) is not int:
        raise Misfit(f"expected a number, found {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = INFINITIES["inf"]
    if number - number != 0:
        raise Misfit("the number is too large for a float", hint='an infinity is written as the text "inf"')
    return number


def _literal(words: tuple[Any, ...]) -> Codec:
    known = frozenset(words)

    def same(value: Any) -> Any:
        if type(value) is not str or value not in known:
            raise Misfit(f"expected one of {', '.join(words)}; found {describe(value)}")
        return value

    return Codec(same, same)


def _each(values: Any, functions: Iterable[Callable[[Any], Any]]) -> list[Any]:
    """Apply one function to each value; a misfit learns the position."""
    made: list[Any] = []
    try:
        for value, function in zip(values, functions, strict=False):
            made.append(function(value))
    except Misfit as misfit:
        misfit.path.append(len(made))
        raise
    return made


def _all_exact(values: Iterable[Any], kind: type) -> bool:
    return set(map(type, values)) <= {kind}


def _sequence(inner: Codec, exact: type | None = None) -> Codec:
    """Tuples of any length; ``exact`` elements are tested at once, as arrays of ids are most of a graph."""

    def write(values: Any) -> list[Any]:
        if type(values) is not tuple:
            raise Misfit(f"expected a tuple, found {describe(values)}")
        if exact is not None and _all_exact(values, exact):
            return list(values)
        return _each(values, repeat(inner.encode))

    def read(values: Any) -> tuple[Any, ...]:
        if type(values) is not list:
            raise Misfit(f"expected an array, found {describe(values)}")
        if exact is not None and _all_exact(values, exact):
            return tuple(values)
        return tuple(_each(values, repeat(inner.decode)))

    return Codec(write, read)


def _record(inner: tuple[Codec, ...]) -> Codec:
    """Tuples of a fixed length."""

    def write(values: Any) -> list[Any]:
        if type(values) is not tuple or len(values) != len(inner):
            raise Misfit(f"expected a tuple of {len(inner)} elements, found {describe(values)}")
        return _each(values, [one.encode for one in inner])

    def read(values: Any) -> tuple[Any, ...]:
        if type(values) is not list or len(values) != len(inner):
            raise Misfit(f"expected an array of {len(inner)} elements, found {describe(values)}")
        return tuple(_each(values, [one.decode for one in inner]))

    return Codec(write, read)


def _optional(inner: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda value: None if value is None else inner.decode(value),
    )


def _encode_placement(value: Any) -> Any:
    if type(value) is Shard:
        return {"shard": codec(int).encode(value.dim)}
    for word, placement in WORDS.items():
        if value == placement:
            return word
    raise Misfit(f"expected a placement, found {describe(value)}")


def _decode_placement(value: Any) -> Any:
    if type(value) is str and value in WORDS:
        return WORDS[value]
    if type(value) is dict and value.keys() == {"shard"}:
        return Shard(dim=codec(int).decode(value["shard"]))
    raise Misfit(f'expected {{"shard": DIM}}, "replicate" or "partial"; found {describe(value)}')


def _line() -> Codec:
    """The actions of one pipeline position as a line of the schedules' grammar."""
    read_action = cache(parse_action)  # a schedule repeats few texts

    def write(actions: Any) -> str:
        return " ".join([str(action) for action in actions])

    def read(line: Any) -> tuple[Any, ...]:
        if type(line) is not str:
            raise Misfit(f"expected a line of actions, found {describe(line)}")
        try:
            return tuple(map(read_action, line.split(" "))) if line else ()
        except ScheduleSyntaxError as error:
            raise Misfit(error.message, hint=error.hint) from None

    return Codec(write, read)


def _noun(cls: Any) -> Codec:
    """An object with one key per field that is not volatile."""
    fields = [entry for entry in fields_of(cls) if not entry.metadata.get("volatile")]
    hints = get_type_hints(cls)
    codecs = {entry.name: codec(hints[entry.name]) for entry in fields}
    if cls is Schedule:
        codecs["ranks"] = _sequence(_line())
    encoders = [(name, one.encode) for name, one in codecs.items()]
    decoders = [(name, one.decode, getattr(cls, name).__set__) for name, one in codecs.items()]
    volatile = [(getattr(cls, entry.name).__set__, entry.default) for entry in fields_of(cls) if entry not in fields]
    keys = set(codecs)

    def write(noun: Any) -> dict[str, Any]:
        if type(noun) is not cls:
            raise Misfit(f"expected a {cls.__name__}, found {describe(noun)}")
        made = {}
        name = ""
        try:
            for name, encode in encoders:
                made[name] = encode(getattr(noun, name))
        except Misfit as misfit:
            misfit.path.append(name)
            raise
        return made

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise Misfit(f"expected an object ({cls.__name__}), found {describe(value)}")
        if value.keys() != keys:
            raise _wrong_keys(cls.__name__, value.keys(), keys)
        noun = cls.__new__(cls)
        name = ""
        try:
            for name, decode, put in decoders:
                put(noun, decode(value[name]))
        except Misfit as misfit:
            misfit.path.append(name)
            raise
        for put, default in volatile:
            put(noun, default)
        return noun

    return Codec(write, read)


def _wrong_keys(noun: str, found: AbstractSet[str], known: AbstractSet[str]) -> Misfit:
    unknown, missing = sorted(found - known), sorted(known - found)
    parts = [f"unknown key {key!r}" for key in unknown] + [f"missing key {key!r}" for key in missing]
    hint = ""
    if unknown:
        from difflib import get_close_matches

        close = get_close_matches(unknown[0], sorted(known), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"a {noun} has {', '.join(sorted(known))}"
    return Misfit(f"{noun} with {', '.join(parts)}", hint=hint)
