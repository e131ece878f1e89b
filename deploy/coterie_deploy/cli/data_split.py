"""`coterie data EXPERIMENT --split HOSTS DIR`: a table becomes a folder for each host, with the rows of its users alone.

Hosts and their users are those of `coterie compose`, whose `--private-data` takes DIR.
"""

import contextlib
import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.columns import Dialect
from coterie.experiment.tables import CsvData
from coterie.text.names import normal
from coterie_client.data.paths import DataFile, one_file
from coterie_client.data.tables.csv_table import lines_of
from coterie_deploy.containers.members import Asked, planned
from coterie_deploy.read.shipped import load
from coterie_deploy.terminal.tables import counted


def split(experiment: str, overrides: Sequence[str], seed: int | None, data: Path | None, n_hosts: int, target: Path) -> list[str]:
    """Writes the folders; a sentence for each. ConfigError for data that is no CSV file of several users, and for files that exist."""
    if n_hosts < 1:
        raise ConfigError(f"--split is for {n_hosts} hosts, want 1 or more")
    source = load(experiment, overrides, seed=seed).data
    if not isinstance(source, CsvData) or not isinstance(source.user_column, str):
        found = f"data.source is {source.source!r}" if not isinstance(source, CsvData) else f"data.user_column is {source.user_column!r}"
        raise ConfigError(f"{found}, want csv with one user_column to split (files of one user each are split by copying them)")
    plan = planned(Asked(experiment, overrides, seed, hosts=n_hosts, data=data or Path()))
    owners = {user: host.name for host in plan.hosts for user in host.users}
    counts = dict.fromkeys((host.name for host in plan.hosts), 0)
    _deal(one_file(source.path, data), Path(source.path), source.user_column, source.csv, owners, target, counts)
    n_users = {host.name: len(host.users) for host in plan.hosts}
    return [f"{target / name}: {counted(n_users[name], 'user')}, {counted(count, 'row')}" for name, count in counts.items()]


def _deal(
    file: DataFile, path: Path, column: str, dialect: Dialect, owners: Mapping[str, str], target: Path, counts: dict[str, int]
) -> None:
    """Each row goes to the file of its user's host, which has the header too."""
    lines = lines_of(file, dialect)
    header = next(lines)[1] if dialect.names is None else None
    names = [normal(name) for name in header] if header is not None else list(dialect.names or ())
    if column not in names:
        raise ConfigError(f"{file.label}: column {column!r} is missing, found {', '.join(map(repr, names))}")
    place = names.index(column)
    with contextlib.ExitStack() as stack:
        writers: dict[str, Any] = {}
        for host in counts:
            writers[host] = _writer(stack, target / host / path, dialect)
            if header is not None:
                writers[host].writerow(header)
        for number, cells in lines:
            owner = owners.get(normal(cells[place].strip())) if len(cells) == len(names) else None
            if owner is None:
                raise ConfigError(f"{file.label} line {number} is of no user of the experiment, want {column!r} to name one")
            writers[owner].writerow(cells)
            counts[owner] += 1


def _writer(stack: contextlib.ExitStack, path: Path, dialect: Dialect) -> Any:
    quoting: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if dialect.quote is None else {"quotechar": dialect.quote}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened: Any = gzip.open if path.suffix == ".gz" else open
        text = stack.enter_context(opened(path, "xt", encoding=dialect.encoding, newline=""))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    return csv.writer(text, delimiter=dialect.delimiter, lineterminator="\n", **quoting)
