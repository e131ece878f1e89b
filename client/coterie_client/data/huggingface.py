"""Data sets of the Hugging Face hub, or local ones in its formats. They need `datasets`, which is imported on first use.

From version 4 on, `datasets` runs no code of a data set. Images are decoded here row by row; `datasets` only stores them.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.data import HuggingfaceData
from coterie.extras import needed
from coterie.findings import Finding
from coterie.text.names import check_name
from coterie_client.data.paths import resolve
from coterie_client.data.pictures import Pictures
from coterie_client.data.pool import Pool
from coterie_client.data.tables.heads import rows_by_user
from coterie_client.data.words import symbols_of

_SAVED = ("dataset_dict.json", "state.json")  # written by `save_to_disk`


def pool(config: HuggingfaceData, data_dir: Path | None, *_rest: object) -> Pool:
    """Rows of uint8 (channels, height, width), or of int64 (length,)."""
    train = _split(config, config.split, data_dir)
    class_names = _class_names(config, train)
    test = None
    if config.test_split is not None:
        test = _pool(config, config.test_split, _split(config, config.test_split, data_dir), class_names, data_dir, None)
    return _pool(config, config.split, train, class_names, data_dir, test)


def _pool(config: HuggingfaceData, split: str, table: Any, class_names: list[str], data_dir: Path | None, test: Pool | None) -> Pool:
    where = f"{_called(config)}, split {split!r}"
    if not len(table):
        raise ConfigError(f"{where} has 0 rows, want at least one")
    users = None
    if config.user is not None and config.user in table.column_names:
        names = np.array([str(name) for name in table[config.user][:]])
        users = rows_by_user(names)
        for name, mine in users.items():
            check_name(name, f"{where} row {mine[0] + 1}, column {config.user!r}")

    def rows(indices: Indices) -> NDArray[Any]:
        if config.text is not None:
            texts = [str(text) for text in table.select(indices)[config.text][:]]
            return symbols_of(texts, config.symbols, config.length)
        return _images(config, where, table, indices, data_dir)

    return Pool(where, _labels(config, where, table, class_names), rows, users, class_names=class_names, test=test)


def _called(config: HuggingfaceData) -> str:
    return f"data set {config.name or config.path!r}"


def _split(config: HuggingfaceData, split: str, data_dir: Path | None) -> Any:
    """One split; its images are not decoded."""
    datasets = _datasets(config)
    try:
        if config.name is not None:
            if Path(config.name).exists():
                raise ConfigError(f"name is {config.name!r}, which is also a file or folder here, want path: for what is local")
            table = datasets.load_dataset(config.name, config.subset, split=split, revision=config.revision)
        else:
            folder = resolve(str(config.path), data_dir)
            if not folder.is_dir():
                raise ConfigError(f"data folder {config.path!r} is missing or no folder, want one that `datasets` reads")
            if any((folder / name).is_file() for name in _SAVED):
                table = datasets.load_from_disk(str(folder))
                table = table[split] if isinstance(table, dict) else table
            else:
                table = datasets.load_dataset(str(folder), config.subset, split=split)
    except ConfigError:
        raise
    except Exception as error:  # errors of the hub, the network, or the files
        said = re.sub(r"\s+", " ", str(error))[:300] or type(error).__name__
        raise ConfigError(f"{_called(config)}, split {split!r} cannot be loaded ({said}), want a data set with this split") from error
    for column in (config.image, config.text, config.label, config.user if split == config.split else None):
        if column is not None and column not in table.column_names:
            raise ConfigError(f"{_called(config)}: column {column!r} is missing, found {', '.join(map(repr, table.column_names))}")
    if config.image is not None:
        try:
            return table.cast_column(config.image, datasets.Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            said = f"{_called(config)}: column {config.image!r} has no images ({table.features[config.image]}), want some"
            raise ConfigError(said) from error
    return table


def _class_names(config: HuggingfaceData, table: Any) -> list[str]:
    """The label names of the data set. For text labels: their sorted values in the training split."""
    names = getattr(table.features[config.label], "names", None)
    if names is not None:
        return list(names)
    values = table[config.label][:]
    return sorted(set(values)) if all(isinstance(value, str) for value in values) else []


def _labels(config: HuggingfaceData, where: str, table: Any, class_names: list[str]) -> Array:
    labels = np.empty(len(table))
    for row, value in enumerate(table[config.label][:]):
        if isinstance(value, str) and value in class_names:
            labels[row] = class_names.index(value)
        elif isinstance(value, int | float):
            labels[row] = value
        else:
            raise ConfigError(f"{where} row {row + 1}: the label is {value!r}, want a whole number, or text that the training rows have")
    return labels


def _images(config: HuggingfaceData, where: str, table: Any, indices: Indices, data_dir: Path | None) -> NDArray[np.uint8]:
    pictures = Pictures(where, config.channels, config.resize)
    pictures.begin(_file(config, where, table[0][config.image], 0, data_dir), "row 1", len(indices))
    for place, row in enumerate(indices.tolist()):
        pictures.put(place, _file(config, where, table[row][config.image], row, data_dir), f"row {row + 1}")
    return pictures.block


def _file(config: HuggingfaceData, where: str, image: Any, row: int, data_dir: Path | None) -> bytes | Path:
    """An image as stored: its bytes, or the path of its file. A local data set's files must lie in the data folder."""
    if image and image.get("bytes"):
        return bytes(image["bytes"])
    if image and image.get("path"):
        return Path(image["path"]) if config.name is not None else resolve(image["path"], data_dir)
    raise ConfigError(f"{where} row {row + 1} has no image, want one")


def _datasets(config: HuggingfaceData) -> Any:
    datasets = needed("datasets", "data", f"{_called(config)} needs datasets", finding=Finding("T21"))  # a heavy one
    datasets.disable_progress_bars()
    return datasets
