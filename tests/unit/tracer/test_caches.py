"""What caches and tables learn while there are no values is forgotten."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from partita.tracer.caches import forgetful
from partita.tracer.capture import capture_model

WIDTH = 8
TABLES: dict[int, torch.Tensor] = {}
ORDERS: list[torch.Tensor] = []
LATEST: torch.Tensor | None = None


@functools.lru_cache(maxsize=8)
def reversed_places(length: int) -> torch.Tensor:
    return torch.arange(length).flip(0)


class Cached(nn.Module):
    """Keeps index tensors in every place that outlives a call."""

    kept: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def places(self) -> torch.Tensor:
        global LATEST  # noqa: PLW0603
        if self.how == "function":
            return reversed_places(WIDTH)
        if self.how == "variable":
            LATEST = torch.arange(WIDTH).flip(0) if LATEST is None else LATEST
            return LATEST
        if self.how == "list":
            if not ORDERS:
                ORDERS.append(torch.arange(WIDTH).flip(0))
            return ORDERS[0]
        table = TABLES if self.how == "global table" else type(self).kept
        if WIDTH not in table:
            table[WIDTH] = torch.arange(WIDTH).flip(0)
        return table[WIDTH]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[:, self.places()]
        return x.sum(1)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    global LATEST  # noqa: PLW0603
    reversed_places.cache_clear()
    TABLES.clear()
    ORDERS.clear()
    Cached.kept.clear()
    LATEST = None


@pytest.mark.parametrize("how", ["function", "global table", "class table", "variable", "list"])
def test_a_capture_leaves_no_tensor_without_values_behind(how: str) -> None:
    torch.manual_seed(0)
    model, x = Cached(how), torch.randn(4, WIDTH)
    places = torch.arange(WIDTH).flip(0)
    expected = x
    for layer in model.layers:
        expected = layer(expected)[:, places]
    capture_model(model, (x,), verify=False)  # the first to run this model: verification would fill the caches
    assert torch.equal(model.places(), places)
    assert torch.allclose(model(x), expected.sum(1))


def test_what_was_known_before_stays() -> None:
    known = reversed_places(3)
    TABLES[3] = known
    ORDERS.append(known)
    with forgetful(Cached("function")):
        TABLES[5] = torch.zeros(5, device="meta")
        ORDERS.append(torch.zeros(5, device="meta"))
    assert list(TABLES) == [3]
    assert TABLES[3] is known
    assert len(ORDERS) == 1
    assert reversed_places.cache_info().currsize == 1


class Maker(OrderedDict[str, Any]):
    """Makes an object of what it holds, each time it is asked."""

    def __getitem__(self, name: str) -> object:
        return super().__getitem__(name)()


MAKERS = Maker(identity=nn.Identity)


def test_tables_are_put_back_as_they_hold_not_as_they_answer() -> None:
    with forgetful(Cached("function")):
        MAKERS.update({"table": torch.zeros(3, device="meta")})
    assert dict.items(MAKERS) == {("identity", nn.Identity)}
    with forgetful(Cached("function")):
        assert isinstance(MAKERS["identity"], nn.Identity)
    assert dict.get(MAKERS, "identity") is nn.Identity
