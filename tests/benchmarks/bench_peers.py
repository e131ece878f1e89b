"""What averages over k clusters cost at a coordinator, all to all, and around a ring: runs of all members in one process, over gRPC.

Vectors and bytes are those of the ledger. Seconds are those of one average on `link`, by the model of `coterie project` from a run on links
as fast as may be. In it no line is shared, so a coordinator whose own line is shared by all clusters takes longer. With `--emulate 1` the
run is made on such links. Then what its rounds took is printed as well, with the computing of all members on this machine.
"""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from coterie.experiment.links import link_rule
from coterie.record.ledger import peers_of
from coterie.record.snapshot import SnapshotFile
from coterie.session.dial import serve_member
from coterie_client.hosting.build import build_host
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.view.project import projection_of
from tests.benchmarks import record
from tests.benchmarks.record import Figure
from tests.two_tier import Tiers, small

_WAIT_S = 900.0
SHAPES = {
    "at a coordinator": ("between", {"topology": "clusters"}),
    "all to all": ("peers", {"ring_above": 10**6}),
    "around a ring": ("peers", {}),
}
_WAITS = {"heartbeat_s": 60.0, "silence_s": 600.0, "join_timeout_s": "none", "absence_timeout_s": _WAIT_S}


class _Patient(Tiers):
    """So many members of one process take long to start."""

    def role(self, cluster: str, **changes: Any) -> Any:
        return super().role(cluster, **{"patience_s": _WAIT_S, **changes})

    async def host(self, name: str) -> str | None:
        cluster = name.partition("-")[0]

        def make(experiment: Any, run_id: str) -> Any:
            return build_host(name, experiment, run_id, self.clusters[cluster], store=SnapshotFile(self.folder / name, "host"))

        return await serve_member(make, f"127.0.0.1:{self.ports[cluster]}", name=name, patience_s=_WAIT_S)


def _run(folder: Path, k: int, d: int, shape: str, iterations: int, links: dict[str, str]) -> Path:
    """The folder of a run with users of one row or two in k clusters of one user."""
    options = {"clusters": k, "users_per_cluster": 1, "rows": 2, "d": d}
    data = {"source": "python", "path": "tests.papers.known_clusters_fixture:made_users", "options": options}
    method = {"name": "async_l2gd", "iterations": iterations, "gamma": 1.0, "alpha": 0.4, "p0": 0.4, "p": 0.5, "trace_every": 0}
    federation = {"topology": "peers", **SHAPES[shape][1], **_WAITS, "hosts": k, "links": links}
    experiment = small(method, data=data, federation=federation, snapshots={"every_rounds": 1000})
    _Patient(experiment, folder).run(2 * _WAIT_S)
    assert verdict_on(folder / "run").agrees
    return folder / "run"


def _figures(run: Path, title: str, scope: str, link: str, is_emulated: bool) -> Iterator[Figure]:
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        ((n,),) = connection.execute("SELECT value FROM results WHERE name = 'between_rounds'")
        where = "FROM ledger WHERE useful AND step = 'between-average' AND scope LIKE 'between-%'"
        rows = connection.execute(f"SELECT link, SUM(vectors), SUM(message_bytes + 5 * frames) {where} GROUP BY link").fetchall()
        at = connection.execute("SELECT round, at FROM rounds ORDER BY stage, round").fetchall()
        averaged = {number for (number,) in connection.execute(f"SELECT DISTINCT round {where} AND direction = 'up'")}
    ends: dict[str, float] = {}
    for name, _, n_bytes in rows:
        for end in peers_of(name) or ("coordinator", name):
            ends[end] = ends.get(end, 0.0) + n_bytes
    yield Figure(title, "vectors", [sum(vectors for _, vectors, _ in rows) / n], exact=True)
    yield Figure(f"{title}, at the busiest member", "bytes", [max(ends.values()) / n], exact=True)
    rule = link_rule(link)
    rounds = [max(turns.seconds(rule) for turns in parents) for parents in projection_of(run).scopes[scope].rounds]
    yield Figure(f"{title}, by coterie project", "s", [statistics.median(rounds)])
    if is_emulated:
        took = [after - before for (_, before), (number, after) in pairwise(at) if number in averaged]
        yield Figure(f"{title}, a round with an average", "s", [statistics.median(took)])


def figures(
    clusters: Sequence[str] = ("10",),
    d: int = 1000,
    link: str = "20Mbit/40ms",
    shapes: Sequence[str] = tuple(SHAPES),
    emulate: int = 0,
) -> Iterator[Figure]:
    """Vectors, bytes at the busiest member, and seconds, of one average."""
    for k in map(int, clusters):
        for shape in shapes:
            scope = SHAPES[shape][0]
            with tempfile.TemporaryDirectory() as folder:
                run = _run(Path(folder), k, d, shape, 8, {scope: link} if emulate else {})
                yield from _figures(run, f"{k} clusters, {shape}", scope, link, bool(emulate))


if __name__ == "__main__":
    record.main(figures)
