"""Runs of convex clustering keep their graph, and their report draws it, and their path as a tree."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.record.snapshot import _flatten, _restore
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.models import stage_models
from coterie_deploy.read.report import report_of
from coterie_deploy.studies.check.federations import CASES
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.run_graph import ties_of
from coterie_deploy.view.run_view import view_of
from coterie_server.interface.half import Outcome
from coterie_server.maths import graphs
from coterie_server.record.rundb import read_run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of two penalties on a graph, and one on all pairs."""
    found = {}
    for name in ("pdmm graph", "son_newton path", "son_newton"):
        here = tmp_path_factory.mktemp("pictures")
        found[name] = here / "run"
        asyncio.run(launch(CASES[name].experiment(here), Launch("loopback", folder=found[name])))
    return found


def charts_of(folder: Path) -> dict[str, Chart]:
    return {chart.key: chart for section in view_of(folder).sections for chart in section.all_charts}


def lines_of(chart: Chart) -> set[tuple[str, str]]:
    return {(row["from"], row["to"]) for layer in chart.spec["layer"] if layer["mark"]["type"] == "rule" for row in layer["data"]["values"]}


@pytest.mark.parametrize("name", ["pdmm graph", "son_newton path"])
def test_a_path_keeps_its_graph_once_and_every_stage_of_it_has_that_graph(name: str, folders: dict[str, Path]) -> None:
    folder, method = folders[name], name.partition(" ")[0]
    models = stage_models(folder, "local").models
    assert models is not None
    graph = graphs.nearest(models, 2, 2.0)
    kept = stage_models(folder, f"{method}-0.5").ties
    assert kept["first"].tolist() == graph.first.tolist()
    assert kept["second"].tolist() == graph.second.tolist()
    assert np.array_equal(kept["weight"], graph.weights)
    assert not stage_models(folder, f"{method}-0.2").ties
    later = ties_of(report_of(folder), f"{method}-0.2")
    assert later is not None
    assert np.array_equal(later.weight, graph.weights)


@pytest.mark.parametrize("name", ["pdmm graph", "son_newton path"])
def test_a_path_tells_its_graph_once(name: str, folders: dict[str, Path]) -> None:
    with read_run(folders[name]) as connection:
        said = [text for (text,) in connection.execute("SELECT text FROM events") if text.startswith("the graph ties 9 users")]
    assert len(said) == 1


@pytest.mark.parametrize("name", ["pdmm graph", "son_newton path"])
def test_the_report_draws_users_ties_and_the_path(name: str, folders: dict[str, Path]) -> None:
    charts = charts_of(folders[name])
    found = stage_models(folders[name], f"{name.partition(' ')[0]}-0.5")
    pairs = zip(found.ties["first"].tolist(), found.ties["second"].tolist(), strict=True)
    assert lines_of(charts["graph"]) == {(found.users[i], found.users[j]) for i, j in pairs}
    assert "the 2 with the nearest local models" in charts["graph"].note
    assert charts["tree"].columns[0] == "penalty"
    assert "the penalty of the result" in charts["tree"].note


def test_on_all_pairs_the_report_says_so_and_draws_no_tie(folders: dict[str, Path]) -> None:
    charts = charts_of(folders["son_newton"])
    assert lines_of(charts["graph"]) == set()
    assert charts["graph"].note.startswith("All pairs of users are tied, with weight 1")
    assert "tree" not in charts


def test_a_folder_of_before_has_the_users_and_says_why_it_has_no_ties(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["son_newton path"], tmp_path / "old")
    for path in (folder / "models").glob("*.npz"):
        with np.load(path) as arrays:
            kept = {name: arrays[name] for name in arrays.files if not name.startswith("ties/")}
        np.savez(path, **kept)
    chart = charts_of(folder)["graph"]
    assert lines_of(chart) == set()
    assert "written by an earlier version, which did not keep the ties" in chart.note
    assert len(chart.rows) == 9


def test_a_checkpoint_of_before_can_be_read() -> None:
    tree = _flatten(Outcome(None, figures={"clusters": 2.0}, ties={}), lambda _: {})
    del tree["fields"]["ties"]
    assert _restore(tree, memoryview(b"")) == Outcome(None, figures={"clusters": 2.0})


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "text", "array", "header"])
def test_a_damaged_file_of_models_is_one_sentence(damage: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(folders["pdmm graph"], folder)
    path = folder / "models" / "pdmm-0.2.npz"
    content = path.read_bytes()
    wanted = f"{path} is damaged, so its models cannot be read: want the file as the run has left it"
    if damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif damage == "header":
        path.write_bytes(b"PK\x03\x04")
    else:
        at = len(content) // 3
        changed = content[:at] + bytes(200) + content[at + 200 :]
        path.write_bytes({"empty": b"", "cut": content[:300], "changed": changed, "text": b"hello"}[damage])
    for read in (lambda: stage_models(folder, "pdmm-0.2"), lambda: view_of(folder)):
        with pytest.raises(RunError) as caught:
            read()
        assert str(caught.value) == wanted
