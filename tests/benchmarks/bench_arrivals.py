"""PDMM where one of ten hosts is slow: seconds to a gap of the objective, with `sampling: arrival` and in whole rounds.

The sixty users of the fixture live on ten hosts, six on each. Hosts answer after a delay, one of them after `slower` times that: their own
arithmetic is little beside it, so a busy machine changes little. The objective is computed here from the models of each update.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.experiment.config import Experiment, experiment_from
from coterie.wire.codec import Encoded
from coterie_client.data import UserData, list_users
from coterie_client.data.sources import user_source
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.run.coordinator import Options, coordinate
from coterie_server.run.engine import Progress
from coterie_server.session.hub import Hub
from tests.benchmarks import record
from tests.benchmarks.record import Figure
from tests.papers.pdmm_federation import Data

HOSTS = 10
_AT_MOST_S = 120.0


class DelayedLink(LoopbackLink):
    """A host in this process whose answer to each task takes its time."""

    def __init__(self, hub: Hub, host: Host, seconds: float) -> None:
        super().__init__(hub, host)
        self._seconds = seconds

    def send(self, encoded: Encoded) -> None:
        asyncio.get_running_loop().call_later(self._seconds, super().send, encoded)


def experiment(penalty: float, gap: float, reference: float, method: dict[str, Any]) -> Experiment:
    return experiment_from(
        {
            "name": "arrivals",
            "seed": 3,
            "data": {"source": "python", "path": "tests.benchmarks.bench_arrivals:users", "test_fraction": 0},
            "problem": {"loss": "squared_hinge", "l2": 1e-3},
            "method": {"name": "pdmm", "penalty": penalty, **method},
            "stop": {"rounds": 100_000, "wall_time_s": _AT_MOST_S, "objective_gap": gap, "reference_objective": reference},
            "federation": {"hosts": HOSTS},
        }
    )


@user_source
def users(options: Mapping[str, Any], seed: int) -> list[UserData]:
    """Those of the fixture, as a source of data in Python."""
    data, nothing = Data(60), np.zeros((0, 2))
    return [UserData(f"u{i}", None, data.features[i], data.labels[i], nothing, nothing[:, 0]) for i in range(data.n)]


def seconds_to(chosen: Experiment, delay_s: float, slower: float) -> tuple[float, int]:
    """Seconds of the stage until it has reached its gap, and its rounds."""
    names = [user.name for user in list_users(chosen.data, chosen.seed)]
    seen: list[tuple[float, Progress]] = []

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        for place in range(HOSTS):
            host = build_host(f"h{place}", chosen, hub.run_id, names[place::HOSTS])
            DelayedLink(hub, host, delay_s * (slower if place == 0 else 1.0)).join()
        yield

    def observe(progress: Progress) -> None:
        seen.append((time.perf_counter(), progress))

    asyncio.run(coordinate(chosen, connect, Options(observer=observe)))
    own = [(at, progress) for at, progress in seen if progress.stage.method == "pdmm"]
    begun = max(at for at, progress in seen if progress.stage.method != "pdmm")
    return own[-1][0] - begun, own[-1][1].round


def figures(
    penalties: Sequence[float] = (0.01, 0.05, 0.09, 0.15), delay_ms: float = 20.0, slower: float = 20.0, gap: float = 1e-4
) -> Iterator[Figure]:
    """Both ways at each penalty."""
    data = Data(60)
    for penalty in penalties:
        found = {}
        for way, method in (("whole rounds", {}), ("arrivals", {"sampling": "arrival"})):
            chosen = experiment(penalty, gap, float(data.son(penalty)["Phi"]), method)
            found[way], n_rounds = seconds_to(chosen, delay_ms / 1e3, slower)
            yield Figure(f"penalty {penalty:g}, {way}, to a gap of {gap:g}", "s", [found[way]])
            yield Figure(f"penalty {penalty:g}, {way}, rounds or updates", "rounds", [n_rounds], None)
        yield Figure(f"penalty {penalty:g}, whole rounds over arrivals", "times", [found["whole rounds"] / found["arrivals"]], "more")


if __name__ == "__main__":
    record.main(figures)
