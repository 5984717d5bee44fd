"""Captured programs as bytes, and the digests that tell two of them apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partita.tracer.capture import Captured, capture_model
from partita.tracer.portable import CannotTravelError, digest, pack, unpack
from partita.tracer.signature import signature_of
from partita.tracer.traced import Traced
from partita.tracer.verify import check_equal
from tests.unit.tracer.traces import WIDTH, Model, rows


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


FORWARDS = {
    "layers": lambda self, x: torch.relu(self.linear(x)).sum(1),
    "function": lambda self, x: Doubled.apply(self.linear(x)),
    "branches": lambda self, x: torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos(), (self.linear(x),)),
    "read": lambda self, x: self.linear(x) if x.abs().max() < 100 else x,
    "random": lambda self, x: torch.dropout(self.linear(x), 0.3, self.training),
}


def _sent(captured: Captured, tensors: tuple[torch.Tensor, ...]) -> Traced:
    signature, _ = signature_of(tensors, {})
    received = unpack(pack(captured.traced, signature), signature)
    assert isinstance(received, Traced)
    return received


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORWARDS)
def test_a_program_that_has_travelled_does_the_same(name: str) -> None:
    model, tensors = Model(FORWARDS[name]), (rows(),)
    captured = capture_model(model, tensors)
    assert captured.traced.recording is not None
    received = _sent(captured, tensors)
    assert received.recording is None
    assert not received.kept_whole
    assert digest(received.program) == digest(captured.traced.program)
    signature, given = signature_of(tensors, {})
    check_equal(model, received.program, signature, given)
    assert received.scalars == captured.traced.scalars
    assert received.program.sizes.holds(((7, WIDTH),)) == captured.traced.program.sizes.holds(((7, WIDTH),))


def test_objects_of_the_callers_arguments_are_the_receivers_own() -> None:
    class Options:
        """Has no name by which another process could find it."""

        scale = 2.0

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, options: Options) -> torch.Tensor:
            return x * options.scale

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Scaled(), Scaled()])

        def forward(self, x: torch.Tensor, options: Options) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, options)
            return x

    mine, theirs = Options(), Options()
    captured = capture_model(Holder(), (rows(), mine))
    here, _ = signature_of((rows(), mine), {})
    there, _ = signature_of((rows(), theirs), {})
    received = unpack(pack(captured.traced, here), there)
    calls = [step for step in received.program.steps if step.kind == "call"]
    assert [step.args[1] for step in calls] == [theirs, theirs]


def test_a_class_without_a_name_cannot_travel() -> None:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    captured = capture_model(Model(lambda self, x: Local.apply(self.linear(x))), (rows(),))
    with pytest.raises(CannotTravelError, match="Local"):
        _sent(captured, (rows(),))


def test_bytes_that_cannot_be_read_are_told() -> None:
    signature, _ = signature_of((rows(),), {})
    with pytest.raises(CannotTravelError):
        unpack(b"nonsense", signature)


def test_the_order_of_steps_is_part_of_a_digest() -> None:
    first = capture_model(Model(lambda self, x: self.linear(x) + self.linear(x * 2)), (rows(),))
    second = capture_model(Model(lambda self, x: self.linear(x * 2) + self.linear(x)), (rows(),))
    assert digest(first.traced.program) == digest(first.traced.program)
    assert digest(first.traced.program) != digest(second.traced.program)


def test_calls_captured_ahead_travel_with_their_own_signatures() -> None:
    def flagged(self: Model, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        return self.linear(x) * (2 if twice else 1)

    calls: list[dict[str, object]] = [{"x": rows()}, {"x": rows(), "twice": True}]
    captured = capture_model(Model(flagged), calls)
    signatures = [signature_of((), call)[0] for call in calls]
    received = unpack(pack(captured.ahead, *signatures), *signatures)
    assert [ahead.traced.signature for ahead in received] == [signatures[1], signatures[0]]
    assert [ahead.mode for ahead in received] == [ahead.mode for ahead in captured.ahead]
    assert [ahead.state for ahead in received] == [ahead.state for ahead in captured.ahead]
