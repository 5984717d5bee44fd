"""Check the nouns at every boundary against numbered rules.

`verify` returns what is wrong, `check` raises it.  A plan's cluster and schedule are checked with it.  The rules are
plain functions in the tables of `partita.ir.rules`; ``rules_of(cls)`` lists them with their sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

from partita.errors import InvalidPlanError
from partita.ir.rules import Rule

TABLES = {"ModelGraph": "graph", "Cluster": "cluster", "Schedule": "schedule", "Plan": "plan"}
"""Module of the rules by class name; imported when needed, as reading a plan needs no rules of graphs."""
SHOWN = 8
"""Violations that an error message spells out."""


class Violation(NamedTuple):
    """One broken rule at one place.

    Attributes:
        code: The rule's number.
        place: Where in the noun, e.g. ``stages[1].ranks``.
        text: What is wrong there, with figures.
        sentence: What the rule demands.
    """

    code: str
    place: str
    text: str
    sentence: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.code} {self.place}: {self.text} (rule: {self.sentence})"


def rules_of(cls: type) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
    """Return the rules of structure and of meaning of a noun.

    Raises:
        TypeError: If there are no rules for the class.
    """
    name = TABLES.get(cls.__name__)
    if name is None:
        raise TypeError(f"there are rules for {', '.join(TABLES)}, not for {cls.__name__}")
    table = import_module(f"partita.ir.rules.{name}")
    return table.STRUCTURE, table.MEANING


def verify(noun: object) -> tuple[Violation, ...]:
    """Return every violation of a graph, cluster, schedule or plan; of meaning only if the structure is sound."""
    parts = [("", noun)]
    if type(noun).__name__ == "Plan":
        parts += [("cluster.", noun.cluster), ("schedule.", noun.schedule)]  # type: ignore[attr-defined]
    for group in (0, 1):
        found = tuple(
            violation for prefix, part in parts for violation in _apply(rules_of(type(part))[group], part, prefix)
        )
        if found:
            return found
    return ()


def _apply(rules: tuple[Rule, ...], noun: object, prefix: str) -> Iterator[Violation]:
    for rule in rules:
        for place, text in rule.broken(noun):
            yield Violation(rule.code, prefix + place, text, rule.sentence)


def check(noun: object) -> None:
    """Raise the violations of a graph, cluster, schedule or plan.

    Raises:
        InvalidPlanError: If there are any; ``violations`` holds them.
    """
    violations = verify(noun)
    if not violations:
        return
    name = type(noun).__name__
    count = "one rule" if len(violations) == 1 else f"rules at {len(violations)} places"
    lines = [f"this {name} breaks {count}:", *(f"  {violation}" for violation in violations[:SHOWN])]
    if len(violations) > SHOWN:
        lines.append(f"  and {len(violations) - SHOWN} more")
    hint = (
        "a noun written by partita keeps every rule; if it was edited by hand, undo that edit" if name == "Plan" else ""
    )
    raise InvalidPlanError("\n".join(lines), hint=hint, violations=violations)
