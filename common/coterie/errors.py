"""The error families of Coterie. Anything else that escapes is our bug and crashes loudly.

    CoterieError
    ├── ConfigError     nothing has started: the experiment, its data or the command line is wrong    (exit code 2)
    ├── ProtocolError   the peer is at fault: it broke the session contract                            (exit code 3)
    └── RunError        the run cannot go on: a host is gone, a disk is full, a deadline has passed    (exit code 3)

Each message is one sentence that names the thing, the value found and the value wanted. It is for the process that raises it, its own
terminal and log. What other processes hear is the error's `finding`, which holds no values.
"""

from __future__ import annotations

from coterie.findings import NO_RULE, Finding


class CoterieError(Exception):
    """Root of all errors a user is expected to meet; `exit_code` is the command's.

    `str(error)` stays in the process; `error.finding` is all that may cross to another one. Who gives none says only that it cannot go on.
    """

    exit_code = 1

    def __init__(self, sentence: str, finding: Finding = NO_RULE) -> None:
        super().__init__(sentence)
        self.finding = finding


class ConfigError(CoterieError):
    """The experiment, its data or the command line is wrong; nothing has started."""

    exit_code = 2


class ProtocolError(CoterieError):
    """The peer broke the session contract."""

    exit_code = 3


class RunError(CoterieError):
    """The run cannot go on."""

    exit_code = 3
