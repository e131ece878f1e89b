"""Columns, and data frames of pandas or polars made of them.

Text with few different values is kept as codes, so a million rows take a million small numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.extras import extra

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Library = Literal["pandas", "polars"]
LIBRARIES: tuple[Library, ...] = ("pandas", "polars")
Frame = TypeVar("Frame")


@dataclass(frozen=True)
class Coded:
    """Text with few different values."""

    codes: NDArray[np.int32]  # (n,) the place of each row's value in `values`
    values: Sequence[str]  # each once


@dataclass(frozen=True)
class Times:
    seconds: Array  # (n,) since the epoch


@dataclass(frozen=True)
class Partial:
    """Numbers that some rows do not have: missing values, which are not NaN."""

    values: Array  # (n,)
    is_there: NDArray[np.bool_]  # (n,)


Column = NDArray[Any] | Coded | Times | Partial | Sequence[str]
Columns = Mapping[str, Column]
Maker = Callable[[Columns], Frame]


def partial(values: Sequence[float | None]) -> NDArray[Any] | Partial:
    """Numbers; None becomes missing."""
    is_there = np.array([value is not None for value in values], dtype=np.bool_)
    numbers = np.array([0.0 if value is None else value for value in values], dtype=np.float64)
    return numbers if is_there.all() else Partial(numbers, is_there)


def coded(values: Iterable[str], known: Iterable[str] = ()) -> Coded:
    """Text as codes, those of `known` first."""
    places: dict[Hashable, int] = {value: place for place, value in enumerate(dict.fromkeys(known))}
    codes = np.fromiter((places.setdefault(value, len(places)) for value in values), dtype=np.int32)
    return Coded(codes, [str(value) for value in places])


def pandas_frame(columns: Columns) -> pd.DataFrame:
    """A frame of pandas: coded text is categorical, moments are in UTC. ConfigError when pandas is not installed."""
    with extra("frames", "pandas", "frames of pandas need pandas"):
        import pandas as pd  # noqa: PLC0415

    def series(column: Column) -> Any:
        if isinstance(column, Coded):
            return pd.Categorical.from_codes(column.codes, pd.Index(list(column.values)))
        if isinstance(column, Times):
            return pd.DatetimeIndex(_microseconds(column)).tz_localize("UTC")
        if isinstance(column, Partial):
            return pd.arrays.FloatingArray(column.values.copy(), ~column.is_there)
        return column if isinstance(column, np.ndarray) else pd.array(list(column), dtype="str")

    return pd.DataFrame({name: series(column) for name, column in columns.items()}, copy=False)


def polars_frame(columns: Columns) -> pl.DataFrame:
    """A frame of polars: coded text is an enumeration, moments are in UTC. ConfigError when polars is not installed."""
    with extra("frames", "polars", "frames of polars need polars"):
        import polars as pl  # noqa: PLC0415

    def series(column: Column) -> Any:
        if isinstance(column, Coded):
            values = list(column.values)
            return pl.Series(values, dtype=pl.Enum(values)).gather(column.codes)
        if isinstance(column, Times):
            return pl.Series(_microseconds(column)).dt.replace_time_zone("UTC")
        if isinstance(column, Partial):
            there = zip(column.values.tolist(), column.is_there.tolist(), strict=True)
            return pl.Series([value if is_there else None for value, is_there in there], dtype=pl.Float64)
        return pl.Series(column) if isinstance(column, np.ndarray) else pl.Series(list(column), dtype=pl.String)

    return pl.DataFrame({name: series(column) for name, column in columns.items()})


def _microseconds(column: Times) -> NDArray[np.datetime64]:
    return np.rint(column.seconds * 1e6).astype(np.int64).astype("datetime64[us]")


def maker_of(library: str) -> Maker[Any]:
    """What makes frames of a library. ConfigError when it is none of `LIBRARIES`, or is not installed."""
    makers: dict[str, Maker[Any]] = {"pandas": pandas_frame, "polars": polars_frame}
    if library not in makers:
        raise ConfigError(f"frames is {library!r}, want one of {', '.join(LIBRARIES)}")
    makers[library]({})
    return makers[library]
