"""Builds a `Host` from the experiment and a selection of users. It loads the rows, and builds losses on standardised rows when needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import default_finding
from coterie.experiment.config import Experiment
from coterie.experiment.features import named_columns
from coterie.experiment.plugins import check_versions
from coterie.experiment.privacy import ALL_ONCE, noised_rounds
from coterie.experiment.reveals import answered_by
from coterie.extras import extra
from coterie.findings import Finding
from coterie.record.snapshot import SnapshotFile
from coterie.registry import method, part
from coterie.session.tls import Tls
from coterie.wire.precision import Precision
from coterie_client.data import UserData, filled, fresh_rows, read_users, standardize
from coterie_client.data.hints import likely_identifiers, unlike_sizes
from coterie_client.families.prepare import State as Preparation
from coterie_client.hosting.host import Host
from coterie_client.hosting.pseudonyms import Admitted
from coterie_client.interface.half import Local, client_half
from coterie_client.problems import ConvexProblem, build_problem

if TYPE_CHECKING:
    from coterie_client.learning.private import RowPrivacy, UserPrivacy
    from coterie_client.nets import TorchNetwork


def build_host(
    name: str,
    experiment: Experiment,
    run_id: str,
    users: Sequence[str] | None,
    *,
    data_dir: Path | None = None,
    store: SnapshotFile | None = None,
    instance: str = "",
    admit: Callable[[Sequence[UserData]], Admitted] | None = None,
    tls: Tls | None = None,
) -> Host:
    """A host for these users (None: all of its data). Raises ConfigError that names what is wrong with the data.

    `admit` decides which of them take part, and under which names. `tls` signs the host's keys of masked sums.
    """
    check_versions(experiment.packages)
    if experiment.privacy is not None:
        experiment.privacy.check_libraries()
    reading = read_users(experiment.data, experiment.seed, users, data_dir)
    taken = None if admit is None else admit(reading.users)
    loaded = reading.users if taken is None else taken.users
    answered = answered_by(experiment)
    for room in {step.partition("/")[0] for step in answered}:
        client_half(room)  # load it before the run waits for it
    if part("coterie_client", experiment.method.name, "UPDATE") is not None:
        from coterie_client.interface.local_update import local_update  # noqa: PLC0415 - few clients take local steps

        local_update(experiment.method.name)  # likewise
    network = None if experiment.model is None else build_network(experiment, loaded[0].features.shape[1:])
    losses = None
    if network is not None:
        network.check_users(loaded)
        if experiment.privacy is not None and experiment.privacy.unit == "row":
            network.check_rows_apart()
    elif not (experiment.data.standardize or experiment.data.fills_missing):  # also early
        losses = _losses(experiment, loaded)
    is_raw = network is None and not experiment.data.standardize
    notes = (*reading.notes, *likely_identifiers(loaded, named_columns(experiment.data)), *(unlike_sizes(loaded) if is_raw else ()))
    return Host(name, experiment, run_id, loaded, local_of, store, instance, network, losses, notes, answered, taken, tls)


def build_network(experiment: Experiment, shape: tuple[int, ...]) -> TorchNetwork:
    """The users' network for rows of this shape. ConfigError if torch is not installed, or the model cannot be built."""
    with extra("torch", "torch", "the experiment has a model and needs torch", finding=Finding("T21")):
        from coterie_client.nets import TorchNetwork  # noqa: PLC0415 - convex clients start without torch
    assert experiment.model is not None  # noqa: S101 - callers check
    return TorchNetwork(experiment.model, experiment.problem.loss, experiment.seed, shape)


def _losses(experiment: Experiment, users: Sequence[UserData]) -> ConvexProblem:
    """The losses of the users on these rows. ConfigError for rows outside their domain."""
    names = [user.name for user in users]
    with default_finding(Finding("L7", place="problem.loss")):
        return build_problem(experiment.problem, names, [user.features for user in users], [user.target for user in users])


def _row_privacy(experiment: Experiment) -> RowPrivacy | None:
    """Clipping and noise of local steps, if the experiment protects rows."""
    privacy, config = experiment.privacy, experiment.method
    if privacy is None or privacy.unit != "row":
        return None
    from coterie_client.learning.private import RowPrivacy  # noqa: PLC0415 - few clients need it

    rounds, is_whole = noised_rounds(experiment), method(config.name).noises_sums

    def multiplier(n_rows: int) -> float:
        return privacy.multiplier(ALL_ONCE if is_whole else config.row_draws(n_rows), rounds)

    return RowPrivacy(privacy.clip, multiplier, rounds, privacy.clip_hessian)


def _user_privacy(experiment: Experiment) -> UserPrivacy | None:
    """Clipping of users' changes, if hosts add noise to their sum."""
    privacy = experiment.privacy
    if privacy is None or not privacy.is_shared:
        return None
    from coterie_client.learning.private import UserPrivacy  # noqa: PLC0415 - few clients need it

    return UserPrivacy(privacy.clip, experiment.stop.rounds, experiment.method.keeps_models)


def local_of(host: Host) -> Local:
    """The input of the halves: rows standardised by the agreed constants, and the losses on them."""
    preparation = host.states.get("prepare", Preparation())
    users, losses, experiment = host.users, host.losses, host.experiment
    mean, scale, data = preparation.mean, preparation.scale, experiment.data
    if mean is not None and data.fills_missing:
        users = tuple(filled(user, mean) for user in users)
    if mean is not None and scale is not None:
        users = tuple(standardize(user, mean, scale) for user in users)
    names = [user.name for user in users]
    is_ready = (scale is not None or not data.standardize) and (mean is not None or not data.fills_missing)
    if host.network is None and losses is None and is_ready:  # earlier tasks only sum the rows
        losses = _losses(experiment, users)
    return Local(
        seed=experiment.seed,
        names=tuple(names),
        indices=host.indices,
        numbers=host.numbers,
        clusters=host.clusters,
        n_members=host.n_members,
        precision=Precision.of_run(experiment),
        users=users,
        losses=losses,
        network=host.network,
        row_privacy=_row_privacy(experiment),
        user_privacy=_user_privacy(experiment),
        fresh=fresh_rows(experiment.data, experiment.seed, [host.true_name(name) for name in names]),
    )
