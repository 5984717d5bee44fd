"""Training in parallel is training: loss, gradients, norms and state equal those of the plain model in one process."""

import pytest

from tests.training import LOOPS, SETUPS, differences, reference, train_loops
from tests.zoo import CASES

LIMIT_S = 30.0

# The simplest cases on every plan; those with values that pass over stages on a longer pipeline too.
EVERYWHERE = ("chain", "tied_words")
LONGER = ("skips", "integers_cross", "structured", "repeated", "in_place", "ragged")


def setups_of(name):
    if name in EVERYWHERE:
        return list(SETUPS)
    return ["pp2"] if CASES[name].coupled else ["pp2xdp2", "pp3"] if name in LONGER else ["pp2xdp2"]


RUNS = [(name, setup) for name in CASES for setup in setups_of(name)]


@pytest.mark.parametrize(("case", "setup"), RUNS)
def test_the_three_loops_equal_the_plain_model(pool, case, setup):
    ranks = pool.run(train_loops, SETUPS[setup].ranks, case, SETUPS[setup], seconds=LIMIT_S)
    for loop in LOOPS:
        expected = reference(case, loop)
        found = {rank: differences(records[loop], expected) for rank, records in enumerate(ranks)}
        assert found == {rank: [] for rank in found}, f"loop {loop}"
