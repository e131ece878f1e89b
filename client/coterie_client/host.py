"""The client host: the users of one process, their state, and the client halves of the methods.

No I/O but the snapshot store, no clock, no network: a transport feeds it whole tasks and carries its replies. Each task is handled exactly
once and in order; replies are kept until the parent says that it will never ask for them again, so that a parent that was killed
is answered from what is stored.
"""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.config import Experiment, method_module
from coterie.errors import ProtocolError, RunError
from coterie.ledger import DOWN, UP, Row, pack, rows_of
from coterie.messages import Message, Rows
from coterie.snapshot import SnapshotFile
from coterie.v1 import session_pb2
from coterie.wire import PROTOCOL_VERSION, Encoded, Precision, Received, encode, reheaded
from coterie_client.data import UserData
from coterie_client.method import ClientMethod, Inbox, Local

_USERS_PER_HELLO = 5000
_ROWS_UNPACKED = 10_000


def numerics() -> str:
    """What decides the bits of the arithmetic: library version, processor, and the kernels that numpy has chosen for it."""
    config: Any = np.show_config(mode="dicts")
    found = config.get("SIMD Extensions", {}).get("found") or ["baseline"]
    return f"numpy {np.__version__}, {platform.machine()}, {found[-1]}"


class Host:
    """All users of one process."""

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        run_id: str,
        users: Sequence[UserData],
        build_local: Callable[[Host], Local],
        store: SnapshotFile | None,
        instance: str = "",
    ) -> None:
        self.name = name
        self.experiment = experiment
        self.run_id = run_id
        self.users = tuple(users)
        self.indices: Indices = np.zeros(0, dtype=np.int64)
        self.numbers, self.clusters = self.indices, self.indices
        self.n_members = 0
        self.states: dict[str, Any] = {}
        self.last_seq = 0
        self._build_local = build_local
        self._local: Local | None = None
        self._store = store
        self._instance = instance
        self._precision = Precision.of(experiment.payload)
        self._stage = ""
        self._replies: dict[int, tuple[Encoded, int]] = {}  # exchange -> (reply, how often it was sent)
        self._fingerprints: dict[int, int] = {}  # exchange -> checksum of the task that the reply answers
        self._rows: list[Row] = []
        self._books: list[bytes] = []  # rows that are packed already: a long run has many
        self._durable_seq = 0
        self._newest_seq = 0
        self._restore()

    # ---- joining

    def hello(self) -> Iterator[session_pb2.JoinRequest]:
        """The frames that introduce the host."""
        users = [session_pb2.User(name=user.name, cluster=user.cluster or "") for user in self.users]
        for start in range(0, len(users), _USERS_PER_HELLO):
            piece = users[start : start + _USERS_PER_HELLO]
            hello = session_pb2.Hello(
                protocol=PROTOCOL_VERSION,
                host=self.name,
                users=piece,
                more=start + len(piece) < len(users),
                run_id=self.run_id if self.last_seq else "",
                last_seq=self.last_seq,
                numerics=numerics(),
                instance=self._instance,
                features=self.users[0].columns if start == 0 else (),
            )
            yield session_pb2.JoinRequest(hello=hello)

    def welcome(self, welcome: session_pb2.Welcome) -> None:
        """Learns the member order. ProtocolError when it does not fit the host's users."""
        if welcome.run_id != self.run_id:
            raise ProtocolError(f"welcomed to run {welcome.run_id!r}, wanted {self.run_id!r}")
        indices = np.array(welcome.member_indices, dtype=np.int64)
        if indices.size != len(self.users) or np.any(np.diff(indices) <= 0) or indices[-1] >= welcome.n_members:
            raise ProtocolError(f"welcomed with {indices.size} member indices for {len(self.users)} users, wanted one each, ascending")
        self.indices, self.n_members = indices, welcome.n_members
        self.numbers = np.array(welcome.numbers, dtype=np.int64)
        self.clusters = np.array(welcome.clusters, dtype=np.int64) - 1
        if not self.numbers.size == self.clusters.size == indices.size:
            raise ProtocolError(f"welcomed with {self.numbers.size} numbers and {self.clusters.size} clusters for {indices.size} users")
        self._local = None

    # ---- tasks

    def handle(self, received: Received) -> Encoded | None:
        """Handles one task; the reply to send, or None when the parent has it already."""
        task = received.frame
        if not isinstance(task, session_pb2.Task):
            raise ProtocolError("the parent sent a reply, wanted a task")
        if not self.n_members:
            raise ProtocolError(f"task {task.seq} came before the welcome")
        messages, entries = received.decode(len(self.users))
        self._rows.extend(rows_of(entries, seq=task.seq, attempt=task.attempt, direction=DOWN, resent=task.resent))
        while self._replies and next(iter(self._replies)) <= task.durable_seq:  # they are kept in order
            oldest = next(iter(self._replies))
            del self._replies[oldest], self._fingerprints[oldest]
        if len(self._rows) > _ROWS_UNPACKED:
            self._pack_rows()
        if task.seq <= self.last_seq:
            return None if task.replay else self._stored(task)
        if task.stage_json:
            self._begin_stage(task.stage_json)
        reply = session_pb2.Reply(seq=task.seq, attempt=task.attempt, durable_seq=self._durable_seq)
        encoded = encode(reply, self._dispatch(messages, task.round), self._precision)
        self.last_seq = task.seq
        self._replies[task.seq] = (encoded, 0 if task.replay else 1)
        self._fingerprints[task.seq] = _fingerprint(task)
        if not task.replay:
            self._book_up(encoded, task, 0)
        if task.snapshot:
            self.save()
        return None if task.replay else encoded

    def _stored(self, task: session_pb2.Task) -> Encoded:
        if task.seq not in self._replies:
            raise RunError(f"host {self.name!r} is asked for task {task.seq} again, but has kept only replies to {sorted(self._replies)}")
        if self._fingerprints[task.seq] != _fingerprint(task):
            raise RunError(f"task {task.seq} is not the one that host {self.name!r} answered before: the coordinator has gone another way")
        kept, times = self._replies[task.seq]
        reply = session_pb2.JoinRequest.FromString(kept.head).reply
        reply.attempt, reply.resent, reply.durable_seq = task.attempt, times, self._durable_seq
        encoded = reheaded(reply, kept)
        self._replies[task.seq] = (kept, times + 1)
        self._book_up(encoded, task, times)
        return encoded

    def _book_up(self, encoded: Encoded, task: session_pb2.Task, resent: int) -> None:
        self._rows.extend(rows_of(encoded.entries, seq=task.seq, attempt=task.attempt, direction=UP, resent=resent))

    def _begin_stage(self, stage_json: str) -> None:
        """Sets up the methods of a new stage. Their earlier states are theirs to build on."""
        stage = json.loads(stage_json)
        self._stage = stage["stage"]
        for method, options in stage["options"].items():
            self.states[method] = self._client(method).init(options, self.local, self.states.get(method))

    def _dispatch(self, messages: Sequence[Message], round_number: int) -> list[Message]:
        """Hands the messages to the halves of their methods, in order, and collects the replies."""
        by_method: dict[str, dict[type[Message], Message]] = {}
        for message in messages:
            by_method.setdefault(message.method, {})[type(message)] = self._with_positions(message)
        replies: list[Message] = []
        for method, listed in by_method.items():
            client = self._client(method)
            if method not in self.states:
                self.states[method] = client.init({}, self.local, None)
            before = self.states[method]
            self.states[method], answers = client.step(before, Inbox(self._stage, round_number, listed), self.local)
            if method == "prepare":
                self._local = None  # the rows may have been standardised
            replies.extend(self._with_indices(answer) for answer in answers)
        return replies

    def _client(self, method: str) -> ClientMethod[Any]:
        client: ClientMethod[Any] = method_module("coterie_client", method).CLIENT
        return client

    @property
    def local(self) -> Local:
        """What the halves may know."""
        if self._local is None:
            self._local = self._build_local(self)
        return self._local

    def _with_positions(self, message: Message) -> Message:
        if not isinstance(message, Rows) or message.users is None:
            return message
        positions = np.searchsorted(self.indices, message.users)
        if np.any(positions == self.indices.size) or np.any(self.indices[positions] != message.users):
            raise ProtocolError(f"{message.kind} came for members that are not on host {self.name!r}")
        return replace(message, users=positions)

    def _with_indices(self, message: Message) -> Message:
        if not isinstance(message, Rows) or message.users is None:
            return message
        return replace(message, users=self.indices[message.users])

    # ---- the end

    def books(self) -> Iterator[session_pb2.JoinRequest]:
        """The host's own ledger."""
        self._pack_rows()
        for book in self._books:
            yield session_pb2.JoinRequest(book=session_pb2.Book.FromString(book))

    def _pack_rows(self) -> None:
        self._books.extend(book.SerializeToString() for book in pack(self._rows))
        self._rows.clear()

    # ---- snapshots

    def save(self) -> None:
        """Writes the state of all users down; without a store nothing is kept."""
        if self._store is None:
            return
        self._pack_rows()
        self._store.save(
            {
                "run_id": self.run_id,
                "last_seq": self.last_seq,
                "users": [user.name for user in self.users],
                "indices": self.indices,
                "n_members": self.n_members,
                "stage": self._stage,
                "states": self.states,
                "replies": [_stored_reply(seq, *reply, self._fingerprints[seq]) for seq, reply in self._replies.items()],
                "books": self._books,
            }
        )
        self._durable_seq, self._newest_seq = self._newest_seq, self.last_seq

    def _restore(self) -> None:
        snapshot = self._store.load() if self._store is not None else None
        if snapshot is None:
            return
        if snapshot["run_id"] != self.run_id:
            raise RunError(f"the state of host {self.name!r} belongs to run {snapshot['run_id']}, wanted {self.run_id}")
        if snapshot["users"] != [user.name for user in self.users]:
            raise RunError(
                f"the state of host {self.name!r} is of users {snapshot['users'][:3]}..., wanted {[u.name for u in self.users][:3]}..."
            )
        self.last_seq, self._newest_seq = snapshot["last_seq"], snapshot["last_seq"]
        self.indices, self.n_members, self._stage = snapshot["indices"], snapshot["n_members"], snapshot["stage"]
        self.states = snapshot["states"]
        self._replies = {item["seq"]: (_restored_reply(item, len(self.users)), item["times"]) for item in snapshot["replies"]}
        self._fingerprints = {item["seq"]: item["fingerprint"] for item in snapshot["replies"]}
        self._books = snapshot["books"]


def _fingerprint(task: session_pb2.Task) -> int:
    """A checksum of what a task asks, without its fences; large tensors are not looked at."""
    checksum = zlib.crc32(b"%d %d" % (task.stage, task.round))
    for part in task.parts:
        checksum = zlib.crc32(part.SerializeToString(), checksum)
    return checksum


def _stored_reply(seq: int, encoded: Encoded, times: int, fingerprint: int) -> Mapping[str, Any]:
    return {"seq": seq, "times": times, "fingerprint": fingerprint, "head": encoded.head, "tails": [bytes(tail) for tail in encoded.tails]}


def _restored_reply(item: Mapping[str, Any], n_own: int) -> Encoded:
    reply = session_pb2.JoinRequest.FromString(item["head"]).reply
    received = Received(reply, tuple(bytearray(tail) for tail in item["tails"]), len(item["head"]))
    _, entries = received.decode(n_own)
    return Encoded(item["head"], tuple(memoryview(tail) for tail in item["tails"]), tuple(entries), is_task=False)
