"""late: skip. A round goes on without a host that is late; that is a decision, and another run can repeat it to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from coterie.experiment.config import Experiment
from coterie.record.snapshot import SnapshotFile
from coterie.wire.codec import Encoded
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub
from tests.simulation import bits, query, small_experiment

RULES = {"hosts": 3, "late": "skip", "late_after_s": 0.01}
SLOW_FROM, SLOW_UNTIL = 6, 12
PASSED = range(SLOW_FROM + 1, SLOW_UNTIL + 1)  # when exchange 12 begins, the host still owes its answer: it is not asked for another
N_MISSED = 1 + len(PASSED)


class SlowLink(LoopbackLink):
    """Keeps the task of an exchange back until others have been asked in a later one."""

    held: list[Encoded]

    def send(self, encoded: Encoded) -> None:
        if self._hub.seq == SLOW_FROM:
            self.held.append(encoded)
        else:
            super().send(encoded)

    def release(self) -> None:
        """The host answers after all."""
        while self.held:
            super().send(self.held.pop())


class WakingLink(LoopbackLink):
    """When its host is asked in that later exchange, the slow one answers."""

    slow: list[SlowLink]

    def send(self, encoded: Encoded) -> None:
        if self._hub.seq == SLOW_UNTIL:
            for link in self.slow:
                link.release()
        super().send(encoded)


async def tick(hub: Hub) -> None:
    while True:
        await asyncio.sleep(0.02)
        hub.tick()


class Killed(BaseException):
    """The coordinator is gone at once."""


class KillingLink(WakingLink):
    """The coordinator dies when it is about to send this exchange."""

    at: int

    def send(self, encoded: Encoded) -> None:
        if self._hub.seq == self.at and self._hub.state.attempt == 1:
            raise Killed
        super().send(encoded)


def test_a_coordinator_killed_after_skips_repeats_them(tmp_path: Path) -> None:
    """Hosts answer from what they stored, so another decision would put answers to other questions together."""
    experiment = small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero"}, federation=RULES, snapshots={"every_rounds": 1000})
    names = [user.name for user in list_users(experiment.data, experiment.seed)]
    stores = {f"h{i}": SnapshotFile(tmp_path / "hosts" / f"h{i}", "host") for i in range(3)}
    kept: dict[str, Host] = {}

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        slow: list[SlowLink] = []
        for i, kind in enumerate((LoopbackLink, SlowLink if hub.state.attempt == 1 else LoopbackLink, KillingLink)):
            host = kept.setdefault(f"h{i}", build_host(f"h{i}", experiment, hub.run_id, names[i::3], store=stores[f"h{i}"]))
            link = kind(hub, host)
            link.held, link.at = [], SLOW_UNTIL + 5  # type: ignore[attr-defined]
            slow += [link] if isinstance(link, SlowLink) else []
            link.slow = slow  # type: ignore[attr-defined]
            link.join()
        ticking = asyncio.create_task(tick(hub))
        try:
            yield
        finally:
            ticking.cancel()

    with pytest.raises(Killed):
        asyncio.run(coordinate(experiment, connect, Options(folder=tmp_path / "run")))
    resumed = asyncio.run(coordinate(experiment, connect, Options(folder=tmp_path / "run", resume=True)))
    assert query(tmp_path / "run", "SELECT seq FROM decisions WHERE kind = 'skip'") == [(SLOW_FROM,)]
    assert query(tmp_path / "run", "SELECT seq FROM decisions WHERE kind = 'pass'") == [(seq,) for seq in PASSED]
    repeated = run(experiment, tmp_path / "repeated", slow=False, decisions_of=tmp_path / "run")
    assert bits(repeated) == bits(resumed)


def run(experiment: Experiment, folder: Path, *, slow: bool, decisions_of: Path | None = None) -> Finished:
    names = [user.name for user in list_users(experiment.data, experiment.seed)]

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        hosts = [build_host(f"h{i}", experiment, hub.run_id, names[i::3]) for i in range(3)]
        late = SlowLink(hub, hosts[1])
        late.held = []
        waking = WakingLink(hub, hosts[2])
        waking.slow = [late]
        for link in (LoopbackLink(hub, hosts[0]), late, waking) if slow else [LoopbackLink(hub, host) for host in hosts]:
            link.join()
        ticking = asyncio.create_task(tick(hub))
        yield
        ticking.cancel()

    return asyncio.run(coordinate(experiment, connect, Options(folder=folder, decisions_of=decisions_of)))


def test_a_late_host_is_skipped_and_the_decision_can_be_repeated(tmp_path: Path) -> None:
    experiment = small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero"}, federation=RULES)
    late = run(experiment, tmp_path / "late", slow=True)
    decisions = [(seq, kind, json.loads(value)) for seq, kind, value in query(tmp_path / "late", "SELECT seq, kind, value FROM decisions")]
    assert decisions == [(SLOW_FROM, "skip", ["h1"]), *((seq, "pass", ["h1"]) for seq in PASSED)]
    assert query(tmp_path / "late", "SELECT text FROM events WHERE kind IN ('skip', 'back') ORDER BY rowid") == [
        (f"going on without h1 from exchange {SLOW_FROM} on",),
        (f"host 'h1' takes part again from exchange {SLOW_UNTIL + 1} on",),
    ]
    repeated = run(experiment, tmp_path / "repeated", slow=False, decisions_of=tmp_path / "late")
    assert bits(repeated) == bits(late)
    calm = run(experiment, tmp_path / "calm", slow=False)
    assert bits(calm) != bits(late)


def test_traffic_of_a_skipped_host_is_not_useful_and_the_closed_form_knows(tmp_path: Path) -> None:
    experiment = small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero"}, federation=RULES)
    run(experiment, tmp_path / "late", slow=True)
    useful = query(tmp_path / "late", "SELECT sum(vectors) FROM ledger WHERE useful AND stage = 0 AND step = 'S5'")[0][0]
    assert useful == 30 * 9 - N_MISSED * 3
    assert query(tmp_path / "late", "SELECT vectors FROM expected WHERE step = 'S5'") == [(useful,)]
    assert query(tmp_path / "late", "SELECT sum(vectors) FROM ledger WHERE NOT useful AND step = 'S5'") == [(3,)]
    sent = query(tmp_path / "late", "SELECT sum(vectors) FROM ledger WHERE stage = 0 AND step = 'S7+S10'")
    assert sent == query(tmp_path / "late", "SELECT vectors FROM expected WHERE step = 'S7+S10'") == [(30 * 9 - len(PASSED) * 3,)]


def test_the_models_still_converge(tmp_path: Path) -> None:
    method = {"name": "pdmm", "penalty": 0.3, "start": "zero"}
    late = run(small_experiment(method, federation=RULES, stop={"rounds": 2000, "residual": 1e-9}), tmp_path / "late", slow=True)
    calm = run(small_experiment(method, federation=RULES, stop={"rounds": 2000, "residual": 1e-9}), tmp_path / "calm", slow=False)
    np.testing.assert_allclose(late.outcomes["pdmm"].models, calm.outcomes["pdmm"].models, atol=1e-5)


def test_a_method_that_needs_everyone_waits_and_says_so(tmp_path: Path) -> None:
    experiment = small_experiment(
        {"name": "pdmm", "penalty": 0.3, "placement": "paper", "start": "zero"}, federation={**RULES, "task_timeout_s": 1}
    )
    from coterie.errors import RunError

    with pytest.raises(RunError, match="host 'h1' has not answered task"):
        run(experiment, tmp_path / "run", slow=True)
    assert "skips no late host, since it needs every user: " in query(tmp_path / "run", "SELECT text FROM events WHERE kind = 'wait'")[0][0]
