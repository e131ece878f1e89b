"""Folders of images, one folder for each class. Files are listed first, and opened when their pixels are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.experiment.data import ImagesData
from coterie_client.data.paths import resolve
from coterie_client.data.pictures import Pictures
from coterie_client.data.pool import Pool

_SUFFIXES = (".png", ".jpg", ".jpeg")


def pool(config: ImagesData, data_dir: Path | None) -> Pool:
    """Rows of uint8 (channels, height, width). A label is the index of the class in the sorted class names."""
    classes = _classes(config.path, data_dir)
    train = _listed(config.path, classes, data_dir)
    test = None
    if config.test_path is not None:
        for name in _classes(config.test_path, data_dir):
            if name not in classes:
                raise ConfigError(f"image folder {config.test_path!r} has the class {name!r}, want classes of {config.path!r}")
        test = _pool(config, config.test_path, classes, _listed(config.test_path, classes, data_dir), None)
    return _pool(config, config.path, classes, train, test)


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
    """Sorted names of the subfolders."""
    folder = resolve(path, data_dir)
    if not folder.is_dir():
        raise ConfigError(f"image folder {path!r} is missing or no folder, want a folder of classes")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ConfigError(f"image folder {path!r} has 0 folders in it, want one for each class")
    return classes


def _listed(path: str, classes: list[str], data_dir: Path | None) -> list[tuple[int, str, Path]]:
    """Label, name and path of each image, sorted by class and name."""
    files = []
    for label, name in enumerate(classes):
        folder = resolve(Path(path) / name, data_dir)
        images = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in _SUFFIXES) if folder.is_dir() else []
        if not images:
            raise ConfigError(f"image folder {path!r}: class {name!r} has 0 images, want at least one .png or .jpg")
        files += [(label, f"{name}/{image}", resolve(Path(path) / name / image, data_dir)) for image in images]
    return files
