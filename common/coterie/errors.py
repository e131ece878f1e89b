"""The error families of Coterie. Any other exception is our bug and crashes loudly.

    CoterieError
    ├── ConfigError     nothing has started: the experiment, its data or the command line is wrong    (exit code 2)
    ├── ProtocolError   the peer is at fault: it broke the session contract                            (exit code 3)
    └── RunError        the run cannot go on: a host is gone, a disk is full, a deadline has passed    (exit code 3)
        └── StoppedError    a signal stopped the run, which can be resumed                            (exit code 130 or 143)

Each message is one sentence that names the thing, the value found and the value wanted. It is for the process that raises it, its own
terminal and log. Three other texts come from an error. None contains a value, a path or a foreign user by accident:

    finding   for the parent
    below     for the members below a parent, when it ends their run
    public    for run.db, events and traces: the message itself, unless it came from a host
"""

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from coterie.findings import NO_RULE, Finding

MISTAKE_CODE = "COTERIE_MISTAKE_EXIT_CODE"  # in the environment: the exit code of a ConfigError, for supervisors that go by 0 or not


class CoterieError(Exception):
    """Root of all errors that a user may meet; `exit_code` is the command's.

    `str(error)` stays in the process; only `error.finding` may cross to another one. The default finding only says that it cannot go on.
    """

    exit_code = 1

    default: ClassVar[Finding] = NO_RULE

    def __init__(self, sentence: str, finding: Finding | None = None, *, public: str | None = None, below: Finding | None = None) -> None:
        super().__init__(sentence)
        self.finding = finding or self.default
        self._public, self._below = public, below

    @property
    def public(self) -> str:
        """For readers of what this process records about the run."""
        return str(self) if self._public is None else self._public

    @property
    def below(self) -> Finding:
        """For the members below: only rules about runs, nothing about this process."""
        return self._below or (self.finding if self.finding.rule.startswith("R") else Finding("R6"))


class ConfigError(CoterieError):
    """The experiment, its data or the command line is wrong; nothing has started."""

    exit_code = 2


class ProtocolError(CoterieError):
    """The peer broke the session contract."""

    exit_code = 3
    default = Finding("J6")


class RunError(CoterieError):
    """The run cannot go on."""

    exit_code = 3


class StoppedError(RunError):
    """The run was asked to stop, and can be resumed. `exit_code` is that of the signal, 128 + its number."""

    exit_code = 143


class SettingsDropped(UserWarning):
    """An override names another method, to which some settings of the experiment mean nothing."""


@contextlib.contextmanager
def default_finding(finding: Finding) -> Iterator[None]:
    """Gives this finding to errors of the block, or of the decorated function, that have none."""
    try:
        yield
    except CoterieError as error:
        if error.finding == NO_RULE:
            error.finding = finding
        raise
