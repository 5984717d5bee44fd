"""Run a captured model cut into stages, all stages in this process."""

from __future__ import annotations

import torch

from partita.runtime.build import tensor_lookup
from partita.runtime.executor import execute_together
from partita.runtime.stages import lay_out
from partita.runtime.transport import LoopbackTransport, Mailbox
from partita.runtime.worker import CallInputs, LossPart, StageWorker
from partita.schedules.makers import make_schedule
from partita.schedules.passes import add_communication
from partita.tracer.recorder import refs
from partita.tracer.signature import signature_of
from partita.tracer.verify import shadow


def even_stages(captured, num_stages):
    """Cut the items into stages of about equally many operators, colocated items together."""
    items = [item for item in captured.graph.items if not item.replicable]
    total = sum(item.ops[1] - item.ops[0] for item in items)
    stage_of, at = {}, 0
    for item in items:
        stage_of[item.id] = min(num_stages - 1, at * num_stages // max(total, 1))
        at += item.ops[1] - item.ops[0]
    for group in captured.graph.colocated:
        first, last = min(group), max(group)
        for item in items:
            if first <= item.id <= last:
                stage_of[item.id] = stage_of[first]
    return stage_of


def run_on_loopback(captured, model, example, num_stages, loss_of):
    """Run forward and backward of one call, cut into stages.

    Args:
        captured: The capture.
        model: The model with weights; it stays as it is.
        example: The call.
        num_stages: Number of stages.
        loss_of: Makes a scalar of the result.

    Returns:
        The loss, and the gradients by parameter name.
    """
    program, root = captured.traced.program, shadow(model)
    layout = lay_out(program, even_stages(captured, num_stages), num_stages, last_reads=refs(program.result))
    _, tensors = signature_of(example.args, example.kwargs)

    def loss(env, _chunk):
        return LossPart(loss_of(env.fill(program.result)), 1.0, 1.0)

    workers = [
        StageWorker(
            layout=layout,
            root=root,
            tensors=tensor_lookup(root),
            inputs=CallInputs(tensors, (None,) * len(tensors), [None]),
            replica=0,
            device=torch.device("cpu"),
            seed=None,
            key=None,
            grad=True,
            loss=loss,
        )
        for _ in range(num_stages)
    ]
    edges = [(a, b, any(n in program.differentiable for n in names)) for (a, b), names in layout.edges.items()]
    schedule = add_communication(make_schedule("1f1b", num_stages, 1), edges)
    mailbox = Mailbox()
    execute_together(schedule.ranks, workers, [LoopbackTransport(mailbox) for _ in workers])
    return workers[-1].losses[0].value, {name: p.grad for name, p in root.named_parameters() if p.grad is not None}
