"""Measured sizes: exact at a sample, a line between two, and never without a source."""

import pytest

from partita.cost.samples import Samples
from partita.errors import CostError

MEGA = 10**6
TABLE = Samples(sizes=(MEGA, 4 * MEGA, 16 * MEGA), seconds=(1e-3, 2e-3, 6e-3))


@pytest.mark.parametrize(
    ("size", "seconds", "source"),
    [
        (1, 1e-3, "interpolated"),
        (MEGA, 1e-3, "measured"),
        (2 * MEGA, 4e-3 / 3, "interpolated"),
        (10 * MEGA, 4e-3, "interpolated"),
        (16 * MEGA, 6e-3, "measured"),
        (28 * MEGA, 10e-3, "modelled"),
    ],
)
def test_a_size_is_measured_interpolated_or_modelled(size, seconds, source):
    found = TABLE.at(size)
    assert (found.value, found.source) == (pytest.approx(seconds), source)
    assert found.low <= found.value <= found.high


def test_a_measured_fall_is_followed_between_and_not_beyond():
    table = Samples(sizes=(MEGA, 2 * MEGA), seconds=(4e-3, 3e-3))
    assert table.at(3 * MEGA // 2).value == pytest.approx(3.5e-3)
    assert table.at(10 * MEGA).value == 3e-3


def test_one_sample_speaks_in_proportion():
    assert Samples(sizes=(MEGA,), seconds=(1e-3,)).at(2 * MEGA).value == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((), (), "as many seconds"),
        ((1,), (1.0, 2.0), "as many seconds"),
        ((2, 1), (1.0, 2.0), "sizes of samples rise"),
        ((1, 2), (1.0, 0.0), "positive"),
        ((1, 2), (1.0, float("nan")), "positive"),
    ],
)
def test_samples_that_say_nothing_are_refused(sizes, seconds, message):
    with pytest.raises(CostError, match=message):
        Samples(sizes=sizes, seconds=seconds)
