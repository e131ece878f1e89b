"""The page on notebooks does what it says: its blocks run in order, in one namespace, on a run of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "docs" / "notebook.md"


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    said: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), said)  # noqa: S102 - a page of ours
    out = capsys.readouterr().out
    assert "Run('ellipses', pdmm, finished, stages: local, global, oracle, pdmm, refit)" in out
    assert said["dominant"] == "S5"
    assert 1 < said["first"]["round"] < 100
    assert (tmp_path / "gap.png").stat().st_size > 5000
    assert 0.3 < said["saved"] < 0.5
    assert sorted(said["run"].clusters.values()) == sorted([0, 1, 2] * 20)
    assert said["comparison"].table().method.tolist() == ["local", "global"]
    assert said["classes"].tolist() == [1.0, -1.0]
