"""A log that nobody else may read, and that outlives kills in the middle of a line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coterie.errors import RunError
from coterie.record.secret_log import SecretLog


def test_entries_come_back_in_order_from_a_file_that_its_owner_alone_may_read(tmp_path: Path) -> None:
    path = tmp_path / "state" / "a.secret"
    before = os.umask(0)
    try:
        log = SecretLog(path)
        assert log.entries() == []
        log.append({"a": 1})
        log.append({"b": [2, "x"]})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert SecretLog(path).entries() == [{"a": 1}, {"b": [2, "x"]}]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_line_that_a_crash_has_cut_is_dropped_and_the_next_one_is_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.secret"
    log = SecretLog(path)
    log.append({"a": 1})
    log.append({"b": 2})
    log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = SecretLog(path)
    assert again.entries() == [{"a": 1}]
    again.append({"c": 3})
    assert SecretLog(path).entries() == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize("damage", [b"{\n", b"7\n", b"\xff\n"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.secret"
    path.write_bytes(damage + b'{"a": 1}\n')
    with pytest.raises(RunError, match=r"a\.secret is damaged"):
        SecretLog(path).entries()


def test_a_disk_that_refuses_is_a_sentence_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.secret"
    log = SecretLog(path)
    log.append({"a": 1})
    real = os.write

    def refuse(file: int, data: bytes) -> int:
        real(file, data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(RunError, match=r"cannot write .*a\.secret: No space left on device"):
        log.append({"b": 2})
    monkeypatch.undo()
    log.append({"c": 3})
    assert SecretLog(path).entries() == [{"a": 1}, {"c": 3}]
