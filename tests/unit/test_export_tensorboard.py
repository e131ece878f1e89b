"""`coterie export --to tensorboard`: what TensorBoard's own readers find is what the run database holds, each value once."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from coterie.errors import ConfigError, RunError
from coterie_deploy.cli.app import main
from coterie_deploy.read import export as package
from coterie_deploy.read.export import LOOK_EVERY_S, export
from coterie_deploy.read.export.to_tensorboard import STATE
from tests.growing_run import STAGES, GrowingRun, finished_run


def scalars(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    """(time, step, value) of each tag, as TensorBoard's accumulator finds them."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.wall_time, event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def all_scalars(folder: Path) -> dict[str, Any]:
    return {stage: scalars(folder / stage) for stage in STAGES if (folder / stage).exists()}


def as_single(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, float(np.float32(value))) for step, value in pairs]


def test_every_figure_stands_against_rounds_and_against_bytes(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    n_values = export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    found = all_scalars(tmp_path / "tb")
    assert n_values == sum(len(values) for stage in found.values() for values in stage.values()) == 2 * (2 * (4 + 3) + 2 * 4 + 1)
    for stage in STAGES:
        times = run.times(stage)
        for figure in ("objective", "clusters"):
            by_round, by_bytes = found[stage][f"{figure}/by_round"], found[stage][f"{figure}/by_bytes"]
            assert [(step, value) for _, step, value in by_round] == as_single(run.by_round(stage, figure))
            assert [(step, value) for _, step, value in by_bytes] == as_single(run.by_bytes(stage, figure))
            assert [at for at, _, _ in by_round] == [at for at, _, _ in by_bytes] == [times[step] for _, step, _ in by_round]
        both = [
            up + down for (_, _, up), (_, _, down) in zip(*(found[stage][f"bytes_{way}/by_round"] for way in ("up", "down")), strict=True)
        ]
        assert both == [step for _, step, _ in found[stage]["objective/by_bytes"]]
    assert [(step, value) for _, step, value in found["pdmm-0.5"]["result/heldout_loss"]] == [(4, 1.25)]
    assert "gap/by_round" not in found["pdmm-0.5"]


def test_the_experiment_is_a_text_and_a_session_of_hyper_parameters(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", stop={"objective_gap": 0.1, "reference_objective": 0.5})
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    (file,) = (tmp_path / "tb").glob("events*")
    version, text, session = EventFileLoader(str(file)).Load()
    assert version.file_version == "brain.Event:2"
    written = text.summary.value[0].tensor.string_val[0].decode()
    assert json.loads(written.partition("```json")[2].partition("```")[0]) == json.loads((run.folder / "experiment.json").read_text())
    (value,) = session.summary.value
    assert value.tag == SESSION_START_INFO_TAG
    info = parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
    assert (info.hparams["seed"].number_value, info.hparams["method.name"].string_value) == (0, "pdmm")
    assert (info.hparams["method.path"].string_value, info.group_name) == ("[0.5]", "0123456789abcdef")
    assert (session.wall_time, info.start_time_secs) == (1_000_000.0, 1_000_000.0)
    gaps = scalars(tmp_path / "tb" / "global")["gap/by_round"]
    assert [value for _, _, value in gaps] == [float(np.float32((value - 0.5) / 0.5)) for _, value in run.by_round("global", "objective")]


def test_an_export_that_is_repeated_adds_nothing(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    before = {path: path.read_bytes() for path in (tmp_path / "tb").rglob("*") if path.is_file()}
    assert export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "tb").rglob("*") if path.is_file()} == before


def grow(run: GrowingRun) -> Any:
    """A step of the run for each call, to its end."""

    def steps() -> Any:
        for stage in range(2):
            run.begin(stage)
            yield
            for number in range(1, 5):
                run.more(objective=1.0 / number + stage)
                yield
            run.end(heldout_loss=0.5)
        run.finish()
        yield

    going = steps()
    return lambda _: next(going)


@pytest.mark.parametrize("two_tiers", [False, True])
def test_a_run_that_is_followed_is_exported_as_one_that_has_finished(tmp_path: Path, two_tiers: bool) -> None:
    run = GrowingRun(tmp_path / "run", two_tiers=two_tiers)
    seen: list[int] = []
    step = grow(run)

    def look(seconds: float) -> None:
        assert seconds >= LOOK_EVERY_S
        found = all_scalars(tmp_path / "tb").get("pdmm-0.5", {})
        seen.append(len(found.get("objective/by_round", ())))
        assert not (two_tiers and "objective/by_bytes" in found)
        step(seconds)

    with run.held():
        followed = export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=True, sleep=look)
    assert {0, 1, 2, 3} <= set(seen)
    assert followed == export(run.folder, "tensorboard", str(tmp_path / "whole"), follow=False)
    assert all_scalars(tmp_path / "tb") == all_scalars(tmp_path / "whole")
    found = all_scalars(tmp_path / "tb")["pdmm-0.5"]["objective/by_bytes"]
    assert [(step, value) for _, step, value in found] == as_single(run.by_bytes("pdmm-0.5", "objective"))


def test_a_run_that_stops_is_followed_no_longer_and_goes_on_where_it_was(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.begin(0)
    for number in range(1, 4):
        run.more(objective=1.0 / number)
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=True)  # no coordinator holds it
    assert [step for _, step, _ in all_scalars(tmp_path / "tb")["global"]["objective/by_round"]] == [1, 2]
    run.more(objective=0.25)
    run.end()
    run.finish("failed: enough")
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=True)
    assert [step for _, step, _ in all_scalars(tmp_path / "tb")["global"]["objective/by_round"]] == [1, 2, 3, 4]


def test_what_a_killed_export_has_left_is_written_again(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    step = grow(run)
    for _ in range(4):
        step(0)
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    state = (tmp_path / "tb" / STATE).read_bytes()
    with contextlib.suppress(StopIteration):
        while True:
            step(0)
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    expected = all_scalars(tmp_path / "tb")
    (tmp_path / "tb" / STATE).write_bytes(state)  # it has not come to this: both files have more than it says, one begins anew
    with next((tmp_path / "tb" / "global").iterdir()).open("ab") as file:
        file.write(b"half of a rec")
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    assert all_scalars(tmp_path / "tb") == expected


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    run, other = finished_run(tmp_path / "run"), finished_run(tmp_path / "other", run_id="fedcba9876543210")
    folder = tmp_path / "tb"
    export(run.folder, "tensorboard", str(folder), follow=False)
    with pytest.raises(ConfigError, match="holds an export of run 0123456789abcdef, want another folder for run fedcba9876543210"):
        export(other.folder, "tensorboard", str(folder), follow=False)
    with pytest.raises(ConfigError, match="is not empty and holds no export"):
        export(run.folder, "tensorboard", str(run.folder), follow=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*file: "):
        export(run.folder, "tensorboard", str(tmp_path / "file"), follow=False)
    (folder / STATE).write_text('{"run_id": 5}')
    with pytest.raises(ConfigError, match="is damaged"):
        export(run.folder, "tensorboard", str(folder), follow=False)


def test_two_exports_to_one_folder_do_not_meet(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.begin(0)

    def second(_: float) -> None:
        with pytest.raises(ConfigError, match="is in use by another export"):
            export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
        run.finish()

    with run.held():
        export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=True, sleep=second)


def test_event_files_that_have_shrunk_are_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
    next((tmp_path / "tb" / "global").iterdir()).write_bytes(b"")
    with pytest.raises(ConfigError, match="is not what an earlier export has left: export to another folder"):
        export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)


def test_the_command_says_what_it_has_added_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "run")
    said = []
    for words in (
        ["--to", "tensorboard", "--output", f"{tmp_path}/tb"],
        ["--to", "wandb", "--output", f"{tmp_path}/tb"],
        ["--to", "tensorboard"],
    ):
        monkeypatch.setattr(sys, "argv", ["coterie", "export", str(tmp_path / "run"), *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said.append((ended.value.code, "".join(capsys.readouterr())))
    assert said[0] == (0, f"46 values added to {tmp_path}/tb\n")
    assert said[1] == (2, "error: --to is 'wandb', want one of tensorboard, mlflow\n")
    assert said[2][0] == 2


@pytest.mark.parametrize(("target", "library"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, library: str) -> None:
    run = finished_run(tmp_path / "run")
    for name in [name for name in sys.modules if name.partition(".")[0] == library] + [library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"{package.__name__}.to_{target}", raising=False)
    with pytest.raises(ConfigError, match=rf"--to {target} needs .*{library}.*, which is not installed: .*coterie\[{target}\]"):
        export(run.folder, target, str(tmp_path / "out"), follow=False)


def test_a_run_that_has_not_begun_has_nothing_to_export(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run")
    run.database.connection.execute("DELETE FROM run")
    with pytest.raises(ConfigError, match="has not begun"):
        export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)


def test_a_disk_that_refuses_ends_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "run")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(RunError, match=r"cannot write to .*tb: No space left on device"):
        export(run.folder, "tensorboard", str(tmp_path / "tb"), follow=False)
