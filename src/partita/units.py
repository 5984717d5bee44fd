"""Quantities: their names, and one way to read and to write them.

Quantities are plain numbers whose unit stands in the name (``_s``, ``_bytes``, ``_flops``). The aliases below say in a
signature what a bare ``int`` or ``float`` means; they cost nothing at run time. Text is parsed at the door only (a
command line, a cluster file, a user's ``limits``) and written at the door only (tables, messages).

* Memory is binary: ``format_bytes(80 * 2**30) == "80.0 GiB"``. Both ``GiB`` (2**30) and ``GB`` (10**9) are read.
* Rates and operation counts are decimal, as on datasheets: ``25.0 GB/s``, ``312 TFLOP``.
* Numbers are written with three significant digits, which is more than any cost model can promise.

The module imports nothing, so that ``partita inspect`` starts at once.
"""

__all__ = [
    "Bytes",
    "BytesPerSecond",
    "Flops",
    "Seconds",
    "format_bandwidth",
    "format_bytes",
    "format_flops",
    "format_seconds",
    "parse_bytes",
    "parse_seconds",
]

Bytes = int
"""A size in memory or on a wire, bytes."""
Seconds = float
"""A duration, seconds."""
Flops = float
"""A count of floating-point operations (a multiply-add counts two), not a rate."""
BytesPerSecond = float
"""A bandwidth, bytes per second."""

_BYTE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "EB": 10**18,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "EiB": 2**60,
}
# (factor, divisor) to seconds, integers, so that "3ms" is the double nearest to 0.003 and not 3 * 0.001.
_SECOND_UNITS = {
    "ns": (1, 10**9),
    "us": (1, 10**6),
    "µs": (1, 10**6),
    "ms": (1, 10**3),
    "s": (1, 1),
    "min": (60, 1),
    "h": (3600, 1),
}
_BINARY_STEPS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL_STEPS = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def parse_bytes(value: str | int) -> Bytes:
    """Read a size in bytes.

    Args:
        value: A whole number of bytes, or text: a number and a unit, as in ``"80GiB"``, ``"2.6 MiB"`` or ``"80GB"``.
            Text without a unit is a whole number of bytes.

    Returns:
        The size in bytes, rounded to the nearest byte.

    Raises:
        ValueError: The text is no size; the message says which part is wrong.
        TypeError: The value is neither text nor a whole number.

    Example:
        >>> parse_bytes("80GiB") == 80 * 2**30
        True
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"a size must be an int (bytes) or text such as '80GiB', not {type(value).__name__}: {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size cannot be negative: {value}")
        return value
    digits, decimals, unit = _split(value, "a size such as '80GiB'")
    if unit and unit not in _BYTE_UNITS:
        raise ValueError(f"unknown unit {unit!r} in the size {value!r}; known units: {', '.join(_BYTE_UNITS)}")
    factor = _BYTE_UNITS[unit] if unit else 1
    if factor == 1 and digits % 10**decimals:
        raise ValueError(f"{value!r} is not a whole number of bytes; name a unit, as in '80GiB'")
    return _divide(digits * factor, 10**decimals)


def parse_seconds(value: str | float) -> Seconds:
    """Read a duration in seconds.

    Args:
        value: A number of seconds, or text: a number and one of ``ns us ms s min h``, as in ``"412ms"``. Text without
            a unit is in seconds.

    Returns:
        The duration in seconds.

    Raises:
        ValueError: The text is no duration, or the number is negative or not finite.
        TypeError: The value is neither text nor a number.

    Example:
        >>> parse_seconds("412ms")
        0.412
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"a duration must be a number (s) or text such as '30s', not {type(value).__name__}: {value!r}")
    if isinstance(value, int | float):
        seconds = float(value)
        if not 0.0 <= seconds < float("inf"):
            raise ValueError(f"a duration must be finite and not negative: {value}")
        return seconds
    digits, decimals, unit = _split(value, "a duration such as '30s'")
    if unit and unit not in _SECOND_UNITS:
        raise ValueError(f"unknown unit {unit!r} in the duration {value!r}; known units: {', '.join(_SECOND_UNITS)}")
    factor, divisor = _SECOND_UNITS[unit] if unit else (1, 1)
    try:
        return float(digits * factor / (divisor * 10**decimals))
    except OverflowError:
        raise ValueError(f"the duration {value!r} is too large") from None


def format_bytes(n: float) -> str:
    """Write a size: ``"71.3 GiB"``, ``"512 B"``.

    Args:
        n: A size in bytes; a negative one (a difference) keeps its sign.

    Returns:
        Three significant digits and a binary unit.
    """
    return _format_scaled(n, 1024, _BINARY_STEPS)


def format_flops(n: float) -> str:
    """Write a count of floating-point operations: ``"312 TFLOP"``; for a rate append ``"/s"``.

    Args:
        n: A number of operations.

    Returns:
        Three significant digits and a decimal unit.
    """
    return _format_scaled(n, 1000, tuple(f"{prefix}FLOP" for prefix in _DECIMAL_STEPS))


def format_bandwidth(bytes_per_s: float) -> str:
    """Write a bandwidth: ``"25.0 GB/s"``.

    Args:
        bytes_per_s: A bandwidth in bytes per second.

    Returns:
        Three significant digits and a decimal unit, as on datasheets.
    """
    return _format_scaled(bytes_per_s, 1000, tuple(f"{prefix}B/s" for prefix in _DECIMAL_STEPS))


def format_seconds(s: float) -> str:
    """Write a duration: ``"412 ms"``, ``"1.25 s"``, ``"3.50 min"``.

    Args:
        s: A duration in seconds; a negative one (a difference) keeps its sign.

    Returns:
        Three significant digits and the largest unit that keeps the number at 1 or more; nanoseconds at the least.
    """
    if not _is_finite(s):
        return f"{s} s"
    magnitude = abs(s)
    sign = "-" if s < 0 else ""
    if magnitude == 0:
        return "0 s"
    # A unit is left as soon as its rounded number would reach the next one: 999.6 ms is written 1.00 s.
    for unit, size_s, end in (("ns", 1e-9, 1e3), ("us", 1e-6, 1e3), ("ms", 1e-3, 1e3), ("s", 1.0, 120.0)):
        text = _three_digits(magnitude / size_s)
        if float(text) < end:
            return f"{sign}{text} {unit}"
    minutes = _three_digits(magnitude / 60)
    return f"{sign}{minutes} min" if float(minutes) < 120 else f"{sign}{_three_digits(magnitude / 3600)} h"


def _split(text: str, what: str) -> tuple[int, int, str]:
    """Split ``"2.6 MiB"`` into ``(26, 1, "MiB")``: digits, number of decimals, unit; exact for any length."""
    stripped = text.strip()
    end = 0
    while end < len(stripped) and stripped[end] in "0123456789.":
        end += 1
    number, unit = stripped[:end], stripped[end:].strip()
    whole, dot, fraction = number.partition(".")
    if stripped.startswith("-"):
        raise ValueError(f"expected {what}, which cannot be negative: {text!r}")
    if not whole + fraction:
        raise ValueError(f"expected {what}, which starts with a number: {text!r}")
    if "." in fraction or (dot and not fraction):
        raise ValueError(f"expected {what}; {number!r} is no number: {text!r}")
    if len(number) > 40:
        raise ValueError(f"expected {what}; the number has {len(number)} digits")
    return int(whole + fraction), len(fraction), unit


def _divide(numerator: int, denominator: int) -> int:
    """Divide whole numbers, rounding to nearest; exact where floats are not."""
    return (2 * numerator + denominator) // (2 * denominator)


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")  # False for nan as well


def _three_digits(value: float) -> str:
    """Write a number of at least 1 with three significant digits, and a smaller one with two decimals."""
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _format_scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    if not _is_finite(value):
        return f"{value} {units[0]}"
    sign = "-" if value < 0 else ""
    scaled = abs(value)
    if scaled < base and scaled == int(scaled):
        return f"{sign}{int(scaled)} {units[0]}"
    for unit in units[:-1]:
        text = _three_digits(scaled)
        if float(text) < base:
            return f"{sign}{text} {unit}"
        scaled /= base
    return f"{sign}{_three_digits(scaled)} {units[-1]}"
