"""What `coterie tune` shows while it goes on: one bar over all points of all folds in a terminal, plain lines elsewhere.

Other commands that make several runs show theirs in the place of folds, by their names, each with one point.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coterie_deploy.terminal.tables import duration
from coterie_deploy.view.progress import LINES_EVERY_S
from coterie_server.run.engine import Progress

_DRAWS_PER_S = 6.0


class TuneDisplay:
    """The state that is shown; an observer of each fold's run in turn."""

    def __init__(self, console: Console, n_folds: int, n_points: int, names: Sequence[str] = ()) -> None:
        self.console = console
        self.n_folds, self.n_points = n_folds, n_points
        self._names = names  # of runs that are no folds
        self.fold = 0
        self.latest: Progress | None = None
        self.n_skipped = 0  # folds that were finished before
        self._began = time.monotonic()

    def skip(self, fold: int) -> None:
        """A fold that an earlier attempt has finished."""
        self.fold, self.latest = fold, None
        self.n_skipped += 1

    def begin(self, fold: int) -> None:
        """The fold whose run comes next."""
        self.fold, self.latest = fold, None

    def __call__(self, progress: Progress) -> None:
        """A round has been made."""
        self.latest = progress

    @property
    def done(self) -> float:
        """How many points are done, of n_folds x n_points; of the one under way a part."""
        before = max(0, self.fold - 1) * self.n_points
        latest = self.latest
        if latest is None:
            return float(before + (self.n_points if 0 < self.n_skipped == self.fold else 0))
        return before + self.n_points * (latest.number + _part_of_stage(latest)) / latest.n_stages

    def left(self) -> str:
        """How long it will take at the speed so far; "" while there is none."""
        done_now = self.done - self.n_skipped * self.n_points
        if done_now < 1:
            return ""
        seconds = (time.monotonic() - self._began) / done_now * (self.n_folds * self.n_points - self.done)
        return f"about {duration(seconds)} left"

    def place(self) -> str:
        """Fold and point."""
        return f"{self.run()}  {'starting' if self.latest is None else self.latest.stage.name}"

    def run(self) -> str:
        """The fold, or the run by its name."""
        if self._names:
            number = max(1, self.fold)
            return f"{self._names[number - 1]} ({number}/{self.n_folds})"
        return f"fold {self.fold}/{self.n_folds}"


def _part_of_stage(progress: Progress) -> float:
    """Which part of its stage is over: of the iterations where a method counts them, else of the rounds."""
    if "iteration" in progress.figures:
        return min(1.0, progress.figures["iteration"] / float(progress.stage.config.iterations))
    return min(1.0, progress.round / progress.stage.stop.rounds)


class _Drawing:
    """What the live display draws, each time anew."""

    def __init__(self, display: TuneDisplay) -> None:
        self._display = display

    def __rich__(self) -> Table:
        shown = self._display
        total = shown.n_folds * shown.n_points
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_column(ratio=1, min_width=8)
        grid.add_column(no_wrap=True, justify="right")
        numbers = "  ".join(part for part in (f"{int(shown.done)}/{total}", shown.left()) if part)
        grid.add_row(Text(shown.place(), style="bold"), ProgressBar(total=total, completed=shown.done), Text(numbers))
        return grid


class _Lines(TuneDisplay):
    """A line for each fold, and every few seconds."""

    def __init__(self, console: Console, n_folds: int, n_points: int, names: Sequence[str] = ()) -> None:
        super().__init__(console, n_folds, n_points, names)
        self._printed_at = time.monotonic()

    def skip(self, fold: int) -> None:
        super().skip(fold)
        self._print(f"{self.run()} was finished before")

    def begin(self, fold: int) -> None:
        super().begin(fold)
        self._print(self.run() if self._names else f"{self.run()}: {self.n_points} points")

    def __call__(self, progress: Progress) -> None:
        super().__call__(progress)
        if time.monotonic() - self._printed_at > LINES_EVERY_S:
            done = f"{int(self.done)} {'runs' if self._names else 'points'} done"
            self._print(f"{self.place()}: {', '.join(part for part in (done, self.left()) if part)}")

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print(line, file=self.console.file, flush=True)


@contextlib.contextmanager
def tune_display(console: Console, n_folds: int, n_points: int, *, quiet: bool, names: Sequence[str] = ()) -> Iterator[TuneDisplay]:
    """Shows a tune while the block runs, on a console of standard error."""
    if quiet:
        yield TuneDisplay(console, n_folds, n_points, names)
    elif console.is_terminal:
        shown = TuneDisplay(console, n_folds, n_points, names)
        with Live(_Drawing(shown), console=console, refresh_per_second=_DRAWS_PER_S, transient=True):
            yield shown
    else:
        yield _Lines(console, n_folds, n_points, names)
