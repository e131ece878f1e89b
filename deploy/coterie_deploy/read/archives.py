"""The files of models in a run folder, which may be damaged."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError

# What numpy and zipfile raise for files that are cut or changed; TypeError for a single array.
_DAMAGE = (ValueError, KeyError, TypeError, EOFError, SyntaxError, RuntimeError, zipfile.BadZipFile, zlib.error)


@contextmanager
def arrays_of(path: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    """The arrays of a file .npz, which are read when they are asked for.

    RunError if it cannot be read, is damaged, or has no array of that name.
    """
    try:
        with path.open("rb") as file, np.load(file) as arrays:  # numpy leaves files open that are damaged
            yield arrays
    except OSError as error:
        raise RunError(f"cannot read the models in {path}: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise RunError(f"{path} is damaged, so its models cannot be read: want the file as the run has left it") from error
