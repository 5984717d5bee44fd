"""Move messages between pipeline positions: real process groups, and a loopback in one process.

A message is a list of values (tensors, None and plain numbers) that one stage sends to another for one microbatch.
Its *form* (which values are there, their shapes, dtypes and whether they need a gradient) travels in a header the
first time; a message whose form is already known to both ends by its key is sent without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from partita.errors import TransportError
from partita.ir.schedule import Action
from partita.schedules.machine import other_end

Value = torch.Tensor | bool | int | float | None
_DTYPES: tuple[torch.dtype, ...] = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 10
_WIDTH = 4 + _MAX_DIMS
_NONE, _NUMBER, _TENSOR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Form:
    """What one value of a message looks like.

    Attributes:
        kind: 0 absent, 1 a plain number, 2 a tensor.
        dtype: Index into the known dtypes; for numbers 0 bool, 1 int, 2 float.
        requires_grad: Whether a gradient comes back.
        shape: Sizes; for numbers its bits.
    """

    kind: int
    dtype: int = 0
    requires_grad: bool = False
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, value: Value) -> Form:
        """Return the form of a value.

        Raises:
            TransportError: If the value cannot travel.
        """
        if value is None:
            return cls(_NONE)
        if isinstance(value, bool | int | float):
            bits = (
                torch.tensor(float(value), dtype=torch.float64).view(torch.int64)
                if isinstance(value, float)
                else torch.tensor(int(value))
            )
            return cls(_NUMBER, [bool, int, float].index(type(value)), False, (int(bits),))
        if value.dtype not in _DTYPES or value.ndim > _MAX_DIMS or value.is_sparse:
            raise TransportError(
                f"a {value.layout} tensor of dtype {value.dtype} with {value.ndim} dims cannot cross a stage boundary",
                hint=f"dense tensors of up to {_MAX_DIMS} dims can",
            )
        return cls(_TENSOR, _DTYPES.index(value.dtype), value.requires_grad, tuple(value.shape))

    def row(self) -> list[int]:
        """Return the form as a fixed number of integers."""
        return [
            self.kind,
            self.dtype,
            int(self.requires_grad),
            len(self.shape),
            *self.shape,
            *[0] * (_MAX_DIMS - len(self.shape)),
        ]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Form:
        """Return the form that `row` wrote."""
        return cls(int(row[0]), int(row[1]), bool(row[2]), tuple(int(n) for n in row[4 : 4 + int(row[3])]))

    def number(self) -> Value:
        """Return the value of a number's form."""
        if self.dtype == 2:
            return float(torch.tensor(self.shape[0]).view(torch.float64))
        return bool(self.shape[0]) if self.dtype == 0 else self.shape[0]

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for the tensor."""
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device=device)


@dataclass(frozen=True, slots=True)
class Received:
    """An arrived message.

    Attributes:
        values: Its values; tensors carry no gradient history.
        requires_grad: For each value whether the sender's needs a gradient.
    """

    values: tuple[Value, ...]
    requires_grad: tuple[bool, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Outgoing:
    """A message to be sent.

    Attributes:
        values: Its values.
        key: Messages of one non-None key always have one form.
        announced: The other end knows the form by itself.
    """

    values: Sequence[Value]
    key: Hashable | None
    announced: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """A message to be received.

    Attributes:
        count: Number of its values.
        key: Key of its form, as the sender gives it.
        forms: Gives their forms, where they are known without being told; None while they are not known yet.
    """

    count: int
    key: Hashable | None
    forms: Callable[[], tuple[Form, ...] | None] | None = None


class Transport(Protocol):
    """Carries messages and sums for one pipeline position.

    A conforming transport delivers every message unchanged to its other end, never blocks in `send` or `post`, and
    gives the same sum to every rank of a reduction.
    """

    def send(self, action: Action, message: Outgoing) -> None:
        """Start a send."""
        ...

    def post(self, action: Action, expected: Expected) -> None:
        """Start a receive."""
        ...

    def wait(self, action: Action) -> Received:
        """Return the posted message once it is there."""
        ...

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum a tensor over ranks, in place."""
        ...

    def finish(self) -> None:
        """Return when everything sent has left."""
        ...


@dataclass(eq=False, slots=True)
class _Pending:
    key: Hashable | None
    peer: int
    tag: int
    late: Callable[[], tuple[Form, ...] | None] | None = None
    header: torch.Tensor | None = None
    forms: list[Form] = field(default_factory=list)
    tensors: list[torch.Tensor | None] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


class ProcessGroupTransport:
    """Messages over `torch.distributed`, one process per rank.

    Args:
        ranks: Global rank of every stage for this replica.
        groups: Process group of every set of ranks that reduces together (sorted tuple); None is the whole world.
        device: Where tensors live.
        talking: Stands around everything that may fail because another rank has, see `World.talking`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        groups: Mapping[tuple[int, ...], Any],
        device: torch.device,
        talking: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._talking = talking
        self._ranks = tuple(ranks)
        self._groups = groups
        self._device = device
        self._known: dict[tuple[Hashable, Hashable], list[Form]] = {}
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._posted: dict[Action, _Pending] = {}

    def _tag(self, action: Action) -> int:
        """Return a number that both ends of a message compute alike."""
        sending = action if action.kind.startswith("SEND") else other_end(action)
        assert sending.peer is not None and sending.microbatch is not None
        backward = sending.kind == "SEND_B"
        pair = sending.stage * len(self._ranks) + sending.peer
        return 2 * (2 * (sending.microbatch * len(self._ranks) ** 2 + pair) + backward)

    def send(self, action: Action, message: Outgoing) -> None:
        """Start a send; a header goes first unless the form is known."""
        assert action.peer is not None
        peer, tag = self._ranks[action.peer], self._tag(action)
        values, key = message.values, message.key
        forms = [Form.of(value) for value in values]
        known = forms if message.announced else None if key is None else self._known.get((_lane(action), key))
        if known is not None and known != forms:
            raise TransportError(
                f"the message {action} changed its form from {known} to {forms}", hint="please report this model"
            )
        if known is None:
            header = torch.tensor([form.row() for form in forms], dtype=torch.int64, device=self._device)
            self._start(header, peer, tag)
            if key is not None:
                self._known[_lane(action), key] = forms
        for value in values:
            if isinstance(value, torch.Tensor) and value.numel():
                self._start(_wire(value.detach().contiguous()), peer, tag + 1)

    def _start(self, data: torch.Tensor, peer: int, tag: int) -> None:
        with self._talking():
            self._sends.append((dist.isend(data, peer, tag=tag), data))

    def _await(self, pending: _Pending, tensor: torch.Tensor, tag: int) -> None:
        with self._talking():
            pending.works.append(dist.irecv(tensor, pending.peer, tag=tag))

    def post(self, action: Action, expected: Expected) -> None:
        """Start the receive: of the tensors if the form is known, of the header otherwise."""
        assert action.peer is not None
        pending = _Pending(expected.key, self._ranks[action.peer], self._tag(action))
        self._posted[action] = pending
        if expected.forms is not None:
            forms = expected.forms()
            if forms is None:
                pending.late = expected.forms
            else:
                self._receive(pending, list(forms))
            return
        known = None if expected.key is None else self._known.get((_lane(action), expected.key))
        if known is not None:
            self._receive(pending, known)
            return
        pending.header = torch.empty((expected.count, _WIDTH), dtype=torch.int64, device=self._device)
        self._await(pending, pending.header, pending.tag)

    def _receive(self, pending: _Pending, forms: list[Form]) -> None:
        pending.forms = forms
        for form in forms:
            tensor = form.empty(self._device) if form.kind == _TENSOR else None
            pending.tensors.append(tensor)
            if tensor is not None and tensor.numel():
                self._await(pending, _wire(tensor), pending.tag + 1)

    def wait(self, action: Action) -> Received:
        """Return the message once every part of it is there."""
        pending = self._posted.pop(action)
        forms = None if pending.late is None else pending.late()
        if forms is not None:
            self._receive(pending, list(forms))
        while pending.works:
            with self._talking():
                pending.works.pop(0).wait()
            if pending.header is not None and not pending.works and not pending.forms:
                told = [Form.from_row(row) for row in pending.header.tolist()]
                if pending.key is not None:
                    self._known[_lane(action), pending.key] = told
                self._receive(pending, told)
        values = tuple(
            f.number() if f.kind == _NUMBER else t for f, t in zip(pending.forms, pending.tensors, strict=True)
        )
        return Received(values, tuple(f.requires_grad for f in pending.forms))

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum over the ranks' process group."""
        if len(ranks) > 1:
            with self._talking():
                dist.all_reduce(_wire(tensor), group=self._groups[tuple(sorted(ranks))])

    def finish(self) -> None:
        """Wait for every send of this step."""
        for work, _data in self._sends:
            with self._talking():
                work.wait()
        self._sends.clear()


def _lane(action: Action) -> tuple[str, int, int | None]:
    """Return what the messages of all microbatches of one edge and direction have in common."""
    return action.kind, action.stage, action.peer


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor that every backend can carry (complex as pairs, bool as bytes)."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


class Mailbox:
    """The shared post of all positions of a loopback.

    Attributes:
        messages: By receiving action.
    """

    def __init__(self) -> None:
        self.messages: dict[Action, Received] = {}
        self.sums: dict[tuple[int, ...], list[torch.Tensor]] = {}


class LoopbackTransport:
    """Messages between positions of one process.

    Args:
        mailbox: Shared by all positions.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def send(self, action: Action, message: Outgoing) -> None:
        """Put copies into the mailbox."""
        values = message.values
        copies = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)
        grads = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        self._mailbox.messages[other_end(action)] = Received(copies, grads)

    def post(self, action: Action, expected: Expected) -> None:
        """Nothing to start: messages come by themselves."""

    def arrived(self, action: Action) -> bool:
        """Whether a message can be taken without waiting."""
        return action in self._mailbox.messages

    def wait(self, action: Action) -> Received:
        """Take the message out.

        Raises:
            TransportError: If it has not been sent.
        """
        if action not in self._mailbox.messages:
            raise TransportError(
                f"{action} was awaited before its message was sent", hint="drive loopback positions by turns"
            )
        return self._mailbox.messages.pop(action)

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
        """One process holds one replica: there is nothing to add."""

    def finish(self) -> None:
        """Everything sent has arrived."""
