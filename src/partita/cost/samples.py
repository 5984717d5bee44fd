"""Measured seconds at a few sizes, and what they say about the sizes between.

A network's library changes its algorithm with the size, so that no pair of latency and bandwidth follows it, and time
may even fall as messages grow; measurements at some nine sizes do, with straight lines between them. They belong to one
collective over one *group*: 8 ranks of one host and one of each of 8 hosts are different measurements.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal

from partita.errors import CostError
from partita.ir.plan import Estimate

BETWEEN_ERROR = 0.12
"""Half-width of the credible range between two measured sizes: 90th percentile above 8 MB inside a host (public tables
of A100 and H100; the median is 1-5 %)."""
SMALL_BYTES = 10**6
SMALL_ERROR = 0.50
"""The same below 1 MB, where neighbouring measurements differ by that much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What one collective over one group took.

    Attributes:
        sizes: Bytes, rising.
        seconds: Seconds at each size.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse samples that say nothing.

        Raises:
            CostError: There is none, the sizes do not rise, or a figure is not positive.
        """
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise CostError(f"samples need as many seconds as sizes, not {len(self.seconds)} for {len(self.sizes)}")
        if self.sizes[0] < 0 or any(first >= second for first, second in pairwise(self.sizes)):
            raise CostError(f"the sizes of samples rise, they do not go {self.sizes}")
        if not all(isfinite(value) and value > 0 for value in self.seconds):
            raise CostError("the seconds of samples are positive numbers")

    def at(self, num_bytes: int) -> Estimate:
        """Return the seconds at a size.

        Measured at a sample, interpolated between two, the smallest sample's below it, and above the largest modelled:
        at the rate of the last two, or in proportion to the only one.

        Example:
            >>> Samples(sizes=(10, 20), seconds=(1.0, 2.0)).at(15)
            Estimate(value=1.5, low=0.75, high=2.25, source='interpolated')
        """
        error = SMALL_ERROR if num_bytes < SMALL_BYTES else BETWEEN_ERROR
        index = bisect_left(self.sizes, num_bytes)
        if index == len(self.sizes):
            return self._beyond(num_bytes)
        size, seconds = self.sizes[index], self.seconds[index]
        if size == num_bytes:
            return Estimate(value=seconds, low=seconds, high=seconds, source="measured")
        if index:
            below, low_s = self.sizes[index - 1], self.seconds[index - 1]
            seconds = low_s + (seconds - low_s) * (num_bytes - below) / (size - below)
        return _ranged(seconds, error, "interpolated")

    def _beyond(self, num_bytes: int) -> Estimate:
        size, seconds = self.sizes[-1], self.seconds[-1]
        rate = seconds / size if size else 0.0
        if len(self.sizes) > 1:
            rate = (seconds - self.seconds[-2]) / (size - self.sizes[-2])
        return _ranged(seconds + max(0.0, rate) * (num_bytes - size), 2 * BETWEEN_ERROR, "modelled")


def _ranged(seconds: float, error: float, source: Literal["interpolated", "modelled"]) -> Estimate:
    return Estimate(value=seconds, low=seconds * (1 - error), high=seconds * (1 + error), source=source)
