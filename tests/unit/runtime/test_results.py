"""Results of microbatches and replicas, put together, are those of the whole batch; so are their gradients."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.runtime.results import chunk_gradient, finish_join, flatten, join_chunks, unflatten
from partita.runtime.rows import cut_rows
from partita.tracer.rows import WHOLE, Join

X = torch.arange(60, dtype=torch.float64).reshape(12, 5) ** 1.5
COUNTED = torch.arange(12) % 3 != 0  # what a counted mean counts
FUNCTIONS = {
    "rows": (lambda x, c: x * 2, Join("rows")),
    "columns": (lambda x, c: (x * 2).T, Join("rows", dim=1)),
    "twice as many": (lambda x, c: x.repeat_interleave(2, 0), Join("rows")),
    "mean": (lambda x, c: x.mean(), Join("mean")),
    "mean over rows": (lambda x, c: x.mean(0), Join("mean")),
    "sum": (lambda x, c: x.square().sum(), Join("sum")),
    "count": (lambda x, c: x[c].mean(), Join("count", targets="t")),
    "whole": (lambda x, c: torch.tensor(3.0), WHOLE),
}


def weight(join, chunk):
    start, stop = chunk
    return float({"mean": stop - start, "count": int(COUNTED[start:stop].sum())}.get(join.how, 1.0))


def parts_of(name, rows, replicas, microbatches):
    """Return the joined replicas, their chunks and weights, and what should come out."""
    function, join = FUNCTIONS[name]
    cut = [chunks for chunks in cut_rows(rows, replicas, microbatches) if chunks]
    parts, weights = [], []
    for chunks in cut:
        weights.append([weight(join, chunk) for chunk in chunks])
        values = [function(X[slice(*chunk)], COUNTED[slice(*chunk)]) for chunk in chunks]
        parts.append(join_chunks(values, join, weights[-1]))
    return parts, cut, weights, function(X[:rows], COUNTED[:rows])


@pytest.mark.parametrize("name", FUNCTIONS)
@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 4))
def test_parts_joined_are_the_whole(name, rows, replicas, microbatches):
    parts, _, _, expected = parts_of(name, rows, replicas, microbatches)
    (found,), _ = finish_join(parts, FUNCTIONS[name][1])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "whole"])
@given(st.integers(2, 12), st.integers(1, 4), st.integers(1, 4))
def test_parts_of_a_gradient_give_the_gradient_of_the_whole(name, rows, replicas, microbatches):
    function, join = FUNCTIONS[name]
    parts, cut, weights, whole = parts_of(name, rows, replicas, microbatches)
    _, total = finish_join(parts, join)
    gradient = torch.linspace(-1, 2, whole.numel(), dtype=whole.dtype).reshape(whole.shape)
    x = X[:rows].clone().requires_grad_()
    function(x, COUNTED[:rows]).backward(gradient)
    found = torch.zeros_like(x)
    for chunks, chunk_weights in zip(cut, weights, strict=True):
        for chunk, chunk_weight in zip(chunks, chunk_weights, strict=True):
            piece = X[slice(*chunk)].clone().requires_grad_()
            part = chunk_gradient(gradient, join, chunk, rows, chunk_weight, total, first=chunk[0] == 0)
            if part is not None:
                function(piece, COUNTED[slice(*chunk)]).backward(part)
                found[slice(*chunk)] = piece.grad
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-15)


def test_the_gradient_of_something_whole_goes_to_the_first_microbatch_only():
    gradient = torch.ones(())
    assert chunk_gradient(gradient, WHOLE, (0, 2), 4, 1.0, 1.0, first=True) is gradient
    assert chunk_gradient(gradient, WHOLE, (2, 4), 4, 1.0, 1.0, first=False) is None
    assert chunk_gradient(gradient, WHOLE, None, 1, 1.0, 1.0, first=False) is gradient
    assert chunk_gradient(None, Join("rows"), (0, 2), 4, 1.0, 1.0, first=True) is None


def test_a_microbatch_without_counted_targets_adds_nothing_not_even_nan():
    join = Join("count", targets="t")
    part = join_chunks([torch.tensor(float("nan")), torch.tensor(3.0)], join, [0.0, 2.0])
    (found,), total = finish_join([part], join)
    assert (found.item(), total) == (3.0, 2.0)
    assert chunk_gradient(torch.ones(()), join, (0, 2), 4, 0.0, total, first=True) is None


@dataclass
class Pair:
    a: object
    b: object


def test_structures_and_flags_survive_the_join():
    def value(rows):
        return Pair(torch.ones(rows, 2, requires_grad=True) * rows, [None, torch.arange(rows), "text"])

    part = join_chunks([value(2), value(3)], Join("rows"), [1.0, 1.0])
    tensors, _ = finish_join([part, part], Join("rows"))
    found = unflatten(part.template, tensors)
    assert type(found) is Pair
    assert found.a[:, 0].tolist() == [2, 2, 3, 3, 3] * 2
    assert found.b[0] is None
    assert found.b[1].tolist() == [0, 1, 0, 1, 2] * 2
    assert found.b[2] == "text"
    assert part.requires_grad == (True, False)
    template, flat = flatten(found)
    assert [t.shape for t in flat] == [(10, 2), (10,)]
    assert unflatten(template, flat).b[2] == "text"
