"""Finds the files of a configured path, and keeps reads inside the client's data folder.

The configuration may come from the coordinator, so its paths are not trusted. A client with a data folder reads only files whose resolved
path lies inside it. "..", absolute paths and symbolic links do not help.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coterie.errors import ConfigError, default_finding
from coterie.experiment.settings import USER
from coterie.findings import Finding
from coterie.text.names import check_name, natural_key

# Files of the client itself, which may lie beside its data: keys, lists of true names, the policy, accepted consents.
_OWN = re.compile(r"policy\.(yaml|key)|accepted\.json|.*pseudonyms.*\.(key|json)")

_Kind = Literal["file", "folder"]


@dataclass(frozen=True)
class DataFile:
    """One file to read, or the folder of one user. Messages use `label`: the configured path, without the client's own folders."""

    path: Path
    label: str
    user: str | None  # all rows are this user's; None: a column names the users


@default_finding(Finding("D2", place="data.path"))
def resolve(path: str | Path, data_dir: Path | None) -> Path:
    """The resolved path. Raises ConfigError when it lies outside `data_dir`, or when `data_dir` is not a folder.

    Without `data_dir`, relative paths start at the current working directory and any path is allowed.
    """
    if data_dir is None:
        return _real(Path(path), path)
    root = _real(Path(data_dir), data_dir)
    if not root.is_dir():
        raise ConfigError(f"data folder {str(data_dir)!r} is {_what(root)}, want an existing folder")
    place = _real(root / path, path)
    if not place.is_relative_to(root):
        raise ConfigError(f"data path {str(path)!r} leaves the data folder, want a path inside it")
    if _OWN.fullmatch(place.name):
        raise ConfigError(f"data path {str(path)!r} is a file of the client itself, want one with data")
    return place


@default_finding(Finding("D2", place="data.path"))
def one_file(path: str, data_dir: Path | None) -> DataFile:
    """The regular file at `path`; ConfigError if there is none."""
    place = resolve(path, data_dir)
    if not place.is_file():
        raise ConfigError(f"data file {path!r} is {_what(place)}, want a readable file")
    return DataFile(place, path, user=None)


@default_finding(Finding("D2", place="data.path"))
def data_files(path: str, data_dir: Path | None, suffixes: tuple[str, ...]) -> list[DataFile]:
    """The files of `path`; files of single users come in natural order of user names.

    A folder means all its files that end in one of `suffixes`, each named after its user. Other files and hidden files are skipped.
    """
    if USER in path:
        return _in_order(path, _matches(path, data_dir))
    if not resolve(path, data_dir).is_dir():
        return [one_file(path, data_dir)]
    found: dict[str, DataFile] = {}
    for suffix in suffixes:
        for file in _matches(str(Path(path) / f"{USER}{suffix}"), data_dir):
            name = str(file.user)
            if name in found:
                raise ConfigError(f"user {name!r} has the files {found[name].label!r} and {file.label!r}, want one")
            found[name] = file
    return _in_order(path, list(found.values()))


@default_finding(Finding("D2", place="data.path"))
def user_folders(path: str, data_dir: Path | None) -> list[DataFile]:
    """The folders that match a pattern with a place for the user, in natural order of user names."""
    return _in_order(path, _matches(path, data_dir, "folder"), "folder")


def _in_order(path: str, files: list[DataFile], what: _Kind = "file") -> list[DataFile]:
    if not files:
        raise ConfigError(f"data path {path!r} matches 0 {what}s, want one {what} per user")
    return sorted(files, key=lambda file: natural_key(str(file.user)))


def _matches(pattern: str, data_dir: Path | None, what: _Kind = "file") -> list[DataFile]:
    parts = Path(pattern).parts
    place = next(index for index, part in enumerate(parts) if USER in part)
    folder, after = Path(*parts[:place]), parts[place + 1 :]
    prefix, suffix = parts[place].split(USER)
    real_folder = resolve(folder, data_dir)
    if not real_folder.is_dir():
        raise ConfigError(f"data folder {str(folder)!r} is {_what(real_folder)}, want a folder with one {what} per user")
    files = []
    for entry in real_folder.iterdir():
        name = entry.name[len(prefix) : len(entry.name) - len(suffix)]
        is_hidden = not prefix and entry.name.startswith(".")
        if entry.name != f"{prefix}{name}{suffix}" or not name or is_hidden:
            continue
        label = str(Path(folder, entry.name, *after))
        real = resolve(label, data_dir)
        if real.is_dir() if what == "folder" else real.is_file():
            files.append(DataFile(real, label, check_name(name, label)))
    return files


def _real(place: Path, called: str | Path) -> Path:
    try:
        real = place.resolve()
        real.exists()
    except (OSError, RuntimeError) as error:  # a loop of symbolic links, a name too long
        raise ConfigError(f"data path {str(called)!r} cannot be followed, want the path of a file or folder") from error
    return real


def _what(place: Path) -> str:
    if not place.exists():
        return "missing"
    return "a folder" if place.is_dir() else "not a regular file"
