"""Train a case, plain or parallel, and tell the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import partita
from tests.zoo import CASES, Batch, Case, Inside

STEPS = 3
CLIP = 0.7
"""Small enough that every step of every case is clipped."""
TOLERANCE = 1e-9
"""Relative; the sums of float64 numbers in another order differ by less."""


@dataclass(frozen=True)
class Setup:
    """A forced plan.

    Attributes:
        pp: Stages.
        dp: Replicas.
        microbatches: Microbatches per replica.
    """

    pp: int
    dp: int
    microbatches: int

    @property
    def ranks(self) -> int:
        return self.pp * self.dp


SETUPS = {
    "pp2": Setup(pp=2, dp=1, microbatches=3),
    "dp2": Setup(pp=1, dp=2, microbatches=2),
    "pp2xdp2": Setup(pp=2, dp=2, microbatches=2),
    "pp3": Setup(pp=3, dp=1, microbatches=4),
}


@dataclass
class Record:
    """What happened in some steps of training."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parallelize(model: nn.Module, batch: Batch, setup: Setup, *, inside: bool = False, **options: Any) -> Any:
    """Return the parallel module of a forced plan."""
    kwargs = dict(batch.kwargs) | ({"target": batch.target} if inside else {})
    return partita.auto_parallelize(
        model,
        partita.Example(args=batch.args, kwargs=kwargs),
        search=partita.Search(pp=setup.pp, dp=setup.dp),
        limits=partita.Limits(num_microbatches=setup.microbatches),
        **options,
    )


# ---------------------------------------------------------------- the loops


def loop_a(model: Any, batch: Batch, loss: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
    """The loss outside."""
    value = loss(model(*batch.args, **batch.kwargs), batch.target)
    value.backward()
    return value.detach()


def loop_b(model: Any, batch: Batch, loss: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
    """The loss in the model."""
    value = model(*batch.args, target=batch.target, **batch.kwargs)
    value.backward()
    return value.detach()


def loop_c(model: Any, batch: Batch, loss: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
    """One call per step."""
    return model.train_step(args=batch.args, kwargs=batch.kwargs, target=batch.target)


LOOPS = {"A": loop_a, "B": loop_b, "C": loop_c}


def train(model: Any, case: Case, loop: Any, *, clip: Callable[[Any], Any] | None = None) -> Record:
    """Train some steps; works for plain and parallel modules."""
    record = Record()
    optimizer = make_optimizer(model)
    for number in range(STEPS):
        batch = case.step(number)
        optimizer.zero_grad()
        record.losses.append(loop(model, batch, case.loss).item())
        record.grads.append(grads_of(model))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) if clip is None else clip(model)
        record.norms.append(norm.item())
        optimizer.step()
    record.state = state_of(model)
    return record


def grads_of(model: Any) -> dict[str, torch.Tensor | None]:
    if hasattr(model, "full_grads"):
        return model.full_grads()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def state_of(model: Any) -> dict[str, torch.Tensor]:
    full = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return {name: value.clone() for name, value in full.items()}


def reference(name: str, loop: str) -> Record:
    """Train the plain model in this process."""
    case = CASES[name]
    model = case.build()
    return train(Inside(model, case.loss) if loop == "B" else model, case, loop_b if loop == "B" else loop_a)


def train_loops(name: str, setup: Setup) -> dict[str, Record]:
    """Train a case in all three loops on this rank; the second loop starts from the first one's module, reloaded."""
    case = CASES[name]
    outside = parallelize(case.build(), case.example(), setup, loss_fn=case.loss)
    check_setup(outside, setup)
    records = {"C": train(outside, case, loop_c, clip=own_clip)}
    outside.load_full_state_dict(case.build().state_dict())
    records["A"] = train(outside, case, loop_a)
    inside = parallelize(Inside(case.build(), case.loss), case.example(), setup, inside=True)
    check_setup(inside, setup)
    records["B"] = train(inside, case, loop_b, clip=own_clip)
    return records


def own_clip(module: Any) -> torch.Tensor:
    return module.clip_grad_norm_(CLIP)


def check_setup(module: Any, setup: Setup) -> None:
    """The plan is the one that was asked for: nothing is proved by a plan that does nothing."""
    assert len(module.plan.stages) == setup.pp, module.plan.notes
    assert module.plan.data_degree == setup.dp, module.plan.notes


# ---------------------------------------------------------------- comparing


def differences(found: Record, expected: Record) -> list[str]:
    """Say how two records differ, in the order in which it happened."""
    return list(_differences(found, expected))


def _differences(found: Record, expected: Record) -> Iterator[str]:
    for step in range(STEPS):
        yield from different(f"step {step}: loss", found.losses[step], expected.losses[step])
        yield from different_maps(f"step {step}: gradient of", found.grads[step], expected.grads[step])
        yield from different(f"step {step}: norm", found.norms[step], expected.norms[step])
    yield from different_maps("state", found.state, expected.state)


def different_maps(what: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    if list(found) != list(expected):
        yield f"{what}: the names are {list(found)}, should be {list(expected)}"
        return
    for name, value in expected.items():
        yield from different(f"{what} {name}", found[name], value)


def different(what: str, found: Any, expected: Any) -> Iterator[str]:
    """Yield what differs between two numbers, tensors or Nones."""
    if found is None or expected is None:
        if found is not expected:
            yield f"{what} is {found}, should be {expected}"
        return
    a, b = torch.as_tensor(found), torch.as_tensor(expected)
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{what} is {a.dtype}{tuple(a.shape)}, should be {b.dtype}{tuple(b.shape)}"
        return
    a, b = a.double(), b.double()
    gap, scale = float((a - b).abs().max()), float(b.abs().max())
    if not gap <= TOLERANCE * max(scale, 1.0):
        yield f"{what} is off by {gap:.2e} of {scale:.2e}"
