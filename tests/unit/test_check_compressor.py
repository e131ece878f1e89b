"""`coterie check compressor`: each check finds the compressor that breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.studies.check import COMPRESSOR_CHECKS, check_compressor
from coterie_deploy.studies.check.table import needed

QUICK = tuple(check.name for check in COMPRESSOR_CHECKS if not check.is_slow)
SIGNS = """
import itertools
import pickle
import numpy as np
from coterie.plugin import Compressor

COUNT = itertools.count()

def sizes(k):
    return (k + 7) // 8, 8

def write(x, draws):
    return np.packbits(x > 0, axis=1), np.abs(x).mean(axis=1, keepdims=True).view(np.uint8)

def read(values, aside, k, draws):
    scale = np.ascontiguousarray(aside).view(np.float64)
    return (2.0 * np.unpackbits(values, axis=1, count=k) - 1.0) * scale

SIGNS = Compressor(sizes=sizes, write=write, read=read)
"""
BREAKS = {
    "longer": ("(k + 7) // 8, 8", "(k + 7) // 8, 9", "sizes", "writes uint8 of shape (4, 8), want uint8 of (4, 9)"),
    "floats": ("(k + 7) // 8, 8", "k / 8, 8", "sizes", "want two whole numbers of bytes"),
    "changing": ("(k + 7) // 8, 8", "(k + 7) // 8, 8 + next(COUNT)", "sizes", "when it is asked again"),
    "in place": ("scale = ", "values ^= 0; scale = ", "reads", "read-only"),
    "undrawn": ("x > 0", "x > np.random.default_rng(next(COUNT)).normal(size=x.shape)", "reads", "want random numbers from draws alone"),
    "together": ("np.abs(x).mean(axis=1, keepdims=True)", "np.full((len(x), 1), np.abs(x).mean())", "alone", "when it is alone"),
    "zeros": ("* scale", "* scale / scale", "numbers", "a row of zeros is read as [nan"),
    "overflow": ("* scale", "* np.sqrt(np.float64(np.float32(scale) ** 2))", "numbers", "a row of huge numbers is read as"),
    "picky": ("scale = ", "(aside[0] == 255).all() and {}[0]; scale = ", "foreign", "KeyError: 0"),
}


def files(folder: Path, name: str = "signs", old: str = "", new: str = "") -> None:
    assert not old or SIGNS.count(old) == 1
    (folder / f"{name}.py").write_text(SIGNS.replace(old, new) if old else SIGNS)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_check_finds_what_is_wrong(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, blamed, sentence = BREAKS[broken]
    name = f"signs_{broken.replace(' ', '_')}"
    files(tmp_path, name, old, new)
    monkeypatch.syspath_prepend(tmp_path)
    found = {one.check.name: one for one in check_compressor(f"{name}:SIGNS", only=QUICK)}
    assert [key for key, one in found.items() if one.state == "failed"] == [blamed]
    assert sentence in found[blamed].reason
    assert found["runs"].state == "not applicable" or blamed == "foreign"


def test_a_right_one_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path, "beside")
    (tmp_path / "beside.py").write_text((tmp_path / "beside.py").read_text() + "COMPRESSOR = SIGNS\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    only = [part for name in QUICK for part in ("--only", name)]
    assert cli._run(["check", "compressor", "beside", *only, "--set", "federation.compress.up.feedback=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert text.startswith("Compressor 'beside' on rows of numbers, and on a small federation")
    assert "1,000 normal numbers take 133 bytes instead of 4,000, and 0.361 of their squared length is lost" in text
    assert text.endswith(f"{len(QUICK)} checks passed, 0 not applicable.")


def test_the_list_says_what_each_check_proves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli._run(["check", "compressor", "--list"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(check.name in text and check.proves in text for check in COMPRESSOR_CHECKS)
    names = [check.name for check in COMPRESSOR_CHECKS]
    for place, check in enumerate(COMPRESSOR_CHECKS):
        assert set(needed(check, COMPRESSOR_CHECKS)) <= set(names[:place])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sings:SIGNS"], "compressor 'sings:SIGNS' cannot be imported: ModuleNotFoundError"),
        (["zip"], "compressor 'zip' is unknown: want"),
        (["json:dumps"], "compressor 'json:dumps' is a function, want a coterie.plugin.Compressor"),
        (["json:dumps", "--only", "size"], "the check 'size' is unknown, want one of sizes, "),
        (["json:dumps", "--set", "federation.compress.up.by=null"], "it compresses nothing"),
        ([], "coterie check compressor wants the name of a compressor, or --list"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["check", "compressor", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_with_files_is_no_output() -> None:
    with pytest.raises(ConfigError, match="is not empty: choose another one"):
        check_compressor("json:dumps", output=Path(__file__).parent)
