"""Bytes that one device of a stage needs: parameters, their gradients and optimiser state, activations, the rest.

Conventions::

    weights     every parameter and buffer once, in its own dtype
    gradients   every trainable parameter once, in its own dtype (they accumulate over the microbatches in place)
    optimizer   state of every trainable parameter in its own dtype; with precision bf16 or fp16 a parameter of 16 bits
                has a float32 master copy here, and float32 state
    activations saved bytes of one microbatch x microbatches in flight
    skips       received bytes of one microbatch x microbatches in flight
    transient   the larger of an operator's short-lived need and of what the optimiser's temporaries need *beyond* the
                activations, which are gone by then; so the categories add up to the peak

ZeRO over ``d`` data ranks keeps a ``d``-th of the optimiser state (level 1), of the gradients too (2), and of the
parameters too (3), rounded up to whole bytes; buffers stay whole.

Frozen parameters and buffers have neither gradient nor state. The sum is *live* bytes: an allocator needs more
(`process_bytes` for a CPU process).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil
from typing import Literal

from partita.errors import CostError
from partita.ir.graph import ITEM_SIZE, TensorSpec
from partita.ir.plan import Memory

MASTER_BYTES = ITEM_SIZE["float32"]
_HALF = frozenset({"float16", "bfloat16"})
PRECISIONS = ("as_is", "fp32", "bf16", "fp16")
"""Known precisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """What an optimiser needs by element of a parameter.

    Attributes:
        states: Elements of state per element.
        traffic: Elements moved per element in one update (unfused Adam: about 100 bytes of a float32 parameter).
        fused_traffic: The same in one kernel: parameter, gradient and state read once, parameter and state written.
        loop_temporaries: Temporaries of the for-loop implementation (the default on a CPU), in largest parameters.
        foreach_temporaries: Temporaries of the foreach implementation (the default on CUDA), in all trainable bytes.
    """

    states: float
    traffic: float
    fused_traffic: float
    loop_temporaries: float
    foreach_temporaries: float


OPTIMIZERS: dict[str, OptimizerCost] = {
    "sgd": OptimizerCost(states=0, traffic=3, fused_traffic=3, loop_temporaries=1, foreach_temporaries=0),
    "sgd_momentum": OptimizerCost(states=1, traffic=6, fused_traffic=5, loop_temporaries=1, foreach_temporaries=0),
    "adam": OptimizerCost(states=2, traffic=25, fused_traffic=7, loop_temporaries=2, foreach_temporaries=1),
    "adamw": OptimizerCost(states=2, traffic=25, fused_traffic=7, loop_temporaries=2, foreach_temporaries=1),
    "adafactor": OptimizerCost(states=0.01, traffic=15, fused_traffic=15, loop_temporaries=2, foreach_temporaries=1),
}
"""Optimisers by name."""
_BY_BYTES = OptimizerCost(states=0, traffic=25, fused_traffic=7, loop_temporaries=2, foreach_temporaries=1)


def optimizer_cost(optimizer: str) -> OptimizerCost:
    """Return what an optimiser needs; one given as bytes per parameter is priced like Adam but for its state.

    Raises:
        CostError: The name is neither known nor a whole number.
    """
    if optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if optimizer.isascii() and optimizer.isdigit():
        return _BY_BYTES
    near = get_close_matches(optimizer, OPTIMIZERS, n=1)
    raise CostError(
        f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}, or bytes of state per parameter as a number",
        hint=f"did you mean {near[0]!r}?" if near else "give bytes of state per parameter, e.g. '8'",
    )


def optimizer_bytes_per_parameter(optimizer: str, dtype: str, precision: str = "as_is") -> float:
    """Return the bytes of state, master copy included, for one element of a trainable parameter.

    Args:
        optimizer: A name of `OPTIMIZERS`, or bytes per parameter as text (the master copy is then part of it).
        dtype: The parameter's dtype.
        precision: One of `PRECISIONS`.

    Raises:
        CostError: An argument is not known.

    Example:
        >>> optimizer_bytes_per_parameter("adamw", "bfloat16", "bf16")  # two moments and a master copy, float32
        12
    """
    cost = optimizer_cost(optimizer)
    if precision not in PRECISIONS:
        raise CostError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    if cost is _BY_BYTES:
        return float(optimizer)
    if precision in {"bf16", "fp16"} and dtype in _HALF:
        return MASTER_BYTES + cost.states * MASTER_BYTES
    return cost.states * ITEM_SIZE[dtype]


def optimizer_bytes(parameter: TensorSpec, optimizer: str, precision: str = "as_is") -> int:
    """Return the bytes of state for one parameter: 0 if it is frozen; Adafactor's from its rows and columns."""
    if not parameter.requires_grad:
        return 0
    per_element = optimizer_bytes_per_parameter(optimizer, parameter.dtype, precision)
    if optimizer != "adafactor":
        return ceil(per_element * parameter.numel)
    # Exact instead of the rule of thumb: a matrix has one figure per row and one per column, a vector one per element.
    masters = precision in {"bf16", "fp16"} and parameter.dtype in _HALF
    element = MASTER_BYTES if masters else ITEM_SIZE[parameter.dtype]
    shape = parameter.shape
    factored = len(shape) > 1 and min(shape[-2:]) > 0
    states = parameter.numel // shape[-1] + parameter.numel // shape[-2] if factored else parameter.numel
    return states * element + (parameter.numel * MASTER_BYTES if masters else 0)


def shard_bytes(num_bytes: int, degree: int) -> int:
    """Return the largest of ``degree`` equal parts, in whole bytes.

    Example:
        >>> shard_bytes(10, 4)
        3
    """
    return -(-num_bytes // degree)


def stage_memory(
    *,
    parameters: Iterable[TensorSpec],
    optimizer: str,
    precision: str = "as_is",
    saved_bytes: int,
    in_flight: int,
    received_bytes: int = 0,
    buffer_bytes: int = 0,
    transient_bytes: int = 0,
    platform: Literal["cpu", "cuda"] = "cpu",
    training: bool = True,
    zero: Literal[0, 1, 2, 3] = 0,
    data_degree: int = 1,
) -> Memory:
    """Add up the bytes of one device of a stage at its peak.

    Args:
        parameters: Parameters and buffers that the stage holds; those that share a storage count once.
        optimizer: A name of `OPTIMIZERS`, or bytes of state per parameter as text.
        precision: One of `PRECISIONS`.
        saved_bytes: Bytes kept for the backward of one microbatch.
        in_flight: Microbatches whose activations are alive at the peak.
        received_bytes: Bytes received for one microbatch and not part of ``saved_bytes``.
        buffer_bytes: Communication buffers, all of them.
        transient_bytes: The largest short-lived need of one operator.
        platform: Decides which implementation of the optimiser runs.
        training: Whether there are gradients and an optimiser at all.
        zero: ZeRO level.
        data_degree: Data ranks that share what ZeRO cuts.

    Returns:
        The bytes by category.

    Raises:
        CostError: The optimizer, the precision or the ZeRO level is not known, or the degree is below 1.
    """
    if zero not in {0, 1, 2, 3} or data_degree < 1:
        raise CostError(f"ZeRO has levels 0 to 3 over 1 or more ranks, not level {zero} over {data_degree}")
    by_state, by_gradient, by_weight = (data_degree if zero >= level else 1 for level in (1, 2, 3))
    specs = {tensor.storage or tensor.id: tensor for tensor in parameters}.values()
    trainable = [spec for spec in specs if spec.role == "parameter" and spec.requires_grad] if training else []
    cut = sum(spec.bytes for spec in specs if spec.role == "parameter")
    gradients = shard_bytes(sum(spec.bytes for spec in trainable), by_gradient)
    state = sum(optimizer_bytes(spec, optimizer, precision) for spec in trainable)
    activations = saved_bytes * in_flight
    skips = received_bytes * in_flight
    cost = optimizer_cost(optimizer)
    # A rank updates its part only: as much as its part of the state says.
    largest = shard_bytes(max((spec.bytes for spec in trainable), default=0), by_state)
    updated = shard_bytes(sum(spec.bytes for spec in trainable), by_state)
    loop = platform == "cpu"
    temporaries = ceil(cost.loop_temporaries * largest if loop else cost.foreach_temporaries * updated)
    return Memory(
        weights=shard_bytes(cut, by_weight) + sum(spec.bytes for spec in specs) - cut,
        gradients=gradients,
        optimizer=shard_bytes(state, by_state),
        activations=activations,
        skips=skips,
        buffers=buffer_bytes,
        transient=max(transient_bytes, temporaries - activations - skips),
    )


def process_bytes(live_bytes: int) -> int:
    """Return what a CPU process grows to for so many live bytes: ``1.03 x live + 32 MiB``.

    Measured with a fixed malloc threshold (``MALLOC_MMAP_THRESHOLD_=65536``): never below, and at most 8 % above from
    260 MiB up, in 14 float32 configurations. With glibc's default it is 14-28 % too low.
    """
    return ceil(1.03 * live_bytes) + 32 * 2**20
