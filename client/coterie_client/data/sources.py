"""What code of a package, or of the client's own, gives as a data source: users, or labelled rows that a partition deals to users.

The experiment may come from the coordinator, and naming any function of any module would let it run any of them ("subprocess:call"). So a
source is a `DataSource`, or a function marked with `@user_source`: whoever wrote it wanted experiments to call it.
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
    """One user as a source returns it; `User` and `UserData` are, any object with these attributes will do.

    Features are numbers (n, p), or, for networks, rows with more axes: bytes (n, channels, height, width) stay bytes.
    `target` (n,), `cluster`, `test_features` (m_test, ...) and `test_target` (m_test,) may be None or absent. Without test rows, some of
    the n rows are held out by the experiment's `test_fraction`.
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

    features: Any  # (n, ...): an array, or what gives an array (len(rows), ...) for `features[rows]`, such as a memory map
    labels: ArrayLike  # (n,) whole numbers from 0
    users: Mapping[str, ArrayLike] | None = None  # of natural users, the numbers of their rows from 0; None: the rows know no users
    class_names: Sequence[str] = ()  # of labels 0, 1, ..., where they have names
    test: LabelledRows | None = None  # test rows; None: some of each user's rows are held out by `test_fraction`


class NoOptions(Settings):
    """Of code that takes none: any key is a mistake."""


@dataclass(frozen=True)
class SourceRequest(Generic[O]):
    """What a source is asked for. The same request must give the same users, in any process."""

    options: O  # `data.options` of the experiment
    seed: int  # of the experiment
    folder: Path | None  # the client's data folder; None: the working directory, and any path

    def path(self, name: str) -> Path:
        """The real place of a file in the data folder. ConfigError when it is outside: the experiment may come from the coordinator."""
        return paths.resolve(name, self.folder)


@dataclass(frozen=True)
class DataSource(Generic[O]):
    """A data source. `options` is the model that `data.options` must fit, a subclass of `Settings`."""

    read: Callable[[SourceRequest[O]], Iterable[UserRecord] | LabelledRows]
    options: type[O] = NoOptions  # type: ignore[assignment]  # which is what O then is


class UserSource(Protocol):
    """Makes all users. The same options and seed must give the same users, in any process."""

    def __call__(self, options: dict[str, JsonValue], seed: int) -> Iterable[UserRecord]: ...


def user_source(function: F) -> F:
    """Mark a `UserSource`: experiments may call it."""
    setattr(function, MARK, True)
    return function


__all__ = ["DataSource", "LabelledRows", "NoOptions", "SourceRequest", "User", "UserRecord", "UserSource", "user_source"]
