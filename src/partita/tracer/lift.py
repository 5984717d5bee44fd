"""Lift a program and its recording into a `ModelGraph`: plain data that every offline part reads."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch
from torch import fx

from partita.cost.formulas import price_op
from partita.ir.graph import Item, ModelGraph, Op, TensorSpec
from partita.tracer.control import is_control
from partita.tracer.control_price import price_control
from partita.tracer.mutation import colocated_items
from partita.tracer.nodes import arguments_of, differentiable_nodes, is_random
from partita.tracer.program import Program
from partita.tracer.recorder import Recording
from partita.tracer.rows import RowAnalysis, source_of
from partita.tracer.sizes import Binding, evaluate


class _Lifter:
    """Builds one graph; node names become value names as in the program."""

    def __init__(
        self,
        name: str,
        program: Program,
        recording: Recording,
        names: dict[str, str],
        shapes: Binding,
        rows: RowAnalysis | None,
    ) -> None:
        self.name, self.program, self.recording, self.rows = name, program, recording, rows
        self.names = names
        self.values = program.sizes.bind(shapes) or {}
        self.specs: dict[str, TensorSpec] = {}
        self.storages: dict[int, str] = {}
        self.unknown: set[str] = set()
        self.paths = self._innermost_paths()
        self.differentiable = differentiable_nodes(recording)

    def _innermost_paths(self) -> list[str]:
        paths = [""] * len(self.recording.nodes)

        def mark(call: Any) -> None:
            if call.function is None:
                paths[call.start : call.end] = [call.path] * (call.end - call.start)
            for child in call.children:
                mark(child)

        mark(self.recording.root)
        return paths

    # -- tensors -------------------------------------------------------------------------------------------------------
    def size(self, value: Any) -> int:
        expression = self.recording.settle(value)
        return int(evaluate(expression, self.values) or 0)

    def value_name(self, node: fx.Node) -> str:
        return self.names.get(node.name, node.name)

    def tensor(self, node: fx.Node) -> str:
        """Note a node's tensor; return its id."""
        name = self.value_name(node)
        if name in self.specs:
            return name
        value = node.meta["val"]
        storage = self.storages.setdefault(value.untyped_storage()._cdata, name)
        role, names = self._role(node, name)
        self.specs[name] = TensorSpec(
            id=name,
            shape=tuple(self.size(s) for s in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            role=role,
            names=names,
            batch_dim=None if self.rows is None else self.rows.dims.get(node.name),
            requires_grad=node.name in self.differentiable
            and (value.dtype.is_floating_point or value.dtype.is_complex),
            storage=storage,
        )
        return name

    def _role(self, node: fx.Node, name: str) -> tuple[Any, tuple[str, ...]]:
        if node.name in self.recording.tensors:
            return ("parameter" if node.name in self.recording.parameters else "buffer"), self.recording.tensors[
                node.name
            ]
        if name in self.program.inputs:
            return "input", (name.removeprefix("in:"),)
        return ("constant" if name in self.program.constants else "activation"), ()

    # -- operators -----------------------------------------------------------------------------------------------------
    def ops(self) -> tuple[list[Op], list[int]]:
        """Return the operators, and for every node the number of operators before it."""
        ops: list[Op] = []
        before: list[int] = []
        for i, node in enumerate(self.recording.nodes):
            before.append(len(ops))
            value = node.meta.get("val")
            if node.op != "call_function":
                if isinstance(value, torch.Tensor):
                    self.tensor(node)
            elif node.target is operator.getitem:
                self._part(node)
            elif self._has_tensors(value):
                ops.append(self._op(len(ops), node, self.paths[i]))
        before.append(len(ops))
        return ops, before

    def _has_tensors(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) or (
            isinstance(value, tuple | list) and any(isinstance(v, torch.Tensor) for v in value)
        )

    def _part(self, node: fx.Node) -> None:
        source = node.args[0]
        if (
            isinstance(source, fx.Node)
            and isinstance(node.meta.get("val"), torch.Tensor)
            and self.value_name(node) not in self.specs
        ):
            self.tensor(node)

    def _reads(self, node: fx.Node) -> tuple[str, ...]:
        names = []
        for source in node.all_input_nodes:
            if isinstance(source.meta.get("val"), torch.Tensor):
                names.append(self.tensor(source))
            elif self._has_tensors(source.meta.get("val")):
                names += [self.value_name(u) for u in source.users if self.value_name(u) in self.specs]
        return tuple(names)

    def _writes(self, node: fx.Node) -> tuple[str, ...]:
        if isinstance(node.meta["val"], torch.Tensor):
            return (self.tensor(node),)
        parts = [u for u in node.users if u.target is operator.getitem and isinstance(u.meta.get("val"), torch.Tensor)]
        return tuple(self.tensor(part) for part in parts)

    def _op(self, number: int, node: fx.Node, path: str) -> Op:
        reads = self._reads(node)
        writes = self._writes(node)
        requires_grad = any(self.specs[w].requires_grad for w in writes)
        target = str(node.target)
        literals = {
            k: self._literal(v)
            for k, v in arguments_of(node).items()
            if not isinstance(v, fx.Node) or not self._has_tensors(v.meta.get("val"))
        }
        operands, results = [self.specs[r] for r in reads], [self.specs[w] for w in writes]
        if is_control(node):
            price = price_control(node, operands, results, self.size, self.unknown)
        else:
            price = price_op(target, operands, results, literals=literals)
        if price.kind == "unknown":
            self.unknown.add(target)
        return Op(
            id=number,
            name=node.name,
            target=target,
            module_path=path,
            source=source_of(node),
            kind=price.kind,
            reads=reads,
            writes=writes,
            flops=price.flops,
            backward_flops=price.backward_flops,
            bytes=price.bytes,
            backward_bytes=price.backward_bytes,
            saved=price.saved if requires_grad else (),
            workspace=price.workspace if requires_grad else 0,
            random=is_random(node),
        )

    def _literal(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            number = value.meta.get("val")
            return self.size(number) if isinstance(number, torch.SymInt | int) else number
        if isinstance(value, list | tuple):
            return [self._literal(v) for v in value]
        return value

    # -- items ---------------------------------------------------------------------------------------------------------
    def items(self, before: list[int]) -> list[Item]:
        return [
            Item(
                id=step.id,
                kind=step.kind,
                name=step.name,
                module_path=step.path,
                ops=(before[step.nodes[0]], before[step.nodes[1]]),
                reads=tuple(r for r in step.reads if r in self.specs),
                writes=tuple(w for w in step.writes if w in self.specs),
                replicable=step.replicable,
                random=step.random,
            )
            for step in self.program.steps
        ]

    def graph(
        self,
        *,
        training: bool,
        outputs: tuple[str, ...],
        batch_rows: int | None,
        scalar_loss: bool,
    ) -> ModelGraph:
        ops, before = self.ops()
        items = self.items(before)
        return ModelGraph(
            name=self.name,
            tensors=tuple(
                sorted(
                    self.specs.values(),
                    key=lambda t: {"parameter": 0, "buffer": 1, "input": 2, "constant": 3}.get(t.role, 4),
                )
            ),
            ops=tuple(ops),
            items=tuple(items),
            outputs=tuple(dict.fromkeys(o for o in outputs if o in self.specs)),
            training=training,
            batch_rows=batch_rows,
            scalar_loss=scalar_loss,
            colocated=colocated_items(self.program),
            unknown_ops=tuple(sorted(self.unknown)),
            fingerprint=_fingerprint(items, self.specs, ops),
        )


def _fingerprint(items: list[Item], specs: dict[str, TensorSpec], ops: list[Op]) -> str:
    """Hash structure, shapes and dtypes; names of files and notes do not count."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.kind, item.name, item.ops, item.reads, item.writes)).encode())
    for spec in specs.values():
        digest.update(repr((spec.id, spec.shape, spec.dtype, spec.names, spec.requires_grad)).encode())
    for op in ops:
        digest.update(repr((op.target, op.reads, op.writes)).encode())
    return digest.hexdigest()[:16]


def lift(
    name: str,
    program: Program,
    recording: Recording,
    names: dict[str, str],
    shapes: Binding,
    rows: RowAnalysis | None,
    *,
    training: bool,
    outputs: tuple[str, ...],
    batch_rows: int | None,
    scalar_loss: bool,
) -> ModelGraph:
    """Build the graph of one capture at the example's shapes.

    Args:
        name: The model's class name.
        program: The folded program.
        recording: Its trace.
        names: Node name to value name where they differ.
        shapes: Shapes of the example's input tensors.
        rows: Where the rows of the batch lie, if the batch axis is known.
        training: Whether the capture ran in training mode.
        outputs: Value names of the result's tensors.
        batch_rows: Rows of the example, if the batch may be cut.
        scalar_loss: Whether the call returns its loss.

    Returns:
        The graph.
    """
    lifter = _Lifter(name, program, recording, names, shapes, rows)
    return lifter.graph(training=training, outputs=outputs, batch_rows=batch_rows, scalar_loss=scalar_loss)
