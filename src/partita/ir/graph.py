"""The captured model as data: tensors, operators, items and blocks.

Theory of operation.  A capture records one call of the user's model as a list of ATen operators (`Op`).  Consecutive
operators that belong to one call of one of the user's own submodules are *folded* into one executable `Item` of kind
``call``; operators of the containers' own code (the *glue*) stay items of kind ``op``.  Items are what a runtime
executes, operators are what a cost model prices, and `Block`s (contiguous runs of items that the partitioner moves as
a unit) are what the partitioner decides about.  Item, operator and block ids are positions in their tuples, in
execution order, so a graph is acyclic by construction.

Shapes are those of the example.  A tensor whose values follow the rows of the batch says so with ``batch_dim``; its
bytes scale with the rows.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from partita.ir.dtypes import ITEM_SIZE
from partita.ir.frozen import dataclass, field
from partita.ir.report import CaptureReport

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ITEM_SIZE", "Block", "Item", "ModelGraph", "Op", "OpKind", "Role", "TensorSpec"]

Role = Literal["input", "parameter", "buffer", "constant", "activation"]
OpKind = Literal[
    "matmul",
    "attention",
    "convolution",
    "norm",
    "embedding",
    "pointwise",
    "reduction",
    "loss",
    "view",
    "factory",
    "movement",
    "scan",
    "random",
    "opaque",
    "unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One value of the graph.

    Attributes:
        id: Unique name inside the graph.
        shape: Sizes at the example's shapes; 0-dim tensors have ``()``.
        dtype: Torch's name without the prefix, e.g. ``"float32"``.
        role: Where the value comes from.
        names: For parameters and buffers every qualified name the model knows it by (ties), the first is canonical;
            for inputs the argument's path.
        batch_dim: The dim that carries the rows of the batch, or None if the value does not depend on them row by row.
        requires_grad: Whether a gradient flows into this value in training.
        storage: Id of the tensor that owns the memory; differs from ``id`` for views and in-place results.
    """

    id: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    names: tuple[str, ...] = ()
    batch_dim: int | None = None
    requires_grad: bool = False
    storage: str = ""

    @property
    def numel(self) -> int:
        """Number of elements at the example's shapes."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes at the example's shapes (dense, contiguous)."""
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One ATen operator with what it costs at the example's shapes.

    Attributes:
        id: Position in ``ModelGraph.ops``.
        name: Name of the recorded node.
        target: Operator overload, e.g. ``"aten.linear.default"``.
        module_path: Qualified name of the innermost module whose forward ran it ("" is the root).
        source: ``file:line`` of the user's code, or "".
        kind: Cost class.
        reads: Tensor ids read, in argument order.
        writes: Tensor ids produced.
        flops: Floating point operations of the forward (a multiply-add is 2).
        backward_flops: The same for the backward as far as gradients are needed.
        bytes: Bytes read and written by the forward.
        backward_bytes: Bytes read and written by the backward.
        saved: Tensor ids that autograd keeps for the backward.
        workspace: Bytes kept for the backward besides `saved`.
        random: Draws random numbers at the recorded arguments.
    """

    id: int
    name: str
    target: str
    module_path: str = ""
    source: str = ""
    kind: OpKind = "unknown"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    flops: int = 0
    backward_flops: int = 0
    bytes: int = 0
    backward_bytes: int = 0
    saved: tuple[str, ...] = ()
    workspace: int = 0
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The unit of execution: one call of a user's submodule, or one operator of the glue.

    Attributes:
        id: Position in ``ModelGraph.items``.
        kind: ``call`` runs the user's own module, ``op`` one ATen operator.
        name: Module path with its occurrence (``encoder.layers.3#0``) or operator name.
        module_path: The called module, or the module whose forward contains the operator.
        ops: Half-open range of operator ids it covers.
        reads: Tensor ids it needs from outside (parameters, buffers, inputs, constants, activations).
        writes: Tensor ids it makes that are read outside or returned.
        replicable: Cheap, without parameters, gradients, randomness or mutation: every stage that needs the value may
            recompute it instead of receiving it.
        random: Draws random numbers.
    """

    id: int
    kind: Literal["call", "op"]
    name: str
    module_path: str
    ops: tuple[int, int]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    replicable: bool = False
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The smallest unit that the partitioner moves: a set of items.

    Attributes:
        id: Position in execution order.
        label: Short text for people.
        items: Item ids, ascending.
        repeat_of: Id of the first block with the same structure, if this one repeats it.
    """

    id: int
    label: str
    items: tuple[int, ...]
    repeat_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """One captured call of a model.

    Attributes:
        name: The model's class name.
        tensors: Every value, parameters and inputs first.
        ops: Operators in execution order.
        items: Items in execution order.
        outputs: Tensor ids that the call returns, in the order of the output structure.
        training: Whether the capture ran in training mode.
        batch_rows: Rows of the example's batch, or None if no batch axis is known.
        scalar_loss: The call returns its loss (a 0-dim floating tensor with gradient).
        colocated: Groups of item ids that must run on one stage (a cut between them would break a mutation).
        unknown_ops: Targets without a cost formula; they are listed, never guessed.
        report: What the capture found out and what was compared with the real model.
        fingerprint: Hash over structure, shapes and dtypes.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    items: tuple[Item, ...]
    outputs: tuple[str, ...]
    training: bool = True
    batch_rows: int | None = None
    scalar_loss: bool = False
    colocated: tuple[tuple[int, ...], ...] = ()
    unknown_ops: tuple[str, ...] = ()
    report: CaptureReport = field(default_factory=CaptureReport)
    fingerprint: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the capture has to say to the user, one sentence each."""
        return self.report.sentences()

    def tensor_map(self) -> dict[str, TensorSpec]:
        """Return the tensors by id."""
        return {tensor.id: tensor for tensor in self.tensors}

    def producers(self) -> dict[str, int]:
        """Return for each tensor that an item makes the id of that item."""
        return {tensor: item.id for item in self.items for tensor in item.writes}

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The parameters, each once whatever its number of names."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "parameter")

    def save(self, path: str | Path) -> None:
        """Write the graph as canonical JSON: the same graph gives the same bytes."""
        from partita.ir.serde import write

        write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> ModelGraph:
        """Read a graph written by `save`.

        Raises:
            InvalidPlanError: If the file is not a graph, is of an unknown version, or breaks a rule of `verify`.
        """
        from partita.ir.serde import read
        from partita.ir.verify import check

        graph = read(cls, path)
        check(graph)
        return graph
