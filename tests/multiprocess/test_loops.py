"""Training in parallel is training: loss, gradients, norms and state equal those of the plain model in one process."""

import pytest

from tests.training import LOOPS, SETUPS, differences, reference, train_loops
from tests.zoo import CASES

# Every case on a plain pipeline or on all kinds of parallelism at once, and the simplest ones on every plan.
ALL_PLANS = ("chain", "tied_words", "ragged")
RUNS = [
    (case, setup) for case in CASES for setup in (SETUPS if case in ALL_PLANS else ("pp2xdp2", "pp3"))
]


@pytest.mark.parametrize(("case", "setup"), RUNS)
def test_the_three_loops_equal_the_plain_model(pool, case, setup):
    ranks = pool.run(train_loops, SETUPS[setup].ranks, case, SETUPS[setup])
    for loop in LOOPS:
        expected = reference(case, loop)
        found = {rank: differences(records[loop], expected) for rank, records in enumerate(ranks)}
        assert found == dict.fromkeys(range(len(ranks)), []), f"loop {loop}"
