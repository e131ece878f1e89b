"""The overview of the commands, help and completion, and what was probably meant by a word that is unknown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.registry import built_in_methods, method
from coterie_deploy.cli import app as cli
from coterie_deploy.cli.commands import app
from coterie_deploy.cli.help import GROUPS
from coterie_deploy.read.keys import keys_of, sections
from coterie_deploy.read.shipped import load


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli._run(list(arguments)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli._run(list(arguments)) == 2
    return capsys.readouterr().err.strip()


def test_every_command_is_in_one_group_with_a_full_line_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys).splitlines()
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    for title, group in GROUPS.items():
        below = lines[lines.index(f"{title}:") + 1 :]
        assert [" ".join(line.split()) for line in below[: len(group)]] == [f"{name} {line}" for name, line in group.items()]
    assert max(map(len, lines)) <= 80


def test_help_is_wrapped_and_not_cut_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = said(capsys, "--help")
    assert max(map(len, text.splitlines())) <= 50, "the library's least width"
    assert all(f"{name} {line}" in " ".join(text.split()) for group in GROUPS.values() for name, line in group.items())


@pytest.mark.parametrize("command", [("run",), ("certs",), ("certs", "issue"), ("check", "method")])
def test_help_has_three_spellings(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    texts = {said(capsys, *command, "--help"), said(capsys, *command, "-h"), said(capsys, "help", *command)}
    assert len(texts) == 1
    assert texts.pop().startswith(f"Usage: coterie {' '.join(command)} ")
    assert said(capsys, "help") == said(capsys, "--help") == said(capsys)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("rnu",), "Did you mean 'run'?"),
        (("help", "ledgr"), "Did you mean 'ledger'?"),
        (("certs", "isue"), "Did you mean 'issue'?"),
        (("run", "hsb", "--quite"), "No such option: --quite; did you mean '--quiet'? (see coterie run --help)"),
        (("data", "elipses"), "did you mean 'ellipses'"),
        (("data", "hsb", "--set", "method.name=fedavgg"), "did you mean 'fedavg'?"),
        (("data", "hsb", "--set", "method.penalti=1"), "method.penalti: unknown key; did you mean 'penalty'?"),
        (("compare", "hsb", "--methods", "locl"), "want local"),
        (("reproduce", "fedrep-table"), "want one of fedrep-table1"),
    ],
)
def test_what_was_meant_is_said(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], meant: str) -> None:
    assert meant in refused(capsys, *arguments)


def test_settings_that_another_method_does_not_take_over_are_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["data", "hsb", "--hash", "--set", "method.name=squared", "--set", "method.penalty=0.1"]) == 0
    said = capsys.readouterr().err
    why = "they have another meaning there, or none; its defaults hold"
    assert said == f"note: method 'squared' does not take over path, refit from 'pdmm': {why}\n"


def test_a_new_experiment_has_comments_and_runs_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "new", "experiment") == "next: edit my.yaml; coterie run my.yaml\n"
    assert said(capsys, "new", "experiment", "a-b", "--output", "there") == "next: edit there/a-b.yaml; coterie run there/a-b.yaml\n"
    assert (tmp_path / "my.yaml").read_text().count("#") > 15
    report = said(capsys, "run", "my.yaml", "--transport", "loopback", "--quiet")
    assert "160 users" in report
    warnings = [line for line in report.splitlines() if line.startswith("warning")]
    assert [re.sub(r"\S+, ", "", line).split(" ended before")[0] for line in warnings] == ["warning: pdmm-0.01"], (
        "clusters are not clear yet"
    )
    assert "my.yaml exists already" in refused(capsys, "new", "experiment")
    assert said(capsys, "new", "experiment", "net", "--network") == "next: edit net.yaml; coterie run net.yaml\n"
    shown = load("net.yaml", ["stop.rounds=1"])
    assert (shown.method.name, shown.model is not None) == ("fedrep", True)
    assert "the name is 'a b'" in refused(capsys, "new", "experiment", "a b")
    assert "wants the name of the loss" in refused(capsys, "new", "loss")


@pytest.mark.parametrize(("words", "number", "offered"), [("coterie ru", 1, ["run"]), ("coterie run hs", 2, ["hsb", "hsb-newton"])])
def test_shells_complete_commands_and_shipped_experiments(words: str, number: int, offered: list[str]) -> None:
    asked = {"_COTERIE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    command = [sys.executable, "-m", "coterie"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, offered, "")


def test_the_help_of_a_client_imports_no_library_of_numbers_or_networks() -> None:
    code = """
import sys
from coterie_deploy.cli import app
app._run(["client", "--help"])
print(sorted({"numpy", "grpc", "rich", "yaml", "scipy", "torch"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("width", [40, 80])
def test_help_of_a_method_explains_each_of_its_keys(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = said(capsys, "help", "fedrep")
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for key in keys_of(method("fedrep").config):
        assert key.name == "name" or f"{key.name}: {key.type.split()[0].replace('`', '')}" in words
    assert "head_epochs: whole number ≥ 0, optional Passes over a user's rows that train its head. 10 without head_updates." in words
    assert "optimizer.lr: number > 0; default 0.01 Step size (learning rate)." in words


@pytest.mark.parametrize(
    ("name", "first", "key"),
    [
        ("images", "Keys of source images, below `data`", "resize: list of whole numbers 1 to 10,000, optional"),
        ("cnn", "Keys of model cnn, below `model`", "hidden: list of whole numbers"),
        ("stop", "Keys of section stop, below `stop`", "rounds: whole number ≥ 1; default 2000 The most rounds of a stage."),
    ],
)
def test_help_of_a_source_a_model_and_a_section_explains_their_keys(
    name: str, first: str, key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = said(capsys, "help", name)
    assert max(map(len, text.splitlines())) <= 40
    words = " ".join(text.split())
    assert words.startswith(first)
    assert key in words


def test_no_name_of_a_section_a_source_or_a_model_is_that_of_a_method_or_hides_a_key() -> None:
    assert not set(sections()) & set(built_in_methods())
    assert {"csv", "npz", "images", "mlp", "problem", "federation", "snapshots"} <= set(sections())


def test_help_of_what_is_neither_a_command_nor_a_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "help", "nope").startswith("error: No such command 'nope'")
    assert said(capsys, "help", "certify").startswith("Usage: coterie certify"), "a command, also where a method has its name"


def test_an_unknown_key_lists_those_of_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "data", "hsb", "--set", "method={name: fedavg, foo: 1}").endswith(
        f"method.foo: unknown key (coterie help fedavg explains the keys: {', '.join(method('fedavg').config.model_fields)})"
    )
    assert refused(capsys, "data", "hsb", "--set", "stop.foo=1").endswith(
        "stop.foo: unknown key, want one of rounds, residual, objective_gap, reference_objective, epsilon, wall_time_s"
    )
