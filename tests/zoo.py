"""Small models, each with one thing that makes parallel training hard; all in float64, so that equal means equal.

A `Case` has a model, a batch for every step, and a loss.  `Inside` puts the loss into the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import scan
from torch.nn import functional

WIDTH = 6
VOCABULARY = 11
WORDS = 5


@dataclass(frozen=True)
class Batch:
    """One step's arguments and target."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        make: Makes the model.
        batch: Gives a step's batch from its number and the number of rows.
        loss: The loss of output and target.
        rows: Rows of a step's batch; the example has eight.
        coupled: The rows depend on each other, so that only a plan without replicas is right.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], torch.Tensor]
    rows: int = 8
    coupled: bool = False

    def build(self) -> nn.Module:
        """Return the model, always with the same weights."""
        torch.manual_seed(7)
        return self.make().double()

    def example(self) -> Batch:
        """Return the batch that the model is captured with."""
        torch.manual_seed(99)
        return self.batch(0, 8)

    def step(self, number: int) -> Batch:
        """Return the batch of a step."""
        torch.manual_seed(100 + number)
        return self.batch(number, self.rows)


class Inside(nn.Module):
    """A model that takes the target and returns its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, target: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss(self.model(*args, **kwargs), target)


# ---------------------------------------------------------------- batches and losses


def vectors(_step: int, rows: int) -> Batch:
    return Batch((torch.randn(rows, WIDTH, dtype=torch.float64),), {}, torch.randn(rows, WIDTH, dtype=torch.float64))


def words(_step: int, rows: int) -> Batch:
    """Sentences whose targets are partly ignored, unevenly over the rows: the last rows are almost all padding."""
    tokens = torch.randint(VOCABULARY, (rows, WORDS))
    target = torch.randint(VOCABULARY, (rows, WORDS))
    target[torch.rand(rows, WORDS) < torch.linspace(0.0, 0.9, rows)[:, None]] = -100
    target[0, 0] = 1
    return Batch((tokens,), {}, target)


def mean_loss(output, target):
    return functional.mse_loss(output, target)


def word_loss(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


# ---------------------------------------------------------------- blocks


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = blocks(count)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# ---------------------------------------------------------------- the models


class TiedWords(nn.Module):
    """A language model whose head is its embedding, so the first and the last stage share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.blocks = blocks(3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(nn.Module):
    """The first values are used again behind every later block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(4)
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second)
        return self.join(torch.cat([self.blocks[3](third) * first, second + x], dim=1))


class Choice(nn.Module):
    """Gives an integer and a truth value for every row, besides the values."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        x = self.block(x)
        return x, x.argmax(dim=1), x.sum(dim=1) > 0


class IntegersCross(nn.Module):
    """The last stage reads integers and truth values that the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.ModuleList([Choice()])
        self.blocks = blocks(3)
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x):
        x, index, positive = self.choice[0](x)
        for block in self.blocks:
            x = block(x)
        return torch.where(positive[:, None], self.table(index) + x, x)


@dataclass
class Answer:
    value: torch.Tensor
    extras: dict[str, Any]
    rows: int


class Structured(nn.Module):
    """Returns a dataclass that is registered nowhere, with a dict inside and the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x):
        first = self.blocks[0](x)
        last = self.blocks[2](self.blocks[1](first))
        return Answer(value=last, extras={"first": first, "pair": (first * 2, None)}, rows=x.shape[0])


def structured_loss(output, target):
    assert type(output) is Answer
    assert output.extras["pair"][1] is None
    return functional.mse_loss(output.value, target) + (output.extras["first"] * output.extras["pair"][0]).mean()


class Output(OrderedDict):
    """A dict with attributes, as libraries of models return."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Named(nn.Module):
    """Takes keyword arguments and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x, *, scale, shift=None):
        for block in self.blocks:
            x = block(x) * scale
        return Output(y=x if shift is None else x + shift, mean=x.mean())


def named_batch(step, rows):
    given = vectors(step, rows)
    scale = torch.rand(rows, 1, dtype=torch.float64)
    return Batch(given.args, {"scale": scale, "shift": torch.rand(WIDTH, dtype=torch.float64)}, given.target)


def named_loss(output, target):
    return functional.mse_loss(output["y"], target) + output.mean


class Frozen(Chain):
    """The first block and one bias of the last do not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[3].down.bias.requires_grad_(False)


class Unused(Chain):
    """One parameter is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Repeated(nn.Module):
    """One block is called twice, with others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x):
        for number in (0, 1, 0, 2):
            x = self.blocks[number](x)
        return x


class Doubled(torch.autograd.Function):
    """The identity, with a backward that no formula of the forward gives."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class OwnBackward(nn.Module):
    """An autograd function between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x):
        for block in self.blocks:
            x = Doubled.apply(block(x))
        return x


class InPlace(nn.Module):
    """Values are changed in place, in the blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x):
        x = x + 1
        for number, block in enumerate(self.blocks):
            x = block(x)
            x.mul_(1.5).add_(number)
            x[:, 0] += 1
        return x


class Normed(nn.Module):
    """BatchNorm: the rows depend on each other, and buffers change once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Counting(nn.Module):
    """Keeps a running mean and a count in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        for block in self.blocks:
            x = block(x)
        return x + self.average


class SequenceFirst(nn.Module):
    """The rows lie in the second dim, the words in the first; recurrent, so that words cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x_TNW):
        for layer in self.layers:
            x_TNW, _ = layer(x_TNW)
        return x_TNW


def sequences(_step: int, rows: int) -> Batch:
    x, target = torch.randn(2, WORDS, rows, WIDTH, dtype=torch.float64)
    return Batch((x,), {}, target)


class Gated(nn.Module):
    """Parameters of the root, some with no dims, used between the blocks; no_grad in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        x = self.blocks[0](x) * self.gate
        with torch.no_grad():
            size = x.abs().amax(dim=1, keepdim=True)
        x = self.blocks[1](x / size) * self.scale
        return self.blocks[2](x) + self.gate


class Adaptive(Chain):
    """A condition on the values around every block: the blocks are called inside ``torch.cond``."""

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = torch.cond(x.mean() > 0.2 * i - 0.3, block, lambda given: given.clone(), (x,))
        return x


class Scanned(nn.Module):
    """A linear recurrence over the sequence in the model's own forward, as a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(2)
        self.decay = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))

    def forward(self, x):
        def step(state, given):
            state = state * torch.sigmoid(self.decay) + given
            return state, state.clone()

        _, states = scan(step, torch.zeros_like(x[0]), self.blocks[0](x), dim=0)
        return self.blocks[1](states)


CASES: dict[str, Case] = {
    "chain": Case(Chain, vectors, mean_loss),
    "tied_words": Case(TiedWords, words, word_loss),
    "skips": Case(Skips, vectors, mean_loss),
    "integers_cross": Case(IntegersCross, vectors, mean_loss),
    "structured": Case(Structured, vectors, structured_loss),
    "named": Case(Named, named_batch, named_loss),
    "frozen": Case(Frozen, vectors, mean_loss),
    "unused": Case(Unused, vectors, mean_loss),
    "repeated": Case(Repeated, vectors, mean_loss),
    "own_backward": Case(OwnBackward, vectors, mean_loss),
    "in_place": Case(InPlace, vectors, mean_loss),
    "normed": Case(Normed, vectors, mean_loss, coupled=True),
    "counting": Case(Counting, vectors, mean_loss, coupled=True),
    "sequence_first": Case(SequenceFirst, sequences, mean_loss),
    "gated": Case(Gated, vectors, mean_loss),
    "ragged": Case(Chain, vectors, mean_loss, rows=5),
    "few_rows": Case(TiedWords, words, word_loss, rows=2),
    "one_row": Case(Chain, vectors, mean_loss, rows=1),
}

CONTROL: dict[str, Case] = {
    "adaptive": Case(Adaptive, vectors, mean_loss, coupled=True),
    "scanned": Case(Scanned, sequences, mean_loss),
}
"""Control flow in the model's own forward; torch compiles its bodies anew in every process, which takes seconds."""
