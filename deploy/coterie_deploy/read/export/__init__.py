"""`coterie export`: the metrics of a run for other tools, against rounds and against bytes.

A target receives the whole run each time and adds what it does not have yet. So an interrupted export can be continued, and a repeated one
changes nothing.
"""

import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from coterie.errors import ConfigError
from coterie_deploy.read.export.points import Points, points_of

TARGETS = ("tensorboard", "mlflow")
LOOK_EVERY_S = 2.0
_REST = 10.0  # times as long as a look has taken, so that a large ledger is not read all the time


class Target(Protocol):
    def add(self, points: Points) -> int:
        """Adds what it does not have yet; how many values these were. RunError when it cannot be written."""
        ...


def export(folder: Path, to: str, output: str, *, follow: bool, sleep: Callable[[float], None] = time.sleep) -> int:
    """Exports a run, as far as it is, or with `follow` to its end; how many values were added.

    Raises ConfigError for an unknown run or target, an output that is another run's, and a library that is not installed.
    """
    points = points_of(folder)
    with _target(to, output, points) as target:
        n_values = target.add(points)
        while follow and not points.is_over:
            start = time.monotonic()
            points = points_of(folder)
            n_values += target.add(points)
            if not points.is_over:
                sleep(max(LOOK_EVERY_S, _REST * (time.monotonic() - start)))
    return n_values


def _target(to: str, output: str, points: Points) -> AbstractContextManager[Target]:
    if to not in TARGETS:
        raise ConfigError(f"--to is {to!r}, want one of {', '.join(TARGETS)}")
    module = importlib.import_module(f"coterie_deploy.read.export.to_{to}")  # its library is an extra, and slow to import
    found: AbstractContextManager[Target] = module.target(output, points)
    return found
