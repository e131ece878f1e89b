"""`coterie watch`: a run as it goes on, whoever has started it, from its folder alone: a picture in a terminal, plain lines elsewhere."""

import math
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coterie.arrays import Array
from coterie.errors import ConfigError, RunError
from coterie.experiment.problem import METRICS
from coterie_deploy.read.run_status import RunStatus, Status, Watcher
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, counted, duration, figure, is_narrow, is_tiny, size, table, table_of
from coterie_deploy.view.progress import LINES_EVERY_S, bars, figures_of, rate_said
from coterie_server.record.curves import RESIDUAL, Curves, residual_of
from coterie_server.record.follow import Event
from coterie_server.record.rundb import open_run
from coterie_server.run.coordinator import is_held

_LOOK_EVERY_S = 0.5
_MAX_MEMBERS = 8
_MAX_EVENTS = 5
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-=+*%@"
_ROUNDS_A_SPARK = 4
_LOGARITHMIC = (RESIDUAL, "gradient_norm", "distance")
_SHOWN = ("objective", RESIDUAL, "gradient_norm", "loss", *METRICS, "distance", "clusters")


def watch(folder: Path, console: Console, *, patience_s: float, once: bool = False) -> None:
    """Shows a run until it has finished. RunError when it has failed, was killed or cannot be read; ConfigError when it does not appear."""
    _wait_for(folder, 0.0 if once else patience_s)
    looks = _looks(Watcher(folder))
    if once:
        run, _ = next(looks)
        console.print(picture(run, console))
    else:
        run = _draw(looks, console) if console.is_terminal else _print_lines(looks, console)
    if run.status in (Status.failed, Status.stopped):
        raise RunError(run.sentence)


def _wait_for(folder: Path, patience_s: float) -> None:
    """Until there is a run database: there may be no folder yet, or a coordinator that is just making it. Says so on standard error."""
    deadline, is_said = time.monotonic() + patience_s, False
    while True:
        try:
            open_run(folder).close()
            return
        except (sqlite3.Error, RunError):
            return  # it is there: the first look says what is wrong with it
        except ConfigError as error:
            is_file = folder.exists() and not folder.is_dir()
            is_coming = not is_file and (is_held(folder) or not (folder / "run.db").exists())
            if not is_coming or time.monotonic() >= deadline:
                waited = f", after {patience_s:g} s" if is_coming and patience_s else ""
                raise ConfigError(f"{error}{waited}") from None
            if not is_said:
                is_said = True
                print(printable(f"waiting up to {patience_s:g} s for a run: {error}"), file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(min(_LOOK_EVERY_S, max(deadline - time.monotonic(), 0.0)))


def _looks(watcher: Watcher) -> Iterator[tuple[RunStatus, Sequence[Event]]]:
    """A look twice a second, and what has happened since the one before; the last is at a run that has ended."""
    while True:
        try:
            run, added = watcher.look()
        except ConfigError as error:
            raise RunError(f"the run folder {watcher.follower.folder} is gone: {error}") from error
        yield run, added.events
        if not run.is_under_way:
            return
        time.sleep(_LOOK_EVERY_S)


def _draw(looks: Iterable[tuple[RunStatus, Sequence[Event]]], console: Console) -> RunStatus:
    with Live(console=console, auto_refresh=False) as live:
        for run, _ in looks:
            live.update(picture(run, console), refresh=True)
    return run


def _print_lines(looks: Iterable[tuple[RunStatus, Sequence[Event]]], console: Console) -> RunStatus:
    """A line for each event, when a stage begins and every few seconds."""
    stage, printed_at = -1, -math.inf
    for number, (run, events) in enumerate(looks):
        for event in events if number else events[-_MAX_EVENTS:]:
            print(printable(f"{_clock(event)} {event.text}"), file=console.file, flush=True)
        if len(run.stages) != stage or time.monotonic() - printed_at > LINES_EVERY_S or not run.is_under_way:
            stage, printed_at = len(run.stages), time.monotonic()
            print(printable(line_of(run)), file=console.file, flush=True)
    return run


def line_of(run: RunStatus) -> str:
    stage = run.stage
    if stage is None:
        return run.doing if run.is_under_way else str(run.status)
    parts = [f"stage {len(run.stages)}/{run.n_stages} {stage.name}: round {count(stage.rounds)}"]
    parts[0] += f" of at most {count(run.limit)}" if run.limit else ""
    if not run.is_under_way:
        parts.insert(0, str(run.status))
    parts += figures_of({} if run.curves is None else latest_of(run.curves))
    parts += [rate_said(run.pace.rounds_per_s)] if run.pace.rounds_per_s else []
    sent = {way: sum(one.wire_bytes for one in run.sent if one.direction == way) for way in ("up", "down")}
    return ", ".join([*parts, *(f"{way} {size(n_bytes)}" for way, n_bytes in sent.items())])


def latest_of(curves: Curves) -> dict[str, float]:
    """The figures of the last round that has them."""
    found = {name: values[~np.isnan(values)] for name, values in curves.figures.items()}
    return {name: float(values[-1]) for name, values in found.items() if values.size}


# ---- the picture


def picture(run: RunStatus, console: Console) -> Group:
    parts = (part(run, console) for part in (_head, _progress, _convergence, _members, _traffic, _events))
    rows = [row for part in parts if part is not None for row in (part, Text())]
    return Group(*rows[:-1])


_STYLES = {Status.running: "bold cyan", Status.finished: "bold green", Status.failed: "bold red", Status.stopped: "bold yellow"}


def _head(run: RunStatus, _: Console) -> RenderableType:
    line = Text(printable(run.name), style="bold")
    line.append(f"  {run.status}", style=_STYLES[run.status])
    more = [f"run {run.run_id}"] if run.run_id else []
    more += [f"attempt {run.attempt}"] if run.attempt > 1 else []
    return line.append(f"  {'  '.join(more)}", style="dim")


def _progress(run: RunStatus, _: Console) -> RenderableType:
    stage = run.stage
    if stage is None:
        return Text(run.doing if run.is_under_way else "no stage has begun", style="dim")
    n_done = sum(bool(one.outcome) for one in run.stages)
    made = f"{count(stage.rounds)}/{count(run.limit)}" if run.limit else count(stage.rounds)
    rows = [(printable(stage.name), stage.rounds, max(run.limit, 1), made)] if run.is_under_way and not stage.outcome else []
    rows.append(("all stages", n_done, max(run.n_stages, 1), f"{n_done}/{run.n_stages}"))
    pace, curves = run.pace, run.curves
    parts = [f"{rate_said(pace.rounds_per_s)} rounds"] if pace.rounds_per_s else []
    if run.status is Status.finished:
        n_rounds = f"{counted(stage.rounds, 'round')} in {duration(stage.seconds)}"
        rows, parts = [], [f"{counted(len(run.stages), 'stage')}, result {printable(stage.name)}: {n_rounds}"]
    if run.is_under_way and curves is not None and not np.isnan(curves.seconds).all():
        parts.append(f"{duration(float(np.nanmax(curves.seconds)))} so far")
    if not math.isnan(run.likely_s):
        parts.append(f"about {duration(run.likely_s)} left")
    if not math.isnan(run.left_s):
        parts.append(f"at most {duration(run.left_s)}")
    return Group(bars(rows), *([Text(", ".join(parts), style="dim")] if parts else []))


def _convergence(run: RunStatus, console: Console) -> RenderableType | None:
    curves = run.curves
    if curves is None:
        return None
    known = dict(curves.figures)
    if (residual := residual_of(curves)) is not None:
        known[RESIDUAL] = residual
    shown = [(name, known[name][~np.isnan(known[name])]) for name in _SHOWN if name in known]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left"):
        grid.add_column(no_wrap=True, justify=justify)
    letters = _SPARKS if console.encoding.lower().startswith("utf") else _PLAIN_SPARKS
    for name, values in shown:
        if values.size:
            drawn = sparkline(values, min(max(console.width - 28, 8), 60), letters, is_log=name in _LOGARITHMIC)
            digits = 2 if name in _LOGARITHMIC else 6 if name == "objective" else 4
            value = f"{values[-1]:.0f}" if name == "clusters" else figure(float(values[-1]), digits)
            grid.add_row(Text(name.replace("_", " ")), Text(value, style="bold"), Text(drawn, style="cyan"))
    return grid if grid.row_count else None


def sparkline(values: Array, width: int, letters: str = _SPARKS, *, is_log: bool = False) -> str:
    """The last rounds of a figure as a line of letters from the lowest to the highest."""
    values = values[-_ROUNDS_A_SPARK * width :]
    if is_log:
        values = np.log(np.maximum(values, np.finfo(float).tiny))
    values = values[np.isfinite(values)]
    if not values.size:
        return ""
    means = np.array([piece.mean() for piece in np.array_split(values, min(width, values.size))])
    low, high = float(means.min()), float(means.max())
    heights = np.zeros(means.size) if high <= low else (means - low) / (high - low) * (len(letters) - 1)
    return "".join(letters[round(height)] for height in heights.tolist())


def _members(run: RunStatus, console: Console) -> RenderableType | None:
    members = run.members
    if not members:
        return None
    n_users, n_here = sum(member.n_users for member in members), sum(member.is_here for member in members)
    who = f"{n_here} of {counted(max(run.n_wanted, len(members)), run.noun)} here" if run.is_under_way else ""
    users = counted(n_users, "user") if n_users else ""
    title = ", ".join(part for part in (who or counted(len(members), run.noun), users) if part)
    # Those who are missing first: they are what one looks for.
    order = sorted(members, key=lambda member: member.is_here) if run.is_under_way else list(members)
    lines = []
    for member in order[:_MAX_MEMBERS]:
        when = "" if math.isnan(member.since) else f" {duration(max(time.time() - member.since, 0.0))}"
        state = f"{'here' if member.is_here else 'absent'}{when}" if run.is_under_way else "took part"
        lines.append([printable(member.name), state, count(member.n_users) if member.n_users else "-"])
    if len(order) > _MAX_MEMBERS:
        lines.append([f"and {len(order) - _MAX_MEMBERS} more", "", ""])
    listed = table("", [run.noun, "", "users"], lines, n_text=2, gap=1 if is_narrow(console) else 2)
    return Group(Text(title, style="bold"), listed)


def _traffic(run: RunStatus, console: Console) -> RenderableType | None:
    if not run.sent:
        return None
    tiny, is_live = is_tiny(console), run.is_under_way
    columns = {
        "scope": [sent.scope for sent in run.sent],
        "way": [sent.direction for sent in run.sent],
        "vectors": None if tiny else [count(sent.vectors) for sent in run.sent],
        "wire": [size(sent.wire_bytes) for sent in run.sent],
        "rate": [f"{size(sent.bytes_per_s)}/s" if sent.bytes_per_s else "-" for sent in run.sent] if is_live else None,
    }
    traffic = table_of("", columns, n_text=2, gap=1 if is_narrow(console) else 2)
    return Group(Text("Traffic of all stages", style="bold"), traffic)  # the title may be wider than the table


def _events(run: RunStatus, _: Console) -> RenderableType | None:
    if not run.events:
        return None
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for event in run.events[-_MAX_EVENTS:]:
        grid.add_row(_clock(event), Text(printable(event.text)))
    return Group(Text("Latest events", style="bold"), grid)


def _clock(event: Event) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event.at))
