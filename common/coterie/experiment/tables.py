"""Tables with one row per example as data sources: paths, column roles, and how cells are read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from coterie.experiment.columns import ColumnType, Dialect, Missing, Name
from coterie.experiment.settings import USER, FilePath, SourceSettings, TestFraction


class TableData(SourceSettings):
    """A table with one row per example: one file for all users of a host, or one file per user."""

    #: A file; a folder with one file per user; or a pattern such as "users/{user}.csv". Relative to the client's data folder.
    path: FilePath
    #: Column that names the user; absent if the file name does. A list, [hospital, ward], names users "hospital/ward" in the known clusters
    #: "hospital".
    user_column: Name | Annotated[tuple[Name, ...], Field(min_length=2, max_length=20)] | None = None
    #: Column of the target, or of labels +1 and -1, or 0, 1, 2, ... for networks. Absent: the loss has no target.
    target_column: Name | None = None
    #: Columns of the features. Absent: all other numbers, booleans and dates.
    feature_columns: tuple[Name, ...] | None = Field(default=None, min_length=1)
    cluster_column: Name | None = None  #: Column of the user's known cluster, which is the same in all rows of a user.
    #: Share of each user's rows that is held out, by seed. Models are judged on it, and chosen by it. 0 trains on all rows.
    test_fraction: TestFraction = 0.2
    #: Types of columns. The type of any other column is found from all of its cells.
    columns: dict[Name, ColumnType] = Field(default_factory=dict)
    #: Missing cells of features. refuse: an error. drop_rows: their rows are left out. mean: they get the mean that the members agree on.
    #: indicator: besides, a feature says where a cell was missing.
    missing: Missing = "refuse"
    #: With missing: indicator, the columns that get such a feature. Absent: all feature columns.
    indicator_columns: tuple[Name, ...] | None = Field(default=None, min_length=1)
    #: Target and features as a formula, instead of target_column and feature_columns: "score ~ ses + C(sector) + ses:hours".
    formula: Annotated[str, StringConstraints(min_length=3, max_length=10_000)] | None = None

    @property
    def user_columns(self) -> tuple[str, ...]:
        """The columns that name the users, from the outer level to the inner one."""
        column = self.user_column
        return () if column is None else (column,) if isinstance(column, str) else column

    @property
    def fills_missing(self) -> bool:
        """Whether missing cells of features are filled with means that the members agree on."""
        return self.missing in ("mean", "indicator")

    @model_validator(mode="after")
    def _columns_and_pattern_agree(self) -> TableData:
        if self.path.count(USER) > 1:
            raise ValueError(f"path {self.path!r} has {self.path.count(USER)} places for {USER}, want at most one")
        if USER in self.path and self.user_column is not None:
            raise ValueError(f"path {self.path!r} names the user, and user_column {self.user_column!r} names it again, want one of the two")
        roles = [("user_column", column) for column in self.user_columns] + [("target_column", self.target_column)]
        if self.cluster_column not in self.user_columns or len(self.user_columns) == 1:  # a level may be the cluster
            roles += [("cluster_column", self.cluster_column)]
        roles += [("feature_columns", column) for column in self.feature_columns or ()]
        seen: dict[str, str] = {}
        for role, column in roles:
            if column is None:
                continue
            if column in seen:
                raise ValueError(f"column {column!r} is in {seen[column]} and again in {role}, want it once")
            if role != "user_column" and self.columns.get(column) == "ignore":
                raise ValueError(f"column {column!r} is in {role}, and columns says to ignore it, want one of the two")
            seen[column] = role
        return self

    @model_validator(mode="after")
    def _missing_and_formula_agree(self) -> TableData:
        if self.indicator_columns is not None and self.missing != "indicator":
            raise ValueError(f"indicator_columns are given and missing is {self.missing!r}, want missing: indicator")
        if self.formula is None:
            return self
        if self.formula.count("~") != 1 or not self.formula.split("~")[0].strip():
            raise ValueError(f"formula is {self.formula!r}, want a target, a tilde and terms, such as 'score ~ ses + hours'")
        for key in ("target_column", "feature_columns"):
            if getattr(self, key) is not None:
                raise ValueError(f"formula and {key} are both given, want one of the two: a formula names target and features")
        if self.missing not in ("refuse", "drop_rows"):
            raise ValueError(f"missing is {self.missing!r} and there is a formula, want refuse or drop_rows")
        return self


class CsvData(TableData):
    """Separated text, `.csv` or `.csv.gz`; by default with commas, in UTF-8, and the first line its header."""

    source: Literal["csv"]
    csv: Dialect = Field(default_factory=Dialect)  #: The format of the text.


class ParquetData(TableData):
    """Parquet files; needs the extra `data` (pyarrow) on the client."""

    source: Literal["parquet"]


class StataData(TableData):
    """Stata's `.dta` files; needs pandas on the client."""

    source: Literal["stata"]


class SpssData(TableData):
    """SPSS's `.sav` files; needs pandas and pyreadstat on the client."""

    source: Literal["spss"]
