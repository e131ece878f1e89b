"""The ledger: what was sent, when, over which link, for which step of the method.

It has one row for each (exchange, link, direction, kind of message). Both ends of a link count independently: the parent in the run
database, the host in a `Book` that it sends to the coordinator at the end. Units: a vector is one d-vector, a scalar one floating-point
number; payload = scalars x item size, message = protobuf bytes, wire = message + 5 bytes of gRPC header for each frame (HTTP/2 and TLS
framing excluded).
"""

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.v1 import session_pb2
from coterie.wire.codec import ENVELOPE, GRPC_FRAME_HEADER_BYTES, Entry
from coterie.wire.messages import kind_class

T = TypeVar("T")

UP, DOWN = "up", "down"
SESSION = "session"  # hello, welcome, heartbeats, books, finish
CONTROL = frozenset({ENVELOPE, SESSION})  # kinds without a declaration
_DIRECTIONS = (UP, DOWN)
_MAX_BOOK_ROWS = 20_000
_MAX_KINDS = 10_000  # in one book
_MAX_NUMBER = 1 << 40  # in a book: sums of a million such numbers fit into 64 bits
_MAX_SHOWN = 100  # characters
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")  # fits into 64 bits


class Row(NamedTuple):
    """What one end of a link counted. `resent` is the number of earlier sendings of the same message."""

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


class Own(NamedTuple):
    """An aggregator's further columns for a row of its own side of a link."""

    useful: int
    stage: int
    round: int
    user_set: int


Booked = tuple[Sequence[Entry], int, int, str, int]  # the arguments of `rows_of`


def rows_of(entries: Iterable[Entry], seq: int, attempt: int, direction: str, resent: int) -> list[Row]:
    """The rows of one task or reply."""
    return [Row(seq, attempt, resent, direction, e.kind, e.vectors, e.scalars, e.payload_bytes, e.message_bytes, e.frames) for e in entries]


def step_of(kind: str) -> str:
    """The paper's step of a kind of message; "control" for kinds without a declaration."""
    return "control" if kind in CONTROL else kind_class(kind).step


def link_below(aggregator: str, host: str) -> str:
    """The name of a link below an aggregator, AGGREGATOR/HOST. The aggregator's name is escaped, so it ends at the first slash."""
    return f"{aggregator.replace('%', '%25').replace('/', '%2F')}/{host}"


_BETWEEN_PEERS = "<>"


def peer_link(lower: str, higher: str) -> str:
    """The name of the link of two aggregators, LOWER<>HIGHER by the numbers of their clusters. Names are escaped."""
    return _BETWEEN_PEERS.join(name.replace("%", "%25").replace("/", "%2F").replace("<", "%3C") for name in (lower, higher))


def peers_of(link: str) -> tuple[str, str] | None:
    """The aggregators at the ends of such a link; None for another link."""
    ends = link.split(_BETWEEN_PEERS)
    if len(ends) != 2 or "/" in link:
        return None
    lower, higher = (name.replace("%3C", "<").replace("%2F", "/").replace("%25", "%") for name in ends)
    return lower, higher


def pack(rows: Iterable[Row], link: str = "") -> Iterator[session_pb2.Book]:
    """A host's rows as control messages, stored by column and compressed; `link` as in the contract."""
    for piece in _pieces(rows):
        yield _packed(piece, link)


def pack_own(rows: Iterable[tuple[Row, Own]], link: str, user_sets: Sequence[str]) -> Iterator[session_pb2.Book]:
    """An aggregator's own side of a link to one of its hosts. `Own.user_set` counts from 1 in `user_sets`; 0 means none."""
    for piece in _pieces(rows):
        book = _packed([(*row, *own) for row, own in piece], link)
        book.of_parent, book.user_sets = True, "\n".join(user_sets)
        yield book


def _pieces(rows: Iterable[T]) -> Iterator[list[T]]:
    left = iter(rows)
    while piece := list(itertools.islice(left, _MAX_BOOK_ROWS)):
        yield piece


def _packed(rows: Sequence[tuple[Any, ...]], link: str) -> session_pb2.Book:
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    kinds = sorted(set(columns[4]))
    place = {kind: i for i, kind in enumerate(kinds)}
    columns[3] = list(map(_DIRECTIONS.index, columns[3]))
    columns[4] = list(map(place.__getitem__, columns[4]))
    data = np.array(columns, dtype="<i8").tobytes()
    return session_pb2.Book(names="\n".join(kinds), rows=zlib.compress(data), n_rows=len(rows), link=link)


def unpack(book: session_pb2.Book) -> list[Row]:
    """The rows of a Book. ProtocolError when it is malformed."""
    return [row for row, _ in _unpacked(book, 0)]


def unpack_own(book: session_pb2.Book) -> list[tuple[Row, Own]]:
    """The rows of an aggregator's own side of a link. ProtocolError when the book is malformed, or names an unknown set of users."""
    rows = [(row, Own(*more)) for row, more in _unpacked(book, len(Own._fields))]
    n_sets = len(book.user_sets.split("\n"))  # one empty set is written like no set
    wrong = next((own.user_set for _, own in rows if not 0 <= own.user_set <= n_sets), None)
    if wrong is not None:
        raise ProtocolError(f"a ledger book names set {wrong} of users, but lists {n_sets}")
    wrong = next((own.useful for _, own in rows if own.useful not in (0, 1)), None)
    if wrong is not None:
        raise ProtocolError(f"a ledger book has a row that is {wrong} times useful, wanted 0 or 1")
    return rows


def _unpacked(book: session_pb2.Book, n_more: int) -> list[tuple[Row, list[int]]]:
    n_columns = len(Row._fields) + n_more
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
    numbers = np.frombuffer(data, dtype="<i8").reshape(n_columns, book.n_rows)
    counted = numbers[5 : len(Row._fields)]  # earlier columns identify the row, later ones are the parent's
    if numbers.size and not 0 <= counted.min() <= counted.max() <= _MAX_NUMBER:
        wrong = counted.min() if counted.min() < 0 else counted.max()
        raise ProtocolError(f"a ledger book counts {wrong} vectors, scalars, bytes or frames, wanted 0 to {_MAX_NUMBER}")
    if numbers.size and numbers[3:5].min() < 0:
        raise ProtocolError("a ledger book names a direction or a kind that it does not list")
    table = numbers.T.tolist()
    kinds = book.names.split("\n", _MAX_KINDS)
    for kind in kinds if book.n_rows else ():
        step_of(kind)
    try:
        n_own = len(Row._fields)
        return [(Row._make((*line[:3], _DIRECTIONS[line[3]], kinds[line[4]], *line[5:n_own])), line[n_own:]) for line in table]
    except IndexError as error:
        raise ProtocolError("a ledger book names a direction or a kind that it does not list") from error


def as_ranges(users: Indices) -> str:
    """Member indices as text, "0-19,25", which identifies a set of users in the run database."""
    ordered, steps = users, np.diff(users)
    if not (steps > 0).all():
        ordered = np.unique(users)
        steps = np.diff(ordered)
    breaks = np.flatnonzero(steps != 1)
    firsts, lasts = (ordered[[0, *(breaks + 1)]], ordered[[*breaks, -1]]) if ordered.size else (ordered, ordered)
    ends = zip(firsts.tolist(), lasts.tolist(), strict=True)
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ends)


def check_ranges(text: str, own: Indices) -> None:
    """ProtocolError unless `text` is ascending ranges as in `as_ranges`, and contains only members of `own` (ascending)."""
    before = -1
    for part in text.split(",") if text else ():
        found = _RANGE.fullmatch(part)
        low, high = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, -1)
        if not before < low <= high:
            raise ProtocolError(f"a set of users is {text[:_MAX_SHOWN]!r}, wanted ascending ranges of numbers such as 0-19,25")
        if int(np.searchsorted(own, high, "right") - np.searchsorted(own, low)) != high - low + 1:
            raise ProtocolError(f"a set of users has {part}, not all of whom are among its users")
        before = high


def of_ranges(text: str) -> Indices:
    """The inverse of `as_ranges`."""
    ends = [part.partition("-")[::2] for part in text.split(",") if part]
    pieces = [np.arange(int(first), int(last or first) + 1) for first, last in ends]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
