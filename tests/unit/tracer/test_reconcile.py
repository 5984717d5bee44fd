"""Models that do other things because they are traced: what eager leaves out is left out of the capture."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from partita.tracer.capture import capture_model
from partita.tracer.known import KnownValues, UnknownValueError
from partita.tracer.portable import pack, unpack
from partita.tracer.reconcile import MAX_RUNS, foresee
from partita.tracer.signature import signature_of
from partita.tracer.skeleton import skeleton
from partita.tracer.traced import Tracer
from partita.tracer.verify import check_equal
from tests.unit.tracer.traces import WIDTH, trace

WINDOW = 8


class Layer(nn.Module):
    """Adds a causal mean, by a given mask or by its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        own = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return x + (own if mask is None else mask).to(x.dtype) @ self.linear(x)


class Stack(nn.Module):
    """Two layers in a list, given what ``mask(self, x, *more)`` makes."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, *more):
        mask = self.mask(self, x, *more)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x.mean()


def causal(x):
    positions = torch.arange(x.shape[1])
    return positions[None, :] <= positions[:, None]


def when_exporting(_self, x):
    return causal(x) if torch.compiler.is_exporting() else None


def when_fake(_self, x):
    return causal(x) if isinstance(x, FakeTensor) else None


def words(rows=6, length=5):
    torch.manual_seed(0)
    return torch.randn(rows, length, WIDTH)


def given_masks(traced):
    """Return what each layer is given as its mask."""
    return [step.kwargs["mask"] for step in traced.program.steps if step.kind == "call"]


def glue(traced):
    return [step.name for step in traced.program.steps if step.kind == "op"]


def left_out(function, *more, x=None):
    """Whether every layer is given None; the capture must equal the model either way."""
    model, given = Stack(function), (words() if x is None else x, *more)
    traced = trace(model, *given)
    check_equal(model, traced.program, *signature_of(given, {}))
    return given_masks(traced) == [None, None]


def test_a_mask_that_exists_only_while_exporting_is_left_out():
    traced = trace(Stack(when_exporting), words())
    assert given_masks(traced) == [None, None]
    assert glue(traced) == ["mean"]


def test_a_mask_that_exists_only_for_fake_tensors_is_left_out():
    traced = trace(Stack(when_fake), words())
    assert given_masks(traced) == [None, None]
    assert glue(traced) == ["mean"]


def test_a_model_without_weights_leaves_it_out_too():
    with torch.device("meta"):
        model = Stack(when_exporting)
    assert given_masks(trace(model, words())) == [None, None]


def test_a_mask_that_eager_makes_is_kept():
    assert not left_out(lambda _self, x: causal(x))


def test_no_size_is_frozen_by_leaving_a_mask_out():
    rules = trace(Stack(when_exporting), words()).program.sizes
    assert all(rules.holds(((rows, length, WIDTH),)) for rows, length in [(6, 5), (3, 5), (6, 50), (64, 1000)])


def windowed(_self, x):
    """Eager leaves the mask out of sequences that are shorter than the window."""
    if not torch.compiler.is_exporting() and x.shape[1] < WINDOW:
        return None
    return causal(x) & causal(x).roll(WINDOW, 1).logical_not()


def test_what_depends_on_a_size_is_asked_again_for_every_size():
    rules = trace(Stack(windowed), words()).program.sizes
    assert rules.holds(((3, WINDOW - 1, WIDTH),))
    assert not rules.holds(((6, WINDOW, WIDTH),))
    assert not rules.holds(((6, WINDOW, WIDTH),)), "the answer is remembered"


def test_a_mask_kept_for_a_long_sequence_holds_for_a_short_one():
    traced = trace(Stack(windowed), words(length=2 * WINDOW))
    assert None not in given_masks(traced)
    assert traced.program.sizes.holds(((6, 4, WIDTH),))


def unless_padded(_self, x, attended):
    """Eager looks whether anything is padded; a trace cannot."""
    if not isinstance(x, FakeTensor) and attended.all():
        return None
    return causal(x)[None] & attended[:, None, :]


def test_what_depends_on_values_is_kept_and_right_for_others():
    model, x = Stack(unless_padded), words()
    full = torch.ones(6, 5, dtype=torch.bool)
    padded = full.tril(2)
    traced = trace(model, x, full)
    assert None not in given_masks(traced)
    for attended in (full, padded):
        check_equal(model, traced.program, *signature_of((x, attended), {}))


def unless_flagged(_self, x, flag):
    """The mask holds no values, but values decide whether there is one."""
    return causal(x) if isinstance(x, FakeTensor) or bool(flag.any()) else None


def test_a_mask_of_sizes_is_kept_if_values_decide_about_it():
    assert not left_out(unless_flagged, torch.zeros(2, dtype=torch.bool))


def warned(_self, x):
    """A question about values that changes nothing, which a trace cannot ask."""
    if not isinstance(x, FakeTensor) and (x == 0).any():
        _self.doubtful = True
    return when_exporting(_self, x)


def test_a_question_whose_answers_lead_to_the_same_does_not_matter():
    assert left_out(warned)


def test_too_many_questions_keep_everything_after_them():
    def curious(self, x):
        if not isinstance(x, FakeTensor):
            _ = [bool((x == number).any()) for number in range(MAX_RUNS)]
        return when_exporting(self, x)

    assert not left_out(curious)


def packed(_self, x):
    """Looks at values that only sizes decide."""
    positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
    starts = torch.zeros(x.shape[:2], dtype=torch.int64)
    starts[:, 1:] = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    if not isinstance(positions, FakeTensor) and (starts[:, -1] == 0).all():
        return None
    return causal(x)[None] & (starts[:, :, None] == starts[:, None, :])


def test_values_that_sizes_decide_are_known():
    assert left_out(packed)


def test_a_mask_that_fits_no_layer_does_not_stop_the_trace():
    assert left_out(lambda _self, x: torch.ones(3, x.shape[1] + 1) if torch.compiler.is_exporting() else None)


def test_a_trace_that_calls_others_than_eager_is_taken_as_it_is():
    def crossed(self, x):
        if torch.compiler.is_exporting():
            return self.layers[1](x, mask=None).mean() * 0 + causal(x)
        return None

    assert None not in given_masks(trace(Stack(crossed), words()))[1:]


def test_a_dropped_mask_in_training_says_nothing_about_eval():
    model = Stack(lambda self, x: when_exporting(self, x) if self.training else causal(x))
    signature, tensors = signature_of((words(),), {})
    tracer = Tracer(model, "cpu")
    trained = tracer.trace(signature, tensors)
    tracer.follow(model.eval())
    evaluated = tracer.trace(signature, tensors)
    assert given_masks(trained) == [None, None]
    assert None not in given_masks(evaluated)
    assert trained.program.sizes.holds(((6, 9, WIDTH),)), "the mode of the trace counts, not that of today"
    assert not tracer.model.training


def test_the_question_about_other_sizes_travels_with_the_capture():
    signature, tensors = signature_of((words(),), {})
    made = Tracer(Stack(windowed), "cpu").trace(signature, tensors)
    received = unpack(pack(made, signature), signature)
    Tracer(Stack(windowed), "cpu").watch(received)
    assert given_masks(received) == [None, None]
    assert received.program.sizes.holds(((3, WINDOW - 1, WIDTH),))
    assert not received.program.sizes.holds(((6, WINDOW, WIDTH),))


def test_the_rows_are_still_found():
    captured = capture_model(Stack(when_exporting), (words(),))
    assert captured.rows is not None
    assert captured.rows.dims == (0,)


def test_foreseeing_leaves_no_trace_on_the_skeleton():
    def messy(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        self.seen.append(x)

    model = Stack(messy)
    model.seen = []
    bare = skeleton(model)
    signature, tensors = signature_of((words(),), {})
    calls = foresee(bare, signature.call, tensors)
    assert [call.path for call in calls] == ["", "layers.0", "layers.0.linear", "layers.1", "layers.1.linear"]
    assert not hasattr(bare, "calls")
    assert bare.seen == []


def known(function):
    """Run with known values; return what a forward would read."""
    unknown = torch.empty(4, device="meta")
    with KnownValues():
        return function(unknown)


def test_known_values_follow_views_and_writes():
    def forward(_unknown):
        zeros = torch.zeros(2, 3)
        zeros[:, 1:] = 5
        zeros.t()[0].add_(1)
        return zeros.sum().item()

    assert known(forward) == 22


def test_a_write_of_unknown_values_is_followed_too():
    def forward(unknown):
        zeros = torch.zeros(4)
        zeros[1:] = unknown[1:]
        return zeros[0].item()

    with pytest.raises(UnknownValueError):
        known(forward)


@pytest.mark.parametrize("make", [torch.rand, torch.empty])
def test_chance_is_unknown(make):
    with pytest.raises(UnknownValueError):
        known(lambda _unknown: make(3).sum().item())


def test_shapes_that_values_decide_are_known_where_the_values_are():
    assert known(lambda _unknown: torch.arange(6).fmod(2).nonzero().shape) == (3, 1)
