"""The gradient norm of the whole model, also for people who call torch's own function.

``torch.nn.utils.clip_grad_norm_(pm.parameters(), ...)`` sees only the local gradients.  So that it never clips by a
local norm, torch's inner norm function is replaced, once a model spans several ranks, by one that recognises such
gradients and computes the norm over all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from partita.errors import ExecutionError
from partita.runtime.world import World


def local_power_sum(gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the sum of ``|g|**norm_type`` (the maximum for infinity) as a float64 scalar."""
    parts = [
        torch.linalg.vector_norm(
            g.detach(), norm_type, dtype=None if g.is_complex() else torch.promote_types(g.dtype, torch.float32)
        )
        for g in gradients
    ]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([p.to(device=device, dtype=torch.float64) for p in parts])
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()


def global_norm(gradients: Iterable[torch.Tensor], norm_type: float, world: World) -> torch.Tensor:
    """Return the norm over the gradients of all ranks.

    Args:
        gradients: The gradients that this rank *owns*; no other rank passes them.
        norm_type: Order of the norm; may be infinity.
        world: The ranks.
    """
    total = local_power_sum(gradients, norm_type, world.device)
    world.all_reduce(total, largest=norm_type == float("inf"))
    return total if norm_type == float("inf") else total ** (1.0 / norm_type)


class _Registry:
    """The live models whose gradients lie on several ranks."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.original: Callable[..., torch.Tensor] | None = None

    def owner_of(self, gradients: list[torch.Tensor]) -> Any | None:
        """Return the model that some of the gradients belong to; with none at all, the only model there is."""
        ids = {id(g) for g in gradients}
        for model in self.models:
            if any(p.grad is not None and id(p.grad) in ids for p in model.parameters()):
                return model
        return next(iter(self.models)) if not gradients and len(self.models) == 1 else None


_REGISTRY = _Registry()


def watch(model: Any) -> None:
    """Let torch's own clipping see the whole model's norm.

    Args:
        model: A `ParallelModule` that spans several ranks.
    """
    _REGISTRY.models.add(model)
    if _REGISTRY.original is None:
        _REGISTRY.original = clip_grad._get_total_norm
        clip_grad._get_total_norm = _total_norm


def _total_norm(
    tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    model = _REGISTRY.owner_of(gradients)
    assert _REGISTRY.original is not None
    if model is None and not gradients and _REGISTRY.models:
        next(iter(_REGISTRY.models)).engine.world.abort()
        raise ExecutionError(
            "this rank has no gradients and there are several parallel models: whose norm is meant is unknown here",
            hint="call clip_grad_norm_ of the parallel model instead of torch's function",
        )
    if model is None:
        return _REGISTRY.original(gradients, norm_type, error_if_nonfinite, foreach)
    return model.gradient_norm(float(norm_type), gradients=gradients, error_if_nonfinite=error_if_nonfinite)  # type: ignore[no-any-return]
