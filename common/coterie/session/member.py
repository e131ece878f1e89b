"""The member's end of a session, without I/O: how a client host and an aggregator behave towards their parent.

Each task is handled exactly once and in order. Replies are kept until the parent says that it will never ask for them again. So a parent
that was killed is answered from stored replies. The subclass handles the content of tasks.
"""

import platform
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from coterie.arrays import Indices
from coterie.compress.link import Link, Place
from coterie.compress.memory import Memory
from coterie.errors import ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.features import Feature
from coterie.findings import Finding
from coterie.record.ledger import DOWN, UP, Booked, pack, rows_of
from coterie.record.snapshot import SnapshotFile
from coterie.session.failures import finding_frame
from coterie.v1 import session_pb2
from coterie.wire.assembler import Held
from coterie.wire.codec import PROTOCOL_VERSION, Encoded, Received, continued, encode
from coterie.wire.messages import Message, Rows
from coterie.wire.precision import Precision

_USERS_PER_HELLO = 5000
_BOOKED_UNPACKED = 2_000  # tasks and replies
_SMALL_BYTES = 16 << 10  # only tensors up to this size enter a task's checksum


class User(Protocol):
    """The parent receives these of each user."""

    @property
    def name(self) -> str: ...
    @property
    def cluster(self) -> str | None: ...


@dataclass(frozen=True)
class Asked:
    """An opened task: its messages, or the answer if it was handled before."""

    task: session_pb2.Task
    messages: Sequence[Message] | None  # None: the task was handled before
    answer: Encoded | None = None


class Member:
    noun = "host"
    is_aggregator = False
    peer_address = ""  # where other aggregators dial this one

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        run_id: str,
        users: Sequence[User],
        store: SnapshotFile | None,
        instance: str = "",
        schema: Sequence[Feature] = (),
        model: str = "",
        findings: Sequence[Finding] = (),
    ) -> None:
        self.name = name
        self.experiment = experiment
        self.run_id = run_id
        self.indices: Indices = np.zeros(0, dtype=np.int64)
        self.numbers, self.clusters = self.indices, self.indices
        self.n_members = 0
        self.last_seq = 0
        self.held = Held(keeps_whole=True)  # of tasks
        self.told: tuple[int, int] = (0, 0)  # the latest task, and how much of its reply the parent holds
        self._members = tuple(users)
        self._schema = tuple(schema)
        self._findings = tuple(findings)
        self._model = model
        self._store = store
        self._instance = instance
        self._precision = Precision.of_run(experiment)
        thin = experiment.federation.compress
        self._up = None if thin is None or thin.up is None else Link.of(thin.up, experiment, lambda: model)
        self._remembered = Memory() if thin is not None and thin.up is not None and thin.up.remembers else None
        self._down = None if thin is None or thin.down is None else Link.of(thin.down, experiment)
        self._replies: dict[int, tuple[Encoded, int]] = {}  # exchange -> (reply, how often it was sent)
        self._fingerprints: dict[int, int] = {}  # exchange -> checksum of the task that the reply answers
        self._unmarked: tuple[session_pb2.Task, Sequence[Message]] | None = None  # the latest task, if it has no checksum yet
        self._is_snapshot_asked = False
        self._booked: list[Booked] = []
        self.whole_books: list[bytes] | None = None  # frames, once the run is over
        self._books: list[bytes] = []  # packed rows, since a long run has many
        self._durable_seq = 0
        self._newest_seq = 0

    def numerics(self) -> str:
        """What determines the bits of the arithmetic: library version, processor, and numpy's kernels for it."""
        config: Any = np.show_config(mode="dicts")
        found = config.get("SIMD Extensions", {}).get("found") or ["baseline"]
        return f"numpy {np.__version__}, {platform.machine()}, {found[-1]}"

    def hello(self) -> Iterator[session_pb2.JoinRequest]:
        users = [session_pb2.User(name=user.name, cluster=user.cluster or "") for user in self._members]
        for start in range(0, len(users), _USERS_PER_HELLO):
            piece = users[start : start + _USERS_PER_HELLO]
            hello = session_pb2.Hello(
                protocol=PROTOCOL_VERSION,
                host=self.name,
                users=piece,
                more=start + len(piece) < len(users),
                run_id=self.run_id if self.last_seq else "",
                last_seq=self.last_seq,
                numerics=self.numerics(),
                instance=self._instance,
                schema=[session_pb2.Feature(name=one.name, kind=one.kind, column=one.column) for one in self._schema] if start == 0 else (),
                findings=[finding_frame(finding) for finding in self._findings] if start == 0 else (),
                model=self._model if start == 0 else "",
                aggregator=self.is_aggregator,
                held=self._holds() if start == 0 else None,
                peer_address=self.peer_address if start == 0 else "",
            )
            yield session_pb2.JoinRequest(hello=hello)

    def _holds(self) -> session_pb2.Held | None:
        kept = self.held.kept
        if kept is None or not kept.n_bytes:
            return None
        return session_pb2.Held(seq=kept.received.frame.seq, attempt=kept.received.frame.attempt, bytes=kept.n_bytes)

    @property
    def progress(self) -> tuple[Any, ...]:
        """Changes with every task that is handled, and with every chunk that this side or the parent holds."""
        coming = self.held.flowing or self.held.kept
        return (self.last_seq, self.told, None if coming is None else (coming.received.frame.seq, coming.n_bytes))

    def welcome(self, welcome: session_pb2.Welcome) -> None:
        """Stores the member order. ProtocolError if it does not fit the member's users, or the heartbeat is not the experiment's."""
        if welcome.run_id != self.run_id:
            raise ProtocolError(f"welcomed to run {welcome.run_id!r}, wanted {self.run_id!r}")
        heartbeat_s = self.experiment.federation.heartbeat_s
        if welcome.heartbeat_s != heartbeat_s:
            raise ProtocolError(f"welcomed with a heartbeat of {welcome.heartbeat_s} s, wanted the experiment's {heartbeat_s} s")
        n_users = len(self._members)
        indices = np.array(welcome.member_indices, dtype=np.int64)
        if indices.size != n_users or np.any(np.diff(indices) <= 0) or indices[-1] >= welcome.n_members:
            raise ProtocolError(f"welcomed with {indices.size} member indices for {n_users} users, wanted one each, ascending")
        self.indices, self.n_members = indices, welcome.n_members
        self.numbers = np.array(welcome.numbers, dtype=np.int64)
        self.clusters = np.array(welcome.clusters, dtype=np.int64) - 1
        if not self.numbers.size == self.clusters.size == n_users:
            raise ProtocolError(f"welcomed with {self.numbers.size} numbers and {self.clusters.size} clusters for {n_users} users")

    def meet(self, peers: session_pb2.PeerList) -> None:
        """Learns where the other aggregators are. ProtocolError for a member that has no peers."""
        raise ProtocolError(f"{self.noun} {self.name!r} was sent {len(peers.peers)} peers, but has none in this run")

    def open(self, received: Received) -> Asked:
        """Books and decodes a task. ProtocolError and RunError for tasks that cannot be for this member."""
        task = received.frame
        if not isinstance(task, session_pb2.Task):
            raise ProtocolError("the parent sent a reply, wanted a task")
        if not self.n_members:
            raise ProtocolError(f"task {task.seq} came before the welcome")
        Member.settle(self)
        messages, entries = received.decode(len(self._members))
        self._booked.extend((sending, task.seq, task.attempt, DOWN, resent) for sending, resent in received.sendings(entries))
        self.told = task.seq, task.reply_held
        while self._replies and next(iter(self._replies)) <= task.durable_seq:  # in order of exchanges
            oldest = next(iter(self._replies))
            del self._replies[oldest], self._fingerprints[oldest]
        if len(self._booked) > _BOOKED_UNPACKED:
            self._pack_rows()
        if task.seq <= self.last_seq:
            self.held.handled(task.seq)
            # Without parts it goes on with the task that was handled here.
            return Asked(task, None, None if task.replay else self._stored(task, _fingerprint(task, messages) if task.parts else None))
        self._unmarked = task, messages
        if received.n_bytes > _SMALL_BYTES:  # frees the messages early
            self._mark()
        messages = [self._with_positions(message) for message in messages]
        return Asked(task, messages if self._down is None else self._down.unpacked(messages, self._place(task)))

    def close(self, asked: Asked, messages: Iterable[Message]) -> Encoded | None:
        """The reply to send, or None if the parent already has it. The task counts as handled from now on."""
        task = asked.task
        if self._up is not None:
            messages = self._up.packed(messages, self._place(task, asked.messages or ()))
        reply = session_pb2.Reply(seq=task.seq, attempt=task.attempt, durable_seq=self._durable_seq)
        encoded = encode(reply, [self._with_indices(message) for message in messages], self._precision)
        self.last_seq = task.seq
        self._replies[task.seq] = (encoded, 0 if task.replay else 1)
        if not task.replay:
            self._booked.append((encoded.entries, task.seq, task.attempt, UP, 0))
        self._is_snapshot_asked = self._is_snapshot_asked or bool(task.snapshot)
        self.held.handled(task.seq)
        return None if task.replay else encoded

    def _place(self, task: session_pb2.Task, messages: Sequence[Message] = ()) -> Place:
        def numbers_of(users: Indices | None) -> Indices:
            return self.numbers if users is None else self.numbers[users]

        return Place(task.stage, task.round, numbers_of, messages, self._remembered)

    def settled_until(self, task: session_pb2.Task) -> int:
        """The last exchange to which neither the parent nor a restart of this member, from either of its snapshots, comes back."""
        return int(task.durable_seq) if self._store is None else min(task.durable_seq, self._durable_seq)

    def settle(self) -> None:
        """Does the work that no reply waits for, after it is sent: the requested snapshot, and the checksum of the task."""
        self._mark()
        if self._is_snapshot_asked:
            self.save()

    def _mark(self) -> None:
        if self._unmarked is not None:
            task, messages = self._unmarked
            self._fingerprints[task.seq] = _fingerprint(task, messages)
            self._unmarked = None

    def _stored(self, task: session_pb2.Task, fingerprint: int | None) -> Encoded:
        who = f"{self.noun} {self.name!r}"
        if task.seq not in self._replies:
            raise RunError(f"{who} is asked for task {task.seq} again, but has kept only replies to {sorted(self._replies)}")
        if fingerprint is not None and self._fingerprints[task.seq] != fingerprint:
            raise RunError(f"task {task.seq} is not the one that {who} answered before: the coordinator has gone another way")
        kept, times = self._replies[task.seq]
        reply = session_pb2.JoinRequest.FromString(kept.head).reply
        reply.attempt, reply.resent, reply.durable_seq = task.attempt, times, self._durable_seq
        encoded = continued(reply, kept, task.reply_held)
        self._replies[task.seq] = (kept, times + 1)
        self._booked.append((encoded.entries, task.seq, task.attempt, UP, times))
        return encoded

    def _with_positions(self, message: Message) -> Message:
        if not isinstance(message, Rows) or message.users is None:
            return message
        positions = np.searchsorted(self.indices, message.users)
        if np.any(positions == self.indices.size) or np.any(self.indices[positions] != message.users):
            raise ProtocolError(f"{message.kind} came for members that are not on {self.noun} {self.name!r}")
        return replace(message, users=positions)

    def _with_indices(self, message: Message) -> Message:
        if not isinstance(message, Rows) or message.users is None:
            return message
        return replace(message, users=self.indices[message.users])

    def handle(self, received: Received) -> Any:
        """Handles one task: the reply (`Encoded`), or None if there is none to send. An awaitable if the work runs on the event loop."""
        raise NotImplementedError

    def ending(self, finish: session_pb2.Finish) -> Any:
        """Work that must be done before the books are complete; may be an awaitable likewise."""
        raise NotImplementedError

    def ended(self) -> None:
        """The run has finished well, and the parent has all books: removes the secrets that only an answer to it would need."""

    def books(self) -> Iterator[session_pb2.JoinRequest]:
        """The member's own ledger, those of links below it, and an empty book that marks the end."""
        self._pack_rows()
        for book in self._books:
            yield session_pb2.JoinRequest(book=session_pb2.Book.FromString(book))
        for below in self.books_below():
            yield session_pb2.JoinRequest(book=below)
        yield session_pb2.JoinRequest(book=session_pb2.Book())

    def books_below(self) -> Iterable[session_pb2.Book]:
        """An aggregator's ledgers of the links below it."""
        return ()

    def _pack_rows(self) -> None:
        self._books.extend(book.SerializeToString() for book in pack(row for booked in self._booked for row in rows_of(*booked)))
        self._booked.clear()

    def save(self) -> None:
        """Saves the state of all users, if there is a store."""
        self._is_snapshot_asked = False
        if self._store is None:
            return
        self._mark()
        self._pack_rows()
        self._store.save(
            {
                "run_id": self.run_id,
                "last_seq": self.last_seq,
                "users": [user.name for user in self._members],
                "indices": self.indices,
                "n_members": self.n_members,
                "replies": [
                    {"seq": seq, "times": times, "fingerprint": self._fingerprints[seq], **kept_reply(reply)}
                    for seq, (reply, times) in self._replies.items()
                ],
                "books": self._books,
                **({} if self._remembered is None else {"compress": self._remembered.tree()}),
                **self.tree(),
            }
        )
        self._durable_seq, self._newest_seq = self._newest_seq, self.last_seq

    def tree(self) -> Mapping[str, Any]:
        """The subclass's part of the snapshot."""
        raise NotImplementedError

    def restored(self) -> Mapping[str, Any] | None:
        """Restores the newest snapshot and returns it, or None. RunError if it is of another run or other users."""
        snapshot: Mapping[str, Any] | None = self._store.load() if self._store is not None else None
        if snapshot is None:
            return None
        names = [user.name for user in self._members]
        if snapshot["run_id"] != self.run_id:
            said = f"the state of {self.noun} {self.name!r} belongs to run {snapshot['run_id']}, wanted {self.run_id}"
            raise RunError(said, Finding("J5"))
        if snapshot["users"] != names:
            said = f"the state of {self.noun} {self.name!r} is of users {snapshot['users'][:3]}..., wanted {names[:3]}..."
            raise RunError(said, Finding("J5"))
        self.last_seq, self._newest_seq = snapshot["last_seq"], snapshot["last_seq"]
        self.indices, self.n_members = snapshot["indices"], snapshot["n_members"]
        self._replies = {item["seq"]: (restored_reply(item, len(names)), item["times"]) for item in snapshot["replies"]}
        self._fingerprints = {item["seq"]: item["fingerprint"] for item in snapshot["replies"]}
        self._books = snapshot["books"]
        if self._remembered is not None:
            self._remembered = Memory.from_tree(snapshot["compress"])
        return snapshot


def _fingerprint(task: session_pb2.Task, messages: Sequence[Message]) -> int:
    """A checksum of a task's content, without its fences and large tensors."""
    checksum = zlib.crc32(f"{task.stage} {task.round} {[message.kind for message in messages]}".encode())
    for message in messages:
        users = message.users if isinstance(message, Rows) else None
        if users is not None:
            checksum = zlib.crc32(users.data, checksum)
        for name, _ in message.specs:
            array = getattr(message, name)
            checksum = zlib.crc32(array if array.nbytes <= _SMALL_BYTES else str(array.shape).encode(), checksum)
    return checksum


def kept_reply(reply: Encoded) -> Mapping[str, Any]:
    """A reply as a snapshot keeps it."""
    return {"head": reply.head, "tails": list(reply.tails)}


def restored_reply(item: Mapping[str, Any], n_own: int) -> Encoded:
    """The inverse of `kept_reply`; `n_own` users have the rows of messages that name no users."""
    reply = session_pb2.JoinRequest.FromString(item["head"]).reply
    received = Received(reply, tuple(bytearray(tail) for tail in item["tails"]), len(item["head"]))
    _, entries = received.decode(n_own)
    return Encoded(item["head"], tuple(memoryview(tail) for tail in item["tails"]), tuple(entries), is_task=False)
