"""A weightless copy of a model: the same modules and names, every parameter and buffer a fake or meta tensor.

Tracing runs on the copy, so a capture can neither change the user's model nor need its weights; the copy can be
traced again at any time, for another shape or mode, on a rank that holds only a part of the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from partita.errors import CaptureError


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every registered tensor under every name: (qualified name, tensor, is a parameter)."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for table, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor, is_parameter


def copy_model(model: nn.Module, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy the module tree with other tensors in place of its parameters and buffers.

    Args:
        model: The user's model; it is not changed.
        replace: Called once per distinct tensor with its first name and the tensor; returns the copy's data.

    Returns:
        A copy with the same names, ties, flags, hooks and plain attributes.

    Raises:
        CaptureError: If an attribute of the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor, is_parameter in named_tensors(model):
        if id(tensor) not in memo:
            new = replace(name, tensor)
            memo[id(tensor)] = _as_parameter(new, tensor) if is_parameter else new
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            owner = getattr(hook, "__self__", hook)
            if not isinstance(owner, nn.Module):
                memo.setdefault(id(owner), owner)  # what a hook gathers is the user's to read
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo.setdefault(id(value), value.detach())  # deepcopy refuses non-leaf tensors kept as attributes
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}",
            hint="move locks, files, generators and other uncopyable objects out of the module's attributes",
        ) from error


def _as_parameter(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Wrap ``data`` as a parameter of the same class, flags and attributes as ``like``."""
    new = nn.Parameter(data, requires_grad=like.requires_grad)
    for key, value in vars(like).items():
        setattr(new, key, value)
    for hook in (like._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(like, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
    return new


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose parameters and buffers are on the meta device."""
    return copy_model(
        model,
        lambda _name, tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"),
    )


def swap_tensors(model: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Put other tensors in place of the registered ones, ties kept; the returned function puts the old ones back."""
    old: list[tuple[Any, str, torch.Tensor]] = []
    new: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                old.append((table, name, tensor))
                if id(tensor) not in new:
                    data = replace(tensor)
                    new[id(tensor)] = _as_parameter(data, tensor) if isinstance(tensor, nn.Parameter) else data
    for table, name, tensor in old:
        table[name] = new[id(tensor)]

    def restore() -> None:
        for table, name, tensor in old:
            table[name] = tensor

    return restore
