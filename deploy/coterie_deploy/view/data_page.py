"""`coterie data`: how an experiment's rows are divided among its users, in numbers; rows themselves are never shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from coterie.experiment.config import Experiment
from coterie.experiment.data import DataConfig, PooledData
from coterie.experiment.features import Feature, named_columns
from coterie_client.data import UserSummary, read_users, summarize_users
from coterie_client.data.hints import likely_identifiers, unlike_sizes
from coterie_client.data.notes import Note
from coterie_client.data.pool import summary
from coterie_deploy.read.feature_lines import feature_lines
from coterie_deploy.read.held_out import held_out_sentence
from coterie_deploy.telemetry.logs import NOTE
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, counted, is_tiny, table

MAX_USERS = 20  # in the picture
MAX_CLASSES = 30  # in the table and the picture
MAX_NAME = 16
_SHADES = {"·": "0", "░": "1/4", "▒": "1/2", "▓": "3/4", "█": "all"}  # up to which share of a user's rows


def print_data(experiment: Experiment, data_dir: Path | None, console: Console) -> None:
    """Tables of the users and their classes. Raises ConfigError for what is wrong with the data."""
    users, features, notes = _read(experiment, data_dir)
    console.print(Text(f"{experiment.name}: {_extent(users)}", style="bold"))
    console.print(Text(_origin(experiment.data)))
    if sentence := held_out_sentence(experiment.data):
        console.print(Text(sentence))
    for line in feature_lines(features, console.width):
        print(line, file=console.file)
    for note in notes:
        console.print(Text(printable(f"{NOTE}{note.sentence}"), style="yellow"))
    console.print()
    labels = _labels(users)
    console.print(_spread(users, labels, console))
    if labels is None:
        return
    classes = sorted({label for mine in labels for label in mine})
    if len(classes) <= MAX_CLASSES:
        console.print()
        console.print(_class_table(labels, classes))
    if lines := _picture(users, labels, classes, console.width):
        console.print()
        console.print(Text("Classes by user", style="bold"))
        console.print(Text("of the user's rows: " + " ".join(f"{shade} {share}" for shade, share in _SHADES.items())))
    for line in lines:
        print(printable(line), file=console.file)  # not by the console, which would wrap it


def _read(experiment: Experiment, data_dir: Path | None) -> tuple[list[UserSummary], tuple[Feature, ...], Sequence[Note]]:
    """The users in numbers, the features where the data names some, and what is to be known of the data."""
    data, seed = experiment.data, experiment.seed
    if isinstance(data, PooledData) and data.fold is None:  # whose rows need not be read
        return summarize_users(data, seed, data_dir), (), ()
    reading = read_users(data, seed, None, data_dir)
    users = reading.users
    listed = [summary(user.name, user.target, len(user.test_target)) for user in users]
    is_raw = experiment.model is None and not data.standardize
    notes = (*reading.notes, *likely_identifiers(users, named_columns(data)), *(unlike_sizes(users) if is_raw else ()))
    return listed, users[0].schema if users else (), notes


def _extent(users: Sequence[UserSummary]) -> str:
    n_rows, n_test = sum(user.n_rows for user in users), sum(user.n_test for user in users)
    return f"{counted(len(users), 'user')}, {counted(n_rows, 'training row')}, {counted(n_test, 'test row')}"


def _origin(data: DataConfig) -> str:
    partition = getattr(data, "partition", None)
    return f"source {data.source}" + ("" if partition is None else f", divided by {partition.by}")


def _labels(users: Sequence[UserSummary]) -> list[Mapping[float, int]] | None:
    """The labels of each user; None where targets are no classes, or there are none."""
    labels = [user.labels for user in users if user.labels is not None]
    has_classes = len(labels) == len(users) and len({label for mine in labels for label in mine}) > 1
    return labels if has_classes else None


def _spread(users: Sequence[UserSummary], labels: Sequence[Mapping[float, int]] | None, console: Console) -> object:
    """Smallest, quartiles and largest of what users have."""
    measured = [("training rows", [user.n_rows for user in users]), ("test rows", [user.n_test for user in users])]
    if labels is not None:
        measured.append(("classes", [len(mine) for mine in labels]))
    columns = ["a user has", "min", "25 %", "median", "75 %", "max"]
    rows = [[what, *(count(float(value)) for value in np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))] for what, values in measured]
    if is_tiny(console):
        columns = ["", "min", "median", "max"]
        rows = [[what, row[1], row[3], row[5]] for what, row in zip(("rows", "tests", "classes"), rows, strict=False)]
    return table("Users", columns, rows)


def _class_table(labels: Sequence[Mapping[float, int]], classes: Sequence[float]) -> object:
    """Of each class, how many users have it and how many training rows it has."""
    n_rows: Counter[float] = Counter()
    for mine in labels:
        n_rows.update(mine)
    rows = [[f"{label:g}", count(sum(label in mine for mine in labels)), count(n_rows[label])] for label in classes]
    return table("Classes", ["class", "users", "rows"], rows)


def _picture(users: Sequence[UserSummary], labels: Sequence[Mapping[float, int]], classes: Sequence[float], width: int) -> list[str]:
    """A line for each user: which of its training rows have which class. Nothing where a line has no room for it."""
    name_width = min(max(len(user.name) for user in users), MAX_NAME)
    gap = 2 if name_width + 2 * len(classes) <= width else 1
    if len(classes) > MAX_CLASSES or name_width + 1 + gap * len(classes) > width:
        return []
    lines = []
    shown = [f"{label:g}" for label in classes]
    if max(map(len, shown)) < gap:
        lines.append(" " * (name_width + 1) + "".join(label.rjust(gap) for label in shown))
    for user, mine in list(zip(users, labels, strict=True))[:MAX_USERS]:
        shares = [mine.get(label, 0) / user.n_rows for label in classes]
        cells = (list(_SHADES)[math.ceil(4 * share)].rjust(gap) for share in shares)
        lines.append(f"{user.name[:MAX_NAME]:<{name_width}} {''.join(cells)}")
    if len(users) > MAX_USERS:
        lines.append(f"and {counted(len(users) - MAX_USERS, 'more user')}")
    return lines
