"""`coterie policy init FILE.csv`: a first policy from the header and the first rows of a table. Its owner decides what stays."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from coterie.errors import ConfigError

_ROWS: Final = 1000  # that are looked at
_FEW: Final = 20  # distinct values: a group, and not a measurement
_LEAST: Final = 8  # rows, before distinct values look like names
_COMMENT = """\
# The policy of the owner of {path}: what an experiment may ask of it. Made by guess from the header and the first rows: read it, and take
# out what nobody is to ask for. A key that is absent allows everything. coterie client --policy FILE, or policy.yaml in the data folder.
"""
_REST = """\
min_rows: 3            # users with fewer training rows do not take part: the sums of one or two rows give them away
# methods: [pdmm]      # that may run; absent: any
# references: []       # that may run beside; absent: any
standardize: true      # sums of each feature travel
pseudonyms: false      # true: users travel as keyed hashes of their names
code: false            # whether an experiment may name code to import here
"""


def policy_text(path: Path) -> str:
    """The policy. ConfigError when the file is no table."""
    header, columns = _columns(path)
    unlike = [name for name, cells in zip(header, columns, strict=True) if _is_identifier(cells)]
    kept = [(name, cells) for name, cells in zip(header, columns, strict=True) if name not in unlike]
    measured = [name for name, cells in kept if _is_measured(cells)]
    grouped = [name for name, cells in kept if name not in measured or len(set(cells)) <= _FEW]
    lines = ["columns:"]
    for key, names, why in (
        ("users", grouped, "text, or few values"),
        ("clusters", grouped, "likewise"),
        ("targets", measured, "numbers"),
        ("features", measured, "numbers; experiments have to list theirs"),
    ):
        lines.append(f"  {key}: {_flow(names)}  # {why}")
    lines += [f"  # in no list, since each row has another value: {_flow(unlike)}"] if unlike else []
    return _COMMENT.format(path=path.name) + "\n".join(lines) + "\n" + _REST


def init_policy(table: Path, output: Path, *, overwrite: bool) -> str:
    """Writes it, and returns what is to be said about it. ConfigError where there is one already."""
    text = policy_text(table)
    try:
        with output.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} is there already, want another --output, or --overwrite") from None
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from error
    return f"a first policy is in {output}: read it, and take out what nobody is to ask for"


def _columns(path: Path) -> tuple[list[str], list[list[str]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            delimiter = max(",;\t|", key=first.count)
            header = next(csv.reader([first], delimiter=delimiter), [])
            rows = [row for row, _ in zip(csv.reader(file, delimiter=delimiter), range(_ROWS), strict=False) if len(row) == len(header)]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise ConfigError(f"{path} is no table in UTF-8: {error}") from None
    if not header or not rows:
        raise ConfigError(f"{path} has {len(header)} columns and {len(rows)} rows, want a header and rows")
    return header, [[row[i].strip() for row in rows] for i in range(len(header))]


def _is_identifier(cells: Sequence[str]) -> bool:
    """Whether each row has a value of its own that is text or a whole number, as names and numbers of people have."""
    if len(cells) < _LEAST or len(set(cells)) < len(cells):
        return False
    return not _is_measured(cells) or all(cell.lstrip("+-").isdecimal() for cell in cells)


def _is_measured(cells: Sequence[str]) -> bool:
    """Whether all cells that are there are numbers."""
    found = [cell for cell in cells if cell]
    return bool(found) and all(map(_is_number, found))


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell.replace(",", ".")))
    except ValueError:
        return False


def _flow(names: Sequence[str]) -> str:
    return yaml.safe_dump(list(names), default_flow_style=True, width=10_000, allow_unicode=True).strip()


__all__ = ["init_policy", "policy_text"]
