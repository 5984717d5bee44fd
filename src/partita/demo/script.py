"""The training script of the demo, as a user would write it.

The loop is the same for one process and for four; ``partita.auto_parallelize`` is the only difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import partita
from partita.demo import task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from partita.runtime.module import ParallelModule


def parallel_model(plan: str | Path) -> ParallelModule:
    """Make the model parallel as planned; every process of the job calls this.

    Args:
        plan: The saved plan.  Without ``plan=`` the call would search for one.
    """
    return partita.auto_parallelize(task.make_model(), task.example(), optimizer=task.make_optimizer, plan=plan)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Mapping[str, Any]]) -> Iterator[float]:
    """Train one step per batch.

    Yields:
        The loss of each step.
    """
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / task.WARM_UP))
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), task.LARGEST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()
