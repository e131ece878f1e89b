"""A file of what a process must not forget and nobody else may read: a line of JSON for each entry, on the disk before `append` returns."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.errors import RunError
from coterie.findings import Finding


class SecretLog:
    """The file has mode 0600. A line that a crash has cut is dropped: nothing can have followed from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def entries(self) -> list[dict[str, Any]]:
        """The entries of earlier processes, in order. RunError when the file cannot be read, or is damaged before its last line."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"cannot read {self.path}: {error.strerror or error}", Finding("J5")) from error
        lines = data.split(b"\n")[:-1]  # what follows the last line's end is a line that was cut
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            raise RunError(f"{self.path} is damaged", Finding("J5")) from None
        if not all(isinstance(entry, dict) for entry in found):
            raise RunError(f"{self.path} is damaged", Finding("J5"))
        return found

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes an entry, and returns when the disk has it. RunError when it refuses."""
        try:
            if self._file is None:
                self._file = self._opened()
            data = json.dumps(entry).encode() + b"\n"
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            self.close()  # some of the line may be there, which the next one must not follow
            raise RunError(f"cannot write {self.path}: {error.strerror or error}", Finding("R5")) from error

    def _opened(self) -> int:
        """The file, behind its last whole line."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(file, 0o600)
        whole = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(file, whole)
        os.lseek(file, whole, os.SEEK_SET)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the file itself outlives a power failure
        finally:
            os.close(folder)
        return file

    def remove(self) -> None:
        """Nobody needs the entries any more. Where the disk refuses, the file stays."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
