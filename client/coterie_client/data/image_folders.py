"""Folders of images, one for each class, of all users or of each. Files are listed first, and opened when their pixels are needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.experiment.labelled import ImagesData
from coterie.experiment.settings import USER
from coterie_client.data.paths import resolve, user_folders
from coterie_client.data.pictures import Pictures
from coterie_client.data.pool import Pool

_SUFFIXES = (".png", ".jpg", ".jpeg")


def pool(config: ImagesData, data_dir: Path | None, *_rest: object) -> Pool:
    """Rows of uint8 (channels, height, width). A label is the index of the class in `classes`, or else in the sorted class names."""
    classes = _classes(config.path, data_dir) if config.classes is None else list(config.classes)
    test = None if config.test_path is None else _read(config, config.test_path, classes, data_dir, None)
    return _read(config, config.path, classes, data_dir, test)


def _read(config: ImagesData, path: str, classes: list[str], data_dir: Path | None, test: Pool | None) -> Pool:
    if USER not in path:
        _known(path, classes, data_dir)
        return _pool(config, path, classes, _listed(path, classes, classes, data_dir), test)
    files: list[tuple[int, str, Path]] = []
    users: dict[str, Indices] = {}
    for folder in user_folders(path, data_dir):
        before = len(files)
        files += _listed(folder.label, _known(folder.label, classes, data_dir), classes, data_dir, f"{folder.user}/")
        users[str(folder.user)] = np.arange(before, len(files))
    return replace(_pool(config, path, classes, files, test), users=users)


def _known(path: str, classes: list[str], data_dir: Path | None) -> list[str]:
    """The classes of a folder in the order of labels. ConfigError for one that is not among `classes`."""
    found = _classes(path, data_dir)
    for name in found:
        if name not in classes:
            raise ConfigError(f"image folder {path!r} has the class {name!r}, want only {', '.join(map(repr, classes))}")
    return [name for name in classes if name in found]


def _pool(config: ImagesData, where: str, classes: list[str], files: list[tuple[int, str, Path]], test: Pool | None) -> Pool:
    def rows(indices: Indices) -> NDArray[Any]:
        pictures = Pictures(where, config.channels, config.resize)
        _, called, place = files[0]
        pictures.begin(place, called, len(indices))
        for row, index in enumerate(indices):
            _, called, place = files[index]
            pictures.put(row, place, called)
        return pictures.block

    return Pool(where, np.array([label for label, _, _ in files], np.float64), rows, class_names=classes, test=test)


def _classes(path: str, data_dir: Path | None) -> list[str]:
    folder = resolve(path, data_dir)
    if not folder.is_dir():
        raise ConfigError(f"image folder {path!r} is missing or no folder, want a folder of classes")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ConfigError(f"image folder {path!r} has 0 folders in it, want one for each class")
    return classes


def _listed(path: str, named: list[str], classes: list[str], data_dir: Path | None, before: str = "") -> list[tuple[int, str, Path]]:
    files = []
    for name in named:
        folder = resolve(Path(path) / name, data_dir)
        images = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in _SUFFIXES) if folder.is_dir() else []
        if not images:
            raise ConfigError(f"image folder {path!r}: class {name!r} has 0 images, want at least one .png or .jpg")
        files += [(classes.index(name), f"{before}{name}/{image}", resolve(Path(path) / name / image, data_dir)) for image in images]
    return files
