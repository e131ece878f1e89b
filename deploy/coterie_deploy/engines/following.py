"""A run that a scheduler has: submitted, followed from its folder until it has ended, and ended with the command."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from coterie.errors import ConfigError, RunError, StoppedError
from coterie.session.where import ADDRESS
from coterie_deploy.engines.interface import Job, JobEngine, JobState, Phase
from coterie_deploy.read.folders import is_finished
from coterie_deploy.terminal.printable import printable
from coterie_deploy.view.watch import watch

LOOK_S = 1.0  # between two questions to the scheduler
SAY_S = 60.0  # between two lines about the same wait
SILENT_S = 600.0  # of a scheduler that does not answer
LAST_WORDS_S = 60.0  # for a cancelled job, and for a file system that shows late what the job has written


class _AskedError(Exception):
    """A signal asks the command to stop."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


def run_job(engine: JobEngine, folder: Path, err: Console, *, quiet: bool) -> None:
    """Submits a run and follows it to its end. A signal ends the job: a StoppedError. RunError when the job ends before its run."""
    job = engine.submit()
    say = Console(quiet=True) if quiet else err
    _print(say, f"{job.name} is submitted; its log is {job.log}")
    with _signals_raised():
        try:
            state = _followed(job, folder, say)
        except _AskedError as asked:
            _print(err, f"asked to stop: {job.cancel}")
            job.end()
            _ended(job)
            stopped = StoppedError(f"{job.name} was cancelled; the same command with --resume goes on with the run")
            stopped.exit_code = asked.exit_code
            raise stopped from None
    if not _waited(lambda: is_finished(folder), LAST_WORDS_S):
        raise RunError(f"{job.name} has ended before its run ({state.said}): see {job.log}; the same command with --resume goes on")


def leave_job(engine: JobEngine, folder: Path, out: Console) -> None:
    """Submits a run, and says how to follow it."""
    job = engine.submit()
    for line in (
        f"{job.name} is submitted",
        f"  coterie watch {folder} --patience 86400   shows the run, once it has begun",
        f"  coterie show {folder}    its result",
        f"  {job.cancel}    ends it; its run has a checkpoint then",
    ):
        _print(out, line)


def _followed(job: Job, folder: Path, say: Console) -> JobState:
    """Shows what happens until the job has ended: its last state."""
    said, said_at = "", 0.0
    while True:
        state = _state(job)
        if state.phase is Phase.ended:
            return state
        if is_finished(folder):
            return _ended(job)
        if state.phase is Phase.running and (folder / ADDRESS).exists():
            with suppress(RunError, ConfigError):  # the attempt has ended: the scheduler knows whether there is another one
                watch(folder, say, patience_s=0.0)
        elif state.said != said or time.monotonic() - said_at > SAY_S:
            said, said_at = state.said, time.monotonic()
            _print(say, f"{job.name} is {state.phase}: {state.said}")
        time.sleep(LOOK_S)


def _state(job: Job) -> JobState:
    """Asks until the scheduler answers. RunError when it has been silent for too long; the job may go on."""
    deadline = time.monotonic() + SILENT_S
    while True:
        try:
            return job.state()
        except RunError as error:
            if time.monotonic() > deadline:
                raise RunError(f"{error}, for {SILENT_S:g} s; {job.name} may go on: {job.cancel} ends it") from None
        time.sleep(LOOK_S)


def _ended(job: Job) -> JobState:
    """The last state of a job that is about to end."""
    _waited(lambda: _state(job).phase is Phase.ended, LAST_WORDS_S)
    return _state(job)


def _waited(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _print(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """The first SIGINT or SIGTERM of the block is an error there; a second one ends the process at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        raise _AskedError(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
