"""Reads NumPy archives (.npz) as streams: only the requested rows, however large the array. Pickled objects are refused."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.findings import Finding
from coterie_client.data.paths import DataFile

_DAMAGE = (OSError, ValueError, EOFError, SyntaxError, zipfile.BadZipFile, zlib.error, NotImplementedError)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_MOST_ROWS = 4096  # read at once


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool


@dataclass(frozen=True)
class Archive:
    """The arrays of one file. Raises ConfigError for any damage, naming file and array."""

    file: DataFile

    @property
    def label(self) -> str:
        """The name of the file in messages."""
        return self.file.label

    def header(self, name: str) -> Header:
        with self._opened() as archive:
            return self._header(archive, name)[1]

    def read(self, name: str) -> NDArray[Any]:
        with self._opened() as archive, self._member(archive, name) as data, self._array_damage(name):
            return np.lib.format.read_array(data, allow_pickle=False)

    def rows(self, name: str, rows: Indices) -> NDArray[Any]:
        """Some rows of an array, (len(rows), ...), in the requested order."""
        with self._opened() as archive:
            start, header = self._header(archive, name)
            if header.is_fortran or len(header.shape) == 1:
                return self.read(name)[rows]
            width = int(np.prod(header.shape[1:], dtype=np.int64)) * header.dtype.itemsize
            with self._member(archive, name) as data, self._array_damage(name):
                return take(data, start, width, rows).view(header.dtype).reshape(len(rows), *header.shape[1:])

    def pieces(self, name: str, starts: Indices, ends: Indices) -> Iterator[tuple[int, bytes]]:
        """(i, bytes starts[i] to ends[i]) of an array of bytes (total,), in file order."""
        with self._opened() as archive:
            start, header = self._header(archive, name)
            if header.dtype != np.uint8 or len(header.shape) != 1:
                raise ConfigError(
                    f"{self.label}: array {name!r} is {header.dtype} {header.shape}, want bytes: uint8 (total,)",
                    Finding("N2", role="feature"),
                )
            for place in np.flatnonzero(~((starts >= 0) & (starts < ends) & (ends <= header.shape[0])))[:1]:
                found = f"bytes {starts[place]} to {ends[place]}"
                raise ConfigError(f"{self.label}: a row is {found} of array {name!r}, want some of its {header.shape[0]}")
            with self._member(archive, name) as data:
                for place in np.argsort(starts, kind="stable").tolist():
                    with self._array_damage(name):
                        data.seek(start + int(starts[place]))
                        piece = _exactly(data, int(ends[place] - starts[place]))
                    yield place, piece

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with self._damage(f"{self.label} cannot be read", "an .npz archive of arrays"):
            data = self.file.path.open("rb")
        with data:
            if data.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                raise ConfigError(f"{self.label} is a single array, want an .npz archive of named arrays", Finding("T1"))
            with self._damage(f"{self.label} cannot be read", "an .npz archive of arrays"):
                archive = zipfile.ZipFile(data)
            with archive:
                yield archive

    @contextmanager
    def _member(self, archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
        listed = {member.removesuffix(".npy"): member for member in archive.namelist()}
        if name not in listed:
            raise ConfigError(f"{self.label}: array {name!r} is missing, found {', '.join(map(repr, listed)) or 'none'}", Finding("N1"))
        with self._array_damage(name):
            data = archive.open(listed[name])
        with data:
            yield data

    def _header(self, archive: zipfile.ZipFile, name: str) -> tuple[int, Header]:
        """Offset of the data, and the header."""
        with self._member(archive, name) as data, self._array_damage(name):
            version = np.lib.format.read_magic(data)
            if version not in _HEADERS:
                raise ValueError(f"its format has the version {version}")
            shape, is_fortran, dtype = _HEADERS[version](data)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            return data.tell(), Header(shape, dtype, is_fortran)

    def _array_damage(self, name: str) -> Any:
        return self._damage(f"{self.label}: array {name!r} cannot be read", "numbers or text")

    @contextmanager
    def _damage(self, what: str, wanted: str) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise ConfigError(f"{what} ({getattr(error, 'strerror', None) or error}), want {wanted}", Finding("T1")) from error


def take(data: IO[bytes], start: int, width: int, rows: Indices) -> NDArray[np.uint8]:
    """(len(rows), width) rows of `width` bytes from a file whose first row is at `start`, read forwards. EOFError when it is too short."""
    taken = np.empty((len(rows), width), np.uint8)
    for places, first, n in _runs(rows):
        data.seek(start + first * width)
        taken[places] = np.frombuffer(_exactly(data, n * width), np.uint8).reshape(n, width)
    return taken


def _runs(rows: Indices) -> Iterator[tuple[Indices, int, int]]:
    """Runs of consecutive rows in file order: their places among `rows`, the first row, the length."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-2) != 1)
    for first, last in zip(starts, np.append(starts[1:], len(rows))[: len(starts)], strict=True):
        for begin in range(int(first), int(last), _MOST_ROWS):
            end = min(begin + _MOST_ROWS, int(last))
            yield order[begin:end], int(ordered[begin]), end - begin


def _exactly(data: IO[bytes], n_bytes: int) -> bytes:
    read = data.read(n_bytes)
    if len(read) < n_bytes:
        raise EOFError("it ends too early")
    return read
