"""What the demo trains: a GPT-2 of five million parameters that learns to write Python's own documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

ROWS, LENGTH = 16, 64
"""A batch: sequences, and characters in each."""
SEED = 0
"""Seed of the weights; the batches have the next one."""
LEARNING_RATE = 1e-3
"""Of AdamW, after the warm-up."""
WARM_UP = 20
"""Steps in which the learning rate grows."""
LARGEST_NORM = 1.0
"""Gradients of a larger norm are clipped.  Without it and the warm-up the training is chaotic: rounding errors of 1e-7
become visible in the loss within 30 steps."""


@cache
def text() -> str:
    """Return the help texts that come with Python: half a million characters, with nothing to fetch."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@cache
def characters() -> str:
    """Return the vocabulary: each character of the text once, sorted."""
    return "".join(sorted(set(text())))


def make_model(*, width: int = 320, layers: int = 4) -> nn.Module:
    """Return the model with its initial weights, the same in every process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(characters()),
        n_positions=LENGTH,
        n_embd=width,
        n_layer=layers,
        n_head=8,
        use_cache=False,
        # Without dropout one process and four compute the same, so that their losses can be compared.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer: of the plain model as of the parallel one."""
    from torch.optim import AdamW

    return AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))


def batches(steps: int) -> Iterator[Mapping[str, Any]]:
    """Yield the batches, the same in every process: rows cut from random places of the text."""
    import torch

    number = {character: index for index, character in enumerate(characters())}
    tokens = torch.tensor([number[character] for character in text()])
    generator = torch.Generator().manual_seed(SEED + 1)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (ROWS,), generator=generator)
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        yield {"input_ids": rows, "labels": rows}


def example() -> Mapping[str, Any]:
    """Return one call of the model."""
    return next(batches(1))
