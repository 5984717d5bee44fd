"""Plain text: aligned tables, bars, and colour where a terminal shows it.

Nothing but strings and no dependency, because these pictures are what ``partita inspect`` has to draw at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

COLOURS = {
    "dim": "2",
    "bold": "1",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
"""SGR codes (ECMA-48) by name."""


def colour_wanted(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether to colour: on a terminal that is not dumb, unless ``NO_COLOR`` is set (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def paint(text: str, colour: str, *, wanted: bool) -> str:
    """Return ``text`` in a colour of `COLOURS`, or as it is."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if wanted and text else text


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Align a table's columns.

    Args:
        header: Column titles.
        rows: Cells, one per column.
        right: Indices of the columns that are aligned to the right (numbers).

    Returns:
        Lines without blanks at their ends: the titles, a rule, the rows.
    """
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for index, row in enumerate(table):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if index == 0:
            lines.append("  ".join("─" * width for width in widths))
    return lines


def shorten(text: str, width: int) -> str:
    """Return ``text`` with its middle left out if it is longer than ``width`` characters."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def share_cells(parts: Sequence[int], whole: int, width: int) -> list[int]:
    """Divide ``width`` cells among ``parts`` of ``whole``, each at least one cell if it is not 0.

    The cells of all parts together are at most ``width``; an excess of small parts is taken from the largest.
    """
    if whole <= 0:
        return [0 for _ in parts]
    ends, total = [], 0
    for part in parts:
        total += part
        ends.append(min(width, round(width * total / whole)))
    cells = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    for index, part in enumerate(parts):
        if part > 0 and cells[index] == 0:
            largest = max(range(len(cells)), key=lambda at: cells[at])
            if sum(cells) < width:
                cells[index] = 1
            elif cells[largest] > 1:
                cells[largest] -= 1
                cells[index] = 1
    return cells


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers with their runs joined: ``0-3 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def terminal_width(stream: TextIO, default: int = 120) -> int:
    """Return the characters of a terminal's line, or ``default`` if the stream is none."""
    if not stream.isatty():
        return default
    import os

    return max(40, os.get_terminal_size(stream.fileno()).columns)
