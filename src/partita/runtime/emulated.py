"""An emulated worker: compute is slept, messages are real.

It checks schedules of many ranks on few cores: what a stage would compute takes its planned time, what it sends has
its planned size.
"""

from __future__ import annotations

import time

import torch

from partita.ir.plan import Plan
from partita.ir.schedule import Action
from partita.runtime.transport import Expected, Outgoing, Received


class EmulatedWorker:
    """Sleeps each stage's forward and backward time and sends messages of the planned sizes.

    Args:
        plan: The plan; its stage times and edges are used.
        device: Where messages live.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._stages = {stage.index: stage for stage in plan.stages}
        self._bytes = {(e.source, e.target): (e.bytes, e.backward_bytes) for e in plan.edges}
        self._device = device

    def compute(self, action: Action) -> None:
        """Sleep the stage's time for this action."""
        stage = self._stages[action.stage]
        time.sleep(stage.forward_s.value if action.kind == "F" else stage.backward_s.value)

    def outgoing(self, action: Action) -> Outgoing:
        """Return a message of the edge's size."""
        assert action.peer is not None
        forward = action.kind == "SEND_F"
        edge = (action.stage, action.peer) if forward else (action.peer, action.stage)
        size = self._bytes[edge][0 if forward else 1]
        return Outgoing((torch.zeros(max(size, 1), dtype=torch.uint8, device=self._device),), "emulated")

    def expected(self, action: Action) -> Expected:
        """Every message is one tensor."""
        del action
        return Expected(1, "emulated")

    def incoming(self, action: Action, message: Received) -> None:
        """Nothing to keep."""

    def reduce(self, action: Action) -> None:
        """Sleep the stage's reduction time."""
        time.sleep(self._stages[action.stage].reduction_s.value)
