"""Snapshots: what is not taken up is named, with the reason."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.record.snapshot import SnapshotFile


@dataclasses.dataclass(frozen=True)
class State:
    x: np.ndarray
    z: int = 0


def test_the_older_generation_serves_where_the_newest_is_damaged(tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path, "run")
    store.save({"point": State(np.arange(3.0), 1)})
    store.save({"point": State(np.arange(3.0), 2)})
    assert store.load()["point"].z == 2
    path = tmp_path / "run.snapshot"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.load()["point"].z == 1


def test_a_snapshot_of_a_class_that_has_changed_since_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotFile(tmp_path, "run")
    store.save({"point": State(np.arange(3.0))})
    changed = dataclasses.make_dataclass("State", [("duals", int)])
    monkeypatch.setattr(sys.modules[__name__], "State", changed)
    why = r"written by another version of coterie: it has a State of x, z"
    with pytest.raises(RunError, match=rf"^no snapshot can be read: .*run\.snapshot \({why}\)$"):
        store.load()
    monkeypatch.delattr(sys.modules[__name__], "State")
    with pytest.raises(RunError, match=why):
        store.load()


def test_what_is_no_snapshot_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.snapshot"
    path.write_bytes(b"PK and whatever follows")
    with pytest.raises(RunError, match=r"run\.snapshot \(not a snapshot\)$"):
        SnapshotFile(tmp_path, "run").load()
