"""State of the whole model, whoever holds it: state_dict, gradients, loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from partita.errors import ExecutionError
from partita.runtime.placement import Placement
from partita.runtime.world import World
from partita.tracer.skeleton import named_tensors

MAX_LISTED = 8
"""How many names an error lists."""
COMPILED_PREFIX = "_orig_mod."
"""What ``torch.compile`` puts before the names of a wrapped model's state."""


class StateKeeper:
    """Gathers and loads the whole model's state.

    Args:
        root: The live module tree.
        placement: Who holds what.
        world: The ranks.
        missing: Canonical names of tensors that nobody has given values yet.
    """

    def __init__(self, root: nn.Module, placement: Placement, world: World, *, missing: frozenset[str]) -> None:
        self._root, self._placement, self._world, self._missing = root, placement, world, missing

    def check_loaded(self) -> None:
        """Refuse to compute with memory that nobody has written.

        Raises:
            ExecutionError: If the model came from the meta device and a tensor has no value, naming it.
        """
        if self._missing:
            shown = ", ".join(sorted(self._missing)[:MAX_LISTED])
            more = f" and {len(self._missing) - MAX_LISTED} more" if len(self._missing) > MAX_LISTED else ""
            raise ExecutionError(
                f"the model was on the meta device and these tensors have no values: {shown}{more}",
                hint="load a checkpoint with pm.load_full_state_dict(state); tensors that no checkpoint holds "
                "(non-persistent buffers) need a model that was built on a real device",
                missing=tuple(sorted(self._missing)),
            )

    def _canonical(self) -> dict[int, str]:
        """Return the canonical name of every registered tensor of the live tree, by identity."""
        names: dict[int, str] = {}
        for name, tensor, _ in named_tensors(self._root):
            names.setdefault(id(tensor), name)
        return names

    def _owner(self, name: str) -> int:
        return self._placement.ranks[name][0]

    # -- gradients -----------------------------------------------------------------------------------------------------
    def owned_gradients(self) -> list[torch.Tensor]:
        """Return the local gradients that this rank counts for everybody."""
        return [
            p.grad
            for n, p in self._root.named_parameters()
            if p.grad is not None and self._owner(n) == self._world.rank
        ]

    def full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return every gradient on every rank, on the CPU."""
        parameters = dict(self._root.named_parameters())
        present = torch.tensor(
            [p.grad is not None for p in parameters.values()], dtype=torch.int32, device=self._world.device
        )
        self._world.all_reduce(present, largest=True)
        found: dict[str, torch.Tensor | None] = {}
        for (name, parameter), there in zip(parameters.items(), present.tolist(), strict=True):
            gradient = None if parameter.grad is None or not there else parameter.grad.detach()
            found[name] = self._whole(gradient, parameter, self._owner(name)) if there else None
        return found

    def _whole(self, tensor: torch.Tensor | None, like: torch.Tensor, owner: int) -> torch.Tensor:
        """Broadcast a tensor from its owner; return it on the CPU."""
        if self._world.size > 1:
            data = (
                tensor.detach().contiguous()
                if owner == self._world.rank and tensor is not None
                else torch.empty(like.shape, dtype=like.dtype, device=self._world.device)
            )
            if data.numel():
                self._world.broadcast(data, owner)
            tensor = data
        assert tensor is not None
        return tensor.detach().to("cpu", copy=True)

    # -- state ---------------------------------------------------------------------------------------------------------
    def full_state_dict(self, *, rank0_only: bool) -> dict[str, Any]:
        """Return the plain model's state_dict on the CPU; every rank must call."""
        names = self._canonical()
        whole: dict[str, torch.Tensor] = {}
        state: dict[str, Any] = {}
        for key, value in self._root.state_dict(keep_vars=True).items():
            name = names.get(id(value)) if isinstance(value, torch.Tensor) else None
            if name is None:
                state[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                continue
            if name not in whole:
                whole[name] = self._whole(value, value, self._owner(name))
            state[key] = whole[name]
        return {} if rank0_only and self._world.rank else state

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Load a plain model's state_dict into what this rank holds."""
        given = dict(state)
        if given and all(key.startswith(COMPILED_PREFIX) for key in given):
            given = {key.removeprefix(COMPILED_PREFIX): value for key, value in given.items()}
        own = self._root.state_dict(keep_vars=True)
        by_tensor: dict[int, list[str]] = {}
        for key, value in own.items():
            by_tensor.setdefault(id(value), []).append(key)
        for keys in by_tensor.values():
            known = next((k for k in keys if k in given), None)
            if known is not None:
                given |= {k: given[known] for k in keys if k not in given}  # one name satisfies a tie
        for key, value in own.items():
            other = given.get(key)
            if isinstance(value, torch.Tensor) and value.is_meta and isinstance(other, torch.Tensor):
                given[key] = torch.empty(other.shape, dtype=other.dtype, device="meta")
        result = self._root.load_state_dict(given, strict=strict)
        names = self._canonical()
        self._missing -= {names[id(value)] for key, value in own.items() if key in given and id(value) in names}
        return result
