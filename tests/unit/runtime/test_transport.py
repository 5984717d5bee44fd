"""Messages arrive as they were sent: every dtype, shape, None and number, on both transports."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import TransportError
from partita.ir.schedule import parse_actions
from partita.runtime.transport import (
    Expected,
    Form,
    LoopbackTransport,
    Mailbox,
    Outgoing,
    ProcessGroupTransport,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
SEND, RECEIVE = parse_actions("0SEND_F3>1")[0], parse_actions("1RECV_F3<0")[0]
numbers = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats())


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and (a == b or (math.isnan(a) and math.isnan(b)))


def example(dtype, shape=(3, 2)):
    torch.manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(0, 2, shape).to(dtype)


# ---------------------------------------------------------------- forms


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=10), st.booleans())
def test_the_form_of_a_tensor_survives_its_row(dtype, shape, grad):
    value = torch.zeros(shape, dtype=dtype)
    if grad and (dtype.is_floating_point or dtype.is_complex):
        value.requires_grad_()
    form = Form.of(value)
    assert Form.from_row(form.row()) == form
    assert form.requires_grad == value.requires_grad
    assert same(form.empty(torch.device("cpu")).zero_(), value.detach())


@given(numbers)
def test_numbers_travel_inside_their_form(number):
    form = Form.from_row(Form.of(number).row())
    assert same(form.number(), number)


def test_the_form_of_nothing():
    assert Form.from_row(Form.of(None).row()) == Form.of(None)
    assert Form.of(math.inf).number() == math.inf
    assert Form.of(True) != Form.of(1) != Form.of(1.0)


@pytest.mark.parametrize(
    "value", [torch.zeros((1,) * 11), torch.zeros(2, 2).to_sparse(), torch.zeros(1, dtype=torch.uint16)]
)
def test_what_cannot_travel_is_refused(value):
    with pytest.raises(TransportError, match="cannot cross a stage boundary"):
        Form.of(value)


# ---------------------------------------------------------------- loopback


def test_loopback_delivers_copies():
    mailbox = Mailbox()
    sender, receiver = LoopbackTransport(mailbox), LoopbackTransport(mailbox)
    value = torch.ones(2, requires_grad=True)
    receiver.post(RECEIVE, Expected(3, None))
    assert not receiver.arrived(RECEIVE)
    with pytest.raises(TransportError, match="awaited before its message was sent"):
        receiver.wait(RECEIVE)
    sender.send(SEND, Outgoing([value, None, 7], None))
    assert receiver.arrived(RECEIVE)
    with torch.no_grad():
        value.zero_()
    found = receiver.wait(RECEIVE)
    assert torch.equal(found.values[0], torch.ones(2))
    assert found.values[0].grad_fn is None
    assert found.values[1:] == (None, 7)
    assert found.requires_grad == (True, False, False)
    assert not receiver.arrived(RECEIVE)


# ---------------------------------------------------------------- process groups

MESSAGES = [
    [example(dtype) for dtype in DTYPES],
    [torch.zeros(0, 3), torch.tensor(2.5), None, True, -5, 0.1, example(torch.float64, (2, 3, 4)).transpose(0, 2)],
    [example(torch.float32).requires_grad_(), example(torch.float32)[:, ::2], None],
    [],
]


def deliver(keyed):
    """Send every message twice from rank 0 to rank 1; return what rank 1 has got."""
    transport = ProcessGroupTransport([0, 1], {}, torch.device("cpu"))
    found = []
    for number, message in enumerate(MESSAGES * 2):
        key = number % len(MESSAGES) if keyed else None
        if dist.get_rank() == 0:
            transport.send(SEND, Outgoing(message, key))
        else:
            transport.post(RECEIVE, Expected(len(message), key))
            found.append(transport.wait(RECEIVE))
        transport.finish()
    return found


@pytest.mark.parametrize("keyed", [False, True], ids=["told every time", "known after the first"])
def test_process_groups_deliver_everything(pool, keyed):
    found = pool.run(deliver, 2, keyed, seconds=20)[1]
    for sent, received in zip(MESSAGES * 2, found, strict=True):
        assert len(sent) == len(received.values)
        assert all(same(a, b) for a, b in zip(sent, received.values, strict=True))
        assert received.requires_grad == tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in sent)


def change_the_form():
    transport = ProcessGroupTransport([0, 1], {}, torch.device("cpu"))
    said = ""
    if dist.get_rank() == 0:
        transport.send(SEND, Outgoing([torch.ones(2)], "key"))
        try:
            transport.send(SEND, Outgoing([torch.ones(3)], "key"))
        except TransportError as error:
            said = str(error)
    else:
        transport.post(RECEIVE, Expected(1, "key"))
        transport.wait(RECEIVE)
    dist.barrier()
    return said


def test_a_message_of_another_form_than_its_key_says_is_an_error(pool):
    assert "changed its form" in pool.run(change_the_form, 2, seconds=20)[0]
