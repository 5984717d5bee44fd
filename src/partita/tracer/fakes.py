"""Shapes of operators that torch cannot trace: registered once, where torch knows none."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stand-ins for the losses, shape (batch,), and the forward variables, (batch, time, 2 x longest + 1).

    Only the operator's own backward reads the forward variables; their last dim here is the most it can be.
    """
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, time, 2 * targets.shape[-1] + 1))


def register_fakes() -> None:
    """Register the shapes; a torch that has them already keeps its own."""
    with contextlib.suppress(RuntimeError):
        torch.library.register_fake("aten::_ctc_loss.Tensor", _ctc_loss)
