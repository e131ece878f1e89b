"""`coterie adapt`: new users join a finished run.

It is a run of its own, with its own ledger. The new users receive the shared tensors, and train the rest on their own rows.
"""

import contextlib
import itertools
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.experiment.model import X
from coterie.experiment.overrides import apply_overrides
from coterie.registry import method
from coterie_client.data.tables.formats import source_of
from coterie_deploy.engines.launch import Launch
from coterie_deploy.engines.local import run_here
from coterie_deploy.read.folders import nothing_left_of_a_failed_start
from coterie_deploy.read.models import FinishedRun, finished_run
from coterie_deploy.read.shipped import FROZEN, NEW_USERS
from coterie_server.interface.half import Outcome

_DROPPED = ("partition", "encoded", "fold", "test_path", "test_features", "test_target", "test_user")  # of the run's data alone


def adapt(
    folder: Path, table: Path, overrides: Sequence[str], output: Path | None, epochs: int, out: Console, err: Console, *, quiet: bool
) -> None:
    """Trains the heads of the users in `table` and reports. Raises CoterieError."""
    run = finished_run(folder)
    where = f"the run in {folder} of method {run.experiment.method.name!r}"
    if not run.shared:
        raise ConfigError(f"{where} has shared nothing that new users could start from")
    if run.experiment.model is None and X in run.shared:
        raise ConfigError(f"{where} has left whole linear models, which have no heads to train: want one with a representation")
    try:
        _method(run.experiment)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None
    chosen = output or _free(folder)
    if (chosen / FROZEN).exists():
        raise ConfigError(f"the run folder {chosen} is already used: choose another one")
    with nothing_left_of_a_failed_start(chosen):
        experiment = adapted_from(run.experiment, _as_data(run, table, chosen, overrides), overrides, epochs)
        how = Launch(transport="loopback", folder=chosen, start=Outcome(None, shared=run.shared, constants=run.constants))
        run_here(experiment, how, out, err, quiet=quiet)


def adapted_from(trained: Experiment, data: Mapping[str, Any], overrides: Sequence[str], epochs: int) -> Experiment:
    """The experiment of new users with these data, after a run of `trained`."""
    content = json.loads(experiment_to_json(trained))
    content |= {"name": f"{trained.name[:90]}-adapt", "data": dict(data), "method": _method(trained), "references": [], "exact_sums": False}
    content["stop"] = {"rounds": max(epochs, 1)}
    content["privacy"] = None  # new users train here what they keep, and nothing of theirs reaches the run's users
    content["federation"] |= {"hosts": 1, "users": None, "topology": "flat", "min_hosts": None}
    return experiment_from(apply_overrides(content, overrides), "the experiment of the new users")


def _method(experiment: Experiment) -> Mapping[str, Any]:
    """How the new users train: as the run's users trained their heads, unless the run's method says otherwise."""
    adapted = method(experiment.method.name).adapted
    if adapted is None:
        raise ConfigError("leaves nothing that new users could adapt")
    return {"name": "adapt", **adapted(experiment.method)}


def _as_data(run: FinishedRun, table: Path, output: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The data section for the new users' file: the run's own if it is of the same kind, else that of the file's ending."""
    source = "npz" if table.suffix == ".npz" else source_of(table)
    if source is None:
        raise ConfigError(f"--data is {str(table)!r}, want a file that ends in .csv, .csv.gz, .parquet, .dta, .sav or .npz")
    if not table.is_file():
        raise ConfigError(f"--data {str(table)!r} is no file, want the new users' rows")
    section = json.loads(experiment_to_json(run.experiment))["data"]
    if section["source"] != source:
        section = {"source": source, "standardize": section.get("standardize", False)}
    section = {key: value for key, value in section.items() if key not in _DROPPED}
    if source != "npz" and section.get("target_column") is None:
        section["target_column"] = getattr(run.experiment.data, "target", None)  # an archive's name for it
    names_users = _names_users(table, source, section, overrides)
    return {**section, "path": str(table if names_users else _folder_of_one(table, output / NEW_USERS))}


def _names_users(table: Path, source: str, section: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether a column or an array of the file names each row's user; else all rows are of one user."""
    if any(override.strip().startswith("data.user") for override in overrides):
        return True
    if source != "npz":
        return section.get("user_column") is not None
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(table) as archive:
        return f"{section.get('user', 'user')}.npy" in archive.namelist()
    return True  # whoever reads the file reports what is wrong with it


def _folder_of_one(table: Path, folder: Path) -> Path:
    """A folder with this file alone, which is named after its user. It stays, since the run may be resumed."""
    try:
        folder.mkdir(parents=True)
        (folder / table.name).symlink_to(table.resolve())
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _free(folder: Path) -> Path:
    """The next free folder of the name."""
    places = (folder.with_name(f"{folder.name}-adapt-{number}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())
