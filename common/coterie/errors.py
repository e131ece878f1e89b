"""The error families of Coterie. Anything else that escapes is our bug and crashes loudly.

    CoterieError
    ├── ConfigError     nothing has started: the experiment, its data or the command line is wrong    (exit code 2)
    ├── ProtocolError   the peer is at fault: it broke the session contract                            (exit code 3)
    └── RunError        the run cannot go on: a host is gone, a disk is full, a deadline has passed    (exit code 3)

Each message is one sentence that names the thing, the value found and the value wanted.
"""

from __future__ import annotations


class CoterieError(Exception):
    """Root of all errors a user is expected to meet; `exit_code` is the command's."""

    exit_code = 1


class ConfigError(CoterieError):
    """The experiment, its data or the command line is wrong; nothing has started."""

    exit_code = 2


class ProtocolError(CoterieError):
    """The peer broke the session contract."""

    exit_code = 3


class RunError(CoterieError):
    """The run cannot go on."""

    exit_code = 3
