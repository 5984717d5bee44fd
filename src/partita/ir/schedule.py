"""When each stage does what: actions, their text grammar, and schedules.

Grammar (one action, no blanks)::

    action     := STAGE compute MICROBATCH
                | STAGE send MICROBATCH ">" STAGE
                | STAGE recv MICROBATCH "<" STAGE
                | STAGE "REDUCE_GRAD"
    compute    := "F" | "B" | "I" | "W"
    send       := "SEND_F" | "SEND_B"
    recv       := "RECV_F" | "RECV_B"

``2F0`` is the forward of microbatch 0 on stage 2; ``2SEND_F0>3`` sends what stage 3 reads of it; ``3RECV_F0<2`` is
its other end.  ``B`` is the whole backward, ``I`` the input-gradient half and ``W`` the weight-gradient half.
``REDUCE_GRAD`` sums the stage's gradients over its replicas and over the stages that share a parameter.

The parser is total: a text is an action or a `ScheduleSyntaxError` with the column.  ``parse_action(str(a)) == a``
for every action.
"""

from __future__ import annotations

from typing import Literal

from partita.errors import ScheduleSyntaxError
from partita.ir.frozen import dataclass

ActionKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"]
COMPUTE_KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")
SEND_KINDS: tuple[ActionKind, ...] = ("SEND_F", "SEND_B")
RECV_KINDS: tuple[ActionKind, ...] = ("RECV_F", "RECV_B")
# Longest first, so that no kind hides another in the parser.
_KINDS_BY_LENGTH: tuple[ActionKind, ...] = ("REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "F", "B", "I", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing one rank does.

    Attributes:
        stage: The stage that acts.
        kind: What it does.
        microbatch: Which microbatch; None for ``REDUCE_GRAD``.
        peer: The other stage of a send or receive; None otherwise.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """Return the action in the text grammar."""
        mark = "" if self.peer is None else (">" if self.kind in SEND_KINDS else "<") + str(self.peer)
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}{mark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ordered actions of every pipeline position.

    Attributes:
        name: The maker's name, e.g. ``"1f1b"``.
        num_stages: Number of stages.
        num_microbatches: Microbatches per step and replica.
        ranks: For each pipeline position its actions in order.  A position is one device per data-parallel replica.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def position_of_stage(self) -> dict[int, int]:
        """Return for each stage the pipeline position that runs it."""
        return {action.stage: position for position, actions in enumerate(self.ranks) for action in actions}

    def lines(self) -> tuple[str, ...]:
        """Return one line of text per pipeline position."""
        return tuple(" ".join(str(action) for action in actions) for actions in self.ranks)


def _digits(text: str, start: int) -> int:
    """Return the end of the run of ASCII digits that begins at ``start``."""
    end = start
    while end < len(text) and "0" <= text[end] <= "9":
        end += 1
    return end


def _number(text: str, start: int, what: str) -> tuple[int, int]:
    """Read a canonical non-negative integer at ``start``; return it and its end."""
    end = _digits(text, start)
    if end == start:
        raise ScheduleSyntaxError(
            f"expected {what} at column {start + 1} of {text!r}", hint="an action reads like 2F0 or 2SEND_F0>3"
        )
    if text[start] == "0" and end - start > 1:
        raise ScheduleSyntaxError(
            f"{what} with a leading zero at column {start + 1} of {text!r}", hint="write 0 or a number without it"
        )
    return int(text[start:end]), end


def parse_action(text: str) -> Action:
    """Parse one action.

    Args:
        text: The action without blanks, e.g. ``"2F0"``.

    Returns:
        The action; ``str`` of it gives ``text`` back.

    Raises:
        ScheduleSyntaxError: With the column, for any other text.
    """
    stage, at = _number(text, 0, "a stage number")
    kind = next((kind for kind in _KINDS_BY_LENGTH if text.startswith(kind, at)), None)
    if kind is None:
        raise ScheduleSyntaxError(
            f"unknown action {text[at:]!r} at column {at + 1} of {text!r}",
            hint=f"known kinds are {', '.join(_KINDS_BY_LENGTH)}",
        )
    at += len(kind)
    microbatch = peer = None
    if kind != "REDUCE_GRAD":
        microbatch, at = _number(text, at, "a microbatch number")
    if kind in SEND_KINDS or kind in RECV_KINDS:
        mark = ">" if kind in SEND_KINDS else "<"
        if text[at : at + 1] != mark:
            raise ScheduleSyntaxError(f"expected {mark!r} and the other stage at column {at + 1} of {text!r}")
        peer, at = _number(text, at + 1, "a stage number")
    if at != len(text):
        raise ScheduleSyntaxError(f"unexpected {text[at:]!r} at column {at + 1} of {text!r}")
    return Action(stage=stage, kind=kind, microbatch=microbatch, peer=peer)


def parse_actions(line: str) -> tuple[Action, ...]:
    """Parse one position's blank-separated actions; raise `ScheduleSyntaxError` naming the first wrong one."""
    return tuple(parse_action(word) for word in line.split())
