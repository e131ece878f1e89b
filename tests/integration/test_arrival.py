"""The order in which answers arrive changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from coterie.wire.codec import Encoded
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub
from tests.simulation import bits, small_experiment

N_HOSTS = 5


class Shuffler:
    """Holds the tasks of an exchange back until all are there, then lets the hosts answer in random order."""

    def __init__(self, seed: int) -> None:
        self.draws = np.random.default_rng(seed)
        self.held: list[tuple[LoopbackLink, Encoded]] = []
        self.orders: set[tuple[int, ...]] = set()

    def hold(self, link: LoopbackLink, encoded: Encoded) -> None:
        if not self.held:
            asyncio.get_running_loop().call_soon(self.release)
        self.held.append((link, encoded))

    def release(self) -> None:
        held, self.held = self.held, []
        order = self.draws.permutation(len(held))
        self.orders.add(tuple(order.tolist()))
        for place in order:
            link, encoded = held[place]
            LoopbackLink.send(link, encoded)


class ShuffledLink(LoopbackLink):
    shuffler: Shuffler

    def send(self, encoded: Encoded) -> None:
        self.shuffler.hold(self, encoded)


def run(method: dict[str, object], shuffler: Shuffler | None) -> Finished:
    experiment = small_experiment(method, federation={"hosts": N_HOSTS}, stop={"rounds": 20})
    names = [user.name for user in list_users(experiment.data, experiment.seed)]

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        # Hosts join in the reverse order of their names, too.
        for i in reversed(range(N_HOSTS)):
            host = build_host(f"h{i}", experiment, hub.run_id, names[i::N_HOSTS])
            link = LoopbackLink(hub, host) if shuffler is None else ShuffledLink(hub, host)
            if isinstance(link, ShuffledLink) and shuffler is not None:
                link.shuffler = shuffler
            link.join()
        yield

    return asyncio.run(coordinate(experiment, connect, Options()))


@pytest.mark.parametrize(
    "method",
    [
        {"name": "pdmm", "penalty": 0.3, "start": "zero"},
        {"name": "pdmm", "penalty": 0.3, "start": "zero", "placement": "paper", "sampling": "paired", "primal_fraction": 0.5},
        {"name": "oracle"},
    ],
)
def test_the_order_of_arrival_does_not_change_a_bit(method: dict[str, object]) -> None:
    calm = run(method, None)
    for seed in range(3):
        shuffler = Shuffler(seed)
        assert bits(run(method, shuffler)) == bits(calm)
        assert len(shuffler.orders) > 1, "the order must have varied"
