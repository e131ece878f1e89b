"""Lists the users of the data, and loads the rows of some of them.

The answer for one user does not depend on the other users that are loaded. So data does not depend on how users are spread over hosts.
"""

# ruff: noqa: PLC0415 - a client reads one source, and starts sooner without the others

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, assert_never

from coterie.arrays import Array
from coterie.errors import default_finding
from coterie.experiment.data import (
    DataConfig,
    DigitsData,
    EllipsesData,
    ExamsData,
    GrowthData,
    HlmData,
    HsbData,
    HuggingfaceData,
    ImagesData,
    LeafData,
    NpzData,
    PooledData,
    PythonData,
    RepresentationData,
    RolesData,
    TorchvisionData,
    TweetsData,
)
from coterie.experiment.tables import CsvData, ParquetData, SpssData, StataData
from coterie.findings import Finding
from coterie.text.names import natural_key, normal, unknown_user
from coterie_client.data.pool import Pool, Share, UserSummary, heads_of, load_shares, summaries, summary
from coterie_client.data.reading import Reading
from coterie_client.data.split import head_with_fold, with_fold
from coterie_client.data.users import UserData, UserHead

Fresh = Callable[[int, int, int], tuple[Array, Array]]


@default_finding(Finding("D1", place="data.source"))
def list_users(config: DataConfig, seed: int, data_dir: Path | None = None) -> list[UserHead]:
    """All users of the data in natural order (u2 before u10). Rows are not read if the source allows it.

    `data_dir` is the client's data folder: paths in `config` start there and must not leave it. None: paths start at the working directory,
    and any path is allowed. `seed` is the experiment's. Raises ConfigError when the data cannot be read.
    """
    heads = sorted(_source(config, seed, data_dir).heads(), key=lambda head: natural_key(head.name))
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
    loaded = _source(config, seed, data_dir).load(wanted)
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
    from coterie_client.data import representation

    return representation.fresh(config, seed, names)


class _Source(NamedTuple):
    heads: Callable[[], list[UserHead]]
    load: Callable[[Collection[str] | None], list[UserData] | Reading]


def _source(config: DataConfig, seed: int, data_dir: Path | None) -> _Source:
    match config:
        case CsvData() | ParquetData() | StataData() | SpssData():
            from coterie_client.data.tables import formats

            return _Source(partial(formats.heads, config, data_dir), partial(formats.load, config, seed, data_dir=data_dir))
        case HsbData() | ExamsData() | GrowthData():
            from coterie_client.data import bundled

            return _Source(partial(bundled.heads, config), partial(bundled.load, config, seed))
        case EllipsesData():
            from coterie_client.data import ellipses

            return _Source(partial(ellipses.heads, config), partial(ellipses.load, config, seed))
        case HlmData():
            from coterie_client.data import hlm

            return _Source(partial(hlm.heads, config), partial(hlm.load, config, seed))
        case RepresentationData():
            from coterie_client.data import representation

            return _Source(partial(representation.heads, config), partial(representation.load, config, seed))
        case PythonData():
            from coterie_client.data import python_source

            return _Source(
                partial(python_source.heads, config, seed, data_dir), partial(python_source.load, config, seed, data_dir=data_dir)
            )
        case _:
            return _Source(partial(_pooled_heads, config, seed, data_dir), partial(_pooled_users, config, seed, data_dir))


def _pooled_heads(config: PooledData, seed: int, data_dir: Path | None) -> list[UserHead]:
    return [head for _, shares in _dealt(config, seed, None, data_dir) for head in heads_of(shares)]


def _pooled_users(config: PooledData, seed: int, data_dir: Path | None, names: Collection[str] | None) -> list[UserData]:
    dealt = _dealt(config, seed, names, data_dir)
    return [user for pool, shares in dealt for user in load_shares(pool, config.partition, shares, names)]


def _dealt(config: PooledData, seed: int, names: Collection[str] | None, data_dir: Path | None) -> Iterator[tuple[Pool, list[Share]]]:
    """Pools of labelled rows with the shares of their users. Pools without users in `names` may be skipped."""
    from coterie_client.data.partition import deal

    for pool in _pools(config, names, data_dir):
        yield pool, deal(pool, config.partition, config.test_fraction, seed)


def _pools(config: PooledData, names: Collection[str] | None, data_dir: Path | None) -> Iterator[Pool]:
    match config:
        case NpzData():
            from coterie_client.data.tables import npz_table

            yield from npz_table.pools(config, data_dir, names)
        case LeafData():
            from coterie_client.data import leaf

            yield leaf.pool(config, data_dir, names)
        case DigitsData():
            from coterie_client.data import digits

            yield digits.pool()
        case ImagesData():
            from coterie_client.data import image_folders

            yield image_folders.pool(config, data_dir)
        case TorchvisionData():
            from coterie_client.data import torchvision_folders

            yield torchvision_folders.pool(config, data_dir)
        case HuggingfaceData():
            from coterie_client.data import huggingface

            yield huggingface.pool(config, data_dir)
        case RolesData():
            from coterie_client.data import roles

            yield roles.pool(config, data_dir)
        case TweetsData():
            from coterie_client.data import tweets

            yield tweets.pool(config, data_dir)
        case _:
            assert_never(config)
