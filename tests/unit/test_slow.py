"""Every slow test runs in one shard, and a shard cannot pass where a test has failed, or where it never ends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import slow

PLANTED = """
import time
import pytest

pytestmark = pytest.mark.slow


def test_that_passes_NAME():
    pass


@pytest.mark.parametrize("n", range(2))
def test_that_is_NAME(n):
    BODY
"""


def test_every_slow_test_is_in_exactly_one_shard(pytestconfig: pytest.Config) -> None:
    n_shards = Counter(file for files in slow.SHARDS.values() for file in files)
    assert {file: n_shards[file] for file in pytestconfig.stash[slow.SLOW] if n_shards[file] != 1} == {}
    assert [file for file in n_shards if ".slow" not in (slow.ROOT / file).read_text()] == []


def test_each_shard_is_first_at_some_commit() -> None:
    names = ["a", "b", "c"]
    assert [slow.in_turn(names, commit) for commit in ("", "ff", "8f")] == [["a", "b", "c"], ["a", "b", "c"], ["c", "a", "b"]]
    assert {slow.in_turn(names, f"{i:x}")[0] for i in range(3)} == set(names)


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, list[str]]:
    bodies = {"good": "pass", "bad": "assert n", "endless": "time.sleep(600)", "both": "assert n\n    time.sleep(600)"}
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(PLANTED.replace("BODY", body).replace("NAME", name))
    return {name: [str(tmp_path / f"test_{name}.py")] for name in bodies}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("names", "seconds", "limit_s", "status", "said"),
    [
        (["good", "bad"], 600, 600, 1, "Shard bad has failed"),
        (["both"], 90, 600, 1, "Shard both has failed"),
        (["good", "endless", "bad"], 60, 600, 0, "test_that_is_endless (2 cases)"),
        (["endless", "good"], 600, 10, 1, "Shard endless does not fit"),
    ],
)
def test_a_failure_before_the_time_is_up_fails_and_what_did_not_run_is_said(
    names: list[str],
    seconds: float,
    limit_s: float,
    status: int,
    said: str,
    planted: dict[str, list[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert slow.run(names, planted, 2, seconds / 60, limit_s) == status
    assert said in capfd.readouterr().out
