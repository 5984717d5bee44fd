"""The rules that every noun keeps, one small function each, in tables that `partita.ir.verify` applies.

A rule is a generator over what breaks it: pairs of a place in the noun and a text with the figures.  The rules of a
table's ``STRUCTURE`` hold on any noun; those of its ``MEANING`` may take the structure for granted, so they are asked
only when it is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Findings = Iterator[tuple[str, str]]
"""What breaks a rule: place in the noun, and what is wrong there."""


class Rule(NamedTuple):
    """One numbered rule.

    Attributes:
        code: A letter for the noun (G, C, S, P) and three digits; never reused.
        sentence: What always holds.
        broken: Finds what breaks it.
    """

    code: str
    sentence: str
    broken: Callable[[Any], Findings]
