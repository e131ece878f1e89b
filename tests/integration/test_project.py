"""`coterie project`: what it reads from a run, and that a run on shaped links takes the time that was projected."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_to_json
from coterie.experiment.links import link_rule
from coterie_deploy.cli.commands import app
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.view.project import among_peers, print_projection, projection_of
from tests.integration.test_links import flat, over_grpc, query, tiers
from tests.tries import soon_enough
from tests.two_tier import Tiers


def projected_s(folder: Path, links: Mapping[str, str]) -> float:
    return projection_of(folder).seconds({scope: link_rule(text) for scope, text in links.items()})


def test_a_projection_counts_turns_and_bytes_and_takes_the_links_of_the_run_itself_out(tmp_path: Path) -> None:
    over_grpc(flat({"direct": "1Gbit/10ms"}), tmp_path / "run")
    found = projection_of(tmp_path / "run")
    scope = found.scopes["direct"]
    sums = "SUM(message_bytes + 5 * frames) FROM ledger WHERE"
    ((n_turns,),) = query(tmp_path / "run", "SELECT count(DISTINCT seq) FROM ledger WHERE seq > 0")
    ((n_bytes,),) = query(tmp_path / "run", f"SELECT {sums} link = 'host-0' AND seq > 0")
    ((down,),) = query(tmp_path / "run", f"SELECT {sums} direction = 'down'")
    ((session,),) = query(tmp_path / "run", "SELECT SUM(message_bytes) FROM ledger WHERE seq = 0 GROUP BY link ORDER BY 1 DESC LIMIT 1")
    ((start,),) = query(tmp_path / "run", "SELECT at FROM events WHERE kind = 'start'")
    ((end,),) = query(tmp_path / "run", "SELECT at FROM events WHERE kind = 'finished'")
    assert found.measured_s == end - start
    assert scope.n_turns(None) == n_turns
    assert scope.down_bytes == down
    # Both hosts have two users, so that their messages have the same size; each has a link of its own.
    frozen = len(experiment_to_json(flat({"direct": "1Gbit/10ms"})))
    own_s = (2 * n_turns + 5) * 0.01 + (n_bytes + session + frozen) * 8 / 1e9
    assert found.seconds({}) == pytest.approx(found.measured_s)
    assert found.computing_s == pytest.approx(found.measured_s - own_s)
    wanted_s = found.computing_s + (2 * n_turns + 5) * 0.5 + (n_bytes + session + frozen) * 8 / 1e4
    assert projected_s(tmp_path / "run", {"direct": "10kbit/500ms"}) == pytest.approx(wanted_s)


def printed(folder: Path, width: int = 120, **links: str) -> str:
    page = io.StringIO()
    print_projection(folder, links, Console(file=page, width=width))
    return page.getvalue()


def test_a_projection_says_what_each_scope_takes_and_refuses_what_it_cannot_know(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asyncio.run(launch(flat({}), Launch("loopback", folder=run)))
    left_out = "without room in 60 columns: links, turns, down, up"
    page = printed(run, direct="20Mbit/40ms")
    assert left_out in printed(run, width=60, direct="20Mbit/40ms")
    assert "without room" not in page
    (line,) = (line for line in page.splitlines() if line.startswith("direct"))
    ((n_turns,),) = query(run, "SELECT count(DISTINCT seq) FROM ledger WHERE seq > 0")
    assert line.split()[:3] == ["direct", "20Mbit/40ms", str(n_turns)]
    assert f"{(2 * n_turns + 5) * 0.04:.1f} s" in line
    assert "20Mbit" not in printed(run, 60, direct="20Mbit/40ms")
    done = CliRunner().invoke(app, ["project", str(run), "--direct", "20Mbit/40ms"], env={"COLUMNS": "120"})
    assert done.output == page
    with pytest.raises(ConfigError, match=r"^no links are given, want one of --direct, --between, --within and --peers"):
        printed(run)
    with pytest.raises(ConfigError, match=r"^--within is given, but the run has no such links: want --direct$"):
        printed(run, within="20Mbit/40ms")
    with pytest.raises(ConfigError, match=r"^--direct is 'fast', want RATE/DELAY such as"):
        printed(run, direct="fast")
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        for change, sentence in (
            ("UPDATE events SET kind = 'begin' WHERE kind = 'start'", "has not written down when it started"),
            ("UPDATE run SET value = '2' WHERE key = 'attempt'", "was resumed"),
            ("UPDATE run SET value = 'running' WHERE key = 'status'", "is running, want a finished one"),
        ):
            connection.execute(change)
            connection.commit()
            with pytest.raises(ConfigError, match=sentence):
                printed(run, direct="20Mbit/40ms")


@pytest.mark.parametrize("is_ring", [False, True])
def test_peers_send_at_once_or_wait_for_each_other_around_a_ring(is_ring: bool) -> None:
    rows = [("a<>b", 0, 0, 0, 9, 9), ("a<>b", 5, 0, 1, 100, 80), ("b<>c", 5, 0, 1, 90, 70), ("a<>b", 6, 0, 2, 10, 20)]
    found = among_peers(rows, is_ring=is_ring)
    rule = link_rule("8kbit/1s")  # 1,000 bytes a second
    assert found.seconds(rule) == pytest.approx(3 * 2 + 0.37 if is_ring else 2 * 2 + 0.12)
    assert (found.down_bytes, found.up_bytes, found.n_turns(rule)) == (209, 179, 3 if is_ring else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "d", "rounds"), [("20Mbit/50ms", 3, 40), ("500kbit/1ms", 200, 40)], ids=["delays", "bandwidth"])
def test_a_shaped_flat_run_takes_the_time_that_was_projected(tmp_path: Path, text: str, d: int, rounds: int) -> None:
    over_grpc(flat({}, d=d, rounds=1), tmp_path / "warm")  # what is imported when it is first needed takes its time in one run only

    def deviation(number: int) -> tuple[float, float]:
        plain, shaped = tmp_path / f"plain-{number}", tmp_path / f"shaped-{number}"
        over_grpc(flat({}, d=d, rounds=rounds), plain)
        over_grpc(flat({"direct": text}, d=d, rounds=rounds), shaped)
        return deviation_of(plain, shaped, {"direct": text})

    soon_enough(deviation)


def deviation_of(plain: Path, shaped: Path, links: Mapping[str, str]) -> tuple[float, float]:
    """Seconds between what the plain run projects and what the shaped run took, and how many there may be."""
    measured_s = projection_of(shaped).measured_s
    is_shaped = measured_s > 3 * projection_of(plain).measured_s
    return abs(projected_s(plain, links) - measured_s) if is_shaped else math.inf, 0.15 * measured_s


SLOW_TIERS = [
    ({"between": "20Mbit/60ms", "within": "1Gbit/30ms"}, 3, 120),
    ({"between": "500kbit/1ms", "within": "1Mbit/1ms"}, 200, 120),
]


@pytest.mark.slow
@pytest.mark.parametrize(("links", "d", "iterations"), SLOW_TIERS, ids=["delays", "bandwidth"])
def test_a_shaped_two_tier_run_takes_the_time_that_was_projected(tmp_path: Path, links: dict[str, str], d: int, iterations: int) -> None:
    Tiers(tiers({}, d, 1), tmp_path / "warm").run()  # as above

    def deviation(number: int) -> tuple[float, float]:
        plain, shaped = tmp_path / f"plain-{number}", tmp_path / f"shaped-{number}"
        Tiers(tiers({}, d, iterations), plain).run()
        Tiers(tiers(links, d, iterations), shaped).run()
        return deviation_of(plain / "run", shaped / "run", links)

    soon_enough(deviation)
