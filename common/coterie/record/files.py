"""Atomic files: a reader finds all of a file, or the version before, even after a crash."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from coterie.errors import RunError
from coterie.findings import Finding


@contextlib.contextmanager
def written_whole(path: Path, noun: str = "", keep: Path | None = None) -> Iterator[IO[bytes]]:
    """A file that replaces `path` when the block ends without an error. The previous file moves to `keep`, if given.

    RunError "cannot write NOUN PATH: reason" when the disk refuses. No partial file is left: it would take space from the next attempt.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise RunError(f"cannot write {noun}{' ' if noun else ''}{path}: {error.strerror or error}", Finding("R5")) from error


def private_folder(path: Path) -> None:
    """Makes a folder that its owner alone may enter, since it holds what users have sent or kept. One that is there stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
