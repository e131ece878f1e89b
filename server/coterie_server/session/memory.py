"""The memory of a hub as a snapshot tree: what a resumed parent must know about its hosts and their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.experiment.features import from_plain, to_plain
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received
from coterie_server.session.outbox import Outbox
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import Errand, Host, RunState, Sent


def memory_of(seq: int, roster: Roster, outbox: Outbox) -> dict[str, Any]:
    """The tree, as if exchange `seq` were the latest. What hosts have answered of later ones they answer again from their stores."""
    return {
        "seq": seq,
        "features": to_plain(roster.schema),
        "model": roster.model,
        "numbers": roster.members.numbers if roster.members else None,
        "cluster_numbers": roster.members.cluster_numbers if roster.members else None,
        "hosts": [
            {
                "name": host.name,
                "users": list(host.users),
                "clusters": list(host.clusters),
                "acked": min(host.acked, seq) if (open_task := host.open_after(seq)) is None else open_task - 1,
                "errand": open_task,
                "forgotten": host.forgotten,
                "told": outbox.with_settings.get(host.name, seq + 1) <= seq,
                "breaches": host.n_breaches,
                "log": _packed([sent for sent in host.log if sent.seq <= seq]),
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
        host.errand = None if entry["errand"] is None else Errand(entry["errand"])
        outbox.log_bytes += sum(sent.encoded.n_bytes for sent in host.log)
        roster.hosts[host.name] = host
        if entry["told"]:
            outbox.with_settings[host.name] = state.seq
    roster.fix()
    if memory["numbers"] is not None:
        roster.number(memory["numbers"], memory["cluster_numbers"])


def _packed(log: Sequence[Sent]) -> dict[str, Any]:
    """The messages of a host since its last snapshot, in one leaf: there are many, and most are small."""
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
        at = received.frame.stage, received.frame.round  # type: ignore[union-attr]
        yield Sent(seq, Encoded(head, tails, tuple(entries), is_task=True), 1, at=at)
