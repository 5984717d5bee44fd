"""Checks of values: the trace goes on, and the check still raises."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from partita.errors import ExecutionError
from partita.tracer.capture import Captured, capture_model
from partita.tracer.checks import passing_answer
from partita.tracer.signature import signature_of
from partita.tracer.verify import check_equal, run_program

WIDTH = 8


class Truth:
    """Notes what a line that asks for its truth would need to go on."""

    def __init__(self) -> None:
        self.seen: list[bool | None] = []

    def __bool__(self) -> bool:
        answer = passing_answer(sys._getframe(1))
        self.seen.append(answer)
        return bool(answer)

    def item(self) -> bool:
        answer = passing_answer(sys._getframe(1))
        self.seen.append(answer)
        return bool(answer)


def plain_assert(t: Truth, other: bool) -> None:
    assert t, other


def negated(t: Truth, other: bool) -> None:
    if not t:
        raise ValueError(other)


def with_item(t: Truth, other: bool) -> None:
    assert not t.item(), other


def last_of_several(t: Truth, other: bool) -> None:
    if other and not t:
        raise ValueError


def first_of_several(t: Truth, other: bool) -> None:
    if t and other:
        raise ValueError


def all_must_hold(t: Truth, other: bool) -> None:
    assert t and other  # noqa: PT018


def over_lines(t: Truth, other: bool) -> None:
    if (
        not other
        or t
    ):  # fmt: skip
        message = "something"
        raise ValueError(message)


def no_check(t: Truth, other: bool) -> None:
    if t:
        del other


def with_another_way(t: Truth, other: bool) -> None:
    if t:
        raise ValueError
    if other:
        pass


def loop(t: Truth, other: bool) -> None:
    while t:
        del other
        break


def chosen(t: Truth, other: bool) -> int:
    return 1 if t else int(other)


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (plain_assert, True),
        (negated, True),
        (with_item, False),
        (last_of_several, True),
        (first_of_several, None),
        (all_must_hold, True),
        (over_lines, False),
        (no_check, None),
        (with_another_way, False),
        (loop, None),
        (chosen, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_way_that_does_not_raise_is_read_off_the_source(function: object, answer: bool | None) -> None:
    truth = Truth()
    function(truth, True)  # type: ignore[operator]
    assert truth.seen == [answer]


class Watchful(nn.Module):
    """Looks at what it has computed, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if torch.isnan(x).any():
            raise ValueError("not a number")
        assert bool((x.abs() <= 1).all()), "out of range"
        spread = torch.distributions.Normal(x, torch.nn.functional.softplus(x), validate_args=True)
        return -spread.log_prob(x.detach()).mean()


def _captured(model: nn.Module) -> tuple[Captured, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH)
    captured = capture_model(model, (x,))
    assert captured.traced.recording is not None
    signature, tensors = signature_of((x,), {})
    check_equal(model, captured.traced.program, signature, tensors)
    return captured, x


def test_checks_of_computed_values_keep_no_model_whole() -> None:
    model = Watchful()
    captured, x = _captured(model)
    assert captured.rows is not None
    assert sum(step.check for step in captured.traced.program.steps) >= 3
    assert not captured.graph.unknown_ops
    with torch.no_grad():
        model.layers[3].bias[0] = float("nan")
    with pytest.raises(ExecutionError, match=r"test_checks\.py:\d+ fails"):
        run_program(captured.traced.program, model, (x,))


def test_a_check_inside_a_layer_needs_no_class_kept_whole() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            assert torch.isfinite(y).all()
            return y

    captured, _ = _captured(nn.Sequential(*(Checked() for _ in range(3))))
    assert [step.name for step in captured.traced.program.steps] == ["0#0", "1#0", "2#0"]
    assert not captured.tracer.opaque


def test_without_weights_checks_are_passed_too() -> None:
    with torch.device("meta"):
        model, x = Watchful(), torch.zeros(6, WIDTH)
    assert capture_model(model, (x,)).traced.recording is not None
