"""The ledger: what was sent, when, over which link, for which step of the method.

One row for each (exchange, link, direction, kind of message). Both ends of a link book on their own: the parent in the run database, the
host in a `Book` that travels to the coordinator when the run ends. Units: a vector is one d-vector, a scalar one floating-point number;
payload = scalars x item size, message = protobuf bytes, wire = message + 5 bytes of gRPC header for each frame (HTTP/2 and TLS
framing excluded).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.messages import kind_class
from coterie.v1 import session_pb2
from coterie.wire import ENVELOPE, GRPC_FRAME_HEADER_BYTES, Entry

UP, DOWN = "up", "down"
SESSION = "session"  # hello, welcome, heartbeats, books, finish
CONTROL = frozenset({ENVELOPE, SESSION})  # kinds that no method declares
_DIRECTIONS = (UP, DOWN)
_MAX_BOOK_ROWS = 20_000


class Row(NamedTuple):
    """What one end of a link booked. `resent` counts earlier sendings of the same message."""

    seq: int
    attempt: int
    resent: int
    direction: str
    kind: str
    vectors: int
    scalars: int
    payload_bytes: int
    message_bytes: int
    frames: int

    @property
    def wire_bytes(self) -> int:
        return self.message_bytes + GRPC_FRAME_HEADER_BYTES * self.frames


def rows_of(entries: Iterable[Entry], *, seq: int, attempt: int, direction: str, resent: int) -> Iterator[Row]:
    """The rows of one task or reply."""
    for e in entries:
        yield Row(seq, attempt, resent, direction, e.kind, e.vectors, e.scalars, e.payload_bytes, e.message_bytes, e.frames)


def step_of(kind: str) -> str:
    """The paper's step of a kind of message; "control" for what no method declares."""
    return "control" if kind in CONTROL else kind_class(kind).step


def pack(rows: Iterable[Row]) -> Iterator[session_pb2.Book]:
    """A host's rows as control messages, column by column and compressed."""
    listed = list(rows)
    for start in range(0, len(listed), _MAX_BOOK_ROWS):
        piece = listed[start : start + _MAX_BOOK_ROWS]
        kinds = sorted({row.kind for row in piece})
        place = {kind: i for i, kind in enumerate(kinds)}
        table = np.array([(*row[:3], _DIRECTIONS.index(row.direction), place[row.kind], *row[5:]) for row in piece], dtype="<i8")
        yield session_pb2.Book(names="\n".join(kinds), rows=zlib.compress(table.T.tobytes()), n_rows=len(piece))


def unpack(book: session_pb2.Book) -> list[Row]:
    """The rows of a Book; ProtocolError when its size does not fit."""
    n_columns = len(Row._fields)
    wanted = book.n_rows * n_columns * 8
    if book.n_rows > _MAX_BOOK_ROWS:
        raise ProtocolError(f"a ledger book announces {book.n_rows} rows, wanted at most {_MAX_BOOK_ROWS}")
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(book.rows, wanted + 1)
    except zlib.error as error:
        raise ProtocolError(f"a ledger book cannot be decompressed: {error}") from error
    if len(data) != wanted:
        raise ProtocolError(f"a ledger book brings {len(data)} bytes for {book.n_rows} rows, wanted {wanted}")
    table = np.frombuffer(data, dtype="<i8").reshape(n_columns, book.n_rows).T.tolist()
    kinds = book.names.split("\n")
    for kind in kinds if book.n_rows else ():
        step_of(kind)
    try:
        return [Row._make((*line[:3], _DIRECTIONS[line[3]], kinds[line[4]], *line[5:])) for line in table]
    except IndexError as error:
        raise ProtocolError("a ledger book names a direction or a kind that it does not list") from error


def as_ranges(users: Indices) -> str:
    """Member indices as text, "0-19,25": how a set of users is interned in the run database."""
    if users.size == 0:
        return ""
    ordered = np.unique(users)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [ordered.size - 1]))]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True))
