"""One rank captures, and all ranks run what it captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from partita.errors import CaptureError
from partita.runtime.world import World
from partita.tracer.capture import Captured, capture_model, examples_of
from partita.tracer.portable import CannotTravelError, digest, pack, unpack
from partita.tracer.program import Program
from partita.tracer.signature import Signature, signature_of
from partita.tracer.traced import Rows, Traced, Tracer
from partita.tracer.trials import Verify

logger = logging.getLogger("partita")
T = TypeVar("T")


def capture_together(model: nn.Module, example: Any, world: World, *, verify: Verify) -> Captured:
    """Capture and verify on rank 0, and give every rank the result.

    Where a capture cannot travel, every rank traces by itself, and the programs are compared.

    Args:
        model: The user's model.
        example: See `partita.tracer.capture.examples_of`.
        world: The ranks.
        verify: See `capture_model`.

    Raises:
        CaptureError: On every rank, if the capture fails or differs from the model, or if the ranks' captures differ.
    """
    device = str(world.device)
    if world.size == 1 or example is None:
        return capture_model(model, example, device=device, verify=verify, agree=world.agree)
    signatures = [signature_of(e.args, e.kwargs)[0] for e in examples_of(example)]
    tracers: list[Tracer] = []

    def make() -> Any:
        captured = capture_model(model, example, device=device, verify=verify)
        tracers.append(captured.tracer)
        parts = (captured.traced, captured.rows, captured.graph, captured.tried, captured.ahead)
        return parts, captured.tracer.knowledge

    def receive(got: Any) -> Captured:
        parts, knowledge = got
        tracer = tracers[0] if tracers else Tracer(model, device)
        tracer.learn(knowledge)
        captured = Captured(tracer, *parts)
        for traced in (captured.traced, *(ahead.traced for ahead in captured.ahead)):
            tracer.watch(traced)
        return captured

    def apart() -> tuple[Captured, list[Program]]:
        captured = capture_model(model, example, device=device, verify=verify, agree=world.agree)
        return captured, [captured.traced.program, *(ahead.traced.program for ahead in captured.ahead)]

    return _together(world, signatures, make, receive, apart)


def trace_together(
    world: World, tracer: Tracer, signature: Signature, make: Callable[[], tuple[Traced, Rows | None, str]]
) -> tuple[Traced, Rows | None, str]:
    """Trace one more call on rank 0, and give every rank the result.

    Args:
        world: The ranks; all of them call this together.
        tracer: This rank's tracer.
        signature: The call's structure, the same on every rank.
        make: Traces the call and finds its rows.

    Returns:
        The traced call, its rows or None, and why there are none.

    Raises:
        CaptureError: On every rank, if the call cannot be captured or the ranks' captures differ.
    """
    if world.size == 1:
        return make()

    def receive(got: Any) -> tuple[Traced, Rows | None, str]:
        made, knowledge = got
        tracer.learn(knowledge)
        tracer.watch(made[0])
        return made  # type: ignore[no-any-return]

    def apart() -> tuple[tuple[Traced, Rows | None, str], list[Program]]:
        made = make()
        return made, [made[0].program]

    return _together(world, [signature], lambda: (make(), tracer.knowledge), receive, apart)


def _together(
    world: World,
    signatures: Sequence[Signature],
    make: Callable[[], Any],
    receive: Callable[[Any], T],
    apart: Callable[[], tuple[T, list[Program]]],
) -> T:
    made: list[Any] = []

    def decide() -> bytes | None:
        made.append(make())
        try:
            return pack(made[0], *signatures)
        except CannotTravelError as error:
            logger.info("every rank captures by itself: %s", error)
            return None

    data = world.agree(decide)
    got = None
    if data is not None and not made:
        try:
            got = unpack(data, *signatures)
        except CannotTravelError as error:
            logger.info("the capture of rank 0 cannot be read here: %s", error)
    elif data is not None:
        got = made[0]
    if all(world.gather(got is not None)):
        return receive(got)
    found, programs = apart()
    _check_same(world, programs)
    return found


def _check_same(world: World, programs: Sequence[Program]) -> None:
    """Refuse programs that differ from rank to rank."""
    digests = world.gather(" ".join(digest(program) for program in programs))
    other = next((rank for rank, text in enumerate(digests) if text != digests[0]), None)
    if other is not None:
        raise CaptureError(
            f"rank {other} captures another program than rank 0: the forward does things in an order of its own in "
            "every process (it walks through a set, say)",
            hint="sort what the forward walks through, or set PYTHONHASHSEED=0 for every process",
        )
