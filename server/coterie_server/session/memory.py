"""The memory of a hub as a snapshot tree: what a resumed parent must know of its hosts and their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.experiment.features import from_plain, to_plain
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received
from coterie_server.session.hosts import Host, Sent
from coterie_server.session.outbox import Outbox
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import RunState


def memory_of(state: RunState, roster: Roster, outbox: Outbox) -> dict[str, Any]:
    """The tree."""
    return {
        "seq": state.seq,
        "features": to_plain(roster.schema),
        "model": roster.model,
        "numbers": roster.members.numbers if roster.members else None,
        "cluster_numbers": roster.members.cluster_numbers if roster.members else None,
        "hosts": [
            {
                "name": host.name,
                "users": list(host.users),
                "clusters": list(host.clusters),
                "acked": host.acked,
                "forgotten": host.forgotten,
                "told": host.name in outbox.told,
                "breaches": host.n_breaches,
                "log": _packed(host.log),
            }
            for host in roster.hosts.values()
        ],
    }


def restore(memory: Mapping[str, Any], state: RunState, roster: Roster, outbox: Outbox, now: float) -> None:
    """Takes up the memory of an earlier attempt; the hosts have yet to come back."""
    state.seq = memory["seq"]
    roster.schema, roster.model = from_plain(memory["features"]), memory["model"]
    for entry in memory["hosts"]:
        host = Host(entry["name"], tuple(entry["users"]), tuple(entry["clusters"]), absent_since=now)
        host.acked, host.forgotten, host.n_breaches = entry["acked"], entry["forgotten"], entry["breaches"]
        host.log.extend(_unpacked(entry["log"], len(host.users)))
        host.asked = max([host.acked, *(sent.seq for sent in host.log)])
        outbox.log_bytes += sum(sent.encoded.n_bytes for sent in host.log)
        roster.hosts[host.name] = host
        if entry["told"]:
            outbox.told.add(host.name)
    roster.fix()
    if memory["numbers"] is not None:
        roster.number(memory["numbers"], memory["cluster_numbers"])


def _packed(log: Sequence[Sent]) -> dict[str, Any]:
    """The messages of a host since its last snapshot: there are many, mostly small ones, so they have one leaf for all."""
    heads = [sent.encoded.head for sent in log]
    return {
        "seqs": np.array([sent.seq for sent in log], dtype=np.int64),
        "head_bytes": np.array([len(head) for head in heads], dtype=np.int64),
        "heads": b"".join(heads),
        "tails": {str(place): list(sent.encoded.tails) for place, sent in enumerate(log) if sent.encoded.tails},
    }


def _unpacked(log: Mapping[str, Any], n_users: int) -> Iterator[Sent]:
    """The messages again, each sent once."""
    start = 0
    for place, (seq, n_bytes) in enumerate(zip(log["seqs"].tolist(), log["head_bytes"].tolist(), strict=True)):
        head = log["heads"][start : start + n_bytes]
        start += n_bytes
        tails = tuple(memoryview(tail) for tail in log["tails"].get(str(place), ()))
        received = Received(session_pb2.JoinResponse.FromString(head).task, tuple(bytearray(tail) for tail in tails), len(head))
        _, entries = received.decode(n_users)
        yield Sent(seq, Encoded(head, tails, tuple(entries), is_task=True), 1)
