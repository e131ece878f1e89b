"""Every run says its features before its first round, and everything that looks at runs has them; notes of hosts are said once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import coterie
from coterie import run
from coterie.experiment.config import experiment_from
from coterie.experiment.features import Feature, numbers
from coterie_client.data.users import Note
from coterie_deploy.engines.hosts import HostNotes, aggregator_process, host_process, notes_in
from coterie_deploy.engines.launch import Launch
from coterie_deploy.engines.local import run_here
from coterie_deploy.read.sentences import feature_lines, features_in
from coterie_deploy.view.data_page import print_data
from coterie_deploy.view.run_view import view_of
from coterie_deploy.view.show import print_run
from coterie_server.record.rundb import read_run
from tests.networks import CLASSES, WIDTH, network_experiment, write_users

TABLES = Path(__file__).parent.parent / "fixtures" / "tables"
EXPERIMENT = {
    "name": "pids",
    "data": {"source": "csv", "path": "patient-number.csv", "user_column": "school", "target_column": "score", "cluster_column": "region"},
    "problem": {"loss": "least_squares"},
    "method": {"name": "local"},
    "federation": {"hosts": 2},
}
FEATURES = numbers(["pid", "ses", "hours"])
LINE = "features (3): pid, ses, hours"
HINT = "column 'pid' has a different whole number in every row"


def said(folder: Path, *, transport: str, width: int = 80, is_terminal: bool = False) -> str:
    """What a run writes to standard error."""
    err = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    how = Launch(transport="grpc" if transport == "grpc" else "loopback", folder=folder, data=TABLES)
    run_here(experiment_from(EXPERIMENT), how, Console(file=io.StringIO()), err, quiet=False)
    assert isinstance(err.file, io.StringIO)
    return err.file.getvalue()


@pytest.mark.parametrize("transport", ["loopback", "grpc"])
def test_a_run_says_its_features_and_the_notes_of_its_hosts_once_before_round_1(tmp_path: Path, transport: str) -> None:
    lines = said(tmp_path / "run", transport=transport).splitlines()
    assert lines.count(LINE) == 1
    assert sum(HINT in line for line in lines) == 1, "two hosts read the same file"
    first_stage = next(place for place, line in enumerate(lines) if line.startswith("stage"))
    assert lines.index(LINE) < first_stage
    with read_run(tmp_path / "run") as connection:
        events = connection.execute("SELECT kind, text, data FROM events ORDER BY rowid").fetchall()
    kinds = [kind for kind, _, _ in events]
    assert kinds.count("features") == 1
    heard = (
        "2 features are of very different sizes: models may have few right digits without data.standardize (rule T42)",
        "a feature that is not declared has a different whole number in every row, as an identifier has (rule T40)",
    )
    assert sorted(text for kind, text, _ in events if kind == "data") == [
        f"host '{name}': {sentence}" for name in ("host-1", "host-2") for sentence in heard
    ]
    assert json.loads({kind: data for kind, _, data in events}["features"])["n"] == 3


def test_a_run_of_networks_says_how_many_numbers_their_parts_have(tmp_path: Path) -> None:
    err = Console(file=io.StringIO(), width=80, color_system=None)
    how = Launch(transport="loopback", folder=tmp_path / "run")
    run_here(
        network_experiment(write_users(tmp_path / "users.npz"), {"name": "fedavg"}), how, Console(file=io.StringIO()), err, quiet=False
    )
    body = 6 * (WIDTH + 1) + 4 * (6 + 1)
    head = CLASSES * (4 + 1)
    assert isinstance(err.file, io.StringIO)
    assert f"model: representation {body:,} numbers, head {head:,}\n" in err.file.getvalue()


def test_show_the_report_results_and_loaded_runs_have_the_features(tmp_path: Path) -> None:
    result = run(EXPERIMENT, output=tmp_path / "run", data=TABLES)
    assert result.features == coterie.load_run(tmp_path / "run").features == FEATURES
    assert run(EXPERIMENT, data=TABLES).as_run().features == FEATURES
    assert ("features", "pid, ses, hours") in view_of(tmp_path / "run").facts
    for width in (40, 80):
        out = io.StringIO()
        print_run(tmp_path / "run", None, Console(file=out, width=width))
        assert LINE in out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80])
def test_coterie_data_lists_features_and_likely_identifiers(width: int) -> None:
    out = io.StringIO()
    print_data(experiment_from(EXPERIMENT), TABLES, Console(file=out, width=width))
    assert LINE in out.getvalue()
    assert HINT in " ".join(out.getvalue().split())
    assert max(map(len, out.getvalue().splitlines())) <= width


def test_features_of_several_kinds_fit_a_terminal_line_by_line() -> None:
    features = (Feature("ses"), Feature("a rather long level=of a category", "category", "a rather long level"))
    for width in (40, 80):
        lines = feature_lines(features, width)
        assert max(map(len, lines)) <= width
        assert " ".join(" ".join(lines).split()) == (
            "features (2): ses number a rather long level=of a category category from column a rather long level"
        )
    assert len(feature_lines(features, None)) == 3


def test_a_name_cannot_steer_the_terminal() -> None:
    assert feature_lines(numbers(["a\x1b[2Jb"]), None) == ["features (1): a\\x1b[2Jb"]


def test_a_run_without_names_says_nothing_of_features() -> None:
    assert feature_lines((), 80) == []
    assert features_in({}) == ()
    assert (
        run({"name": "e", "data": {"source": "ellipses"}, "problem": {"loss": "logistic", "l2": 0.1}, "method": {"name": "local"}}).features
        == ()
    )


def test_notes_of_an_aggregators_hosts_are_said_once_when_it_joins(tmp_path: Path) -> None:
    for name in ("host-1-1", "host-1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text("note: a\nnote: b\nfeatures (1): x\n")
    (tmp_path / "host-1-2" / "log.txt").write_text("waiting\nnote: c\nnote: a\n")
    heard: list[str] = []
    notes = HostNotes(heard.append, None)
    hosts = [host_process(name, (), tmp_path / name, None) for name in ("host-1-1", "host-1-2")]
    notes.watch([aggregator_process("north", hosts, tmp_path / "aggregator-1")])
    notes("join", "", {"host": "somebody"})
    assert heard == []
    notes("join", "", {"host": "north"})
    notes("join", "", {"host": "north"})
    assert heard == ["a", "b", "c"]
    assert notes_in(tmp_path / "nowhere") == []


def test_a_note_has_a_sentence_for_its_host_and_a_finding_for_others() -> None:
    from coterie.findings import Finding

    assert Note("column 'x' is text", Finding("T1")).finding.sentence == "its data file cannot be read (rule T1)"
