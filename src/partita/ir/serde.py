"""Canonical JSON for graphs, their reports, clusters, schedules and plans, driven by the nouns' type hints.

Format.  A document is one JSON object (RFC 8259, UTF-8): ``schema`` and ``version`` first, then the noun's fields in
the order of their declaration; every field is written, defaults too.

* a noun is an object; a tuple is an array; text, whole numbers, ``true``/``false`` and ``null`` are themselves
* a float is written by ``repr``; an infinite one as ``"inf"`` or ``"-inf"``; NaN is refused
* a placement is ``{"shard": 0}``, ``"replicate"`` or ``"partial"``
* a schedule's ``ranks`` are lines of its text grammar, one per pipeline position
* a field marked ``volatile`` (the solver's wall time) is not written
* layout: a value that fits on a line of 160 characters is on one line; any other has one element per
  line, indented by 1

Two equal nouns give equal bytes, and ``to_json(from_json(cls, text)) == text`` for every text that `to_json` wrote.
Reading is strict: an unknown, missing or doubled key, a wrong type and an unknown version are errors with the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from partita.errors import InvalidPlanError
from partita.ir.codec import Misfit, codec, describe

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
"""Version of the document format; a reader refuses every other."""
SCHEMAS = {
    "ModelGraph": "partita.graph",
    "Cluster": "partita.cluster",
    "Schedule": "partita.schedule",
    "Plan": "partita.plan",
    "CaptureReport": "partita.capture-report",
}
"""What a document may hold: class name to the text in its ``schema`` field."""
LINE = 160
"""Characters of the longest line that holds more than one value."""

T = TypeVar("T")


def to_json(noun: object) -> str:
    """Return a noun of `SCHEMAS` as canonical JSON, with a line break at the end.

    Raises:
        TypeError: For any other object.
        InvalidPlanError: With the place, if a field holds something else than its type says, or NaN.
    """
    cls = type(noun)
    schema = _schema(cls)
    try:
        fields = codec(cls).encode(noun)
    except Misfit as misfit:
        raise InvalidPlanError(f"{misfit.place()}: {misfit.what}", path=misfit.place()) from None
    return layout_json({"schema": schema, "version": VERSION} | fields)


def from_json(cls: type[T], text: str) -> T:
    """Read a document written by `to_json`.

    Args:
        cls: A class of `SCHEMAS`.
        text: The document.

    Raises:
        InvalidPlanError: With the place in the document, if it is no such document.

    Complexity: Linear; 6,000 operators take about 0.15 s.
    """
    schema = _schema(cls)
    document = _parse(text, schema)
    found, version = document.pop("schema", None), document.pop("version", None)
    if found != schema:
        known = found in SCHEMAS.values()
        hint = (
            f"this is a {found} document; read it as such" if known else f"a {schema} document begins with its schema"
        )
        raise InvalidPlanError(f"$.schema: expected {schema!r}, found {found!r}", hint=hint, path="$.schema")
    if type(version) is not int or version != VERSION:
        hint = "plan again with this version of partita, or read the file with the version that wrote it"
        raise InvalidPlanError(f"$.version: expected {VERSION}, found {version!r}", hint=hint, path="$.version")
    try:
        noun: T = codec(cls).decode(document)
    except Misfit as misfit:
        hint = misfit.hint or "write the file with partita, or compare it with docs/plan-format.md"
        raise InvalidPlanError(f"{misfit.place()}: {misfit.what}", hint=hint, path=misfit.place()) from None
    return noun


def write(noun: object, path: str | Path) -> None:
    """Write a noun's document to ``path``, the same bytes on every platform."""
    with open(path, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123  (pathlib costs the CLI 4 ms)
        file.write(to_json(noun))


def read(cls: type[T], path: str | Path) -> T:
    """Read a noun's document from ``path``; errors name the file."""
    with open(path, encoding="utf-8", newline="") as file:  # noqa: PTH123  (pathlib costs the CLI 4 ms)
        try:
            return from_json(cls, file.read())
        except UnicodeDecodeError as error:
            raise InvalidPlanError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
        except InvalidPlanError as error:
            raise type(error)(f"{path}: {error.message}", hint=error.hint, **error.data) from None


def layout_json(document: dict[str, Any]) -> str:
    """Write a JSON object in the layout of this module's documents, with a line break at the end."""
    return _layout(document, 0, LINE) + "\n"


def _parse(text: str, schema: str) -> dict[str, Any]:
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        hint = f"a {schema} document is written by partita; was the file cut off?"
        raise InvalidPlanError(f"not JSON: {error.msg} at {where}", hint=hint, path="$") from None
    except Misfit as misfit:
        raise InvalidPlanError(misfit.what, hint=misfit.hint, path="$") from None
    except (ValueError, RecursionError) as error:
        raise InvalidPlanError(f"not a {schema} document: {error}", path="$") from None
    if not isinstance(document, dict):
        hint = f"a {schema} document is a JSON object"
        raise InvalidPlanError(f"$: expected an object, found {describe(document)}", hint=hint, path="$")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Misfit(f"the key {twice!r} occurs twice in one object", hint="remove one of them")
    return made


def _no_constant(text: str) -> Any:
    raise Misfit(f"{text} is not JSON", hint='an infinity is written as the text "inf" or "-inf"')


def _layout(value: Any, depth: int, used: int) -> str:
    """Write a JSON value: on one line if it fits behind the ``used`` characters of its key, else in rows."""
    line = _dumps(value)
    if not isinstance(value, dict | list) or not value or depth + used + len(line) < LINE:
        return line
    if isinstance(value, dict):
        keys = [f"{_dumps(key)}: " for key in value]
        rows = [key + _layout(entry, depth + 1, len(key)) for key, entry in zip(keys, value.values(), strict=True)]
        first, last = "{", "}"
    else:
        rows, first, last = [_layout(entry, depth + 1, 0) for entry in value], "[", "]"
    indent = "\n" + " " * (depth + 1)
    return f"{first}{indent}{f',{indent}'.join(rows)}\n{' ' * depth}{last}"


_dumps: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode


def _schema(cls: type) -> str:
    if cls.__name__ not in SCHEMAS:
        raise TypeError(f"a document holds one of {', '.join(SCHEMAS)}, not {cls.__name__}")
    return SCHEMAS[cls.__name__]
