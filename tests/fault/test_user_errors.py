"""An error in the user's code reaches the user, in the user's words, and no rank is left waiting."""

import time

import pytest
import torch
from torch import nn

from partita.tracer.traced import Tracer
from tests.training import SETUPS, Setup, loop_a, loop_b, loop_c, parallelize
from tests.zoo import CASES, Batch, Block, Inside, vectors

PIPELINE = Setup(pp=3, dp=1, microbatches=3)
ENDED_S = 10.0
"""How long any rank may go on after another one's error."""


class Failing(nn.Module):
    """Blocks of which one fails when it is armed; the trace never sees it armed."""

    def __init__(self, at):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[at].register_forward_hook(self.stumble)

    @staticmethod
    def stumble(module, args, output):
        if getattr(module, "armed", False):
            raise FloatingPointError("the user's own words")

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class FailingBackward(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if FailingBackward.armed:
            raise FloatingPointError("the user's own words")
        return gradient


class FailsBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](FailingBackward.apply(x))


def fail(loop, at):
    """Train a step; then one stage fails. Return the error's type, its text and how long it took."""
    case = CASES["chain"]
    torch.manual_seed(0)
    plain = (FailsBackward() if at is None else Failing(at)).double()
    batch = vectors(0, 6)
    module = parallelize(
        Inside(plain, case.loss) if loop == "B" else plain,
        batch,
        PIPELINE,
        inside=loop == "B",
        loss_fn=case.loss if loop == "C" else None,
    )
    step = {"A": loop_a, "B": loop_b, "C": loop_c}[loop]
    step(module, batch, case.loss)
    FailingBackward.armed = True
    for name, part in module.named_modules():
        if at is not None and name.endswith(f"blocks.{at}"):
            part.armed = True
    start = time.monotonic()
    try:
        step(module, batch, case.loss)
    except BaseException as error:  # noqa: BLE001
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        FailingBackward.armed = False
    return "nothing", "", time.monotonic() - start


@pytest.mark.parametrize(("loop", "at"), [("A", 0), ("A", 2), ("B", 1), ("C", 2), ("A", None), ("C", None)])
def test_an_error_in_one_stage_ends_every_rank(pool, loop, at):
    ranks = pool.run(fail, PIPELINE.ranks, loop, at, seconds=3 * ENDED_S)
    kinds = [kind for kind, _, _ in ranks]
    texts = [text for _, text, _ in ranks]
    assert "nothing" not in kinds
    assert kinds.count("FloatingPointError") >= 1
    assert any("the user's own words" in text for text in texts)
    assert max(seconds for _, _, seconds in ranks) < ENDED_S


def fail_on_capture():
    """Every rank gets the refusal of a call that cannot be planned."""
    case = CASES["chain"]
    module = parallelize(case.build(), case.example(), SETUPS["pp2"])
    try:
        module(torch.zeros(8, 5, dtype=torch.float64))
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_call_that_the_model_itself_refuses_is_refused_on_every_rank(pool):
    for text in pool.run(fail_on_capture, 2, seconds=20):
        assert "5" in text
        assert "6" in text


def test_the_tracer_is_left_usable_by_a_refusal():
    from partita.errors import CaptureError
    from partita.tracer.signature import signature_of

    tracer = Tracer(CASES["chain"].build(), "cpu")
    wrong, right = Batch((torch.zeros(8, 5).double(),)), CASES["chain"].example()
    signature, tensors = signature_of(wrong.args, {})
    with pytest.raises(CaptureError, match=r"zoo\.py:\d+"):
        tracer.trace(signature, tensors, whole=False)
    signature, tensors = signature_of(right.args, {})
    assert len(tracer.trace(signature, tensors, whole=False).program.steps) == 4
