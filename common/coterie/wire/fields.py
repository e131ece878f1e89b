"""The bytes of frames where protobuf does not show them, or copies too often: sizes and numbers of fields, and chunks."""

import functools
import itertools
from collections.abc import Iterator

from coterie.errors import ProtocolError

CHUNK_BYTES = 480 << 10  # proxies may limit what a stream carries: under the 1 MiB of nginx two chunks get through
# Field numbers of the contract, which a test checks against the descriptors.
TASK_OR_REPLY, TASK_PARTS, REPLY_PARTS = 2, 9, 5
CHUNK, CHUNK_DATA = 3, 1
# The fields of larger frames are counted. An empty part or user takes 2 bytes in a frame and 30 times as many in memory.
PLAIN_BYTES = 16 << 10
MAX_FIELDS = 100_000
_CHUNK_TAG, _DATA_TAG = bytes((CHUNK << 3 | 2,)), bytes((CHUNK_DATA << 3 | 2,))


def delimited_bytes(size: int) -> int:
    """Bytes of a length-delimited field (number below 16) around `size` bytes."""
    return 1 + max(1, (size.bit_length() + 6) // 7) + size


def chunk_frame_bytes(total: int, chunk_bytes: int) -> tuple[int, int]:
    """(protobuf bytes, frames) of the Chunk frames that carry `total` bytes, all but the last of them `chunk_bytes`."""
    full, rest = divmod(total, chunk_bytes)
    n_bytes = full * delimited_bytes(delimited_bytes(chunk_bytes))
    if rest:
        n_bytes += delimited_bytes(delimited_bytes(rest))
    return n_bytes, full + bool(rest)


def field_head(number: int, size: int) -> bytes:
    """The tag and the size of a length-delimited field."""
    found = [number << 3 | 2]
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*found, size))


@functools.lru_cache(maxsize=64)
def _chunk_head(size: int) -> bytes:
    inner = field_head(CHUNK_DATA, size)
    return field_head(CHUNK, len(inner) + size) + inner


def chunk_frame(piece: memoryview) -> bytes:
    """The frame of a chunk, with the bytes that protobuf would write. Its interface copies the piece three times more."""
    return b"".join((_chunk_head(len(piece)), piece))


def chunk_in(data: bytes) -> memoryview | None:
    """What a frame carries that is one chunk and nothing else; None for every other frame, which protobuf has to read."""
    if data[0:1] != _CHUNK_TAG:
        return None
    try:
        size, at = _varint(data, 1)
        inner, start = _varint(data, at + 1)
    except ValueError:
        return None
    is_one = at + size == len(data) == start + inner and data[at : at + 1] == _DATA_TAG
    return memoryview(data)[start:] if is_one else None


def _fields(data: bytes, start: int, end: int, count: Iterator[int]) -> Iterator[tuple[int, int, int]]:
    """(number, start of contents, end) of each field of a protobuf message. ValueError for a malformed message."""
    while start < end:
        if next(count) >= MAX_FIELDS:
            raise ProtocolError(f"a frame has more than {MAX_FIELDS} parts, users and other fields, which is the most")
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
        yield (tag >> 3 if tag & 7 == 2 else 0), inner, stop
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


def check_fields(data: bytes, part_number: int) -> None:
    """ProtocolError for a malformed frame, or one with more than MAX_FIELDS fields, counted down to those of its parts."""
    count = itertools.count()
    try:
        for number, inner, stop in _fields(data, 0, len(data), count):
            for part, start, end in _fields(data, inner, stop, count) if number else ():
                if number == TASK_OR_REPLY and part == part_number:
                    for _ in _fields(data, start, end, count):
                        pass
    except ValueError as error:
        raise ProtocolError(f"a frame of {len(data)} bytes is not a frame of the contract: {error}") from error
