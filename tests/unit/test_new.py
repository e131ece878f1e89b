"""`coterie new`: what it writes runs at once, passes its own tests, and is registered by pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.cli.new import KINDS, write_package

NAMES = {kind: f"own_{kind}" for kind in KINDS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind."""
    folder = tmp_path_factory.mktemp("made")
    for kind, name in NAMES.items():
        write_package(kind, name, folder / name)
    return folder


def ran(*command: str, here: Path, path: str = "", seconds: float = 55) -> str:
    """What a command printed that ended well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    found = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.timeout(300)
def test_each_kind_passes_the_tests_that_come_with_it(made: Path) -> None:
    said = ran(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *NAMES.values(), here=made, seconds=290)
    assert f"{3 * len(NAMES) + 1} passed" in said


def test_its_code_is_tidy(made: Path) -> None:
    ruff = (sys.executable, "-m", "ruff")
    ran(*ruff, "check", "--isolated", "--no-cache", "--line-length=140", "--select=A,ARG,B,C4,E,F,I,N,RET,RUF,SIM,UP,W", here=made)
    ran(*ruff, "format", "--isolated", "--no-cache", "--line-length=140", "--check", here=made)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_types_are_right(made: Path, tmp_path: Path) -> None:
    for path in made.glob("*/*.py"):
        shutil.copy(path, tmp_path)
    ran(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", ".", here=tmp_path, seconds=290)


def test_pip_registers_it(made: Path, tmp_path: Path) -> None:
    folder, site = made / NAMES["loss"], tmp_path / "site"
    ran(sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--target", str(site), "-e", ".", here=folder)
    short = (folder / "experiment.yaml").read_text().replace('"own_loss:LOSS"', "own_loss")
    assert "loss: own_loss," in short
    (tmp_path / "short.yaml").write_text(short)
    path = os.pathsep.join([str(site), str(folder)])  # the second is what pip has written into a .pth, which only site folders read
    said = ran(sys.executable, "-m", "coterie", "data", "short.yaml", "--reveals", here=tmp_path, path=path)
    assert "code of installed packages: coterie-own-loss 0.1.0" in said
    assert "code to import here: none" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("loss", "Own"), "the name is 'Own', want small letters, digits and underscores, of which the first is a letter"),
        (("loss", "lambda"), "the name is 'lambda', want small letters"),
        (("loss", "huber"), "loss 'huber' is built in: want another name"),
        (("data", "digits"), "data source 'digits' is built in: want another name"),
        (("model", "json"), "Python has a module 'json' already: want another name"),
        (("loss", "taken"), "taken exists already, want a folder that is new or empty (--output DIR)"),
        (("model", "own", "--network"), "--network is for loss and experiment, but this is model: want no such option"),
        (("rule", "krum"), "rule 'krum' is built in: want another name"),
        (("method", "fedavg"), "method 'fedavg' is built in: want another name"),
        (("loss", "own", "--messages"), "--messages is for method, but this is loss: want no such option"),
        (("story", "own"), "Invalid value for"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert cli._run(["new", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_the_command_says_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._run(["new", "data", "own_rows"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "own_rows: README.md, experiment.yaml, own_rows.py, pyproject.toml, test_own_rows.py",
        "next: cd own_rows; coterie run experiment.yaml; pip install -e .",
    ]
    with pytest.raises(ConfigError, match="own_rows exists already"):
        write_package("data", "own_rows", tmp_path / "own_rows")
