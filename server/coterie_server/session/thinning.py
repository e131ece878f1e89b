"""Compression at a parent's end: tasks before they are encoded, and answers after they are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.compress.link import Link, Place, rounded
from coterie.compress.memory import Memory
from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment
from coterie.v1 import session_pb2
from coterie.wire.codec import Received
from coterie.wire.messages import Message, Rows
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import Host, Sent


class Thinning:
    """Both directions, for the hosts of one hub. Without `federation.compress` all messages pass as they are."""

    def __init__(self, experiment: Experiment, roster: Roster) -> None:
        rule, self._roster = experiment.federation.compress, roster
        self._up = None if rule is None or rule.up is None else Link.of(rule.up, experiment, lambda: roster.model)
        self._down = None if rule is None or rule.down is None else Link.of(rule.down, experiment)
        self.remembered = Memory() if self._up is not None and self._up.looks_back else None

    def task(self, host: str, messages: Sequence[Message], at: tuple[int, int]) -> tuple[Sequence[Message], Sequence[Message] | None]:
        """A host's part of a task as it travels, and as the host gets it, where answers differ from that. `at`: stage and round."""
        place = self._place(host, at)
        parts = messages if self._down is None else self._down.packed(messages, place)
        if self._up is None or not self._up.looks_at_tasks:
            return parts, None
        return parts, self._seen(parts, place)

    def answer(self, host: Host, seq: int, messages: Sequence[Message]) -> list[Message]:
        """The messages of a host's answer to a task. ProtocolError if they cannot be read."""
        if self._up is None:
            return list(messages)
        sent = next((sent for sent in reversed(host.log) if sent.seq == seq), None)
        if sent is None:
            raise ProtocolError(f"it answers task {seq}, which is not kept any more")
        if sent.seen is None and self._up.looks_at_tasks:
            sent.seen = self._read_again(host, sent)
        own = self._roster.layout.own[host.name]
        for message in messages:
            if isinstance(message, Rows) and message.users is not None and not np.isin(message.users, own).all():
                raise ProtocolError(f"{message.kind} has rows of users that are not on host {host.name!r}")
        if self.remembered is not None:
            self.remembered.begin(seq, sent.at)
        return self._up.unpacked(messages, self._place(host.name, sent.at, sent.seen or ()))

    def memory(self, seq: int) -> dict[str, Any]:
        """What answers are differences from, as a snapshot tree, as it was after exchange `seq`."""
        return {} if self.remembered is None else {"compress": self.remembered.tree(seq)}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up the memory of an earlier attempt."""
        if self.remembered is not None:
            self.remembered = Memory.from_tree(tree["compress"])

    def check_announced(self, frame: session_pb2.Task | session_pb2.Reply) -> None:
        """ProtocolError if compressed fields announce other sizes than their shapes have."""
        if self._up is not None:
            self._up.check_announced(frame)

    def _read_again(self, host: Host, sent: Sent) -> list[Message]:
        """A task of an earlier attempt as its host got it."""
        task = session_pb2.JoinResponse.FromString(sent.encoded.head).task
        received = Received(task, sent.encoded.tails, len(sent.encoded.head))
        messages, _ = received.decode(len(host.users))
        return self._seen(messages, self._place(host.name, sent.at))

    def _seen(self, parts: Sequence[Message], place: Place) -> list[Message]:
        assert self._up is not None  # noqa: S101 - only answers are compared with tasks
        return rounded(parts if self._down is None else self._down.unpacked(parts, place), self._up.precision)

    def _place(self, host: str, at: tuple[int, int], task: Sequence[Message] = ()) -> Place:
        own, number_of = self._roster.layout.own[host], self._roster.fixed.number_of
        return Place(*at, lambda users: number_of[own if users is None else users], task, self.remembered)
