"""What one average over k clusters costs: at a coordinator, all to all, and around a ring. Nothing is run.

Messages are encoded as in a run. Times are those of `coterie project` on `link`, where each link has a rate of its own: a coordinator whose
own line is shared by all clusters takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from coterie.experiment.links import link_rule
from coterie.methods.async_l2gd import MESSAGES
from coterie.v1 import session_pb2
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES, encode
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_deploy.view.project import Scope, Turns, among_peers
from tests.benchmarks import record
from tests.benchmarks.record import Figure


def _bytes(frame: session_pb2.Task | session_pb2.Reply, message: Message) -> int:
    encoded = encode(frame, [message], Precision.of("float64", is_convex=True))
    return sum(len(piece) + GRPC_FRAME_HEADER_BYTES for piece in encoded.frames())


def figures(clusters: Sequence[str] = ("10", "100"), d: int = 10_000, link: str = "20Mbit/40ms") -> Iterator[Figure]:
    """Vectors, bytes at the busiest member, and seconds."""
    vector, one, rule = np.zeros((1, d)), np.zeros(1, dtype=np.int64), link_rule(link)
    task, reply = session_pb2.Task(seq=9, attempt=1, stage=1, round=9), session_pb2.Reply(seq=9, attempt=1)
    pair, news = MESSAGES.cluster_sums(one, vector, np.ones(1)), MESSAGES.global_average(one, vector)
    up, down, back = _bytes(reply, pair), _bytes(task, news), _bytes(reply, news)
    for k in map(int, clusters):
        partial = [_bytes(reply, MESSAGES.partial_sums(np.arange(n), vector, np.ones(n))) for n in range(1, k)]
        every = [(f"{i}<>{j}", 9, 0, 9, up, up) for i in range(k) for j in range(i + 1, k)]
        ring = [(f"{i}<>{i + 1}", 9, 0, 9, n_bytes, back) for i, n_bytes in enumerate(partial)]
        star = Scope([[Turns(1, up + down)]], 0, k * down, k * up, None, session_delays=0)
        costs = {
            "at a coordinator": (star, 2 * k, k * (up + down)),
            "all to all": (among_peers(every, is_ring=False), k * (k - 1), 2 * (k - 1) * up),
            "around a ring": (among_peers(ring, is_ring=True), 2 * (k - 1), 2 * (max(partial) + back)),
        }
        for name, (scope, n_vectors, busiest) in costs.items():
            yield Figure(f"{k} clusters, {name}", "vectors", [n_vectors], exact=True)
            yield Figure(f"{k} clusters, {name}, at the busiest member", "bytes", [busiest], exact=True)
            yield Figure(f"{k} clusters, {name}", "s", [scope.seconds(rule)])


if __name__ == "__main__":
    record.main(figures)
