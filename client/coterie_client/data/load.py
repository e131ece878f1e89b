"""Lists the users of the data, and loads the rows of some of them.

The answer for one user does not depend on the other users that are loaded. So data does not depend on how users are spread over hosts.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.arrays import Array
from coterie.errors import default_finding
from coterie.experiment.data import DataConfig, HuggingfaceData, NpzData, PooledData, RepresentationData
from coterie.findings import Finding
from coterie.text.names import natural_key, normal, unknown_user
from coterie_client.data.pool import Pool, Share, UserSummary, load_shares, summaries, summary
from coterie_client.data.split import head_with_fold, with_fold
from coterie_client.data.users import Reading, UserData, UserHead

Fresh = Callable[[int, int, int], tuple[Array, Array]]
# The module of a source, if it has another name. A client reads one source, and starts sooner without the others.
_MODULES = {
    **dict.fromkeys(("csv", "parquet", "stata", "spss"), "tables.formats"),
    **dict.fromkeys(("hsb", "exams", "growth", "digits"), "bundled"),
    "npz": "tables.npz_table",
    "images": "image_folders",
    "torchvision": "torchvision_folders",
    "python": "python_source",
}


@default_finding(Finding("D1", place="data.source"))
def list_users(config: DataConfig, seed: int, data_dir: Path | None = None) -> list[UserHead]:
    """All users of the data in natural order (u2 before u10). Rows are not read if the source allows it.

    `data_dir` is the client's data folder: paths in `config` start there and must not leave it. None: paths start at the working directory,
    and any path is allowed. `seed` is the experiment's. Raises ConfigError when the data cannot be read.
    """
    if isinstance(config, PooledData):
        listed = (share for _, shares in _dealt(config, seed, None, data_dir) for share in shares)
        found = [UserHead(share.name, share.cluster, len(share.rows)) for share in listed]
    else:
        found = _module(config).heads(config, seed, data_dir)
    heads = sorted(found, key=lambda head: natural_key(head.name))
    fold = config.fold
    return heads if fold is None else [head_with_fold(head, fold, seed) for head in heads]


@default_finding(Finding("D1", place="data.source"))
def load_users(config: DataConfig, seed: int, names: Sequence[str] | None, data_dir: Path | None = None) -> list[UserData]:
    """The users in `names` (None: all) with their rows, in natural order of names. Order and repetitions of `names` do not matter.

    `seed` and `data_dir` are as in `list_users`. Raises ConfigError when the data cannot be read, a row of one of these users is wrong, or
    a name is unknown. Rows of other users are not kept; only their user's name is checked.
    """
    return list(read_users(config, seed, names, data_dir).users)


@default_finding(Finding("D1", place="data.source"))
def read_users(config: DataConfig, seed: int, names: Sequence[str] | None, data_dir: Path | None = None) -> Reading:
    """As `load_users`, with notes on rows and columns that were left out, dropped or converted."""
    wanted = None if names is None else frozenset(map(normal, names))
    loaded: Reading | list[UserData]
    if isinstance(config, PooledData):
        dealt = _dealt(config, seed, wanted, data_dir)
        loaded = [user for pool, shares in dealt for user in load_shares(pool, config.partition, shares, wanted)]
    else:
        loaded = _module(config).load(config, seed, wanted, data_dir)
    reading = loaded if isinstance(loaded, Reading) else Reading(loaded)
    users = sorted(reading.users, key=lambda user: natural_key(user.name))
    unknown = (wanted or frozenset()) - {user.name for user in users}
    if unknown:
        raise unknown_user(min(unknown, key=natural_key), [head.name for head in list_users(config, seed, data_dir)])
    fold = config.fold
    return replace(reading, users=users if fold is None else [with_fold(user, fold, seed) for user in users])


@default_finding(Finding("D1", place="data.source"))
def summarize_users(config: DataConfig, seed: int, data_dir: Path | None = None) -> list[UserSummary]:
    """Counts for all users, in natural order: rows, test rows, and training rows by label.

    For sources with a partition, only labels are read. Raises ConfigError as `list_users` does.
    """
    if isinstance(config, PooledData) and config.fold is None:
        dealt = _dealt(config, seed, None, data_dir)
        listed = [one for pool, shares in dealt for one in summaries(pool, config.partition, shares)]
        return sorted(listed, key=lambda user: natural_key(user.name))
    return [summary(user.name, user.target, len(user.test_target)) for user in load_users(config, seed, None, data_dir)]


def count_users(config: DataConfig, seed: int) -> int | None:
    """The number of users, or None when only files or data sets outside the package can tell."""
    partition = config.partition if isinstance(config, PooledData) else None
    if partition is not None and partition.users is not None:
        return partition.users
    if isinstance(config, HuggingfaceData) or getattr(config, "path", None) is not None:
        return None
    return len(list_users(config, seed))


def fresh_rows(config: DataConfig, seed: int, names: Sequence[str]) -> Fresh | None:
    """(position in `names`, round, m) -> m new rows (m, p) and targets (m,). None unless the data is generated from a known truth."""
    if not isinstance(config, RepresentationData):
        return None
    fresh: Fresh = _module(config).fresh(config, seed, names)
    return fresh


def _module(config: DataConfig) -> Any:
    """The module of the config's source: with `heads` and `load`, or, for labelled rows, with `pool`."""
    return importlib.import_module(f"coterie_client.data.{_MODULES.get(config.source, config.source)}")


def _dealt(config: PooledData, seed: int, names: Collection[str] | None, data_dir: Path | None) -> Iterator[tuple[Pool, list[Share]]]:
    """Pools of labelled rows with the shares of their users. Pools without users in `names` may be skipped."""
    from coterie_client.data.partition import deal  # noqa: PLC0415 - for labelled rows alone

    module = _module(config)
    pools = module.pools if isinstance(config, NpzData) else lambda *given: [module.pool(*given)]
    for pool in pools(config, data_dir, names):
        yield pool, deal(pool, config.partition, config.test_fraction, seed)
