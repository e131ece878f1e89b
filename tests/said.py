"""What commands say that run in the process of a test. Nothing here is tested itself."""

from __future__ import annotations

import importlib.util

import pytest

from coterie_deploy.cli import app as cli


def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    code = cli._run(list(arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """The sentence of a command that fails with this exit code: one line."""
    assert cli._run(list(arguments)) == code
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]
