"""What holds in every method: the table of `coterie check method`, on each of our methods' small federations. A new method is a new row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from coterie.experiment.config import Experiment
from coterie.registry import methods
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.check import CHECKS, Check, verdict
from coterie_deploy.studies.check.declared import why_flat
from coterie_deploy.studies.check.federations import CASES
from coterie_deploy.studies.check.runs import check_books, check_counts
from coterie_deploy.studies.check.trial import Trial
from tests.simulation import query
from tests.two_tier import COORDINATOR, Death, Tiers

FAST = ("pdmm lean", "fedrep", "fedavg convex")  # whose checks in this process are no slow tests
PROCESSES = ("grpc", "aggregators", "processes")
TWO_TIERS = ("oracle", "oracle sums", "squared", "hlm_exact", "oracle inference", *(name for name in CASES if name.startswith("async")))
TOLERANT = (
    "pdmm graph",
    "pdmm lean",
    "pdmm uniform",
    "fedrep_linear",
    "fedrep_linear shared",
    "fedrep",
    "fedrep sums",
    "fedrep masked",
    "local_network",
    "fed_mtl convex",
)


@pytest.fixture(scope="module")
def trial_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trial]]:
    """The trial of a row, whose undisturbed run all checks of the row share."""
    trials: dict[str, Trial] = {}

    def found(name: str) -> Trial:
        if name not in trials:
            trials[name] = Trial(CASES[name], tmp_path_factory.mktemp("trial"))
        return trials[name]

    yield found
    trials.clear()


def row(name: str, check: Check) -> object:
    """A parameter of the table."""
    is_slow = check.is_slow and (name not in FAST or check.name in PROCESSES)
    return pytest.param(name, check, id=f"{name}-{check.name}", marks=[pytest.mark.slow] if is_slow else [])


def test_every_method_is_here() -> None:
    assert {name.partition(" ")[0] for name in CASES} == set(methods())


@pytest.mark.parametrize(("name", "check"), [row(name, check) for name in CASES for check in CHECKS])
def test_every_method_keeps_what_coterie_promises(name: str, check: Check, trial_of: Callable[[str], Trial]) -> None:
    trial = trial_of(name)
    found = verdict(check, trial)
    assert found.state != "failed", found.reason
    is_flat = check.name == "aggregators" and (why_flat(trial.experiment) or not all(head.cluster for head in trial.heads))
    assert (found.state == "not applicable") == bool(is_flat), found.reason
    if check.name == "left-out" and name in TOLERANT:
        assert found.reason == "it goes on without them"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", TOLERANT)
def test_the_closed_form_knows_of_hosts_that_are_left_out_anywhere(name: str, seed: int, tmp_path: Path) -> None:
    check = next(check for check in CHECKS if check.name == "left-out")
    assert verdict(check, Trial(CASES[name], tmp_path, seed)).state == "passed"


# ---- members of two tiers that die


def two_tiers(name: str, folder: Path, deaths: Sequence[Death] = ()) -> Tiers:
    """The federation with an aggregator and two hosts for each cluster."""
    experiment: Experiment = CASES[name].experiment(folder)
    quick = {"heartbeat_s": 0.2, "silence_s": 10.0, "join_timeout_s": 20.0, "absence_timeout_s": 20.0}
    rules = experiment.federation.model_copy(update={"topology": "clusters", "hosts": 3, "hosts_per_cluster": 2, **quick})
    return Tiers(experiment.model_copy(update={"federation": rules}), folder, hosts_per_cluster=2, deaths=deaths)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TWO_TIERS)
def test_with_aggregators_the_ledger_is_the_closed_form_whoever_dies(name: str, seed: int, tmp_path: Path) -> None:
    """A host, an aggregator and the coordinator die, in an order and at exchanges that the seed draws."""
    (tmp_path / "calm").mkdir()
    two_tiers(name, tmp_path / "calm").run()
    links = "SELECT MAX(seq) FROM ledger WHERE scope = ? AND link LIKE ?"
    n_above = int(query(tmp_path / "calm" / "run", links.replace("?", "'between-cluster'", 1).replace("?", "'%'"))[0][0])
    n_below = int(query(tmp_path / "calm" / "run", links.replace("?", "'within-cluster'", 1).replace("?", "'%c1/%'"))[0][0])
    draws = np.random.default_rng(seed)
    above = [int(seq) for seq in draws.choice(np.arange(1, n_above + 1), 2, replace=False)]
    below = int(draws.integers(1, n_below + 1))
    deaths = [Death("c0", COORDINATOR, above[0]), Death(COORDINATOR, COORDINATOR, above[1]), Death("c1-0", "c1", below)]
    two_tiers(name, tmp_path, deaths).run()
    found = verdict_on(tmp_path / "run")
    check_books(found)
    check_counts(found)
