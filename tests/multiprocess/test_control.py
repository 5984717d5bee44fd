"""A model with control flow in its own forward trains on two ranks as it does on one."""

import pytest
import torch

from tests.training import SETUPS, check_setup, grads_of, loop_a, loop_c, parallelize
from tests.zoo import CONTROL

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while Dynamo reads the bodies
LIMIT_S = 120.0
"""Torch compiles the bodies in every process and for every new size."""


def train_once(name):
    case = CONTROL[name]
    module = parallelize(case.build(), case.example(), SETUPS["pp2"], loss_fn=case.loss)
    check_setup(module, SETUPS["pp2"])
    return loop_c(module, case.step(0), case.loss), grads_of(module)


@pytest.mark.parametrize("name", CONTROL)
def test_two_stages_equal_the_plain_model(pool, name):
    case = CONTROL[name]
    model = case.build()
    expected = loop_a(model, case.step(0), case.loss)
    for loss, grads in pool.run(train_once, 2, name, seconds=LIMIT_S):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grads, grads_of(model), rtol=1e-9, atol=1e-12)
