"""What a capture found out: which modules were opened, what was compared, which sizes and rows are free, and why not.

The report travels with its `ModelGraph`: it is saved and loaded with it and needs no torch.  ``str(report)`` is the
text for people (`partita.ir.report_text`); `CaptureReport.sentences` says the decisions in one sentence each.
"""

from __future__ import annotations

from typing import Literal

from partita.ir.frozen import dataclass

Rung = Literal["recorded", "classes kept", "whole"]
"""How much of the model the capture could enter; see ``docs/capture.md``."""
Decision = Literal["opened", "kept whole", "folded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntry:
    """One decision about modules of one class.

    Attributes:
        decision: ``opened`` runs the module's own code as operators; ``folded`` calls the module as it is; ``kept
            whole`` does so because the trace could not enter it.
        class_name: The modules' class.
        paths: Qualified names of the modules ("" is the root), in execution order.
        reason: Why, in plain words; empty if it is the usual decision for such a module.
        source: ``file:line`` of the class's forward; empty for modules of torch itself.
        stopped_at: ``file:line`` where the trace stopped, if it did.
    """

    decision: Decision
    class_name: str
    paths: tuple[str, ...]
    reason: str = ""
    source: str = ""
    stopped_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison of the captured program with the real model.

    Attributes:
        call: Which call, e.g. ``the example`` or ``another size``.
        compared: What was compared: ``results``, ``gradients``, ``buffers``.
        shapes: Shapes of the call's input tensors.
        difference: Largest relative difference found; 0 is equality to the bit.
        problem: Why the comparison did not take place or what differs; empty if they are equal.
    """

    call: str
    compared: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    difference: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEntry:
    """One input tensor of the call.

    Attributes:
        name: The argument's path.
        shape: Sizes of the example.
        fixed_dims: Dims whose size is a condition of the capture: a call with another size is captured anew.
        batch_dim: The dim that carries the rows of the batch, or None if it has none or the batch is not cut.
    """

    name: str
    shape: tuple[int, ...]
    fixed_dims: tuple[int, ...] = ()
    batch_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCount:
    """How often an operator occurs."""

    target: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What the capture of a call found out.

    Attributes:
        rung: How much of the model the capture could enter.
        reason: Why the model is kept whole; empty if it is not.
        stopped_at: ``file:line`` where the trace stopped, for a model kept whole.
        calls: Items that run one of the model's own modules.
        glue: Items that run one operator between them.
        operators: Operators of the call, those inside modules included.
        modules: Decisions about modules.
        comparisons: Comparisons with the real model, in the order in which they were made.
        inputs: The input tensors.
        rows: Rows of the example's batch, or None if the batch is not cut.
        why_not_cut: Why the batch is not cut; empty if it is.
        unknown: Operators without a cost formula, by how often they occur.
        blocks: Blocks that a partitioner may move, or None if they were not counted.
        distinct_blocks: How many of them differ in structure.
        remarks: Further sentences for people.
    """

    rung: Rung = "recorded"
    reason: str = ""
    stopped_at: str = ""
    calls: int = 0
    glue: int = 0
    operators: int = 0
    modules: tuple[ModuleEntry, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    inputs: tuple[InputEntry, ...] = ()
    rows: int | None = None
    why_not_cut: str = ""
    unknown: tuple[OperatorCount, ...] = ()
    blocks: int | None = None
    distinct_blocks: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether the capture was compared with the real model."""
        return any(comparison.compared and not comparison.problem for comparison in self.comparisons)

    def sentences(self) -> tuple[str, ...]:
        """Return the decisions that differ from the usual, one sentence each."""
        found = []
        for entry in self.modules:
            if entry.decision == "opened" and entry.reason:
                found += [f"{path or 'the model'} is not folded: {entry.reason}" for path in entry.paths]
            if entry.decision == "kept whole":
                found.append(f"modules of class {entry.class_name} are kept whole: {entry.reason}")
        if self.reason:
            found.append(f"the model is kept whole: {self.reason}")
        if self.why_not_cut:
            found.append(f"the batch is not cut: {self.why_not_cut}")
        return (*found, *self.remarks)

    def __str__(self) -> str:
        from partita.ir.report_text import report_text

        return report_text(self)
