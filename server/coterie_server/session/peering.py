"""The messages of an aggregator for the other aggregators, and theirs for it (`federation.topology: peers`). It has no I/O of its own.

Each fetches what it needs, so a lost stream costs a question more. A message is kept until every snapshot of whoever may fetch it contains
the exchange. A restarted aggregator repeats its exchanges, and fetches again what it needs for them. Rows of the ledger are written before
a message leaves, and before a message that has come is used. So neither side forgets what it has booked, and a message is booked as useful
once, however often it travels.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from coterie.errors import ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.findings import Finding
from coterie.record.ledger import DOWN, SESSION, UP, Own, Row, pack, pack_own, peer_link, rows_of
from coterie.session.member import kept_reply, restored_reply
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Entry, Received, encode, reheaded
from coterie.wire.messages import PerCluster
from coterie.wire.precision import Precision
from coterie_server.session.ports import Recorder

P = TypeVar("P", bound=PerCluster)
_ALL = -1  # the place of a message that all others may fetch
_MAX_SHOWN = 100  # characters of a name
_Key = tuple[str, str, int]  # link, direction, exchange


class PeerRecorder(Recorder, Protocol):
    """The file of an aggregator's links to others."""

    def own_rows(self, link: str) -> Iterator[tuple[Row, Own]]: ...
    def host_rows(self, link: str) -> Iterator[Row]: ...
    def times(self) -> Counter[_Key]: ...  # how often each message was booked


class Fetch(Protocol):
    """The transport: fetches from the peer at a place what it has for this aggregator, with vectors of length d.

    RunError when the peer is gone for too long, ProtocolError for frames that are none.
    """

    async def __call__(self, place: int, seq: int, durable_seq: int, d: int) -> Received: ...


@dataclass
class _Kept:
    where: tuple[int, int]  # stage and round
    encoded: Encoded


class Peering:
    """One aggregator among the others: `Peers` of its half, and what a transport needs."""

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        run_id: str,
        recorder: PeerRecorder,
        note: Callable[..., None],
        attempt: int,
    ) -> None:
        """`recorder` has the links to peers alone; `note` takes an event of the cluster: kind, text and data."""
        self.name, self.run_id, self.rules, self.note = name, run_id, experiment.federation, note
        self.fetch_from: Fetch | None = None
        self.n_sent, self.n_received = Counter[int](), Counter[int]()  # bytes of questions and heartbeats, by place
        self._precision, self._recorder, self._attempt = Precision.of_run(experiment), recorder, attempt
        self._peers: Sequence[session_pb2.Peer] = ()
        self._place = -1
        self._task = session_pb2.Task()
        self._durable_seq = 0
        self._kept: dict[int, dict[int, _Kept]] = {}  # by exchange, and by the place of who may fetch it
        self._durable = Counter[int]()  # by place: what a peer will not ask again
        self._forgotten = 0  # messages up to this exchange
        self._times = recorder.times()
        self._changed = asyncio.Event()

    # ---- `Peers`

    @property
    def place(self) -> int:
        """See `Peers`."""
        return self._place

    @property
    def n(self) -> int:
        """See `Peers`."""
        return len(self._peers)

    @property
    def is_ring(self) -> bool:
        """See `Peers`."""
        return self.rules.peers_of(self.n) == "ring"

    def offer(self, message: PerCluster, to: int | None = None) -> None:
        """See `Peers`."""
        frame = session_pb2.Reply(seq=self._task.seq, attempt=self._task.attempt)
        kept = _Kept((self._task.stage, self._task.round), encode(frame, [message], self._precision))
        self._kept.setdefault(self._task.seq, {})[_ALL if to is None else to] = kept
        self._wake()

    async def fetch(self, kind: type[P], place: int, d: int) -> P:
        """See `Peers`."""
        if self.fetch_from is None:
            raise RunError("an aggregator without a transport to its peers was asked to fetch from one")
        seq = int(self._task.seq)
        try:
            received = await self.fetch_from(place, seq, self._durable_seq, d)
            message, entries = self._opened(kind, place, seq, d, received)
        except ProtocolError as error:
            raise RunError(f"aggregator {self.peer(place).name!r} broke the protocol: {error}", Finding("R7")) from None
        for sent, resent in received.sendings(entries):
            where = (self._task.stage, self._task.round)
            self._book(place, sent, (seq, received.frame.attempt, resent), where, is_sent=False)
        self._recorder.flush()
        return message

    def _opened(self, kind: type[P], place: int, seq: int, d: int, received: Received) -> tuple[P, Sequence[Entry]]:
        """The message of a peer, checked, and its entries for the ledger. ProtocolError."""
        if received.frame.seq != seq or received.kinds != (kind.kind,):
            found = f"{', '.join(received.kinds) or 'nothing'} of exchange {received.frame.seq}"
            raise ProtocolError(f"it sent {found}, wanted {kind.kind} of exchange {seq}")
        (message,), entries = received.decode(1, {"d": d})
        assert isinstance(message, kind)  # noqa: S101 - that is what its kind says
        own = [peer.cluster for peer in self._peers]
        # A sum on its way around a ring is of all clusters so far; an average names the cluster that has passed it on.
        if message.clusters.tolist() not in ([own[place]], own[: place + 1]):
            raise ProtocolError(f"it sent {kind.kind} of clusters {message.clusters.tolist()}, wanted its own, {own[place]}")
        for field, spec in message.specs:
            if spec.is_float and not np.isfinite(getattr(message, field)).all():
                raise ProtocolError(f"{kind.kind}.{field} has a number that is not finite")
        return message, entries

    # ---- the aggregator

    def meet(self, peers: session_pb2.PeerList) -> None:
        """Learns where the others are, perhaps again. ProtocolError for a list that is not of this run."""
        names = [peer.name for peer in peers.peers]
        if self._peers and names != [peer.name for peer in self._peers]:
            raise ProtocolError("the coordinator sent other peers than before")
        if names.count(self.name) != 1 or len(set(names)) != len(names):
            raise ProtocolError(f"the coordinator sent {len(names)} peers, wanted each once, and this aggregator among them")
        self._peers, self._place = tuple(peers.peers), names.index(self.name)
        self._wake()

    def begin(self, task: session_pb2.Task, durable_seq: int) -> None:
        """A task of the coordinator begins. Every snapshot of this aggregator contains the exchanges up to `durable_seq`."""
        self._task, self._durable_seq = task, durable_seq

    @property
    def kept_bytes(self) -> int:
        """Bytes of messages that peers may still fetch."""
        return sum(kept.encoded.n_bytes for by_place in self._kept.values() for kept in by_place.values())

    def tree(self) -> Mapping[str, Any]:
        """What a snapshot keeps."""
        kept = [
            {"seq": seq, "place": place, "where": list(one.where), **kept_reply(one.encoded)}
            for seq, by_place in self._kept.items()
            for place, one in by_place.items()
        ]
        return {"kept": kept, "forgotten": self._forgotten}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up what a snapshot has kept."""
        self._forgotten = tree["forgotten"]
        for item in tree["kept"]:
            stage, number = item["where"]
            self._kept.setdefault(item["seq"], {})[item["place"]] = _Kept((stage, number), restored_reply(item, 1))

    def books(self) -> Iterator[session_pb2.Book]:
        """This side of each link to a peer."""
        self._recorder.flush()
        for place in self._linked:
            peer, link, is_parent = self._peers[place], self._link(place), self._place < place
            if is_parent:
                counts = {DOWN: self.n_sent[place], UP: self.n_received[place]}
                session = [(Row(0, self._attempt, 0, way, SESSION, 0, 0, 0, n, 0), Own(1, 0, 0, 0)) for way, n in counts.items()]
                found = pack_own([*self._recorder.own_rows(link), *session], "", ())
            else:
                found = pack(self._recorder.host_rows(link))
            for book in found:
                book.peer = peer.name
                yield book

    # ---- the transport

    def peer(self, place: int) -> session_pb2.Peer:
        """The aggregator at a place."""
        return self._peers[place]

    def place_of(self, name: str) -> int | None:
        """The place of another aggregator; None as long as the others are not known. ProtocolError for a name that is none of them."""
        if not self._peers:
            return None
        place = next((i for i, peer in enumerate(self._peers) if peer.name == name), self._place)
        if place == self._place:
            raise ProtocolError(f"{name[:_MAX_SHOWN]!r} is no other aggregator of this run")
        return place

    def is_forgotten(self, seq: int) -> bool:
        """Whether a message of this exchange is no longer kept."""
        return seq <= self._forgotten

    def has(self, place: int, seq: int) -> bool:
        """Whether there is a message for the peer at a place."""
        by_place = self._kept.get(seq, {})
        return place in by_place or _ALL in by_place

    def sending(self, place: int, seq: int) -> Encoded:
        """The message for a peer, booked as sent."""
        by_place = self._kept[seq]
        kept = by_place[place] if place in by_place else by_place[_ALL]
        way = DOWN if self._place < place else UP
        encoded, times = kept.encoded, self._times[self._link(place), way, seq]
        frame = session_pb2.JoinRequest.FromString(encoded.head).reply
        if times:
            frame.resent = times
            encoded = reheaded(frame, encoded)
        self._book(place, encoded.entries, (seq, frame.attempt, times), kept.where, is_sent=True)
        self._recorder.flush()
        return encoded

    def said_durable(self, place: int, seq: int) -> None:
        """A peer says that every snapshot of it contains the exchanges up to this one. Forgets what nobody can fetch any more.

        It cannot have one of an exchange that needs the message of the task under way, whatever it says.
        """
        self._durable[place] = max(self._durable[place], min(seq, max(0, self._task.seq - 1)))
        least = min(self._durable[other] for other in self._linked)
        if least > self._forgotten:
            self._forgotten = least
            self._kept = {number: kept for number, kept in self._kept.items() if number > least}
            again = min(least, self._durable_seq)  # a restarted aggregator fetches again what its snapshot does not contain
            self._times = Counter({key: n for key, n in self._times.items() if key[2] > again})

    async def change_within(self, seconds: float) -> bool:
        """Waits for a new message, or new addresses; whether one has come in time."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def _linked(self) -> list[int]:
        """The places of those with whom this aggregator exchanges messages."""
        around = range(self._place - 1, self._place + 2) if self.is_ring else range(self.n)
        return [place for place in around if place != self._place and 0 <= place < self.n]

    def _wake(self) -> None:
        self._changed.set()

    def _link(self, place: int) -> str:
        lower, higher = sorted((place, self._place))
        return peer_link(self._peers[lower].name, self._peers[higher].name)

    def _book(self, place: int, entries: Sequence[Entry], fences: tuple[int, int, int], where: tuple[int, int], *, is_sent: bool) -> None:
        """Books a message on the link to a peer; `fences`: exchange, attempt, how often it had been sent before."""
        seq, attempt, resent = fences
        way, link = (DOWN if is_sent == (self._place < place) else UP), self._link(place)
        rows = rows_of(entries, seq, attempt, way, resent)
        if self._place < place:
            self._recorder.book(link, where, [(row, None) for row in rows], useful=not self._times[link, way, seq])
        else:
            self._recorder.book_host(link, rows)
        self._times[link, way, seq] += 1
