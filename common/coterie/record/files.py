"""Files that are written whole or not at all: whoever reads one finds all of it or what was there before, also after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from coterie.errors import RunError
from coterie.findings import Finding


@contextlib.contextmanager
def written_whole(path: Path, noun: str = "", keep: Path | None = None) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends well, and that of `keep` is taken by what was at `path` before.

    RunError "cannot write NOUN PATH: reason" when the disk refuses; half a file would take the space that the next attempt needs, so none
    is left.
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
