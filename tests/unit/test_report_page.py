"""`coterie report`: what is on the page, that it needs no network and believes no name, and that it copes with runs in any state."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie_deploy.cli import app as cli
from coterie_deploy.read.costs import Weighing
from coterie_deploy.read.shipped import runs_in
from coterie_deploy.view import charts, pages, report_page
from coterie_deploy.view.pages import MOST_ROWS, safe_json
from coterie_deploy.view.report_page import write_report
from coterie_deploy.view.run_users import _by_size, _known, _order, _spread
from coterie_deploy.view.run_view import RunView, links_of, view_of
from coterie_server.record.curves import Curves, Goal, goal_from
from coterie_server.record.rundb import open_run
from coterie_server.record.summary import StageSummary
from tests.benchmarks.bench_ledger import make_large
from tests.growing_run import GrowingRun, finished_run
from tests.small_runs import ROWS, as_table, make_run

EVIL = "<script>alert(1)</script>&\"'{{ 7777 * 7 }}</script><!-- \\u2028"
N_SCRIPTS = 4  # the specifications, the themes, the library, and what draws


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three users."""
    here = tmp_path_factory.mktemp("report")
    return make_run(here, here / "small")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the library, which takes a second to be put together."""
    monkeypatch.setattr(report_page, "vega_script", lambda: "var vegaEmbed;")


@pytest.fixture
def copied(small: Path, tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A copy of the run whose database can be changed."""
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    with contextlib.closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as connection:
        yield folder, connection


class Page(HTMLParser):
    """What a browser would see: elements, texts, and what they would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[dict[str, str | None]] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.content: dict[str, str] = {}
        self._in: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "script":
            self.scripts.append(found)
            self._in = found.get("id") or "script"
        if found.get("id"):
            self.ids.append(str(found["id"]))
        self.fetched += [str(found[name]) for name in ("src", "href", "data", "action", "poster", "srcset") if name in found]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._in = None

    def handle_data(self, data: str) -> None:
        if self._in is None:
            self.texts.append(data)
        else:
            self.content[self._in] = self.content.get(self._in, "") + data

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def specs(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content["charts"])
        return found


def page_of(*folders: Path, goal: str | None = None, up_weight: float = 1.0) -> Page:
    out = folders[0].parent / "page.html"
    write_report(folders, out, Weighing(None if goal is None else goal_from(goal), up_weight))
    text = out.read_text(encoding="utf-8")
    out.unlink()
    return Page(text)


def section(view: RunView, key: str) -> Any:
    return next(part for part in view.sections if part.key == key)


# ---- a page by itself


def test_a_page_fetches_nothing(small: Path, tmp_path: Path) -> None:
    page, _ = write_report([small], tmp_path / "page.html", Weighing())
    text = page.read_text(encoding="utf-8")
    page = Page(text)
    assert "default-src 'none'" in text
    assert [address for address in page.fetched if not address.startswith(("#", "data:"))] == []
    assert len(page.scripts) == N_SCRIPTS
    assert all("src" not in script for script in page.scripts)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert all("url" not in spec.get("data", {}) for spec in page.specs.values())
    assert "vegaEmbed" in page.content["script"]
    assert set(page.specs) == set(re.findall(r'data-key="([^"]+)"', text))
    assert len(set(page.ids)) == len(page.ids)
    assert len(text) < 3_000_000


@pytest.mark.usefixtures("quick")
def test_a_page_says_what_was_run_and_what_came_of_it(small: Path) -> None:
    text = page_of(small).text
    for said in (
        "small",
        "finished",
        "3 users, 1 host",
        "pdmm",
        "Held-out accuracy",
        "logistic",
        "0.05",
        "equal within 0.0001 of each coefficient",
    ):
        assert said in text
    for part in ("Progress", "Communication", "Users", "Events", "Stages", "Experiment"):
        assert part in text


def test_the_numbers_of_users_and_rows_are_told(small: Path, copied: tuple[Path, sqlite3.Connection]) -> None:
    told = dict(view_of(small).facts)
    assert told["users"] == "3"
    n_train = int(re.fullmatch(r"(\d+) to train", told["rows"])[1])  # type: ignore[index]
    assert 3 <= n_train < len(ROWS)
    folder, connection = copied
    connection.execute("DELETE FROM run WHERE key = 'rows'")
    assert "rows" not in dict(view_of(folder).facts)


@pytest.mark.usefixtures("quick")
def test_every_chart_has_its_table(small: Path) -> None:
    view = view_of(small)
    n_rows = sum(len(chart.rows) for part in view.sections for chart in part.all_charts)
    text = page_of(small).text
    assert text.count("Table of") == sum(len(part.all_charts) for part in view.sections)
    assert all(len(chart.rows) < MOST_ROWS for part in view.sections for chart in part.all_charts)
    assert n_rows > 100
    assert "S7+S10" in text


@pytest.mark.usefixtures("quick")
def test_names_are_text_and_never_markup(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    as_table(connection)
    for table, column in (("members", "name"), ("members", "host"), ("members", "cluster"), ("stages", "name"), ("ledger", "link")):
        connection.execute(f"UPDATE {table} SET {column} = {column} || ?", (EVIL,))
    connection.execute("UPDATE run SET value = ? WHERE key = 'name'", (EVIL,))
    connection.execute("UPDATE run SET value = value || ? WHERE key = 'final_stage'", (EVIL,))
    connection.executemany("INSERT INTO events VALUES (2e9, ?, ?, '{}')", [("warning", EVIL), ("refused", EVIL)])
    connection.execute("INSERT INTO user_results SELECT number, 'accuracy', 1, 0.5 FROM stages")
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    for page in (page_of(folder), page_of(folder, other)):
        assert len(page.scripts) == N_SCRIPTS
        assert EVIL in page.text
        assert "54439" not in page.text
        assert json.dumps(EVIL)[1:-1] in json.dumps(page.specs)
        assert "<" not in page.content["charts"]


def test_json_in_a_page_cannot_end_its_element_and_has_no_nan() -> None:
    text = safe_json({"a": "</script><!--&", "b": [float("nan"), float("inf"), 1.5]})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!--&", "b": [None, None, 1.5]}


# ---- runs in whatever state


def forget(*statements: str) -> Callable[[sqlite3.Connection], None]:
    def change(connection: sqlite3.Connection) -> None:
        as_table(connection)
        for statement in statements:
            connection.execute(statement)

    return change


STATES: dict[str, tuple[Callable[[sqlite3.Connection], None], str]] = {
    "nothing yet": (
        forget(
            *(f"DELETE FROM {table}" for table in ("stages", "figures", "rounds", "results", "ledger", "members", "memberships", "events"))
        ),
        "stopped before all hosts were there",
    ),
    "no rounds": (forget("DELETE FROM figures", "DELETE FROM rounds"), "Communication"),
    "one round": (forget("DELETE FROM figures WHERE round > 1", "DELETE FROM rounds WHERE round > 1"), "Progress"),
    "figures that are no numbers": (forget("UPDATE figures SET value = NULL WHERE round % 2"), "Progress"),
    "no figure is a number": (
        forget("UPDATE figures SET value = NULL", "UPDATE results SET value = NULL WHERE name <> 'clusters'"),
        "Progress",
    ),
    "infinite": (forget("UPDATE figures SET value = 9e999 WHERE round % 2"), "Progress"),
    "no times": (forget("DELETE FROM rounds"), "Progress"),
    "under way": (
        forget(
            "UPDATE stages SET outcome = '', rounds = 0 WHERE number = 2",
            "DELETE FROM results WHERE stage = 2",
            "DELETE FROM expected WHERE stage = 2",
            "UPDATE run SET value = 'running' WHERE key = 'status'",
            "DELETE FROM run WHERE key = 'final_stage'",
        ),
        "stopped after round 40",
    ),
    "failed": (forget("UPDATE run SET value = 'failed: host-1 is gone' WHERE key = 'status'"), "host-1 is gone"),
    "resumed": (forget("UPDATE ledger SET useful = 0, attempt = 2 WHERE round = 3"), "sent again, came too late, or were repeated"),
    "no ledger": (forget("DELETE FROM ledger"), "Progress"),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("state", STATES)
def test_a_run_is_reported_in_whatever_state_it_is(state: str, copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    change, said = STATES[state]
    change(connection)
    if state in ("nothing yet", "under way"):
        shutil.rmtree(folder / "models")
    page = page_of(folder)
    assert said in page.text
    assert "nan" not in page.text.split()
    assert "inf" not in page.text.split()
    view = view_of(folder)
    assert report_page.page_of([view, view], Weighing()).comparison is not None


@pytest.mark.usefixtures("quick")
def test_a_run_without_objective_is_drawn_by_its_accuracy(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    for table in ("figures", "user_results"):
        connection.execute(f"DELETE FROM {table}")
    connection.executemany("INSERT INTO figures VALUES (2, ?, 'accuracy', ?)", [(n, 0.5 + n / 100) for n in range(1, 41)])
    connection.executemany("INSERT INTO user_results VALUES (2, 'personal_accuracy', ?, ?)", [(n, 0.7 + n / 10) for n in range(3)])
    view = view_of(folder)
    assert {chart.key for chart in section(view, "users").all_charts} >= {"users-accuracy"}
    assert section(view, "users").tables[0].rows[0][:3] == ["personal accuracy", "3", "0.8000"]
    costs = section(view, "progress").tables[0]
    levels = {0.5: 1, 0.6: 10, 0.7: 20, 0.8: 30, 0.9: 40}
    assert [row[:2] for row in costs.rows] == [[f"accuracy ≥ {level}", str(number)] for level, number in levels.items()]
    assert {key.split("-")[0] for key in page_of(folder).specs} >= {"accuracy", "users"}


@pytest.mark.usefixtures("quick")
def test_a_two_tier_run_tells_bytes_within_and_between_clusters(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "tiers", two_tiers=True)
    run.database.connection.executemany("INSERT INTO members VALUES (?, ?, 'c', 'h')", [(0, "u0"), (1, "u1")])
    run.database.close()
    page = page_of(tmp_path / "tiers", goal="objective=1.4")
    assert "The gap is relative to the smallest objective of the stage itself." in page.text
    assert {"gap-within", "gap-between", "scopes", "topology"} <= set(page.specs)
    (between,) = section(view_of(tmp_path / "tiers", Weighing(Goal("objective", 1.4))), "progress").tables[1:]
    assert between.title == "Between clusters in stage pdmm-0.5 until objective ≤ 1.4"
    assert between.rows == [["c", "4.22 kB", "2.12 kB", "6.34 kB"]]  # of 2 rounds, as below
    with contextlib.closing(open_run(tmp_path / "tiers")) as connection:
        links = links_of(connection)
    assert {(link.above, link.below, link.n_users) for link in links} == {("", "h", 2), ("a", "h", None)}


def test_bytes_until_a_goal_are_those_of_the_ledger(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    view = view_of(tmp_path / "run", Weighing(Goal("objective", 1.4)))
    (row,) = section(view, "progress").tables[0].rows
    # round 2 of the second stage: its start 100, rounds 1001 and 1002, twice as much up, and 5 for each frame
    assert row == ["objective ≤ 1.4", "2", "6.34 kB", "4.22 kB", "2.12 kB", "2.0 s"]
    assert run.query("SELECT SUM(message_bytes + 5 * frames) FROM ledger WHERE stage = 1 AND round <= 2")[0][0] == 6339
    run.database.close()


def test_a_gap_that_only_the_smallest_objective_itself_reaches_is_not_told(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    connection.execute("DELETE FROM figures WHERE name = 'objective'")
    (number,) = connection.execute("SELECT number FROM stages s JOIN run ON value = s.name WHERE key = 'final_stage'").fetchone()
    values = (2.0, 1.05, 1.0, 1.08)  # gaps of 1, .05, 0 and .08
    connection.executemany("INSERT INTO figures VALUES (?, ?, 'objective', ?)", [(number, t, v) for t, v in enumerate(values, start=1)])
    connection.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", [(number, t, 1e9 + t) for t in range(5)])
    (progress,) = (section for section in view_of(folder, Weighing()).sections if section.key == "progress")
    (costs,) = (table for table in progress.tables if table.title == "What it cost stage pdmm to get there")
    assert [row[:2] for row in costs.rows] == [["gap \N{LESS-THAN OR EQUAL TO} 0.1", "2"]]
    connection.execute("UPDATE stages SET outcome = '' WHERE number = ?", (number,))
    progress = section(view_of(folder, Weighing(Goal("gap", 1e-3))), "progress")
    assert [row[1:] for row in progress.tables[0].rows] == [["-"] * (len(progress.tables[0].columns) - 1)]
    assert "The gap is relative to the smallest objective of the stage itself so far: it has not ended." in progress.sentences
    assert "says nothing of gap <= 0.001: round 3 of 4" in progress.sentences[-1]


def test_of_a_refit_the_curves_are_those_of_what_it_refits(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    connection.execute("INSERT INTO stages VALUES (3, 'refit', 'oracle', 2, 'converged', 0.1)")
    connection.execute("UPDATE run SET value = 'refit' WHERE key = 'final_stage'")
    frozen = json.loads((folder / "experiment.json").read_text())
    frozen["method"]["refit"] = True
    (folder / "experiment.json").write_text(json.dumps(frozen))
    view = view_of(folder)
    assert view.curves is not None
    assert view.curves.stage.name == "pdmm"


def test_found_clusters_are_compared_with_those_that_the_data_names(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    connection.execute("UPDATE members SET cluster = CASE WHEN position < 2 THEN 'a' ELSE 'b' END")
    connection.execute("DELETE FROM memberships")
    connection.executemany("INSERT INTO memberships VALUES (2, ?, ?)", [(1, "[0,1,2]"), (5, "[0,1,1]"), (9, "[0,0,1]")])
    clusters = section(view_of(folder), "clusters")
    assert "by 1.000" in clusters.sentences[0]
    assert [chart.key for chart in clusters.charts] == ["agreement", "clusters", "graph"]
    assert clusters.charts[0].rows[-1] == (9, 1.0)
    assert ("known", "u2", 1) in clusters.charts[1].rows


@pytest.mark.usefixtures("quick")
def test_the_result_comes_before_the_traffic_and_a_single_link_is_a_sentence(small: Path) -> None:
    view = view_of(small)
    assert [part.key for part in view.sections] == ["stages", "users", "coefficients", "clusters", "progress", "communication", "events"]
    assert "There is one link, to host-1, with 3 users: " in " ".join(section(view, "communication").sentences)
    assert "topology" not in page_of(small).specs


def test_most_of_the_traffic_is_more_than_half_of_it(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    as_table(connection)
    said = []
    for n_bytes in (1, 10**9):
        connection.execute("UPDATE ledger SET message_bytes = ? WHERE step = 'S5'", (n_bytes,))
        said.append(section(view_of(folder), "communication").sentences[0])
    assert said[0].startswith("The largest part is step S7+S10 down: ")
    assert said[1].startswith("Most of it is step S5 up: 100%")


def test_a_figure_of_one_round_is_a_sentence_and_no_chart(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    connection.execute("DELETE FROM figures WHERE name <> 'objective' OR round > 2")
    (number,) = connection.execute("SELECT number FROM stages s JOIN run ON value = s.name WHERE key = 'final_stage'").fetchone()
    connection.execute("INSERT INTO figures VALUES (?, 2, 'accuracy', 0.75)", (number,))
    progress = section(view_of(folder), "progress")
    assert "Mean local test accuracy is known in round 2 alone, and is 0.7500." in progress.sentences
    assert not any(chart.key.startswith("accuracy") for chart in progress.all_charts)


def test_users_of_several_clusters_have_no_box_across_them(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    connection.executemany("INSERT INTO user_results VALUES (2, 'heldout_metric', ?, ?)", [(n, 0.7 + n / 10) for n in range(3)])

    def chart() -> Any:
        return section(view_of(folder), "users").charts[0]

    connection.execute("DELETE FROM memberships")
    assert any(layer["mark"].get("style") == "box" for layer in chart().spec["layer"])
    assert chart().note.startswith("Ticks: 3 users; ")
    connection.execute("UPDATE members SET cluster = CASE WHEN position < 2 THEN 'a' ELSE 'b' END")
    assert "layer" not in chart().spec
    assert chart().spec["encoding"]["color"]["scale"]["domain"] == ["a", "b"]
    assert chart().note == "Ticks: 3 users in 2 clusters, by colour. Clusters differ, so no box is drawn across them."


def test_counts_have_ticks_at_whole_numbers() -> None:
    def axis(values: list[float], figure: str) -> Any:
        stage = StageSummary(0, "s", "m", 3, "", 1.0)
        found = Curves(stage, np.arange(3), np.arange(3.0), {figure: np.array(values)})
        spec: Any = charts.progress_chart({"s": found}, figure, "round").spec
        return spec["encoding"]["y"].get("axis", {})

    assert axis([12.0, 12.0, 11.0], "users")["tickMinStep"] == 1
    assert "tickMinStep" not in axis([0.5, 0.25, 1.0], "accuracy")


def test_labels_of_other_users_are_not_drawn(copied: tuple[Path, sqlite3.Connection]) -> None:
    folder, connection = copied
    assert [chart.key for chart in section(view_of(folder), "clusters").charts] == ["clusters", "graph"]
    connection.execute("UPDATE memberships SET labels = '[0]'")
    assert [chart.key for chart in section(view_of(folder), "clusters").charts] == ["graph"]  # it has the labels of the models


def test_users_who_are_together_stand_together() -> None:
    assert _known(["", "", ""]) is None
    assert _known(["a", "b", "c"]) is None
    few, many = np.array([0, 0, 1, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 3, 2, 3])
    assert _by_size(few).tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert _order([many, few], None).tolist() == [2, 5, 4, 6, 0, 3, 1]
    assert _spread(10, 4) == [0, 3, 6, 9]
    assert _spread(3, 10) == [0, 1, 2]
    assert _spread(0, 10) == []


# ---- several runs


@pytest.mark.usefixtures("quick")
def test_runs_of_one_name_are_told_apart_by_their_folders(small: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for folder in folders:
        shutil.copytree(small, folder)
    page = page_of(*folders)
    assert "2 runs compared" in page.text
    assert "The goal is what every run has reached, objective ≤" in page.text
    colours = page.specs["objective-bytes"]["encoding"]["color"]["sort"]
    assert colours == ["a/run", "b/run"]
    assert {"run1-traffic", "run2-traffic", "outcomes"} <= set(page.specs)
    assert len(set(page.ids)) == len(page.ids)


@pytest.mark.usefixtures("quick")
def test_the_folder_of_a_comparison_stands_for_its_runs_in_the_order_of_names(small: Path, tmp_path: Path) -> None:
    for name in ("ditto-10", "ditto-9"):
        shutil.copytree(small, tmp_path / "compared" / name)
    assert runs_in(tmp_path / "compared") == [tmp_path / "compared" / name for name in ("ditto-9", "ditto-10")]
    assert runs_in(tmp_path / "compared" / "ditto-9") == [tmp_path / "compared" / "ditto-9"]
    assert runs_in(tmp_path / "nowhere") == [tmp_path / "nowhere"]
    assert cli._run(["report", str(tmp_path / "compared")]) == 0
    assert "2 runs compared" in (tmp_path / "compared" / "report.html").read_text()


@pytest.mark.usefixtures("quick")
def test_a_comparison_tells_what_a_goal_cost_with_bytes_up_weighted(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path / "one"), finished_run(tmp_path / "two")]
    for run in runs:
        run.database.close()
    text = page_of(tmp_path / "one", tmp_path / "two", goal="objective=1.4", up_weight=5).text
    assert "a byte up counts as 5 bytes down" in text
    assert "6.34 kB" in text  # 2.12 down and 4.22 up
    assert "23.2 kB" in text  # 2.12 down and five times 4.22 up


@pytest.mark.usefixtures("quick")
def test_of_very_many_runs_only_the_comparison_is_shown(small: Path) -> None:
    page = report_page.page_of([view_of(small)] * 7, Weighing())
    assert page.labels == [f"small ({number})" for number in range(1, 8)]
    assert not any(key.startswith("run") for key, _ in page.charts)
    assert len(Page(report_page.html_of(page)).specs) == len(page.charts)


def test_a_goal_that_no_run_has_is_refused(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folders in ([small], [small, small]):
        with pytest.raises(ConfigError, match="has no figure 'accuracy' of its rounds, want one of: "):
            write_report(folders, tmp_path / "page.html", Weighing(Goal("accuracy", 0.9)))
    assert cli._run(["report", str(small), "--goal", "gap"]) == 2
    assert "the goal is 'gap', want FIGURE=VALUE" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- files


def test_figures_are_files_of_the_kinds_that_were_asked_for(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = view_of(small)
    few = [(chart.key, chart) for chart in section(view, "communication").all_charts][:1]
    written = report_page.write_figures(few, tmp_path / "figures", ["png", "svg", "pdf", "png"])
    starts = {path.suffix: path.read_bytes()[:5] for path in written}
    assert starts == {".png": b"\x89PNG\r", ".svg": b"<svg ", ".pdf": b"%PDF-"}
    assert {path.stem for path in written} == {"traffic"}
    graph = next(chart for chart in section(view, "clusters").all_charts if chart.key == "graph")
    (drawn,) = report_page.write_figures([("graph", graph)], tmp_path / "figures", ["svg"])
    height = re.search(r'<svg [^>]*height="(\d+)"', drawn.read_text())
    assert height is not None
    assert graph.paper_height is not None
    assert graph.paper_height <= int(height[1]) < graph.spec["height"]
    assert cli._run(["report", str(small), "--format", "png"]) == 2
    assert "--format png is for figures, want --figures DIR with it" in capsys.readouterr().err
    assert cli._run(["report", str(small), "--format", "gif"]) == 2
    assert "gif" in capsys.readouterr().err


def test_a_report_stands_in_its_run_folder_unless_one_says_where(
    copied: tuple[Path, sqlite3.Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_page, "vega_script", lambda: "")
    monkeypatch.chdir(tmp_path)
    folder = copied[0]
    assert cli._run(["report", str(folder)]) == 0
    assert cli._run(["report", str(folder), str(folder)]) == 0
    assert cli._run(["report", str(folder), "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert [path.is_file() for path in (folder / "report.html", tmp_path / "report.html", tmp_path / "new/page.html")] == [True] * 3
    assert "report: " in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_written_is_said(small: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(RunError, match=r"cannot write the report .*page\.html: "):
        write_report([small], tmp_path / "page.html", Weighing())
    assert cli._run(["report", str(tmp_path)]) == 2  # no run folder


def test_without_its_libraries_the_command_says_what_to_install(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.environment.cache_clear()
    monkeypatch.setattr(report_page, "view_of", lambda *_: pytest.fail("the run was read all the same"))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert cli._run(["report", str(small)]) == 2
    assert "this command needs jinja2, which is not installed: pip install 'coterie[report]'" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_goes_on_can_be_reported_all_the_time(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    with run.held():
        assert view_of(tmp_path / "run").status == "running"
        run.begin(0)
        view_of(tmp_path / "run")
        for number in range(3):
            run.more(objective=1.0 / (number + 1))
            found = view_of(tmp_path / "run").curves
            assert found is not None
            assert len(found.rounds) == number + 2
    run.database.close()


@pytest.mark.slow
def test_a_million_rows_of_the_ledger_make_a_small_page(tmp_path: Path, small: Path) -> None:
    (tmp_path / "large").mkdir()
    make_large(tmp_path / "large", 1_000_000)
    shutil.copy(small / "experiment.json", tmp_path / "large")
    page, _ = write_report([tmp_path / "large"], None, Weighing())
    assert page.stat().st_size < 2_000_000
