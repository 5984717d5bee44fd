"""Calls captured before they first occur: the user's further examples, and evaluation.

While the capture is made every rank has the whole model, so a call can be compared with it; once the model is placed no
rank can.  What is expected to occur is therefore captured and verified here, and found by the runtime when it does.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from partita.errors import CaptureError
from partita.ir.report import Comparison
from partita.ir.request import Example
from partita.tracer.assume import holds_for
from partita.tracer.decide import Settings, rows_along, settle_call
from partita.tracer.signature import Signature, attributes_of, mode_of, signature_of
from partita.tracer.traced import Rows, Traced
from partita.tracer.trials import try_once
from partita.tracer.verify import shadow

EVALUATION = "eval()"
"""What the evaluation of the example is called in reports."""


@dataclass(frozen=True, eq=False, slots=True)
class Ahead:
    """A call that was captured before it first occurs.

    Attributes:
        traced: The capture.
        rows: How it may be cut, or None.
        mode: Of the model, see `mode_of`.
        state: Plain attributes of the opened modules for which it holds.
        tried: Its rows were tried on numbers.
    """

    traced: Traced
    rows: Rows | None
    mode: Hashable
    state: Hashable
    tried: bool

    def fits(self, signature: Signature, tensors: tuple[torch.Tensor, ...], mode: Hashable) -> bool:
        """Whether this is the capture of such a call."""
        return self.mode == mode and _holds(self.traced, signature, tensors)


def _holds(traced: Traced, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether a capture is valid for a call."""
    shapes = tuple(tuple(t.shape) for t in tensors)
    same = traced.signature.key == signature.key and traced.program.sizes.holds(shapes)
    if any(tensor.is_meta for tensor in tensors):
        return same and not traced.program.assumptions
    return same and holds_for(traced.program, tensors)


@dataclass(eq=False, slots=True)
class Forecast:
    """Captures further calls of a model whose first example is captured.

    Attributes:
        settings: How captures are tried.
        model: The user's model, maybe without weights.
        base: The example's capture.
        rows: How it may be cut, or None.
        found: Further captures.
        comparisons: What was compared.
        remarks: Sentences for the report.
        refusal: Why the model has to be kept whole ("" if it has not).
    """

    settings: Settings
    model: nn.Module
    base: Traced
    rows: Rows | None
    found: list[Ahead] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    refusal: str = ""

    def examples(self, examples: Sequence[Example], start: int = 2) -> None:
        """Compare further examples with the model; capture those that the capture does not hold for.

        Args:
            examples: The examples.
            start: Number of the first one in messages.

        Raises:
            CaptureError: If one cannot be captured, or its capture differs from the model.
        """
        for number, example in enumerate(examples, start):
            signature, tensors = signature_of(example.args, example.kwargs)
            self._example(f"example {number}", signature, tensors)

    def _example(self, name: str, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> None:
        mode, settings = mode_of(self.model), self.settings
        live = None if any(t.is_meta for t in tensors) else settings.live
        known = [self.base, *(ahead.traced for ahead in self.found)]
        fitting = next((traced for traced in known if _holds(traced, signature, tensors)), None)
        if fitting is not None:
            if live is not None and settings.verify != "off":
                self.comparisons.append(self._tried_once(live, fitting, tensors, name))
            return
        familiar = self.base.signature.key == signature.key
        self.remarks.append(
            f"{name} is a capture of its own: "
            + ("it breaks a condition of the first" if familiar else "it is called in another way")
        )
        tied = self.base.tied if familiar else ()
        traced = settings.tracer.trace(signature, tensors, tied=tied, live=live, whole=False)
        traced, decision = settle_call(
            Settings(settings.tracer, live, settings.verify, settings.agree), traced, tensors, name
        )
        if decision.refusal:
            raise CaptureError(decision.refusal)
        self.comparisons += decision.comparisons
        axis = decision.axis if self.rows is not None else None
        rows, reason = rows_along(traced, axis, tensors, None)
        if rows is None:
            self.remarks.append(f"the batch of {name} is not cut: {decision.reason or reason}")
        self._note(traced, rows, self.model, mode, tried=live is not None)

    def _tried_once(self, live: nn.Module, traced: Traced, tensors: tuple[torch.Tensor, ...], name: str) -> Comparison:
        def decide() -> Comparison | str:
            try:
                return try_once(live, traced, tensors, name)
            except CaptureError as error:
                return str(error)

        found: Comparison | str = self.settings.agree(decide)
        if isinstance(found, str):
            raise CaptureError(found)
        return found

    def evaluation(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Capture and verify the example in evaluation mode without gradients.

        One that differs keeps the model whole; one that cannot be captured is noted, and refused when it occurs.
        """
        live, tracer = self.settings.live, self.settings.tracer
        assert live is not None
        evaluated = shadow(live).eval()
        tracer.follow(evaluated)
        try:
            with torch.no_grad():
                self._evaluate(evaluated, tensors)
        except CaptureError as error:
            text = str(error).splitlines()[0]
            self.comparisons.append(Comparison(call=EVALUATION, problem=f"cannot be captured: {text}"))
        finally:
            tracer.follow(self.model)

    def _evaluate(self, evaluated: nn.Module, tensors: tuple[torch.Tensor, ...]) -> None:
        base = self.base
        traced = self.settings.tracer.trace(base.signature, tensors, tied=base.tied, live=evaluated, whole=False)

        def decide() -> tuple[Comparison, bool]:
            try:
                compared = try_once(evaluated, traced, tensors, EVALUATION)
            except CaptureError as error:
                return Comparison(call=EVALUATION, problem=str(error).splitlines()[0]), False
            rows, _ = rows_along(traced, None if self.rows is None else self.rows.axis, tensors, evaluated)
            return compared, rows is not None

        compared, cut = self.settings.agree(decide)
        self.comparisons.append(compared)
        self.refusal = compared.problem
        if self.refusal:
            return
        rows, _ = rows_along(traced, self.rows.axis if cut and self.rows else None, tensors, None)
        self._note(traced, rows, evaluated, mode_of(evaluated), tried=True)

    def _note(self, traced: Traced, rows: Rows | None, model: nn.Module, mode: Hashable, *, tried: bool) -> None:
        state = attributes_of(dict(model.named_modules(remove_duplicate=False)), traced.paths)
        self.found.append(Ahead(traced, rows, mode, state, tried))
