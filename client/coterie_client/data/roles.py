"""Speaking roles of plays as users: rows are character sequences, and the label is the next character."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.experiment.data import RolesData
from coterie.text.names import check_name
from coterie_client.data.paths import DataFile, one_file
from coterie_client.data.pool import Pool


def pool(config: RolesData, data_dir: Path | None, *_rest: object) -> Pool:
    """Rows of int64 (T,); roles in order of their first speech. Test rows lie entirely in the last part of a role's text."""
    file = one_file(config.path, data_dir)
    text = _text(file)
    speeches = {name: said for name, said in speeches_of(text, file.label).items() if len(said) >= config.min_characters}
    if not speeches:
        raise ConfigError(f"{file.label} has no role with {config.min_characters} characters, want at least one: see min_characters")
    symbols = sorted(set(text))
    codes = np.zeros(max(map(ord, symbols)) + 1, np.int64)
    codes[[ord(symbol) for symbol in symbols]] = np.arange(len(symbols))
    texts = {name: codes[np.frombuffer(said.encode("utf-32-le"), np.uint32)] for name, said in speeches.items()}
    whole = np.concatenate(list(texts.values()))
    parts: dict[str, list[tuple[str, int, int]]] = {"train": [], "test": []}
    start = 0
    for name, said in texts.items():
        n_train = len(said) - math.floor(len(said) * config.test_fraction + 0.5)
        if n_train <= config.sequence_length:
            found = f"role {name!r} has {n_train} training characters"
            raise ConfigError(f"{file.label}: {found}, want more than the sequence_length of {config.sequence_length}: see min_characters")
        split = start + n_train
        parts["train"].append((name, start, split))
        parts["test"].append((name, split, start + len(said)))
        start += len(said)
    test = _windows(config, file.label, whole, parts["test"], symbols, None)
    return _windows(config, file.label, whole, parts["train"], symbols, test)


def speeches_of(text: str, where: str) -> Mapping[str, str]:
    """The text of each role: its speeches, joined by newlines."""
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        head, _, speech = block.strip("\n").partition("\n")
        if head.endswith(":") and speech:
            said.setdefault(check_name(head[:-1].strip(), f"{where}, a role"), []).append(speech)
    return {name: "\n".join(speeches) for name, speeches in said.items()}


def _windows(
    config: RolesData, where: str, whole: Indices, spans: list[tuple[str, int, int]], symbols: list[str], test: Pool | None
) -> Pool:
    """The rows that lie inside these spans of the text, including their labels."""
    length = config.sequence_length
    begins = [np.arange(start, end - length, config.stride) for _, start, end in spans]
    ends = np.cumsum([len(mine) for mine in begins])
    users = {name: np.arange(end - len(mine), end) for (name, _, _), mine, end in zip(spans, begins, ends, strict=True)}
    first = np.concatenate(begins)

    def rows(indices: Indices) -> NDArray[Any]:
        taken: NDArray[Any] = whole[first[indices][:, np.newaxis] + np.arange(length)]
        return taken

    target = whole[first + length].astype(np.float64)
    return Pool(where, target, rows, users, class_names=symbols, test=test)


def _text(file: DataFile) -> str:
    try:
        return file.path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.label} has the byte {error.object[error.start]:#04x} at the wrong place, want UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file.label} cannot be read ({error.strerror}), want the text of plays") from error
