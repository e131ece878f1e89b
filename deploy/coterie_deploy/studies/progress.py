"""The display of a series of runs: one bar over all points of all runs in a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie_deploy.terminal.tables import duration
from coterie_deploy.terminal.waiting import repeating
from coterie_deploy.view.progress import DRAWS_PER_S, LINES_EVERY_S, QUIET_S, bars
from coterie_server.run.engine import Progress


class At(NamedTuple):
    """Where a run is."""

    stage: str
    number: int  # of the stage
    n_stages: int
    round: int
    part: float  # how much of the stage is over, 0 to 1

    @classmethod
    def of(cls, progress: Progress) -> "At":
        return cls(progress.stage.name, progress.number, progress.n_stages, progress.round, progress.part)


class SeriesDisplay:
    """The progress of a series whose runs are made one after another or side by side. Each run counts as `n_points`."""

    def __init__(self, names: Sequence[str], n_points: int = 1) -> None:
        self.names, self.n_points = names, n_points
        self.number = 0  # of the run that began last, from 1
        self.under_way: dict[int, At | None] = {}
        self.n_over = self.n_skipped = 0  # all runs that have ended, and those that had before
        self._began = time.monotonic()

    def skip(self, number: int) -> None:
        """This run was finished by an earlier attempt."""
        self.number = number
        self.n_over += 1
        self.n_skipped += 1

    def begin(self, number: int) -> None:
        """A run begins."""
        self.number = number
        self.under_way[number] = None

    def __call__(self, progress: Progress) -> None:
        """The only run under way has made a round."""
        self.has_come(self.number, At.of(progress))

    def has_come(self, number: int, at: At) -> None:
        """A run has made a round."""
        self.under_way[number] = at

    def end(self, number: int) -> None:
        """A run has ended."""
        self.under_way.pop(number, None)
        self.n_over += 1

    @property
    def total(self) -> int:
        return len(self.names) * self.n_points

    def points(self, at: At | None) -> float:
        """How many points of a run are done."""
        return 0.0 if at is None else self.n_points * (at.number + at.part) / at.n_stages

    @property
    def done(self) -> float:
        """The number of points that are done, with parts of those under way."""
        return self.n_over * self.n_points + sum(map(self.points, list(self.under_way.values())))

    def said(self) -> str:
        """The number of points that are done, and the time that the others will take at the speed so far."""
        done_now = self.done - self.n_skipped * self.n_points
        if done_now < 1:
            return f"{int(self.done)}/{self.total}"
        seconds = (time.monotonic() - self._began) / done_now * (self.total - self.done)
        return f"{int(self.done)}/{self.total}  about {duration(seconds)} left"

    def run(self, number: int) -> str:
        return self.names[max(1, number) - 1]

    def place(self, number: int | None = None) -> str:
        """A run, by default the one that began last, and where it is."""
        number = self.number if number is None else number
        at = self.under_way.get(number)  # another thread may ask, while the next run begins
        return f"{self.run(number)}  {'starting' if at is None else at.stage}"

    def picture(self) -> Table:
        """One bar; with several runs at a time one for each, and one for all."""
        under_way = sorted(self.under_way.items())
        if len(under_way) < 2:
            return bars([(self.place(), self.done, self.total, self.said())])
        each = [(self.place(number), self.points(at), self.n_points, "") for number, at in under_way]
        return bars([*each, ("all", self.done, self.total, self.said())])


class _Lines(SeriesDisplay):
    """A line for each run, and every few seconds."""

    def __init__(self, console: Console, names: Sequence[str], n_points: int) -> None:
        super().__init__(names, n_points)
        self._console = console
        self._printed_at: dict[int, float] = {}  # by run

    def skip(self, number: int) -> None:
        super().skip(number)
        self._print(number, f"{self.run(number)} was finished before")

    def begin(self, number: int) -> None:
        super().begin(number)
        self._print(number, self.run(number) if self.n_points == 1 else f"{self.run(number)}: {self.n_points} points")

    def has_come(self, number: int, at: At) -> None:
        super().has_come(number, at)
        if self._is_silent(number, LINES_EVERY_S):
            self._print(number, f"{self.place(number)}: {self.said()}")

    def within_a_round(self) -> None:
        """Call it every `LINES_EVERY_S`: a round that takes long is not silent."""
        for number, at in list(self.under_way.items()):
            if self._is_silent(number, QUIET_S):
                done = "no round has ended yet" if at is None else f"round {at.round} has ended, and none since"
                self._print(number, f"{self.place(number)}: {self.said()}, {done}")

    def _is_silent(self, number: int, seconds: float) -> bool:
        return time.monotonic() - self._printed_at.get(number, self._began) > seconds

    def _print(self, number: int, line: str) -> None:
        self._printed_at[number] = time.monotonic()
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
        lines = _Lines(console, names, n_points)
        with repeating(lines.within_a_round, LINES_EVERY_S, LINES_EVERY_S):
            yield lines
