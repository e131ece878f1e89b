"""Snapshots: what is not taken up is named, with the reason."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.findings import Finding
from coterie.record import snapshot
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


# ---- a file that names classes of its own choice


def of_class(store: SnapshotFile, path: str, fields: dict[str, object]) -> None:
    """A snapshot with a right checksum that names this class."""
    skeleton = json.dumps({"!": "dataclass", "class": path, "fields": fields}).encode()
    body = len(skeleton).to_bytes(8, "little") + skeleton
    digest = hashlib.blake2b(body, digest_size=32).digest()
    (store.folder / f"{store.name}.snapshot").write_bytes(b"COTERIE1" + digest + body)


def test_a_module_that_a_hostile_snapshot_names_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass State:\n    x: int\n")
    monkeypatch.syspath_prepend(tmp_path)
    store = SnapshotFile(tmp_path, "run")
    of_class(store, "hostile:State", {"x": 1})
    with pytest.raises(RunError, match=r"it names the class 'hostile:State', want one of coterie or of an installed plug-in\)$"):
        store.load()
    assert "hostile" not in sys.modules
    monkeypatch.setattr(snapshot, "PACKAGES", {*snapshot.PACKAGES, "hostile"})
    assert store.load().x == 1


@pytest.mark.parametrize("path", ["coterie.record.snapshot:dataclasses.Field", "coterie_client:__loader__", "coterie.findings:", "coterie"])
def test_a_class_that_a_module_of_ours_only_imports_is_not_built(path: str, tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path, "run")
    of_class(store, path, {})
    with pytest.raises(RunError, match="written by another version of coterie"):
        store.load()


def test_a_class_of_ours_behind_the_name_of_another_module_is_not_built(tmp_path: Path) -> None:
    store = SnapshotFile(tmp_path, "run")
    of_class(store, "coterie.errors:Finding", {"rule": "T3"})
    with pytest.raises(RunError, match="written by another version of coterie"):
        store.load()
    of_class(store, "coterie.findings:Finding", {"rule": "T3"})
    assert store.load() == Finding("T3")
