"""A call's signature: everything but the values and the sizes of its tensors."""

import pytest
import torch
from torch import nn

from partita.tracer.signature import Slot, mode_of, signature_of

X = torch.zeros(2, 3)


def key(*args, **kwargs):
    return signature_of(args, kwargs)[0].key


def test_tensors_become_slots_and_can_be_put_back():
    signature, tensors = signature_of((X, [1, X + 1]), {"mask": X > 0, "mode": "fast"})
    assert signature.template == ((Slot(0), [1, Slot(1)]), {"mask": Slot(2), "mode": "fast"})
    assert signature.names == ("args[0]", "args[1][1]", "mask")
    args, kwargs = signature.arguments(tensors)
    assert args[1][1] is tensors[1]
    assert kwargs == {"mask": tensors[2], "mode": "fast"}


def test_values_and_sizes_do_not_count():
    assert key(X, flag=True) == key(torch.ones(7, 1), flag=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((X, True), (X, 1)),
        ((X, 1), (X, 1.0)),
        ((X, None), (X,)),
        ((X, "a"), (X, "b")),
        ((X,), (X.double(),)),
        ((X,), (X[0],)),
        ((X,), (X.clone().requires_grad_(),)),
        ((X, None), (None, X)),
        ((X, object()), (X, object())),
        (({"a": X},), ({"b": X},)),
        ((X, 0.0), (X, float("nan"))),
    ],
)
def test_everything_else_counts(first, second):
    assert key(*first) == key(*first)
    assert key(*first) != key(*second)


@pytest.mark.parametrize(
    ("first", "second"), [((X, []), (X,)), ((X, []), (X, {})), (((X, X),), ([X, X],)), (({0: X},), ([X],))]
)
def test_containers_count(first, second):
    assert key(*first) != key(*second)


def test_keywords_and_positions_are_different():
    assert key(X) != key(x=X)
    assert key(a=X, b=1) != key(a=X)


def test_the_mode_has_training_trainability_and_grad():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    training = mode_of(model)
    assert mode_of(model) == training
    model[1].eval()
    partly = mode_of(model)
    assert partly != training
    model[1].train()
    model[0].bias.requires_grad_(False)
    assert mode_of(model) not in {training, partly}
    model[0].bias.requires_grad_(True)
    with torch.no_grad():
        assert mode_of(model) != training
