"""Traces of small modules."""

import torch
from torch import nn

from partita.tracer.signature import signature_of
from partita.tracer.traced import Tracer

WIDTH = 4


class Model(nn.Module):
    """A module whose forward is a function of itself and the arguments, with whatever it needs beside it."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def rows(count=6, width=WIDTH):
    torch.manual_seed(0)
    return torch.randn(count, width)


def trace(model, *args, **kwargs):
    """Trace one call; a refusal is raised."""
    signature, tensors = signature_of(args, kwargs)
    return Tracer(model, "cpu").trace(signature, tensors, whole=False)


def names(traced, kind="call"):
    """Return the names of a program's calls (or operators)."""
    return [step.name for step in traced.program.steps if step.kind == kind]
