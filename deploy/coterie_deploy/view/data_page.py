"""`coterie data`: how an experiment's rows are divided among its users, in numbers. It never shows rows."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie.experiment.config import Experiment
from coterie.experiment.data import PooledData
from coterie.experiment.features import Feature, named_columns
from coterie_client.data import UserSummary, read_users, summarize_users
from coterie_client.data.hints import likely_identifiers, unlike_sizes
from coterie_client.data.pool import summary
from coterie_client.data.users import Note
from coterie_deploy.read.sentences import feature_lines, held_out_sentence
from coterie_deploy.telemetry.logs import NOTE
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, counted, is_tiny, say, say_left_out, table

MAX_USERS = 20  # in the picture
MAX_CLASSES = 30  # in the table and the picture
MAX_NAME = 16
_SHADES = {"·": "0", "░": "1/4", "▒": "1/2", "▓": "3/4", "█": "all"}  # up to which share of a user's rows


def print_data(experiment: Experiment, data_dir: Path | None, console: Console) -> None:
    """Tables of the users and their classes. Raises ConfigError for what is wrong with the data."""
    users, features, notes = _read(experiment, data_dir)
    n_rows, n_test = sum(user.n_rows for user in users), sum(user.n_test for user in users)
    rows = f"{counted(n_rows, 'training row')}, {counted(n_test, 'test row')}"
    say(console, f"{experiment.name}: {counted(len(users), 'user')}, {rows}", style="bold")
    partition = getattr(experiment.data, "partition", None)
    origin = f"source {experiment.data.source}" + ("" if partition is None else f", divided by {partition.by}")
    say(console, origin, held_out_sentence(experiment.data))
    for line in feature_lines(features, console.width):
        print(line, file=console.file)
    say(console, *(f"{NOTE}{note.sentence}" for note in notes), style="yellow")
    console.print()
    labels = _labels(users)
    console.print(_spread(users, labels, console))
    say_left_out(console, ["25 %", "75 %"] if is_tiny(console) else [])
    if labels is None:
        return
    classes = sorted({label for mine in labels for label in mine})
    if len(classes) <= MAX_CLASSES:
        console.print()
        console.print(_class_table(labels, classes))
    if lines := _picture(users, labels, classes, console.width):
        console.print()
        say(console, "Classes by user", style="bold")
        say(console, "of the user's rows: " + " ".join(f"{shade} {share}" for shade, share in _SHADES.items()))
    for line in lines:
        print(printable(line), file=console.file)  # not by the console, which would wrap it


def _read(experiment: Experiment, data_dir: Path | None) -> tuple[list[UserSummary], tuple[Feature, ...], Sequence[Note]]:
    data, seed = experiment.data, experiment.seed
    if isinstance(data, PooledData) and data.fold is None:  # whose rows need not be read
        return summarize_users(data, seed, data_dir), (), ()
    reading = read_users(data, seed, None, data_dir)
    users = reading.users
    listed = [summary(user.name, user.target, len(user.test_target)) for user in users]
    is_raw = experiment.model is None and not data.standardize
    notes = (*reading.notes, *likely_identifiers(users, named_columns(data)), *(unlike_sizes(users) if is_raw else ()))
    return listed, users[0].schema if users else (), notes


def _labels(users: Sequence[UserSummary]) -> list[Mapping[float, int]] | None:
    """The labels of each user; None if targets are no classes, or there are none."""
    labels = [user.labels for user in users if user.labels is not None]
    has_classes = len(labels) == len(users) and len({label for mine in labels for label in mine}) > 1
    return labels if has_classes else None


def _spread(users: Sequence[UserSummary], labels: Sequence[Mapping[float, int]] | None, console: Console) -> object:
    """Minimum, quartiles and maximum of the users' numbers."""
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
    having = [[mine[label] for mine in labels if label in mine] for label in classes]
    rows = [[f"{label:g}", count(len(numbers)), count(sum(numbers))] for label, numbers in zip(classes, having, strict=True)]
    return table("Classes", ["class", "users", "rows"], rows)


def _picture(users: Sequence[UserSummary], labels: Sequence[Mapping[float, int]], classes: Sequence[float], width: int) -> list[str]:
    """A line for each user: the share of each class in its training rows. Empty if lines are too short."""
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
