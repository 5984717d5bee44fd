"""Give modules what eager gives them, where a model does other things because it is being traced.

Models ask whether they are being exported, or whether a tensor is fake, and then build what eager leaves out: mostly an
attention mask that says no more than "causal", or nothing at all.  The mask would cross every boundary between stages,
take the fast path away from the attention, and sometimes does not even fit.

So the model first runs on the meta device with nothing known but sizes and constants (`partita.tracer.known`), which
no model takes for a trace.  Where that run passes None to a module, eager passes None for these sizes whatever the
values of inputs and parameters are; the traced call is then given None as well.  Whether other sizes are given None
too is not guessed: for each new set of input shapes the same run is made again (`Foresight.agrees`), and where it
disagrees the capture does not hold and the call is captured anew.  Such a run needs no weights and no data, so all
ranks agree.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from partita.tracer.caches import forgetful
from partita.tracer.hooks import hooks_as_they_were
from partita.tracer.known import KnownValues
from partita.tracer.objects import Snapshot, own_attributes
from partita.tracer.opaque import Observations, kept_whole
from partita.tracer.signature import Signature
from partita.tracer.sizes import Binding
from partita.tracer.tree import Path, leaves

MAX_RUNS = 8
"""How often a model is run to try the answers to questions that values decide."""

ModelCall = Callable[[nn.Module, tuple[torch.Tensor, ...]], Any]


@dataclass(frozen=True, slots=True)
class EagerCall:
    """What eager gives to one module call, for all values of the inputs.

    Attributes:
        path: The module's qualified name.
        occurrence: How many calls of it came before.
        places: Where the leaves of its arguments are.
        absent: Those of them that are None.
    """

    path: str
    occurrence: int
    places: tuple[Path, ...]
    absent: frozenset[Path]


def foresee(model: nn.Module, call: ModelCall, tensors: tuple[torch.Tensor, ...]) -> tuple[EagerCall, ...]:
    """Return the module calls that a model makes whatever its values are.

    Where values decide between yes and no, both are tried (`MAX_RUNS`), and what is the same for all answers is
    returned, up to the first call that is not.

    Args:
        model: A `skeleton`; it is left as it was.
        call: Calls the model with the user's arguments rebuilt around the given tensors.
        tensors: The input tensors; only shapes, dtypes and flags matter.
    """
    runs: list[list[EagerCall]] = []
    open_scripts: list[tuple[tuple[bool, ...], int]] = [((), 0)]
    while open_scripts and len(runs) < MAX_RUNS:
        script, _ = open_scripts.pop()
        seen, answers = _run(model, call, tensors, KnownValues(script))
        runs.append(seen)
        for i in range(len(script), len(answers)):
            before = tuple(answer for answer, _ in answers[:i])
            open_scripts.append(((*before, not answers[i][0]), answers[i][1]))
    common = _common(runs)
    return common[: min((calls for _, calls in open_scripts), default=len(common))]


def _run(
    model: nn.Module, call: ModelCall, tensors: tuple[torch.Tensor, ...], known: KnownValues
) -> tuple[list[EagerCall], list[tuple[bool, int]]]:
    """Run once; return the calls seen, and each answer that was made up with the number of calls before it."""
    seen: list[EagerCall] = []
    asked: list[int] = []
    counts: Counter[str] = Counter()
    paths = {id(module): path for path, module in model.named_modules()}
    given = without_data(tensors, [t.shape for t in tensors])  # outside of the mode: their values are not known

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        asked.extend([len(seen)] * (len(known.answers) - len(asked)))
        found = list(leaves((args, dict(kwargs))))
        absent = frozenset(place for place, leaf in found if leaf is None)
        path = paths[id(module)]
        seen.append(EagerCall(path, counts[path], tuple(place for place, _ in found), absent))
        counts[path] += 1

    with contextlib.ExitStack() as stack:
        stack.enter_context(_left_as_it_was(model))
        stack.enter_context(forgetful(model))
        stack.enter_context(hooks_as_they_were(model))
        for module in model.modules():
            handle = module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # control-flow operators would start Dynamo
        with contextlib.suppress(Exception), known:  # whatever ends the run: what was seen before is true
            call(model, given)
    asked.extend([len(seen)] * (len(known.answers) - len(asked)))
    return seen, list(zip(known.answers, asked, strict=True))


def _common(runs: list[list[EagerCall]]) -> tuple[EagerCall, ...]:
    """Return what several runs have in common, up to the first call that differs in more than what is None."""
    found: list[EagerCall] = []
    for calls in zip(*runs, strict=False):
        if len({(c.path, c.places) for c in calls}) > 1:
            break
        absent = frozenset.intersection(*(c.absent for c in calls))
        found.append(replace(calls[0], absent=absent))
    return tuple(found)


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Undo what a forward does to the attributes and buffers of a skeleton, and to Python's random numbers."""
    chance = random.getstate()
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    held = Snapshot([own_attributes(module) for module in model.modules()])
    try:
        yield
    finally:
        random.setstate(chance)
        held.restore()
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


@dataclass(eq=False, slots=True)
class Reconciler:
    """Walks beside a trace and says what its calls must not be given.

    The trace and the foreseen run are compared call by call, for as long as both call the same modules with arguments
    of the same form.  Only whole arguments are replaced: lists and objects stay the ones that the model made.

    Attributes:
        foreseen: The calls of the foreseen run.
        omitted: For each call (path, occurrence) that was given None where it was.
    """

    foreseen: tuple[EagerCall, ...]
    omitted: dict[tuple[str, int], frozenset[Path]] = field(default_factory=dict)
    _at: int = 0

    def settle(self, path: str, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        """Return the arguments of the trace's next call as eager gives them, or None if they are the same."""
        if self._at >= len(self.foreseen):
            return None
        eager = self.foreseen[self._at]
        traced = dict(leaves((args, kwargs)))
        if eager.path != path or eager.places != tuple(traced):
            self._at = len(self.foreseen)
            return None
        self._at += 1
        extra = frozenset(
            place for place in eager.absent if len(place) == 2 and isinstance(traced[place], torch.Tensor)
        )
        if not extra:
            return None
        self.omitted[path, eager.occurrence] = extra
        return (
            tuple(None if (0, i) in extra else value for i, value in enumerate(args)),
            {name: None if (1, name) in extra else value for name, value in kwargs.items()},
        )


@dataclass(frozen=True, eq=False, slots=True)
class Foresight:
    """Whether what a capture leaves out is left out by eager for other sizes as well.

    It holds no module, so that it travels with the capture; every rank asks its own skeleton.

    Attributes:
        signature: The call's structure.
        inputs: Stand-ins of its tensors, for their dtypes and flags.
        attributes: Plain attributes of the skeleton's modules during the trace.
        omitted: For each call (path, occurrence) that was given None where it was.
        classes: Classes that the trace kept whole.
        observations: What is known of their results.
    """

    signature: Signature
    inputs: tuple[torch.Tensor, ...]
    attributes: tuple[Mapping[str, Any], ...]
    omitted: Mapping[tuple[str, int], frozenset[Path]]
    classes: frozenset[type]
    observations: Observations | None

    def agrees(self, model: nn.Module, shapes: Binding) -> bool:
        """Whether eager leaves out, for these input shapes, what the capture leaves out.

        Args:
            model: A `skeleton` of the captured model, whatever its present mode.
            shapes: Shapes of the input tensors.
        """
        tensors = without_data(self.inputs, shapes)
        with kept_whole(model, set(self.classes), self.observations), _left_as_it_was(model):
            for module, known in zip(model.modules(), self.attributes, strict=True):
                vars(module).update(known)
            seen = {(c.path, c.occurrence): c.absent for c in foresee(model, self.signature.call, tensors)}
        return all(places <= seen.get(call, frozenset()) for call, places in self.omitted.items())


def without_data(tensors: tuple[torch.Tensor, ...], shapes: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """Return tensors without data of other shapes."""
    return tuple(
        torch.empty(tuple(shape), dtype=t.dtype, device="meta", requires_grad=t.requires_grad)
        for shape, t in zip(shapes, tensors, strict=True)
    )
