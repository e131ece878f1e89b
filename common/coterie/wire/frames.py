"""Protobuf framing by hand, where protobuf itself would copy large tensors an extra time. Bytes in, bytes out.

Frames that are encoded differently are left to protobuf. A test checks the field numbers against the contract.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from coterie.errors import ProtocolError

CHUNK_BYTES = 1 << 20
# Field numbers of the contract, which a test checks against the descriptors.
TASK_OR_REPLY, CHUNK, CHUNK_DATA = 2, 3, 1
TASK_PARTS, REPLY_PARTS, PART_KIND, PART_USERS, PART_TENSORS, TENSOR_DATA = 9, 5, 1, 2, 3, 4
CHUNK_TAG, CHUNK_DATA_TAG = bytes((CHUNK << 3 | 2,)), bytes((CHUNK_DATA << 3 | 2,))
# Larger tensors are taken out of a frame before protobuf copies them; for smaller ones it is not worthwhile.
PLAIN_BYTES = 16 << 10
# An empty part or user takes 2 bytes in a frame and 30 times as many in memory, so fields are counted before protobuf parses them.
MAX_FIELDS = 100_000


@functools.lru_cache(maxsize=4096)
def field_header(number: int, size: int) -> bytes:
    """Tag and length of a length-delimited field (number below 16) of `size` bytes."""
    header = bytearray((number << 3 | 2,))
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header)


def delimited_bytes(size: int) -> int:
    """Bytes of a length-delimited field (number below 16) around `size` bytes."""
    return 1 + max(1, (size.bit_length() + 6) // 7) + size


def chunk_frame_bytes(total: int) -> tuple[int, int]:
    """(protobuf bytes, frames) of the Chunk frames that carry `total` bytes."""
    full, rest = divmod(total, CHUNK_BYTES)
    n_bytes = full * delimited_bytes(delimited_bytes(CHUNK_BYTES))
    if rest:
        n_bytes += delimited_bytes(delimited_bytes(rest))
    return n_bytes, full + bool(rest)


@dataclass(frozen=True, slots=True)
class Lifted:
    """Large tensors taken out of a frame before protobuf copies them: part -> tensor -> bytes, and the original sizes of these parts."""

    data: dict[int, dict[int, memoryview]]
    sizes: dict[int, int]


class _Count:
    """Counts the parsed fields of one frame."""

    def __init__(self) -> None:
        self._n = 0

    def one_more(self) -> None:
        self._n += 1
        if self._n > MAX_FIELDS:
            raise ProtocolError(f"a frame has more than {MAX_FIELDS} parts, users and other fields, which is the most")


def _fields(data: bytes, start: int, end: int, count: _Count) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start of contents, end) of each field of a protobuf message. ValueError for a malformed message."""
    while start < end:
        count.one_more()
        tag, at = _varint(data, start)
        if tag & 7 == 2:
            size, inner = _varint(data, at)
            stop = inner + size
        elif tag & 7 == 0:
            inner = at
            _, stop = _varint(data, at)
        elif tag & 7 in (1, 5):
            inner, stop = at, at + (8 if tag & 7 == 1 else 4)
        else:
            raise ValueError("a group")
        if stop > end:
            raise ValueError("a field ends after its message")
        yield (tag >> 3 if tag & 7 == 2 else 0), start, inner, stop
        start = stop


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number without an end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def lift(data: bytes, part_number: int) -> tuple[bytes, Lifted | None]:
    """A task or reply frame without its large tensors. Frames of another form are returned unchanged, for protobuf to parse.

    ProtocolError for a frame of more than MAX_FIELDS fields.
    """
    view, lifted, rest, place, count = memoryview(data), Lifted({}, {}), bytearray(), 0, _Count()
    try:
        number, _, start, end = next(_fields(data, 0, len(data), count))
        if number != TASK_OR_REPLY or end != len(data):
            return data, None
        for number, begin, inner, stop in _fields(data, start, end, count):
            if number == part_number and stop - inner > PLAIN_BYTES:
                part, tensors = _lift_part(data, view, inner, stop, count)
                rest += field_header(part_number, len(part)) + part
                lifted.data[place], lifted.sizes[place] = tensors, stop - begin
            else:
                for _ in _fields(data, inner, stop, count) if number == part_number else ():
                    pass
                rest += view[begin:stop]
            place += number == part_number
    except ValueError:
        return data, None
    return field_header(TASK_OR_REPLY, len(rest)) + bytes(rest), lifted


def _lift_part(data: bytes, view: memoryview, start: int, end: int, count: _Count) -> tuple[bytes, dict[int, memoryview]]:
    rest, tensors, place = bytearray(), dict[int, memoryview](), 0
    for number, begin, inner, stop in _fields(data, start, end, count):
        if number == PART_TENSORS and stop - inner > PLAIN_BYTES:
            tensor = bytearray()
            for field, at, contents, after in _fields(data, inner, stop, count):
                if field == TENSOR_DATA:
                    tensors[place] = view[contents:after]
                else:
                    tensor += view[at:after]
            rest += field_header(number, len(tensor)) + tensor
        else:
            rest += view[begin:stop]
        place += number == PART_TENSORS
    return bytes(rest), tensors


def check_fields(data: bytes, part_number: int) -> None:
    """ProtocolError for a malformed frame, or one with more than MAX_FIELDS fields, counted down to those of its parts."""
    count = _Count()
    try:
        for number, _, inner, stop in _fields(data, 0, len(data), count):
            for part, _, start, end in _fields(data, inner, stop, count) if number else ():
                if number == TASK_OR_REPLY and part == part_number:
                    for _ in _fields(data, start, end, count):
                        pass
    except ValueError as error:
        raise ProtocolError(f"a frame of {len(data)} bytes is not a frame of the contract: {error}") from error


def chunk_data(data: bytes) -> memoryview | None:
    """The bytes of a chunk frame without a copy; None if it is not encoded as in `Encoded.frames`."""
    try:
        size, inner = _varint(data, 1)
        if data[inner : inner + 1] != CHUNK_DATA_TAG or inner + size != len(data):
            return None
        size, start = _varint(data, inner + 1)
    except ValueError:
        return None
    return memoryview(data)[start:] if start + size == len(data) else None
