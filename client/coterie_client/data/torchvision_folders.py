"""Data sets in torchvision's folder layout: MNIST and relatives as IDX files, CIFAR as Python pickles or in the binary version.

It needs neither torch nor torchvision. A pickle can run any code, so CIFAR's are read by an unpickler that accepts only arrays.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.experiment.data import TorchvisionData
from coterie_client.data.archive import take
from coterie_client.data.paths import DataFile, one_file, resolve
from coterie_client.data.pool import Pool

Bytes = NDArray[np.uint8]

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_BYTES = math.prod(_CIFAR_SHAPE)


@dataclass(frozen=True)
class _Cifar:
    folder: str
    binary_folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    key: str  # of the labels in a pickle
    n_label_bytes: int  # before the pixels of a row of the binary version; the last one is the label


_CIFARS = {
    "CIFAR10": _Cifar(
        "cifar-10-batches-py", "cifar-10-batches-bin", tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",), "labels", 1
    ),
    "CIFAR100": _Cifar("cifar-100-python", "cifar-100-binary", ("train",), ("test",), "fine_labels", 2),
}


def pool(config: TorchvisionData, data_dir: Path | None, *_rest: object) -> Pool:
    """Rows of uint8 (1, 28, 28) or (3, 32, 32), with torchvision's test rows."""
    train, test = (_parts(config, data_dir, is_test=is_test) for is_test in (False, True))
    return _joined(config.path, train, _joined(config.path, test, None))


def _joined(where: str, parts: Sequence[_Part], test: Pool | None) -> Pool:
    labels = [part.labels() for part in parts]
    ends = np.cumsum([len(mine) for mine in labels])

    def rows(indices: Indices) -> NDArray[Any]:
        of_part = np.searchsorted(ends, indices, side="right")
        taken = [
            (at, part.pixels(indices[at] - (ends[k] - len(labels[k]))))
            for k, part in enumerate(parts)
            if len(at := np.flatnonzero(of_part == k))
        ]
        block = np.empty((len(indices), *(taken[0][1].shape[1:] if taken else ())), np.uint8)
        for at, pixels in taken:
            block[at] = pixels
        return block

    return Pool(where, np.concatenate(labels).astype(np.float64), rows, test=test)


def _parts(config: TorchvisionData, data_dir: Path | None, *, is_test: bool) -> list[_Part]:
    cifar = _CIFARS.get(config.dataset)
    if cifar is None:
        return [_idx(config, "t10k" if is_test else "train", data_dir)]
    root, names = Path(config.path), cifar.test if is_test else cifar.train
    if resolve(root / cifar.folder, data_dir).is_dir():
        return [_Pickled(one_file(str(root / cifar.folder / name), data_dir), cifar.key) for name in names]
    if resolve(root / cifar.binary_folder, data_dir).is_dir():
        return [_Binary(one_file(str(root / cifar.binary_folder / f"{name}.bin"), data_dir), cifar.n_label_bytes) for name in names]
    said = f"folder {config.path!r} has neither {cifar.folder} nor {cifar.binary_folder}, want the folder given to torchvision as root"
    raise ConfigError(said)


@dataclass(frozen=True)
class _Pickled:
    """A CIFAR batch: a dictionary of pixels (n, 3072) and a list of labels. Each access reads the file again, to save memory."""

    file: DataFile
    key: str

    def labels(self) -> Bytes:
        labels = np.array(self._read(self.key))
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < 256)).all():
            raise ConfigError(f"{self.file.label}: {self.key!r} is no list of labels, want whole numbers 0 to 255")
        return labels.astype(np.uint8)

    def pixels(self, rows: Indices) -> Bytes:
        data = self._read("data")
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (_CIFAR_BYTES,) or rows.max() >= len(data):
            raise ConfigError(f"{self.file.label}: 'data' is no array of a row of {_CIFAR_BYTES} bytes for each label, want one")
        return data[rows].reshape(-1, *_CIFAR_SHAPE)

    def _read(self, key: str) -> Any:
        try:
            with self.file.path.open("rb") as data:
                batch = _OnlyArrays(data, encoding="latin1").load()
        except Exception as error:  # a damaged pickle fails in any way
            raise ConfigError(f"{self.file.label} cannot be read ({error}), want a batch of CIFAR") from error
        listed = batch.items() if isinstance(batch, dict) else ()
        entries = {name.decode() if isinstance(name, bytes) else name: value for name, value in listed}
        if key not in entries:
            raise ConfigError(f"{self.file.label} has no {key!r}, want a batch of CIFAR")
        return entries[key]


class _OnlyArrays(pickle.Unpickler):
    """Accepts only the callables of pickled arrays. All of them are compiled code, which a pickle cannot change."""

    _KNOWN: dict[tuple[str, str], Any] = {  # noqa: RUF012 - never changed
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): __import__("_codecs").encode,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Called by `load` for each global name in the pickle."""
        if (module_name, global_name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")
        return self._KNOWN[module_name, global_name]


@dataclass(frozen=True)
class _Binary:
    """Rows of one or two label bytes and 3072 pixels."""

    file: DataFile
    n_label_bytes: int

    def labels(self) -> Bytes:
        with _damage(self.file, "rows of CIFAR"):
            whole = np.memmap(self.file.path, np.uint8, "r").reshape(-1, self.n_label_bytes + _CIFAR_BYTES)
            return np.array(whole[:, self.n_label_bytes - 1])

    def pixels(self, rows: Indices) -> Bytes:
        with _damage(self.file, "rows of CIFAR"), self.file.path.open("rb") as data:
            taken = take(data, 0, self.n_label_bytes + _CIFAR_BYTES, rows)
        return taken[:, self.n_label_bytes :].reshape(-1, *_CIFAR_SHAPE)


@dataclass(frozen=True)
class _Idx:
    """A file of images and a file of labels, plain or gzip."""

    images: DataFile
    labels_file: DataFile

    def labels(self) -> Bytes:
        with _idx_opened(self.labels_file) as data:
            (n,) = _idx_shape(self.labels_file, data, 1)
            labels = np.frombuffer(data.read(n), np.uint8)
        with _idx_opened(self.images) as data:
            n_images, _, _ = _idx_shape(self.images, data, 3)
        if not len(labels) == n == n_images:
            said = f"{self.labels_file.label} has {len(labels)} labels for the {n_images} images of {self.images.label}, want one for each"
            raise ConfigError(said)
        return labels

    def pixels(self, rows: Indices) -> Bytes:
        with _idx_opened(self.images) as data:
            _, height, width = _idx_shape(self.images, data, 3)
            return take(data, data.tell(), height * width, rows).reshape(-1, 1, height, width)


_Part = _Pickled | _Binary | _Idx  # the file, or pair of files, of some rows: labels (n,) and pixels (len(rows), channels, height, width)


def _idx(config: TorchvisionData, prefix: str, data_dir: Path | None) -> _Idx:
    found = []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        places = [Path(config.path) / folder / f"{name}{ending}" for folder in (f"{config.dataset}/raw", ".") for ending in ("", ".gz")]
        files = [place for place in places if resolve(place, data_dir).is_file()]
        if not files:
            raise ConfigError(f"folder {config.path!r} has no {config.dataset}/raw/{name}, want the folder given to torchvision as root")
        found.append(one_file(str(files[0]), data_dir))
    return _Idx(*found)


@contextmanager
def _idx_opened(file: DataFile) -> Iterator[IO[bytes]]:
    opener: Callable[..., Any] = gzip.open if file.path.suffix == ".gz" else open
    with _damage(file, "an IDX file"), opener(file.path, "rb") as data:
        yield data


def _idx_shape(file: DataFile, data: IO[bytes], n_axes: int) -> tuple[int, ...]:
    """Reads the header: two zeros, the type (8: bytes), the number of axes, and the big-endian 32-bit length of each axis."""
    magic = data.read(4)
    if magic != bytes([0, 0, 8, n_axes]):
        said = f"{file.label} begins with the bytes {list(magic)}, want {[0, 0, 8, n_axes]}: an IDX file of bytes with {n_axes} axes"
        raise ConfigError(said)
    return struct.unpack(f">{n_axes}I", data.read(4 * n_axes))


@contextmanager
def _damage(file: DataFile, wanted: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise ConfigError(f"{file.label} cannot be read ({getattr(error, 'strerror', None) or error}), want {wanted}") from error
