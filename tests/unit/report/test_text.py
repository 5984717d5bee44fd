"""Tables, bars and colour of plain text."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.report.text import (
    colour_wanted,
    paint,
    ranges,
    render_table,
    share_cells,
    shorten,
    terminal_width,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_columns_are_aligned_and_lines_end_without_blanks():
    lines = render_table(("name", "size"), [("a", "1"), ("longer", "1000")], right=(1,))
    assert lines == ["name    size", "──────  ────", "a          1", "longer  1000"]
    assert render_table(("a", "b"), [("x", "")]) == ["a  b", "─  ─", "x"]


def test_a_table_without_rows_is_its_head():
    assert render_table(("a", "bc"), []) == ["a  bc", "─  ──"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5, 7, 8], "0-2 5 7-8")]
)
def test_runs_are_joined(numbers, text):
    assert ranges(numbers) == text


@given(st.text(max_size=40), st.integers(3, 20))
def test_shortened_text_fits(text, width):
    short = shorten(text, width)
    assert len(short) == min(len(text), width)
    assert short == text or "…" in short


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=7), st.integers(0, 10**12), st.integers(8, 80))
def test_cells_share_a_bar(parts, free, width):
    whole = sum(parts) + free
    cells = share_cells(parts, whole, width)
    assert sum(cells) <= width
    assert all(count >= 0 for count in cells)
    assert [count > 0 for count in cells] == [part > 0 for part in parts]
    if whole:
        assert all(abs(count - width * part / whole) < len(parts) + 1 for part, count in zip(parts, cells, strict=True))


def test_nothing_of_nothing():
    assert share_cells((0, 0), 0, 10) == [0, 0]


@pytest.mark.parametrize(
    ("stream", "environment", "wanted"),
    [
        (io.StringIO(), {}, False),
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(stream, environment, wanted):
    assert colour_wanted(stream, environment) is wanted


def test_paint():
    assert paint("x", "red", wanted=True) == "\x1b[31mx\x1b[0m"
    assert paint("x", "red", wanted=False) == "x"
    assert paint("", "red", wanted=True) == ""


def test_the_width_of_what_is_no_terminal():
    assert terminal_width(io.StringIO()) == 120
