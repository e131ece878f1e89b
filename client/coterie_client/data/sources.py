"""The interface of data sources in Python. A source returns users, or labelled rows that a partition deals to users.

The experiment may come from the coordinator. If it could name any function, it could call "subprocess:call". So a source must be a
`DataSource`, or a function marked with `@user_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import ArrayLike
from pydantic import JsonValue

from coterie.experiment.settings import Settings
from coterie_client.data import paths

MARK = "__coterie_user_source__"
F = TypeVar("F", bound=Callable[..., Iterable[Any]])
O = TypeVar("O", bound=Settings)


class UserRecord(Protocol):
    """One user as a source returns it: a `User`, a `UserData`, or any object with these attributes.

    Features are numbers (n, p). For networks they may have more axes; bytes (n, channels, height, width) stay bytes. `target` (n,),
    `cluster`, `test_features` (m_test, ...) and `test_target` (m_test,) may be None or absent. Without test rows, the experiment's
    `test_fraction` of the n rows is held out.
    """

    @property
    def name(self) -> str: ...
    @property
    def features(self) -> ArrayLike:  # (n, p) or (n, ...)
        ...


@dataclass(frozen=True, eq=False)
class User:
    """A `UserRecord`."""

    name: str
    features: ArrayLike  # (n, p) or (n, ...)
    target: ArrayLike | None = None  # (n,)
    cluster: str | None = None  # its known cluster
    test_features: ArrayLike | None = None  # (m_test, ...)
    test_target: ArrayLike | None = None  # (m_test,)


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Rows that the experiment's `data.partition` deals to users."""

    features: Any  # (n, ...): an array, or an object such as a memory map whose `features[rows]` is an array (len(rows), ...)
    labels: ArrayLike  # (n,) whole numbers from 0
    users: Mapping[str, ArrayLike] | None = None  # the row numbers of each natural user, from 0; None: rows have no users
    class_names: Sequence[str] = ()  # of labels 0, 1, ..., if they have names
    test: LabelledRows | None = None  # None: each user's `test_fraction` is held out


class NoOptions(Settings):
    """Accepts no options."""


@dataclass(frozen=True)
class SourceRequest(Generic[O]):
    """The input of a source. The same request must give the same users in any process."""

    options: O  # `data.options` of the experiment
    seed: int  # of the experiment
    folder: Path | None  # the client's data folder; None: the working directory, and any path is allowed

    def path(self, name: str) -> Path:
        """The resolved path of a file in the data folder. ConfigError when it lies outside, since the experiment may come from the
        coordinator.
        """
        return paths.resolve(name, self.folder)


@dataclass(frozen=True)
class DataSource(Generic[O]):
    """A data source. `options` is the subclass of `Settings` that checks `data.options`."""

    read: Callable[[SourceRequest[O]], Iterable[UserRecord] | LabelledRows]
    options: type[O] = NoOptions  # type: ignore[assignment]  # which is what O then is


class UserSource(Protocol):
    """Makes all users. The same options and seed must give the same users in any process."""

    def __call__(self, options: dict[str, JsonValue], seed: int) -> Iterable[UserRecord]: ...


def user_source(function: F) -> F:
    """Mark a function as a `UserSource`, so that experiments may call it."""
    setattr(function, MARK, True)
    return function
