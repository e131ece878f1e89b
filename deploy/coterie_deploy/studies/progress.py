"""What a series of runs shows while it goes on: one bar over all points of all runs in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie_deploy.terminal.tables import duration
from coterie_deploy.view.progress import DRAWS_PER_S, LINES_EVERY_S, bars
from coterie_server.run.engine import Progress


class SeriesDisplay:
    """The state that is shown; an observer of each run in turn. Each has `n_points` stages that count, or counts as one."""

    def __init__(self, names: Sequence[str], n_points: int = 1) -> None:
        self.names, self.n_points = names, n_points
        self.number = 0  # of the run under way, from 1
        self.latest: Progress | None = None
        self.n_skipped = 0  # runs that were finished before
        self._began = time.monotonic()

    def skip(self, number: int) -> None:
        """A run that an earlier attempt has finished."""
        self.number, self.latest = number, None
        self.n_skipped += 1

    def begin(self, number: int) -> None:
        """The run that comes next."""
        self.number, self.latest = number, None

    def __call__(self, progress: Progress) -> None:
        """A round has been made."""
        self.latest = progress

    @property
    def total(self) -> int:
        """All points."""
        return len(self.names) * self.n_points

    @property
    def done(self) -> float:
        """How many points are done; of the one under way a part."""
        before = max(0, self.number - 1) * self.n_points
        latest = self.latest
        if latest is None:
            return float(before + (self.n_points if 0 < self.n_skipped == self.number else 0))
        return before + self.n_points * (latest.number + latest.part) / latest.n_stages

    def said(self) -> str:
        """How many points are done, and how long the others will take at the speed so far."""
        done_now = self.done - self.n_skipped * self.n_points
        if done_now < 1:
            return f"{int(self.done)}/{self.total}"
        seconds = (time.monotonic() - self._began) / done_now * (self.total - self.done)
        return f"{int(self.done)}/{self.total}  about {duration(seconds)} left"

    def run(self) -> str:
        """The run under way, by its name."""
        return self.names[max(1, self.number) - 1]

    def place(self) -> str:
        """The run under way and its stage."""
        return f"{self.run()}  {'starting' if self.latest is None else self.latest.stage.name}"

    def picture(self) -> Table:
        """What a terminal shows."""
        return bars([(self.place(), self.done, self.total, self.said())])


class _Lines(SeriesDisplay):
    """A line for each run, and every few seconds."""

    def __init__(self, console: Console, names: Sequence[str], n_points: int) -> None:
        super().__init__(names, n_points)
        self._console = console
        self._printed_at = time.monotonic()

    def skip(self, number: int) -> None:
        super().skip(number)
        self._print(f"{self.run()} was finished before")

    def begin(self, number: int) -> None:
        super().begin(number)
        self._print(self.run() if self.n_points == 1 else f"{self.run()}: {self.n_points} points")

    def __call__(self, progress: Progress) -> None:
        super().__call__(progress)
        if time.monotonic() - self._printed_at > LINES_EVERY_S:
            self._print(f"{self.place()}: {self.said()}")

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print(line, file=self._console.file, flush=True)


@contextlib.contextmanager
def series_display(console: Console, names: Sequence[str], n_points: int = 1, *, quiet: bool) -> Iterator[SeriesDisplay]:
    """Shows a series while the block runs, on a console of standard error."""
    if quiet:
        yield SeriesDisplay(names, n_points)
    elif console.is_terminal:
        shown = SeriesDisplay(names, n_points)
        with Live(get_renderable=shown.picture, console=console, refresh_per_second=DRAWS_PER_S, transient=True):
            yield shown
    else:
        yield _Lines(console, names, n_points)
