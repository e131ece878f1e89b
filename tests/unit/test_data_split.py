"""A table is split into a folder for each host, as `coterie compose --private-data` wants them, and the run has the same bits."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from coterie import run
from coterie.errors import ConfigError
from coterie_client.data import list_users
from coterie_deploy.cli import app as cli
from coterie_deploy.cli.data_split import split
from coterie_deploy.containers.members import Asked, planned
from coterie_deploy.read.shipped import load

EXPERIMENT = """
name: rows
data: {source: csv, path: PATH, user_column: user, target_column: y}
problem: {loss: least_squares, l2: 0.1}
method: {name: local}
"""
ROWS = [["user", "a", "y"], *([f"u{user}", f"0.{row}", f"{row * user}"] for row in range(4) for user in (1, 2, 3, 10))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.yaml").write_text(EXPERIMENT.replace("PATH", "in/rows.csv"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/rows.csv").write_text("".join(",".join(row) + "\n" for row in ROWS))
    return tmp_path


def test_each_host_gets_its_users_rows_in_their_order_under_the_same_path(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["data", "rows.yaml", "--split", "2", "private"]) == 0
    assert capsys.readouterr().out == "private/host-1: 2 users, 8 rows\nprivate/host-2: 2 users, 8 rows\n"
    plan = planned(Asked("rows.yaml", hosts=2, data=Path()))
    for host in plan.hosts:
        with (here / "private" / host.name / "in/rows.csv").open(newline="") as file:
            assert list(csv.reader(file)) == [ROWS[0], *(row for row in ROWS[1:] if row[0] in host.users)]
    mine = planned(Asked("rows.yaml", hosts=2, private_data=Path("private")))
    assert [host.name for host in mine.hosts] == [host.name for host in plan.hosts]


def test_what_is_written_is_read_as_the_table_was(here: Path) -> None:
    content = EXPERIMENT.replace("PATH", "rows.csv.gz").replace("target_column: y", "target_column: y, csv: {delimiter: ';', decimal: ','}")
    (here / "odd.yaml").write_text(content)
    text = "user;a;y\n" + "".join(f'"u;{i % 3}";{i},5;{i}\n' for i in range(12))
    (here / "rows.csv.gz").write_bytes(gzip.compress(text.encode()))
    split("odd.yaml", (), None, None, 3, Path("out"))
    experiment = load("odd.yaml")
    whole = list_users(experiment.data, 0, None)
    found = [head for i in (1, 2, 3) for head in list_users(experiment.data, 0, here / "out" / f"host-{i}")]
    assert found == whole
    assert len(run("odd.yaml", data=here / "out/host-1", hosts=1).models) == 1


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        (EXPERIMENT.replace("PATH", "in"), "want"),
        (
            "name: x\ndata: {source: hsb}\nproblem: {loss: least_squares}\nmethod: {name: local}\n",
            "data.source is 'hsb', want csv with one",
        ),
        (EXPERIMENT.replace("PATH", "in/rows.csv").replace("user_column: user", "user_column: [user, a]"), "data.user_column is"),
    ],
)
def test_what_cannot_be_split_is_refused(here: Path, yaml: str, sentence: str) -> None:
    (here / "x.yaml").write_text(yaml)
    with pytest.raises(ConfigError, match=sentence):
        split("x.yaml", (), None, None, 2, Path("out"))
    assert not (here / "out").exists()


def test_nothing_is_overwritten(here: Path) -> None:
    split("rows.yaml", (), None, None, 2, Path("out"))
    with pytest.raises(ConfigError, match=r"cannot write out/host-1/in/rows\.csv: File exists"):
        split("rows.yaml", (), None, None, 2, Path("out"))


@pytest.mark.parametrize("n_hosts", [0, -1])
def test_rows_are_split_among_one_host_or_more(here: Path, n_hosts: int) -> None:
    with pytest.raises(ConfigError, match=f"^--split is for {n_hosts} hosts, want 1 or more$"):
        split("rows.yaml", (), None, None, n_hosts, Path("out"))
    assert not (here / "out").exists()
