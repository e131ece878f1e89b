"""The codec: what goes in comes out, both sides count the same bytes, and hostile frames are the sender's fault, not a crash of ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire import codec
from coterie.wire.assembler import Assembler, Held
from coterie.wire.codec import Encoded, Entry, Received, continued, encode, reheaded
from coterie.wire.fields import CHUNK_BYTES, PLAIN_BYTES, chunk_frame, chunk_in
from coterie.wire.messages import Broadcast, Message, Positions, Rows, Scalars, Vectors, declare
from coterie.wire.precision import Precision

DOUBLE, SINGLE = Precision.of("float64"), Precision.of("float32")
MIB = 1 << 20


@declare(method="wiretest", step="W1")
@dataclass(frozen=True)
class Block(Rows):
    """Vectors, exact scalars and positions of some users."""

    x: Annotated[Array, Vectors("rows", "d")]
    loss: Annotated[Array, Scalars("rows")]
    partner: Annotated[Indices, Positions("rows")]


@declare(method="wiretest", step="W2")
@dataclass(frozen=True)
class Common(Broadcast):
    """The same for everyone, with a single number."""

    models: Annotated[Array, Vectors("models", "d")]
    weight: Annotated[Array, Scalars()]


@declare(method="wiretest", step="W3")
@dataclass(frozen=True)
class Nothing(Broadcast):
    """A part without fields."""


@dataclass(frozen=True)
class Secret(Rows):
    """Not declared."""

    x: Array


def block(n: int, d: int, users: Sequence[int] | None = None) -> Block:
    rng = np.random.default_rng(n * 1000 + d)
    indices = None if users is None else np.array(users, dtype=np.int64)
    return Block(rng.standard_normal((n, d)), rng.standard_normal(n), rng.integers(0, 1 << 40, n), users=indices)


def common(models: int, d: int) -> Common:
    return Common(np.random.default_rng(models).standard_normal((models, d)), np.array(0.25))


def task(*messages: Message, precision: Precision = DOUBLE) -> Encoded:
    return encode(session_pb2.Task(seq=7, attempt=1, stage=2, round=3, stage_json='{"a": 1}'), messages, precision)


def reply(*messages: Message, precision: Precision = DOUBLE) -> Encoded:
    return encode(session_pb2.Reply(seq=7, attempt=1), messages, precision)


def carried(encoded: Encoded) -> Received:
    """What the other side makes of the frames."""
    assembler = Assembler(session_pb2.JoinResponse if encoded.is_task else session_pb2.JoinRequest)
    results = [assembler.feed(frame) for frame in encoded.frames()]
    assert all(result is None for result in results[:-1])
    assert isinstance(results[-1], Received)
    return results[-1]


def assert_equal(sent: Message, got: Message) -> None:
    assert type(sent) is type(got)
    for name, _ in sent.specs:
        np.testing.assert_array_equal(getattr(sent, name), getattr(got, name), strict=True)
    if isinstance(sent, Rows):
        assert isinstance(got, Rows)
        assert (sent.users is None) == (got.users is None)
        np.testing.assert_array_equal([] if sent.users is None else sent.users, [] if got.users is None else got.users)


SHAPES = [(0, 3), (1, 1), (5, 0), (3, 2), (60, 3), (60, 1000), (3, 50_000), (2, 400_000), (1, 61_440), (1, 61_441)]


@pytest.mark.parametrize("wrap", [task, reply])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_what_is_sent_is_what_arrives(wrap: Callable[..., Encoded], n: int, d: int) -> None:
    messages = [common(2, d), block(n, d), Nothing()]
    got, _ = carried(wrap(*messages)).decode(n)
    for sent, arrived in zip(messages, got, strict=True):
        assert_equal(sent, arrived)


@pytest.mark.parametrize("wrap", [task, reply])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_the_first_frame_has_the_bytes_that_protobuf_would_write(wrap: Callable[..., Encoded], n: int, d: int) -> None:
    outer = session_pb2.JoinResponse if wrap is task else session_pb2.JoinRequest
    for messages in ([], [Nothing()], [block(n, d), Nothing(), common(2, d)], [block(n, d, users=range(3, 3 + n)), block(n, d)]):
        head = wrap(*messages).head
        parsed = outer.FromString(head)
        assert parsed.SerializeToString() == head
        frame = parsed.task if isinstance(parsed, session_pb2.JoinResponse) else parsed.reply
        assert [part.kind for part in frame.parts] == [message.kind for message in messages]


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("precision", [DOUBLE, SINGLE])
def test_both_sides_book_the_same_bytes_and_those_are_the_bytes_on_the_wire(n: int, d: int, precision: Precision) -> None:
    encoded = task(common(2, d), block(n, d, users=range(3, 3 + n)), Nothing(), block(n, d), precision=precision)
    frames = list(encoded.frames())
    _, received = carried(encoded).decode(n)
    for ours, theirs in zip(encoded.entries, received, strict=True):
        assert _numbers(ours) == _numbers(theirs)
    assert sum(entry.message_bytes for entry in encoded.entries) == sum(len(frame) for frame in frames)
    assert sum(entry.frames for entry in encoded.entries) == len(frames)
    assert max(len(frame) for frame in frames) <= MIB + 4096


def _numbers(entry: Entry) -> tuple[Any, ...]:
    users = None if entry.users is None else entry.users.tolist()
    return (entry.kind, entry.vectors, entry.scalars, entry.payload_bytes, entry.message_bytes, entry.frames, users)


def test_vectors_and_scalars_are_counted_as_declared() -> None:
    entry = next(entry for entry in task(block(4, 3)).entries if entry.kind == "wiretest.Block")
    assert (entry.vectors, entry.scalars, entry.payload_bytes) == (4, 4 * 3 + 4, (4 * 3 + 4) * 8)
    entry = next(entry for entry in task(block(4, 3), precision=SINGLE).entries if entry.kind == "wiretest.Block")
    assert entry.payload_bytes == 4 * 3 * 4 + 4 * 8  # exact scalars stay in double precision


@pytest.mark.parametrize("d", [3, 10_000, 400_000])
def test_float32_payload_arrives_as_it_was_rounded(d: int) -> None:
    sent = block(2, d)
    (got,), _ = carried(task(sent, precision=SINGLE)).decode(2)
    assert isinstance(got, Block)
    np.testing.assert_array_equal(got.x, SINGLE.rounded(sent.x))
    np.testing.assert_array_equal(got.loss, sent.loss)
    assert got.x.dtype == np.float64


@pytest.mark.parametrize("d", [3, 10_000, 400_000])
def test_received_arrays_are_aligned_and_read_only(d: int) -> None:
    for offset in range(9):  # the header's length moves the payload within its frame
        frame = session_pb2.Task(seq=1, stage_json="x" * offset)
        (got,), _ = carried(encode(frame, [block(1, d)], DOUBLE)).decode(1)
        assert isinstance(got, Block)
        assert got.x.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            got.x[0, 0] = 1.0


def test_arrays_of_any_layout_are_sent_in_c_order() -> None:
    x = np.asfortranarray(np.arange(60_000.0).reshape(6, 10_000))[::2]
    sent = Block(x, np.zeros(3), np.zeros(3, dtype=np.int64))
    (got,), _ = carried(task(sent)).decode(3)
    assert_equal(sent, got)


def test_an_undeclared_message_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="Secret is not a declared message"):
        task(Secret(np.zeros((1, 1))))  # type: ignore[arg-type, unused-ignore]


def test_a_heartbeat_may_stand_between_two_chunks() -> None:
    encoded = task(block(2, 400_000))
    beat = session_pb2.JoinResponse(heartbeat=session_pb2.Heartbeat(seq=3)).SerializeToString()
    assembler = Assembler(session_pb2.JoinResponse)
    got = [assembler.feed(data) for frame in encoded.frames() for data in (beat, frame)]
    assert isinstance(got[-1], Received)
    assert_equal(block(2, 400_000), got[-1].decode(2)[0][0])


@pytest.mark.parametrize("d", [3, 10_000, 400_000])
def test_a_message_sent_again_has_another_header_and_the_same_parts(d: int) -> None:
    first = task(block(2, d))
    frame = session_pb2.JoinResponse.FromString(first.head).task
    frame.resent, frame.replay = 4, 1
    again = reheaded(frame, first)
    received = carried(again)
    assert isinstance(received.frame, session_pb2.Task)
    assert (received.frame.resent, received.frame.replay, received.frame.seq) == (4, 1, 7)
    messages, entries = received.decode(2)
    assert_equal(block(2, d), messages[0])
    assert [_numbers(entry) for entry in entries] == [_numbers(entry) for entry in again.entries]


# ---- hostile frames


def tensor(**changes: Any) -> tensor_pb2.Tensor:
    fields: dict[str, Any] = {"name": "models", "dtype": tensor_pb2.ELEMENT_TYPE_FLOAT64, "shape": [2, 3], "data": bytes(48)}
    return tensor_pb2.Tensor(**{**fields, **changes})


def weight() -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(name="weight", dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, data=bytes(8))


def part(**changes: Any) -> tensor_pb2.Part:
    fields: dict[str, Any] = {"kind": "wiretest.Common", "tensors": [tensor(), weight()]}
    return tensor_pb2.Part(**{**fields, **changes})


def fed(*parts: tensor_pb2.Part, after: Sequence[bytes] = ()) -> Received:
    assembler = Assembler(session_pb2.JoinRequest)
    frame = session_pb2.JoinRequest(reply=session_pb2.Reply(seq=1, parts=parts)).SerializeToString()
    got = [assembler.feed(data) for data in (frame, *after)][-1]
    assert isinstance(got, Received)
    return got


def chunk(size: int) -> bytes:
    return session_pb2.JoinRequest(chunk=session_pb2.Chunk(data=bytes(size))).SerializeToString()


def test_the_harmless_frame_that_the_hostile_ones_are_made_from_is_accepted() -> None:
    (message,), _ = fed(part()).decode(1)
    assert isinstance(message, Common)


BIG = 3 * PLAIN_BYTES
HOSTILE = {
    "too few bytes": part(tensors=[tensor(data=bytes(40)), weight()]),
    "too many bytes": part(tensors=[tensor(data=bytes(56)), weight()]),
    "too many bytes, large": part(tensors=[tensor(data=bytes(BIG)), weight()]),
    "a shape that overflows": part(tensors=[tensor(shape=[1 << 63, 1 << 63]), weight()]),
    "an empty tensor of absurd extent": part(tensors=[tensor(shape=[0, (1 << 64) - 1], data=b""), weight()]),
    "another number of axes": part(tensors=[tensor(shape=[6]), weight()]),
    "integers for floats": part(tensors=[tensor(dtype=tensor_pb2.ELEMENT_TYPE_INT64), weight()]),
    "an unknown element type": part(tensors=[tensor(dtype=99), weight()]),
    "no element type": part(tensors=[tensor(dtype=0), weight()]),
    "an undeclared kind": part(kind="wiretest.Undeclared"),
    "a kind that is a path": part(kind="os.path"),
    "a kind of nothing": part(kind=""),
    "another field": part(tensors=[tensor(name="y"), weight()]),
    "a field missing": part(tensors=[tensor()]),
    "a field too many": part(tensors=[tensor(), weight(), weight()]),
    "users of a broadcast": part(users=tensor_pb2.Tensor(dtype=tensor_pb2.ELEMENT_TYPE_INT32, shape=[1], data=bytes(4))),
    "floats as users": part(kind="wiretest.Block", users=tensor()),
    "a chunked tensor with the wrong shape": part(tensors=[tensor(data=b"", chunked_bytes=40), weight()]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_part_is_a_protocol_error(name: str) -> None:
    after = [chunk(40)] if "chunked" in name else []
    with pytest.raises(ProtocolError):
        fed(HOSTILE[name], after=after).decode(2)


def test_a_message_with_the_wrong_number_of_rows_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="axis 'rows' is 3, wanted 2"):
        carried(reply(block(3, 2))).decode(2)


ANNOUNCED = part(tensors=[tensor(data=b"", shape=[2, 3], chunked_bytes=48), weight()])


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([chunk(8)], "no tensor is incomplete"),
        ([b"\xff\xff\xff"], "is not a JoinRequest"),
        ([b""], "has no kind that protocol"),
        ([b"\x1a\x05\x0a\x09abc"], "is not a JoinRequest"),
        ([b"\x7a\x01a"], "has no kind that protocol"),
        ([ANNOUNCED, chunk(49)], "a chunk ends at byte 49 of a tensor of 48 bytes"),
        ([ANNOUNCED, chunk(0)], "a chunk ends at byte 0"),
        ([ANNOUNCED, ANNOUNCED], "came while [0-9]+ bytes of the one before were missing"),
        ([part(tensors=[tensor(data=b"", chunked_bytes=1 << 50), weight()])], "were announced, wanted at most"),
        ([part(tensors=[tensor(data=b"", chunked_bytes=12 << 30), tensor(chunked_bytes=12 << 30)])], "were announced, wanted at most"),
    ],
)
def test_frames_out_of_order_or_out_of_bounds_are_protocol_errors(frames: list[Any], sentence: str) -> None:
    def as_bytes(frame: Any) -> bytes:
        is_part = isinstance(frame, tensor_pb2.Part)
        return session_pb2.JoinRequest(reply=session_pb2.Reply(parts=[frame])).SerializeToString() if is_part else frame

    assembler = Assembler(session_pb2.JoinRequest)
    for frame in frames[:-1]:
        assembler.feed(as_bytes(frame))
    with pytest.raises(ProtocolError, match=sentence):
        assembler.feed(as_bytes(frames[-1]))


def resumed(encoded: Encoded, n_frames: int, in_vain: int = 0) -> tuple[Held, Encoded]:
    """A receiver whose stream was cut after so many frames, and what it is sent then. Some more frames were sent in vain."""
    first = Assembler(session_pb2.JoinRequest)
    for frame in list(itertools.islice(encoded.frames(), n_frames + in_vain))[:n_frames]:
        assert first.feed(frame) is None
    held = first.held.reopened()
    header = session_pb2.JoinRequest.FromString(encoded.head).reply
    header.resent = 1
    n_bytes = held.bytes_of(7, 1)
    assert encoded.can_continue(n_bytes)
    return held, continued(header, encoded, n_bytes)


@pytest.mark.parametrize("n_frames", range(2, 7))  # the header, and one to five chunks
def test_a_message_that_was_cut_goes_on_with_the_first_chunk_that_is_missing(n_frames: int) -> None:
    sent = [block(3, 187_500, users=range(3)), common(1, 75_000)]  # 4.5 MB: ten chunks, and 600 kB: two
    encoded = reply(*sent)
    n_all = len(list(encoded.frames()))
    held, rest = resumed(encoded, n_frames, in_vain=1)
    frames = list(rest.frames())
    assert len(frames) == 1 + n_all - n_frames
    assert len(frames[0]) < 100, "the parts are not sent again"
    received = completed(Assembler(session_pb2.JoinRequest, held=held), frames)
    got, entries = received.decode(3)
    for one, other in zip(sent, got, strict=True):
        assert_equal(one, other)
    (whole, _), (again, _) = received.sendings(entries)
    for ours, theirs in ((whole, encoded.entries), (again, rest.entries)):
        assert list(map(str, ours)) == list(map(str, theirs)), "both ends book the same"
    chunk_bytes = len(frames[1])
    assert [(entry.kind, entry.vectors, entry.scalars, entry.message_bytes, entry.frames) for entry in again] == [
        ("wiretest.Block", 0, CHUNK_BYTES // 8, chunk_bytes, 1),
        ("envelope", 0, 0, len(frames[0]), 1),
    ]
    assert not list(received.sendings(entries)), "everything is booked once"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seq": 8}, "a reply with number 8 goes on, but nothing of it is held"),
        ({"attempt": 2}, "a reply with number 7 goes on, but nothing of it is held"),
        ({"continued": {"held": CHUNK_BYTES}}, "goes on behind 491520 bytes, with 0 again and 0 parts; wanted 983040"),
        ({"continued": {"held": 2 * CHUNK_BYTES, "again": 1 << 40}}, "with 1099511627776 again"),
        ({"parts": [tensor_pb2.Part(kind="wiretest.Nothing")]}, "and 1 parts"),
    ],
)
def test_what_goes_on_otherwise_than_it_was_cut_is_a_protocol_error(change: dict[str, Any], sentence: str) -> None:
    held, rest = resumed(reply(block(3, 187_500)), 3)
    outer = session_pb2.JoinRequest.FromString(rest.head)
    for name, value in change.items():
        outer.reply.ClearField(name)  # type: ignore[arg-type]
        outer.reply.MergeFrom(session_pb2.Reply(**{name: value}))
    with pytest.raises(ProtocolError, match=sentence):
        Assembler(session_pb2.JoinRequest, held=held).feed(outer.SerializeToString())


@pytest.mark.parametrize("length", [128 << 10, 1 << 20])
def test_a_peer_that_cuts_chunks_of_another_length_is_understood_and_booked_alike(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [block(3, 187_500, users=range(3)), common(1, 75_000)]
    with monkeypatch.context() as peer:
        peer.setattr(codec, "CHUNK_BYTES", length)
        encoded = reply(*sent)
        frames = list(encoded.frames())
        held, rest = resumed(encoded, 3, in_vain=1)
        more = list(rest.frames())
    got, entries = (whole := completed(Assembler(session_pb2.JoinRequest), frames)).decode(3)
    for one, other in zip(sent, got, strict=True):
        assert_equal(one, other)
    assert list(map(_numbers, entries)) == list(map(_numbers, encoded.entries))
    assert whole.chunk_bytes == length
    received = completed(Assembler(session_pb2.JoinRequest, held=held), more)
    _, entries = received.decode(3)
    _, (again, _) = received.sendings(entries)
    assert list(map(_numbers, again)) == list(map(_numbers, rest.entries))


def completed(assembler: Assembler, frames: Iterable[bytes]) -> Received:
    """What the last of these frames completes."""
    received = [assembler.feed(frame) for frame in frames][-1]
    assert isinstance(received, Received)
    return received


@pytest.mark.parametrize("outer", [session_pb2.JoinRequest, session_pb2.JoinResponse])
@pytest.mark.parametrize("size", [1, 123, 124, 125, 126, 127, 128, 16_380, 16_384, CHUNK_BYTES])
def test_a_chunk_is_framed_with_the_bytes_of_protobuf_and_read_without_it(outer: Any, size: int) -> None:
    piece = np.random.default_rng(size).bytes(size)
    frame = chunk_frame(memoryview(piece))
    assert frame == outer(chunk=session_pb2.Chunk(data=piece)).SerializeToString()
    assert chunk_in(frame) == piece


def test_only_a_frame_that_is_one_chunk_and_nothing_else_is_read_without_protobuf() -> None:
    frame = chunk_frame(memoryview(b"abc" * 100))
    beat = session_pb2.JoinRequest(heartbeat=session_pb2.Heartbeat(seq=3)).SerializeToString()
    for other in (b"", b"\x1a", b"\x1a\x00", frame[:-1], frame + beat, frame + frame, beat, frame + b"\x00", reply(block(3, 2)).head):
        assert chunk_in(other) is None, other[:9]
    rng = np.random.default_rng(0)
    n_read = 0
    for _ in range(5000):
        data = bytearray(frame)
        data[int(rng.integers(7))] = int(rng.integers(256))
        if (found := chunk_in(bytes(data))) is not None:
            n_read += 1
            assert session_pb2.JoinRequest.FromString(bytes(data)) == session_pb2.JoinRequest(chunk=session_pb2.Chunk(data=bytes(found)))
    assert n_read > 500  # of bytes of the contents


def test_frames_of_a_stream_that_was_followed_by_another_fill_nothing() -> None:
    old = Assembler(session_pb2.JoinRequest)
    first, *chunks = reply(block(3, 187_500)).frames()
    old.feed(first)
    old.feed(chunks[0])
    held = old.held.reopened()
    with pytest.raises(ProtocolError, match="no tensor is incomplete"):
        old.feed(chunks[1])
    assert held.bytes_of(7, 1) == CHUNK_BYTES
    held.handled(7)
    assert held.kept is not None
    assert not held.kept.received.tails, "a handled message keeps no tensor"


def test_no_mutilation_of_a_frame_does_more_than_a_protocol_error() -> None:
    rng = np.random.default_rng(0)
    whole = reply(block(3, 2), common(2, 3000)).head
    for length, position in itertools.product((*range(0, 200, 7), len(whole)), range(0, 120, 3)):
        data = bytearray(whole[:length] if length else whole)
        data[position % len(data)] = int(rng.integers(256))
        try:
            got = Assembler(session_pb2.JoinRequest).feed(bytes(data))
            if isinstance(got, Received):
                got.decode(3)
        except ProtocolError:
            continue


@declare(method="wiretest", step="W2")
@dataclass(frozen=True)
class Large(Rows):
    """One long row per user."""

    x: Annotated[Array, Vectors("rows", "d")]


def test_each_tensor_has_memory_of_its_own() -> None:
    assembler = Assembler(session_pb2.JoinRequest)

    def received(value: float) -> np.ndarray[Any, Any]:
        encoded = encode(session_pb2.Reply(seq=1), [Large(np.full((1, 400_000), value))], Precision.of("float64"))
        for frame in encoded.frames():
            item = assembler.feed(frame)
        assert isinstance(item, Received)
        (message,), _ = item.decode(1)
        return message.x  # type: ignore[attr-defined, no-any-return]

    kept = [received(float(value)) for value in range(4)]
    assert [set(np.unique(x)) for x in kept] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_a_part_that_is_written_in_another_way_is_read_and_booked_with_its_own_bytes() -> None:
    tensors = [tensor_pb2.Tensor(name=name, dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, shape=[1, 1], data=bytes(8)) for name in "x"]
    part = tensor_pb2.Part(tensors=tensors).SerializeToString() + tensor_pb2.Part(kind="wiretest.Large").SerializeToString()  # kind last
    twice = part + tensor_pb2.Part(kind="wiretest.Large").SerializeToString()  # and once more, which protobuf allows
    text = session_pb2.Task(seq=1).SerializeToString() + b"\x4a" + bytes((len(twice),)) + twice
    received = Assembler(session_pb2.JoinResponse).feed(b"\x12" + bytes((len(text),)) + text)
    assert isinstance(received, Received)
    messages, entries = received.decode(1)
    assert [type(message) for message in messages] == [Large]
    assert sum(entry.message_bytes for entry in entries) == 2 + len(text)
