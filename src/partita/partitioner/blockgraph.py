"""The graph of blocks, independent of any configuration: what crosses between blocks, and what each block holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from partita.ir.graph import Block, ModelGraph, TensorSpec
from partita.partitioner.coarsen import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor that leaves its block.

    Attributes:
        tensor: The tensor.
        producer: The block that makes it.
        readers: The other blocks that read it, directly or through replicable items, ascending.
        savers: The blocks whose backward keeps its storage.
        gradient: A gradient comes back.
    """

    tensor: TensorSpec
    producer: int
    readers: tuple[int, ...]
    savers: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One parameter, buffer or constant with the blocks that read it (none for an unread one)."""

    tensor: TensorSpec
    readers: tuple[int, ...]

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient: an unread parameter gets none."""
        return self.tensor.role == "parameter" and self.tensor.requires_grad and bool(self.readers)


class BlockGraph:
    """Blocks with their values, holdings and dependencies.

    Args:
        graph: The captured graph.
        blocks: Its blocks, from `partita.partitioner.coarsen.coarsen`.

    Attributes:
        graph: As given.
        blocks: As given.
        edges: Dependencies between blocks (producer, reader), ascending.
        values: What crosses between blocks, by producer.
        holdings: Parameters, buffers and constants, each storage once.
    """

    def __init__(self, graph: ModelGraph, blocks: tuple[Block, ...]) -> None:
        self.graph = graph
        self.blocks = blocks
        self._reads = Reads(graph)
        self._tensors = graph.tensor_map()
        readers: dict[str, set[int]] = {}
        savers: dict[str, set[int]] = {}
        for block in blocks:
            for item in block.items:
                for name in self._reads.of(item):
                    readers.setdefault(name, set()).add(block.id)
                for op in graph.ops[slice(*graph.items[item].ops)]:
                    for name in op.saved:
                        savers.setdefault(self._storage(name), set()).add(block.id)
        self.values = tuple(self._values(readers, savers))
        self.holdings = tuple(self._holdings(readers))
        self.edges = tuple(sorted({(value.producer, reader) for value in self.values for reader in value.readers}))

    def _storage(self, name: str) -> str:
        return self._tensors[name].storage or name

    def _values(self, readers: dict[str, set[int]], savers: dict[str, set[int]]) -> Iterable[Value]:
        for block in self.blocks:
            written = dict.fromkeys(name for item in block.items for name in self.graph.items[item].writes)
            for name in written:
                others = readers.get(name, set()) - {block.id}
                if not others:
                    continue
                tensor, owner = self._tensors[name], self._storage(name)
                # A view of an input or parameter is resident anyway: nothing is kept for it.
                kept = savers.get(owner, set()) if self._tensors.get(owner, tensor).role == "activation" else set()
                yield Value(
                    tensor=tensor,
                    producer=block.id,
                    readers=tuple(sorted(others)),
                    savers=tuple(sorted(kept & (others | {block.id}))),
                    gradient=tensor.requires_grad and self.graph.training,
                )

    def _holdings(self, readers: dict[str, set[int]]) -> Iterable[Holding]:
        found: dict[str, tuple[TensorSpec, set[int]]] = {}
        for tensor in self.graph.tensors:
            if tensor.role in {"parameter", "buffer", "constant"}:
                _, known = found.setdefault(tensor.storage or tensor.id, (tensor, set()))
                known |= readers.get(tensor.id, set())
        for tensor, known in found.values():
            yield Holding(tensor=tensor, readers=tuple(sorted(known)))

    def items_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the items that a stage of these blocks runs, the replicable ones included, ascending."""
        own = [item for block in blocks for item in self.blocks[block].items]
        return tuple(sorted({*own, *self._reads.recomputed_for(own)}))

    def readers_of(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the blocks that read a parameter or buffer, or another of its storage."""
        owner = tensor.storage or tensor.id
        return next(h.readers for h in self.holdings if (h.tensor.storage or h.tensor.id) == owner)

    def bytes_at(self, tensor: TensorSpec, rows: int) -> int:
        """Return the bytes of a tensor at ``rows`` rows of the batch."""
        if tensor.batch_dim is None or self.graph.batch_rows is None:
            return tensor.bytes
        return ceil(tensor.bytes * rows / self.graph.batch_rows)
