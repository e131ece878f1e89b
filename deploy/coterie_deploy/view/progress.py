"""The progress of a run: a live display in a terminal, plain lines elsewhere.

A round costs one assignment: the display draws by its own clock.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coterie.experiment.problem import METRICS
from coterie_deploy.telemetry.logs import Log, LogFormat, LogLevel, on_console
from coterie_deploy.terminal.tables import duration, figure
from coterie_deploy.terminal.waiting import repeating
from coterie_server.run.engine import Progress
from coterie_server.session.hub import Hub

LINES_EVERY_S = 10.0
QUIET_S = 2 * LINES_EVERY_S  # after a line, from which there is one within a round
DRAWS_PER_S = 6.0
_RATE_OVER_S = 3.0


class Display:
    """The progress that is shown; call it after each round."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.latest: Progress | None = None
        self.hub: Hub | None = None
        self._samples: deque[tuple[float, int, int]] = deque()  # (time, stage, round)

    def __call__(self, progress: Progress) -> None:
        self.latest = progress

    def rate(self) -> float:
        """Rounds per second over the last few seconds, 0 while unknown."""
        latest, now = self.latest, time.monotonic()
        if latest is None:
            return 0.0
        samples = self._samples
        samples.append((now, latest.number, latest.round))
        while len(samples) > 2 and (samples[0][1] != latest.number or now - samples[0][0] > _RATE_OVER_S):
            samples.popleft()
        began, stage, first = samples[0]
        return (latest.round - first) / (now - began) if stage == latest.number and now > began else 0.0

    def waiting(self) -> str:
        """What the run waits for before the first round."""
        if self.hub is None:
            return "starting"
        hosts = list(self.hub.roster.hosts.values())
        n_here, n_wanted = sum(host.link is not None for host in hosts), self.hub.rules.hosts
        return f"waiting for {self.hub.rules.noun}s: {n_here} of {n_wanted} here" if n_here < n_wanted else "preparing"

    def picture(self) -> Group:
        latest = self.latest
        if latest is None:
            return Group(Text(self.waiting(), style="dim"))
        rate, limit = self.rate(), latest.stage.stop.rounds
        left = f"  at most {duration((limit - latest.round) / rate)}" if rate > 0 else ""
        grid = bars([(_stage_of(latest), latest.round, limit, f"{latest.round}/{limit}{left}")])
        parts = [*figures_of(latest.figures), rate_said(rate)]
        return Group(grid, Text("  " + "  ".join(parts), no_wrap=True, overflow="ellipsis"))


def figures_of(known: Mapping[str, float]) -> list[str]:
    """Those of objective, residual, loss, metric, distance, epsilon and clusters that a round has."""
    parts = []
    if "objective" in known:
        parts.append(f"objective {figure(known['objective'], 6)}")
    residuals = [known[name] for name in ("primal_residual", "dual_residual") if name in known]
    if residuals:
        parts.append(f"residual {figure(max(residuals), 2)}")
    elif "gradient_norm" in known:
        parts.append(f"gradient {figure(known['gradient_norm'], 2)}")
    if "loss" in known:
        parts.append(f"loss {figure(known['loss'], 4)}")
    parts += [f"{name.replace('_', ' ')} {figure(known[name], 4)}" for name in (*METRICS, "distance") if name in known]
    if "epsilon" in known:
        parts.append(f"epsilon {figure(known['epsilon'], 3)}")
    if "clusters" in known:
        parts.append(f"clusters {known['clusters']:.0f}")
    return parts


def rate_said(rate: float) -> str:
    return f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s"


def bars(rows: Iterable[tuple[str, float, int, str]]) -> Table:
    """A progress bar for each row: (name, how many are done, of how many, text at its right)."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(no_wrap=True, justify="right")
    for what, done, of, said in rows:
        grid.add_row(Text(what, style="bold"), ProgressBar(total=of, completed=done), Text(said))
    return grid


def _stage_of(progress: Progress) -> str:
    return f"{progress.number + 1}/{progress.n_stages} {progress.stage.name}"


class _Lines(Display):
    """A line when a stage ends and every few seconds."""

    def __init__(self, console: Console, log: Log) -> None:
        super().__init__(console)
        self._log = log
        self._printed_at = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        before, self.latest = self.latest, progress
        if before is not None and before.number != progress.number:
            self._print("stage", before)
        elif time.monotonic() - self._printed_at > LINES_EVERY_S:
            self._print("progress", progress)

    def last(self) -> None:
        if self.latest is not None:
            self._print("stage", self.latest)

    def within_a_round(self) -> None:
        """Call it every `LINES_EVERY_S`: a round that takes long is not silent."""
        if time.monotonic() - self._printed_at <= QUIET_S:
            return
        if self.latest is not None:
            self._print("progress", self.latest, "; no round has ended since")
        else:
            self._printed_at = time.monotonic()
            self._log.say("waiting", f"{self.waiting()}; no round has ended yet")

    def _print(self, event: str, progress: Progress, more: str = "") -> None:
        self._printed_at = time.monotonic()
        stage, limit = progress.stage.name, progress.stage.stop.rounds
        rounds = f"stage {_stage_of(progress)}: round {progress.round} of at most {limit}"
        line = ", ".join([rounds, *figures_of(progress.figures)]) + more
        self._log.say(event, line, stage=stage, round=progress.round, rounds=limit, figures=dict(progress.figures))


@contextlib.contextmanager
def display(console: Console, *, quiet: bool, log: Log | None = None) -> Iterator[Display]:
    """Shows a run while the block runs, on a console of standard error; lines go to the log."""
    log = log or on_console(console, LogFormat.text, LogLevel.info)
    if quiet:
        yield Display(console)
    elif console.is_terminal and not log.is_json:
        shown = Display(console)
        with Live(get_renderable=shown.picture, console=console, refresh_per_second=DRAWS_PER_S, transient=True):
            yield shown
    else:
        lines = _Lines(console, log)
        try:
            with repeating(lines.within_a_round, LINES_EVERY_S, LINES_EVERY_S):
                yield lines
        finally:
            lines.last()
