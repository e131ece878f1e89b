"""Methods or settings compared from Python: `coterie.compare`, and the `Comparison` that it gives."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import ConfigError
from coterie.text.quoting import quoted
from coterie_deploy.engines.api import Source, outside_of_loops
from coterie_deploy.engines.launch import Transport, default_hosts
from coterie_deploy.read.frames import Library, maker_of, partial
from coterie_deploy.read.loading import Run, load_run
from coterie_deploy.studies.compare import How, names_shown, wanted
from coterie_deploy.studies.compare.plan import SERIES, Asked, Budget, Comparing, choose, run_folder
from coterie_deploy.studies.compare.result import Compared, columns_of, result_of, write_files
from coterie_deploy.studies.progress import SeriesDisplay
from coterie_deploy.terminal.signals import Stop


@dataclass(frozen=True)
class Comparison:
    """Methods, or settings of one, on one experiment from the same seeds: what each reached, and at what cost."""

    folder: Path  # has a run's folder for each row and seed, and compare.csv
    methods: tuple[str, ...]
    rows: tuple[str, ...]  # the methods; or, where keys vary, names such as "penalty=0.05"
    seeds: tuple[int, ...]
    warnings: tuple[str, ...]  # each once
    _compared: Compared = field(repr=False)
    _comparing: Comparing = field(repr=False)

    def table(self, *, frames: Library = "pandas") -> Any:
        """The columns of compare.csv: one row for each of `rows`, and for each kind of fine-tuning that its users judged.

        A key that varies is a column under its whole name, such as "method.penalty".
        The quality is the mean over users and seeds; `_least` and `_most` are of single seeds. Bytes are those of a whole run on the wire.
        ConfigError when the library is not installed.
        """
        return maker_of(frames)({name: _column(values) for name, values in columns_of(self._compared).items()})

    def run(self, row: str, seed: int, *, frames: Library = "pandas") -> Run[Any]:
        """The run of a row from a seed, as `coterie.load_run` gives it. ConfigError when there is no such run."""
        if row not in self.rows:
            raise ConfigError(f"the comparison has no row {quoted(row)}, want one of {'; '.join(self.rows)}")
        return load_run(run_folder(self.folder, self._comparing.rows[row], seed), frames=frames)


def _column(values: list[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        return values
    return partial(values) if any(value is None or isinstance(value, float) for value in values) else np.array(values)


def compare(
    config: Source,
    methods: Sequence[str] | None = None,
    *,
    output: str | os.PathLike[str],
    seeds: Sequence[int] | None = None,
    target: str | None = None,
    transport: Transport = "loopback",
    hosts: int | None = None,
    budget: Budget | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    data: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> Comparison:
    """Runs methods on an experiment from the same seeds, by default 0, 1 and 2, as `coterie compare` does.

    `vary` makes settings the rows: {"method.penalty": [0.05, 0.09]} by the experiment's own method, or by each of `methods`. Several keys
    are a grid. `output` is the folder of the runs; `resume` goes on with those in it, and remembers methods, seeds and what varies.
    `overrides` are of the form "stop.rounds=100", or "ditto:method.penalty=0.5" for one method. Rounds and bytes are counted up to the
    `target`, such as "accuracy=0.9"; users then evaluate along the way. `budget`: "same" (the default) gives every method the local passes
    over the rows of the experiment's own method; "own" leaves each its own settings. `jobs` runs are made at a time, each in a process,
    with the same bits. A script calls it so below `if __name__ == "__main__":`, since each process imports the script. For all else see
    `coterie.run`. Raises ConfigError, RunError, ProtocolError.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}, want at least 1")
    folder = None if data is None else Path(data)
    listed, numbers = (None if values is None else ",".join(map(str, values)) for values in (methods, seeds))
    asked = Asked(config, listed, numbers, overrides, hosts, transport, Path(output), resume, target, budget, vary)
    comparing, place = choose(asked, lambda experiment: default_hosts(experiment, transport, folder))
    return outside_of_loops(lambda: _made(comparing, place, How(transport, folder, jobs)))


def _made(comparing: Comparing, folder: Path, how: How) -> Comparison:
    display = SeriesDisplay(names_shown(comparing, folder))
    asyncio.run(SERIES.make(comparing, folder, wanted(comparing, folder), how, display, Stop()))
    compared = result_of(comparing, folder)
    write_files(compared, folder)
    return Comparison(
        folder, tuple(comparing.methods), tuple(comparing.rows), tuple(comparing.seeds), tuple(compared.cautions), compared, comparing
    )
