"""Real processes, real SIGKILL: masked sums with noise of the hosts end with the same bits, whoever dies.

Keys of noise and masks are new in each run. So a run is stopped after some rounds, and its folders are copied. The copy goes on in peace;
the other one is under fire. Both must draw the same noise.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie_deploy.read.verify import verdict_on
from tests.convex import write_rows
from tests.processes import SERVER, Processes, arrays_of, processes

ROUNDS = 300
FIRST = 5  # after which the run is stopped
SHARES = {"a": "#0..#1", "b": "#2..#3", "c": "#4"}
USER: Mapping[str, Any] = {"unit": "user", "where": "hosts", "clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-3}
ROW: Mapping[str, Any] = {"unit": "row", "clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-3}


def content_of(privacy: Mapping[str, Any], **rules: Any) -> dict[str, Any]:
    """Each round takes at least 20 ms, however fast the machine is: an exchange and its answer have this delay on their way."""
    return {
        "name": "noise",
        "data": {"source": "npz", "path": "users.npz"},
        "problem": {"loss": "least_squares"},
        "privacy": dict(privacy),
        "method": {"name": "fedavg", "participation": 1.0, "average": "plain", "evaluate_last": 1, "fine_tune": []},
        "stop": {"rounds": ROUNDS, "residual": None},
        "exact_sums": True,
        "snapshots": {"every_rounds": 10},
        "federation": {"sums": "masked", "hosts": 3, "absence_timeout_s": 60, "links": {"direct": "1Gbit/10ms"}, **rules},
    }


def stopped(folder: Path, content: Mapping[str, Any]) -> None:
    """The run, stopped after a few rounds: the coordinator and its hosts have written their states."""
    write_rows(folder / "users.npz")
    with processes(folder, content, hosts=SHARES) as begun:
        begun.wait_for_round(FIRST)
        begun.processes[SERVER].terminate()
        assert begun.processes[SERVER].wait(60) != 0, begun.logs()
        assert FIRST <= begun.round(0) < ROUNDS / 4, "it must be far from its end"


def going_on(folder: Path, content: Mapping[str, Any]) -> Any:
    return processes(folder, content, hosts=SHARES, options=["--resume"])


def end(run: Processes) -> dict[str, np.ndarray]:
    run.end()
    verdict = verdict_on(run.run)
    assert verdict.agrees, (verdict.books, verdict.differences)
    return arrays_of(run.run, "fedavg")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("privacy", "on_loss"), [(USER, "skip"), (ROW, "stop")], ids=["shares", "rows"])
def test_masked_sums_with_noise_of_hosts_survive_sigkill_of_each_member_with_the_same_bits(
    privacy: Mapping[str, Any], on_loss: str, tmp_path: Path
) -> None:
    struck, calm = tmp_path / "struck", tmp_path / "calm"
    struck.mkdir()
    content = content_of(privacy, on_loss=on_loss)
    stopped(struck, content)
    shutil.copytree(struck, calm)
    with going_on(calm, content) as undisturbed:
        wanted = end(undisturbed)
    with going_on(struck, content) as under_fire:
        for number, dying in enumerate((("a",), ("b", SERVER), (SERVER, "c"))):
            under_fire.wait_for_round(20 + 20 * number)
            under_fire.kill(*dying)
        found = end(under_fire)
        assert int(under_fire.rows("SELECT value FROM run WHERE key = 'attempt'")[0][0]) == 4, "begun, resumed, and killed twice"
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_host_has_another_key_ends_with_other_bits_or_not_at_all(tmp_path: Path) -> None:
    """The test above has power: the key in a state folder decides the noise, and a host without it does not go on."""
    content = content_of(USER)
    stopped(tmp_path, content)
    (key,) = (tmp_path / "state-a").glob("*.key")
    assert key.stat().st_mode & 0o777 == 0o600
    key.unlink()
    with going_on(tmp_path, content) as lost:
        assert lost.processes["a"].wait(60) != 0, lost.logs()
        assert "the key of the noise in" in (tmp_path / "a.log").read_text()
