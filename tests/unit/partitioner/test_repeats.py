"""Which blocks of captured models repeat an earlier one, for layers in patterns of any period."""

import torch
from torch import nn
from torch.nn import functional

from partita.partitioner.coarsen import coarsen
from partita.tracer.capture import capture_model
from tests.unit.partitioner.model_graphs import Builder

WIDTH = 16


def kinds(model, example):
    """Return for each block the number of the block that it repeats, or its own."""
    blocks = coarsen(capture_model(model, (example,), verify=False).graph)
    return [block.id if block.repeat_of is None else block.repeat_of for block in blocks]


class Layer(nn.Module):
    """A residual layer whose inside is given."""

    def __init__(self, inside):
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(WIDTH), inside

    def forward(self, x):
        return x + self.inside(self.norm(x))


class Attend(nn.Module):
    """Attention to everything before, or within windows."""

    def __init__(self, window=None):
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x if self.window is None else x.unflatten(1, (-1, self.window)).flatten(0, 1)
        y = functional.scaled_dot_product_attention(*self.qkv(y).chunk(3, -1), is_causal=True)
        return self.out(y).reshape(x.shape)


class Experts(nn.Module):
    """A dense mixture: every expert sees every token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x):
        return torch.einsum("bte,bti,eij->btj", self.router(x).softmax(-1), x, self.experts)


class State(nn.Module):
    """A state-space layer: a convolution that looks back, cut to the length of the sequence, and a running sum."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x):
        y = self.mix(x.transpose(1, 2))[..., : x.shape[1]]
        return (functional.silu(y) * y).cumsum(2)[:, :, :].transpose(1, 2)


class Pair(nn.Module):
    """Two layers one after another."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


class Dense(nn.Module):
    """A layer of two products."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers one after another, under a head."""

    def __init__(self, *layers):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.randn(4, 8, WIDTH)


def test_five_windowed_layers_and_a_full_one():
    layers = [Layer(Attend(None if i % 6 == 5 else 4)) for i in range(12)]
    assert kinds(Stack(*layers), TOKENS) == [0, *[1] * 5, 6, *[1] * 5, 6, 13]


def test_dense_layers_and_mixtures_in_turn():
    layers = [Layer(Dense() if i % 2 == 0 else Experts()) for i in range(6)]
    assert kinds(Stack(*layers), TOKENS) == [0, 1, 2, 1, 2, 1, 2, 7]


def test_two_patterns_at_once_repeat_with_their_common_period():
    """Attention in every fourth layer, else a state; a mixture after every second, else a dense layer: period 4."""
    layers = [
        Pair(Layer(Attend() if i % 4 == 2 else State()), Layer(Experts() if i % 2 else Dense())) for i in range(8)
    ]
    found = kinds(Stack(*layers), TOKENS)
    assert found == [0, 1, 2, 3, 2, 1, 2, 3, 2, 9]


class Stages(nn.Module):
    """A U-Net with several blocks in each stage: they repeat inside a stage, and nowhere else."""

    def __init__(self, blocks=3, width=8):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.down = nn.ModuleList(self.stage(width * 2**i, blocks) for i in range(2))
        self.halve = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 2, 2) for i in range(2))
        self.bottom = self.stage(width * 4, blocks)
        self.widen = nn.ModuleList(nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2**i, 2, 2) for i in (1, 0))
        self.up = nn.ModuleList(self.stage(width * 2**i, blocks) for i in (1, 0))

    @staticmethod
    def stage(width, blocks):
        return nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU()) for _ in range(blocks))

    def forward(self, x):
        x, skips = self.first(x), []
        for stage, halve in zip(self.down, self.halve, strict=True):
            for block in stage:
                x = x + block(x)
            skips.append(x)
            x = halve(x)
        for block in self.bottom:
            x = x + block(x)
        for widen, stage in zip(self.widen, self.up, strict=True):
            x = widen(x) + skips.pop()
            for block in stage:
                x = x + block(x)
        return self.last(x)


def test_blocks_repeat_inside_a_stage_and_in_the_stage_of_the_same_size_on_the_way_up():
    found = kinds(Stages(), torch.randn(2, 1, 16, 16))
    assert len(found) == 21
    down, deeper, bottom = found[1], found[5], found[9]
    assert found[1:4] == [down] * 3
    assert found[5:8] == [deeper] * 3
    assert found[9:12] == [bottom] * 3
    assert found[13:16] == [deeper] * 3
    assert found[17:20] == [down] * 3
    assert len(set(found)) == 3 + 6


def test_a_slice_that_takes_everything_tells_no_layers_apart():
    """Torch records such slices in one layer and leaves them out in the next, from the same line of the model."""
    assert [block.repeat_of for block in coarsen(two_layers(taken=8))] == [None, 0]
    assert [block.repeat_of for block in coarsen(two_layers(taken=7))] == [None, None]


def two_layers(taken):
    """Two equal layers, of which one slices its result."""
    b = Builder()
    x = b.tensor("x", (8, 4), batch=True)
    for layer in range(2):
        y = b.tensor(f"y{layer}", (8, 4), batch=True)
        z = b.tensor(f"z{layer}", (8, 4), batch=True)
        b.item(f"layer{layer}", (x, b.parameter(f"w{layer}", 4, 4)), (y,), flops=1000)
        if layer:
            y = b.item(
                "slice",
                (y,),
                (b.tensor("s", (taken, 4), batch=True, storage=y),),
                kind="op",
                target="aten.slice.Tensor",
            )
        x = b.item(f"norm{layer}", (y,), (z,), target="aten.relu.default")
    return b.build((x,))
