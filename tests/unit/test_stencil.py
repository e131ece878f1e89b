"""Plans: a frame like the one before is read without parsing, with the same result as in full, and any other frame is read in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.codec import Assembler, Precision, Received, encode
from coterie.wire.messages import Broadcast, Message, Positions, Rows, Scalars, Vectors, declare

DOUBLE, SINGLE = Precision.of("float64"), Precision.of("float32")
OWN = 4


@declare(method="stenciltest", step="S1")
@dataclass(frozen=True)
class Block(Rows):
    """Vectors, exact scalars and positions of some users."""

    x: Annotated[Array, Vectors("rows", "d")]
    loss: Annotated[Array, Scalars("rows")]
    partner: Annotated[Indices, Positions("rows")]


@declare(method="stenciltest", step="S2")
@dataclass(frozen=True)
class Common(Broadcast):
    """A single number for everyone."""

    weight: Annotated[Array, Scalars()]


def messages(seed: int, users: list[int] | None = None, d: int = 3) -> list[Message]:
    rng = np.random.default_rng(seed)
    n = OWN if users is None else len(users)
    rows = Block(
        rng.standard_normal((n, d)), rng.standard_normal(n), rng.integers(0, 9, n), users=None if users is None else np.array(users)
    )
    return [rows, Common(np.array(rng.standard_normal()))]


def frame(seq: int, *sent: Message, precision: Precision = DOUBLE, **header: Any) -> bytes:
    return encode(session_pb2.Task(seq=seq, attempt=1, **header), sent, precision).head


def received(assembler: Assembler, data: bytes) -> Received:
    got = assembler.feed(data)
    assert isinstance(got, Received)
    return got


def content(got: Received, n_own: int = OWN, dims: dict[str, int] | None = None) -> list[Any]:
    """All that a receiver sees, as plain values."""
    decoded, entries = got.decode(n_own, dims)
    fences = (got.frame.seq, got.frame.attempt, got.kinds)
    arrays = [
        [(name, array.dtype.name, array.tolist(), array.flags.aligned) for name, array in sorted(vars(m).items()) if array is not None]
        for m in decoded
    ]
    booked = [
        (e.kind, e.vectors, e.scalars, e.payload_bytes, e.message_bytes, e.frames, None if e.users is None else e.users.tolist())
        for e in entries
    ]
    return [fences, arrays, booked]


def trained(*frames: bytes) -> Assembler:
    """An assembler that has seen frames."""
    assembler = Assembler(session_pb2.JoinResponse)
    for data in frames:
        received(assembler, data).decode(OWN)
    return assembler


def in_full(data: bytes) -> Received:
    return received(Assembler(session_pb2.JoinResponse), data)


USERS = [None, [0, 2, 3]]


@pytest.mark.parametrize("precision", [DOUBLE, SINGLE])
@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("d", [3, 5000])
def test_a_frame_that_fits_is_read_as_in_full(precision: Precision, users: list[int] | None, d: int) -> None:
    assembler = trained(frame(1, *messages(1, users, d), precision=precision))
    data = frame(2, *messages(2, users, d), precision=precision)
    got = received(assembler, data)
    assert got.plan is not None
    assert content(got) == content(in_full(data))
    assert received(assembler, data).plan is got.plan, "the same frame twice"


def test_other_users_are_numbers_like_others() -> None:
    data = frame(2, *messages(2, [1, 2, 3]))
    got = received(trained(frame(1, *messages(1, [0, 2, 3]))), data)
    assert got.plan is not None
    assert content(got) == content(in_full(data))


def test_planned_arrays_are_read_only_and_aligned_wherever_they_begin() -> None:
    for offset in range(1, 9):
        header: dict[str, Any] = {"stage_json": "x" * offset}
        got = received(trained(frame(1, *messages(1), **header)), frame(2, *messages(2), **header))
        assert got.plan is not None
        block = got.decode(OWN)[0][0]
        assert isinstance(block, Block)
        assert block.x.flags.aligned
        assert not block.x.flags.writeable


OTHERS: dict[str, bytes] = {
    "another number of users": frame(2, *messages(2, [0, 1])),
    "other users than all": frame(2, *messages(2, [0, 1, 2, 3])),
    "another d": frame(2, *messages(2, d=4)),
    "another payload type": frame(2, *messages(2), precision=SINGLE),
    "another order": frame(2, *reversed(messages(2))),
    "one message less": frame(2, messages(2)[0]),
    "a longer header": frame(2, *messages(2), snapshot=1),
    "no header": encode(session_pb2.Task(), messages(2), DOUBLE).head,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_frame_of_another_layout_is_read_in_full(name: str) -> None:
    got = received(trained(frame(1, *messages(1))), OTHERS[name])
    assert got.plan is None
    assert content(got) == content(in_full(OTHERS[name]))


def test_each_length_has_a_plan_of_its_own() -> None:
    assembler = trained(frame(1, *messages(1)), frame(2, *messages(2, [0, 1])))
    assert all(received(assembler, data).plan is not None for data in (frame(3, *messages(3)), frame(4, *messages(4, [2, 3]))))


def outcome(assembler: Assembler, data: bytes) -> Any:
    try:
        return content(received(assembler, data))
    except ProtocolError as error:
        return str(error)


def test_no_changed_byte_makes_a_difference_between_a_planned_frame_and_one_read_in_full() -> None:
    first, second = frame(1, *messages(1, [0, 2, 3])), frame(2, *messages(2, [0, 2, 3]))
    assembler = trained(first)
    n_planned = 0
    for position in range(len(second)):
        for value in (0, second[position] ^ 1, second[position] ^ 0x80, 0x4A):
            data = bytearray(second)
            data[position] = value
            hostile = bytes(data)
            alone = outcome(Assembler(session_pb2.JoinResponse), hostile)
            planned = outcome(assembler, hostile)
            assert repr(planned) == repr(alone), position
            n_planned += isinstance(planned, list)
            received(assembler, first).decode(OWN)  # what was learnt from a harmless change is unlearnt
    assert n_planned > len(second), "the numbers may be anything"


@pytest.mark.parametrize("header", [b"\x4a\x00", b"\x42\x7f", b"\x42\x80"])  # an empty part; settings that reach into what follows; no end
def test_a_header_that_swallows_a_part_or_brings_one_is_read_in_full(header: bytes) -> None:
    text, parts = session_pb2.Task(seq=1).SerializeToString(), frame(0, *messages(1))[_HEADER_BYTES:]
    assembler = trained(outer(text + b"\x42\x00" + parts))  # settings, but empty ones
    hostile = outer(text + header + parts)
    planned = outcome(assembler, hostile)
    assert planned == outcome(Assembler(session_pb2.JoinResponse), hostile)


_HEADER_BYTES = 3 + 5  # of a task without a number: the outer field, then the attempt


def outer(text: bytes) -> bytes:
    """A task around its fields, of 128 bytes to 16 kB."""
    return b"\x12" + bytes((len(text) & 0x7F | 0x80, len(text) >> 7)) + text


def test_shapes_are_checked_again_for_other_extents() -> None:
    assembler = trained(frame(1, *messages(1)))
    with pytest.raises(ProtocolError, match="axis 'rows' is 4, wanted 5"):
        received(assembler, frame(2, *messages(2))).decode(5)
    with pytest.raises(ProtocolError, match="axis 'd' is 3, wanted 2"):
        received(assembler, frame(3, *messages(3))).decode(OWN, {"d": 2})
    assert content(received(assembler, frame(4, *messages(4))), OWN, {"d": 3}) == content(in_full(frame(4, *messages(4))))


def test_a_frame_that_is_written_in_another_way_teaches_nothing() -> None:
    tensor = tensor_pb2.Tensor(name="weight", dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, data=bytes(8))
    kind = tensor_pb2.Part(kind="stenciltest.Common").SerializeToString()
    part = tensor_pb2.Part(tensors=[tensor]).SerializeToString() + kind  # the kind comes last
    text = session_pb2.Task(seq=1).SerializeToString() + b"\x4a" + bytes((len(part),)) + part
    data = b"\x12" + bytes((len(text),)) + text
    assembler = trained(data)
    again = received(assembler, data)
    assert again.plan is None
    assert content(again)[1] == [[("weight", "float64", 0.0, True)]]


def test_what_is_remembered_is_bounded() -> None:
    assembler = Assembler(session_pb2.JoinResponse)
    for size in range(300):
        received(assembler, frame(1, *messages(1, list(range(size % 4)) or [0]), stage_json="x" * size)).decode(OWN)
    assert len(assembler._plans._plans) <= 64
