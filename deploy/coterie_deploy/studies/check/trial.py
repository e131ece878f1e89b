"""A method under check: its small federation, and the undisturbed run that other runs are compared with."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coterie.experiment.config import Experiment
from coterie.record.snapshot import dumps
from coterie_client.data import UserHead, list_users
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.engines.loopback import explained
from coterie_deploy.studies.check.federations import Case
from coterie_deploy.studies.check.results import Results, counted_in, results_of
from coterie_deploy.studies.check.world import World
from coterie_server.interface.half import Outcome
from coterie_server.record.rundb import read_run
from coterie_server.run.coordinator import Finished

N_HOSTS = 3
W = TypeVar("W", bound=World)


class Failed(Exception):  # noqa: N818 - a verdict, not a fault of ours
    """What a check has found, as a sentence."""


class NotApplicable(Exception):  # noqa: N818
    """Why there is nothing to check, as a sentence."""


@dataclass(frozen=True)
class Run:
    """A finished run in this process."""

    finished: Finished
    folder: Path
    results: Results
    states: Mapping[str, bytes]  # of each host, all that its users keep


class Trial:
    """The small federation of one method. Runs are made when first asked for, each in a folder of its own.

    ConfigError when the experiment is wrong.
    """

    def __init__(self, case: Case, folder: Path, seed: int = 0) -> None:
        self.case, self.seed = case, seed
        self._folder = folder
        self._numbers = itertools.count(1)
        self._calm: Run | Exception | None = None
        self.experiment = case.experiment(self.folder("data"))

    def folder(self, what: str) -> Path:
        path = self._folder / f"{next(self._numbers)}-{what}"
        path.mkdir(parents=True)
        return path

    def run_folder(self, what: str) -> Path:
        return self.folder(what) / "run"

    @functools.cached_property
    def start(self) -> Outcome | None:
        """What the run before has left, if the experiment starts from one."""
        return None if self.case.starts_from is None else self.case.start(self.folder("start"))

    @functools.cached_property
    def heads(self) -> list[UserHead]:
        return list_users(self.experiment.data, self.experiment.seed, self.case.data)

    @property
    def n_hosts(self) -> int:
        """Of the undisturbed run."""
        return min(N_HOSTS, len(self.heads))

    @property
    def fewest_hosts(self) -> int:
        """On which the run can be made: one, or two where they hide their sums."""
        return min(2 if self.experiment.masks_sums else 1, self.n_hosts)

    def check_several_hosts(self) -> None:
        """NotApplicable for a federation of one user."""
        if self.n_hosts == 1:
            raise NotApplicable("the federation has one user")

    @property
    def hosts(self) -> list[str]:
        return [f"h{number}" for number in range(self.n_hosts)]

    @property
    def calm(self) -> Run:
        """The undisturbed run, made once. Each time raises the error that ended it."""
        if self._calm is None:
            try:
                self._calm = self.run(self.world(World, "calm"))
            except Exception as error:
                self._calm = error
        if isinstance(self._calm, Exception):
            raise self._calm
        return self._calm

    @property
    def n_exchanges(self) -> int:
        """Of the undisturbed run."""
        with read_run(self.calm.folder) as connection:
            return int(connection.execute("SELECT MAX(seq) FROM ledger").fetchone()[0])

    def world(
        self, kind: Callable[..., W], what: str, *before: Any, experiment: Experiment | None = None, n_hosts: int = 0, **more: Any
    ) -> W:
        """A run in this process that has yet to be made, in a folder of its own. `before` are arguments of the kind's own."""
        place = self.run_folder(what)
        wanted = experiment or self.experiment
        return kind(*before, wanted, place, n_hosts or self.n_hosts, start=self.start, data=self.case.data, **more)

    def run(self, world: World) -> Run:
        """Makes it. What ends it is raised with what the host at fault has to say in full."""
        with explained(world.links):
            finished = world.run()
        states = {name: dumps(dict(host.tree())) for name, host in world.hosts.items()}
        return Run(finished, world.folder, results_of(finished, world.folder), states)

    def launched(self, folder: Path, n_hosts: int, federation: Mapping[str, Any] | None = None, **how: Any) -> Results:
        """What a run leaves whose members are processes of their own; `how` are fields of its `Launch`. Without `federation` it is flat."""
        changes = {"hosts": n_hosts, "topology": "flat", "hosts_per_cluster": 1, **(federation or {})}
        rules = self.experiment.federation.model_copy(update=changes)
        wanted = Launch("grpc", folder, self.case.data, start=self.start, **how)
        return results_of(asyncio.run(launch(self.experiment.model_copy(update={"federation": rules}), wanted)), folder)

    def compare(self, other: Run, where: str) -> None:
        """Failed unless another run of the same hosts has the same bits, the same states of users, and the same counts."""
        self.compare_results(other.results, where, with_counts=True)
        for name, state in self.calm.states.items():
            if other.states[name] != state:
                raise Failed(f"{where}, the users of host {name!r} keep something else at the end")
        mine, theirs = counted_in(self.calm.folder), counted_in(other.folder)
        for place in {**mine, **theirs}:
            if mine.get(place) != theirs.get(place):
                raise Failed(f"{where}, the ledger has {theirs.get(place)} for {place}, not {mine.get(place)}")

    def compare_results(self, other: Results, where: str, *, with_counts: bool = False) -> None:
        """Failed unless another run, perhaps of other hosts, has the same bits."""
        if found := self.calm.results.first_difference(other, with_counts=with_counts):
            raise Failed(f"{where}, {found}")
