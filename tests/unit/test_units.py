import contextlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.units import format_bandwidth, format_bytes, format_flops, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (12345, 12345),
        ("512", 512),
        ("512B", 512),
        ("80GiB", 80 * 2**30),
        ("80 GiB", 80 * 2**30),
        (" 80GB ", 80 * 10**9),
        ("2.6MiB", 2726298),  # 2726297.6, rounded
        (".5KiB", 512),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1.0B", 1),
        ("9007199254740993", 2**53 + 1),  # no detour through a float
        ("3PiB", 3 * 2**50),
    ],
)
def test_parse_bytes(text, expected):
    parsed = parse_bytes(text)
    assert parsed == expected
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "starts with a number"),
        ("GiB", "starts with a number"),
        (".", "starts with a number"),
        ("-1GiB", "cannot be negative"),
        (-1, "cannot be negative"),
        ("80Gb", "unknown unit 'Gb'.*GiB"),  # bits or bytes?
        ("80G", "unknown unit 'G'"),
        ("1e9", "unknown unit 'e9'"),
        ("1_000", "unknown unit '_000'"),
        ("1.2.3GiB", "'1.2.3' is no number"),
        ("1.GiB", "'1.' is no number"),
        ("1.5", "not a whole number of bytes"),
        ("0.5B", "not a whole number of bytes"),
        ("1" * 41, "41 digits"),
        ("nan", "starts with a number"),
        ("٣GiB", "starts with a number"),  # a digit, but not an ASCII one
    ],
)
def test_parse_bytes_says_what_is_wrong(text, said):
    with pytest.raises(ValueError, match=said):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1"])
def test_parse_bytes_refuses_other_types(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (3, 3.0),
        (0.25, 0.25),
        ("30", 30.0),
        ("412ms", 0.412),
        ("3 us", 3e-6),
        ("3µs", 3e-6),
        ("7ns", 7e-9),
        ("1.5s", 1.5),
        ("2min", 120.0),
        ("1.5h", 5400.0),
    ],
)
def test_parse_seconds(text, expected):
    parsed = parse_seconds(text)
    assert parsed == expected
    assert type(parsed) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "starts with a number"),
        ("3 weeks", "unknown unit 'weeks'.*ms"),
        ("-3s", "cannot be negative"),
        (-3, "not negative"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        ("1.2.3", "is no number"),
    ],
)
def test_parse_seconds_says_what_is_wrong(text, said):
    with pytest.raises(ValueError, match=said):
        parse_seconds(text)


@pytest.mark.parametrize("value", [False, None, b"1"])
def test_parse_seconds_refuses_other_types(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        parse_seconds(value)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2726298, "2.60 MiB"),
        (int(71.3 * 2**30), "71.3 GiB"),
        (412 * 2**30, "412 GiB"),
        (1023 * 2**30, "1023 GiB"),
        (2**40 - 1, "1.00 TiB"),  # not "1024 GiB"
        (-3 * 2**20, "-3.00 MiB"),
        (2**80, "1048576 EiB"),
        (float("inf"), "inf B"),
    ],
)
def test_format_bytes(n, text):
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0, "0 s"),
        (0.412, "412 ms"),
        (0.9996, "1.00 s"),  # not "1000 ms"
        (1.25, "1.25 s"),
        (37.04, "37.0 s"),
        (119.4, "119 s"),
        (210, "3.50 min"),
        (7200, "2.00 h"),
        (3e-6, "3.00 us"),
        (5e-10, "0.50 ns"),
        (-0.002, "-2.00 ms"),
        (float("nan"), "nan s"),
    ],
)
def test_format_seconds(s, text):
    assert format_seconds(s) == text


def test_format_rates_and_counts():
    assert format_bandwidth(25e9) == "25.0 GB/s"
    assert format_bandwidth(900e9) == "900 GB/s"
    assert format_bandwidth(3.35e12) == "3.35 TB/s"
    assert format_flops(312e12) == "312 TFLOP"
    assert format_flops(12) == "12 FLOP"
    assert format_flops(999.9e9) == "1.00 TFLOP"


@given(st.integers(min_value=0, max_value=2**60))
def test_bytes_survive_a_round_trip_to_three_digits(n):
    assert parse_bytes(format_bytes(n)) == pytest.approx(n, rel=0.0051)


@given(st.floats(min_value=1e-8, max_value=1e6))
def test_seconds_survive_a_round_trip_to_three_digits(s):
    assert parse_seconds(format_seconds(s)) == pytest.approx(s, rel=0.0051)


@given(st.text())
def test_parsers_are_total(text):
    for parse in (parse_bytes, parse_seconds):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


def test_the_module_imports_nothing():
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('u', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "before = set(sys.modules)\n"
        "spec.loader.exec_module(module)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    path = sys.modules["partita.units"].__file__
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
