"""Defences that a hostile peer meets seldom, one by one: see `tests/integration/test_hostile.py` for the others."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Received, encode
from coterie.wire.fields import PLAIN_BYTES
from coterie.wire.precision import Precision
from coterie_server.session.journal import Sparse
from tests.fuzz.mutations import Centres, Common
from tests.unit.test_hub import All, Answer, asked, rows, run, two_hosts


def wrapped(number: int, contents: bytes) -> bytes:
    """A length-delimited field."""
    header, size = bytearray((number << 3 | 2,)), len(contents)
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*header, size)) + contents


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(tensor_pb2.ELEMENT_TYPE_FLOAT32, b"\x01\x00\x80\x7f"), (tensor_pb2.ELEMENT_TYPE_FLOAT16, b"\x01\x7c")],
)
def test_a_signalling_nan_is_read_without_a_warning(dtype: tensor_pb2.ElementType, number: bytes) -> None:
    tensor = tensor_pb2.Tensor(name="centre", dtype=dtype, shape=[40], data=number * 40)
    frame = session_pb2.JoinRequest(reply=session_pb2.Reply(seq=1, parts=[tensor_pb2.Part(kind="fuzz.Common", tensors=[tensor])]))
    received = Assembler(session_pb2.JoinRequest).feed(frame.SerializeToString())
    assert isinstance(received, Received)
    (message,), _ = received.decode(1)
    assert isinstance(message, Common)
    assert np.isnan(message.centre).all()


def test_fields_are_counted_in_small_parts_too() -> None:
    part = wrapped(5, b"\x1a\x00" * (PLAIN_BYTES // 2 - 2))
    with pytest.raises(ProtocolError, match="more than 100000 parts, users and other fields"):
        Assembler(session_pb2.JoinRequest).feed(wrapped(2, part * 200))


def test_a_group_does_not_hide_fields_from_being_counted() -> None:
    with pytest.raises(ProtocolError, match="is not a frame of the contract: a group"):
        Assembler(session_pb2.JoinRequest).feed(wrapped(1, b"\x9b\x06\x9c\x06" + b"\x1a\x00" * PLAIN_BYTES))


def test_a_reply_of_an_earlier_attempt_is_not_taken_for_one_of_this() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.state.attempt = 2
        exchange = await asked(w, All(np.ones(2)))
        stale = encode(session_pb2.Reply(seq=1, attempt=1), [rows(2, 9.0)], Precision.of("float64"))
        received = Assembler(session_pb2.JoinRequest).feed(stale.head)
        assert isinstance(received, Received)
        w.hub.received("b", received)
        w.answer("a", 1, rows(2))
        w.answer("b", 1, rows(2))
        np.testing.assert_array_equal((await exchange)[Answer].x[1], [0, 1])
        assert w.notes.kinds().count("late") == 1

    run(test())


def test_a_client_host_does_not_speak_for_a_cluster() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.participation.may_skip = False
        exchange = await asked(w, All(np.ones(2)))
        w.answer("b", 1, Centres(np.array([0]), np.ones((1, 2))))
        with pytest.raises(Exception, match=r"host 'b' sent fuzz.Centres for clusters \[0\], wanted \[\]"):
            await exchange

    run(test())


def test_of_many_like_events_the_first_are_written_down_and_then_ever_fewer() -> None:
    sparse = Sparse()
    due = [times for _ in range(1000) if (times := sparse.due("refused", "a"))]
    assert due == [*range(1, 21), 40, 80, 160, 320, 640]
    assert sparse.due("refused", "b") == sparse.due("lost", "a") == 1
