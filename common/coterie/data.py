"""Where the users' rows come from: the `data` section of an experiment.

Configuration only. The readers and generators are in `coterie_client.data`; the coordinator never sees a row.
Every source names its users, optionally gives each a known cluster label, and holds out test rows per user by seed, except
where the source brings test rows of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, NonNegativeFloat, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"^[^\x00]+$")]
TestFraction = Annotated[float, Field(ge=0, lt=1)]

USER = "{user}"
MAX_USERS = 1_000_000
MAX_POINTS = 10_000_000  # of generated data, in memory: a quarter of a gigabyte


class Fold(BaseModel):
    """One fold of a cross-validation on the users: which of each user's training rows are held out, in the place of its test rows.

    `coterie_client.data.split.fold_rows` says how rows are dealt. The test rows are left out altogether, neither trained on nor judged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1)
    of: int = Field(ge=2, le=1000)

    @model_validator(mode="after")
    def _number_is_one_of_them(self) -> Fold:
        if self.number > self.of:
            raise ValueError(f"number is {self.number}, want 1 to the {self.of} folds there are")
        return self


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Centre and scale the features by constants that the members agree on in a federated round of sums.
    standardize: bool = False
    fold: Fold | None = None


class _Table(_Model):
    """A table with one row per example: one file for all users of a host, or one file per user."""

    # One file; a folder with one file per user; or a pattern such as "users/{user}.csv". Relative to the client's data folder.
    path: FilePath
    user_column: Name | None = None  # absent where the file name is the user's name
    target_column: Name | None = None  # absent: the loss has no target, and targets are 0
    feature_columns: tuple[Name, ...] | None = Field(default=None, min_length=1)  # absent: all other numeric columns
    cluster_column: Name | None = None  # the user's known cluster label, constant within a user
    test_fraction: TestFraction = 0.2  # of a user's rows, rounded to whole rows

    @model_validator(mode="after")
    def _columns_and_pattern_agree(self) -> _Table:
        if self.path.count(USER) > 1:
            raise ValueError(f"path {self.path!r} has {self.path.count(USER)} places for {USER}, want at most one")
        if USER in self.path and self.user_column is not None:
            raise ValueError(f"path {self.path!r} names the user, and user_column {self.user_column!r} names it again, want one of the two")
        roles = [("user_column", self.user_column), ("target_column", self.target_column)]
        roles += [("cluster_column", self.cluster_column)]
        roles += [("feature_columns", column) for column in self.feature_columns or ()]
        seen: dict[str, str] = {}
        for role, column in roles:
            if column is None:
                continue
            if column in seen:
                raise ValueError(f"column {column!r} is in {seen[column]} and again in {role}, want it once")
            seen[column] = role
        return self


class CsvData(_Table):
    """Comma-separated text, `.csv` or `.csv.gz`, in UTF-8, the first line its header."""

    source: Literal["csv"]


class ParquetData(_Table):
    """Parquet files; needs the extra `data` (pyarrow) on the client."""

    source: Literal["parquet"]


class NpzData(_Model):
    """One NumPy archive of arrays with n rows each; the fields say what the arrays are called in it."""

    source: Literal["npz"]
    path: FilePath
    features: Name = "features"  # (n, p) numbers
    target: Name | None = "target"  # (n,) numbers; null: the loss has no target, and targets are 0
    user: Name = "user"  # (n,) integers or text
    cluster: Name | None = None  # (n,) integers or text, constant within a user
    test_fraction: TestFraction = 0.2


class EllipsesData(_Model):
    """Synthetic classification in the plane: each cluster's two classes are uniform in two overlapping ellipses.

    The data of section V of Armacki, Bajovic, Jakovetic and Kar (2022); the geometry is in `coterie_client.data.ellipses`.
    """

    source: Literal["ellipses"]
    clusters: int = Field(default=3, ge=1, le=1000)
    users_per_cluster: int = Field(default=20, ge=1, le=100_000)
    rows_per_user: int = Field(default=10, ge=2, le=2_000_000)  # 2: each user holds both classes
    points_per_class: int = Field(default=100, ge=1, le=1_000_000)  # the pool of a cluster, from which its users draw
    test_per_class: int = Field(default=2000, ge=0, le=1_000_000)  # the test set that a cluster's users share
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  # absent: the experiment's

    @model_validator(mode="after")
    def _pool_is_large_enough(self) -> EllipsesData:
        if self.rows_per_user > 2 * self.points_per_class:
            raise ValueError(
                f"rows_per_user is {self.rows_per_user}, want at most the {2 * self.points_per_class} points of a cluster's pool"
            )
        return self

    @model_validator(mode="after")
    def _all_of_it_fits(self) -> EllipsesData:
        n_users = self.clusters * self.users_per_cluster
        if n_users > MAX_USERS:
            raise ValueError(f"clusters times users_per_cluster is {n_users} users, want at most {MAX_USERS}")
        n_points = 2 * self.clusters * (self.points_per_class + self.test_per_class) + n_users * self.rows_per_user
        if n_points > MAX_POINTS:
            raise ValueError(f"pools, test sets and rows of the users are {n_points} points together, want at most {MAX_POINTS}")
        return self


class HlmData(_Model):
    """Synthetic regression from a hierarchical linear model: users' parameters lie around their cluster's, clusters' around one centre.

    The data of section 6.1 of Lyu, Hanzely and Kolar (2022); sigmas are standard deviations. There is no intercept in it.
    """

    source: Literal["hlm"]
    clusters: int = Field(default=20, ge=1, le=100_000)
    users_per_cluster: int = Field(default=20, ge=1, le=100_000)
    d: int = Field(default=20, ge=1, le=10_000)  # features
    rows_per_user: int = Field(default=10, ge=1, le=1_000_000)  # m
    test_per_user: int = Field(default=10, ge=0, le=1_000_000)
    sigma_global: NonNegativeFloat = 0.0  # of the centre around 0
    sigma_cluster: NonNegativeFloat = 1.0  # of a cluster's parameters around the centre
    sigma_user: NonNegativeFloat = 1.0  # of a user's parameters around its cluster's
    sigma_noise: NonNegativeFloat = 1.0  # of the targets
    design: Literal["gaussian", "orthogonal"] = "gaussian"  # X'X = m I where it is orthogonal
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  # absent: the experiment's

    @model_validator(mode="after")
    def _an_orthogonal_design_has_room(self) -> HlmData:
        if self.design == "orthogonal" and self.rows_per_user < self.d:
            raise ValueError(f"rows_per_user is {self.rows_per_user}, want at least d, which is {self.d}, for an orthogonal design")
        return self

    @model_validator(mode="after")
    def _all_of_it_fits(self) -> HlmData:
        n_users = self.clusters * self.users_per_cluster
        if n_users > MAX_USERS:
            raise ValueError(f"clusters times users_per_cluster is {n_users} users, want at most {MAX_USERS}")
        n_numbers = n_users * (self.rows_per_user + self.test_per_user) * (self.d + 1)
        if n_numbers > 3 * MAX_POINTS:
            raise ValueError(f"the users' rows are {n_numbers} numbers together, want at most {3 * MAX_POINTS}")
        return self


class RepresentationData(_Model):
    """Synthetic regressions that share a representation: y = w_i' B*' x + noise, x in R^d, B* (d, k) with orthonormal columns.

    Section 5.1 of Collins, Hassani, Mokhtari and Shakkottai (2021); `coterie.representation` says how the truth is drawn. Rows are fresh
    on demand: a method may draw as many as it wants. There is no intercept in it.
    """

    source: Literal["representation"]
    users: int = Field(default=100, ge=1, le=100_000)
    d: int = Field(default=10, ge=1, le=10_000)
    k: int = Field(default=2, ge=1, le=10_000)
    rows_per_user: int = Field(default=5, ge=1, le=1_000_000)  # m
    test_per_user: int = Field(default=0, ge=0, le=1_000_000)
    noise: NonNegativeFloat = 1e-3  # the paper's N(., 1e-3): its figure has the floors of a standard deviation
    noise_is: Literal["std", "variance"] = "std"
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  # absent: the experiment's

    @model_validator(mode="after")
    def _the_representation_is_smaller(self) -> RepresentationData:
        if self.k > self.d:
            raise ValueError(f"k is {self.k}, want at most d, which is {self.d}")
        n_numbers = self.users * (self.rows_per_user + self.test_per_user) * (self.d + 1)
        if n_numbers > 3 * MAX_POINTS:
            raise ValueError(f"the users' rows are {n_numbers} numbers together, want at most {3 * MAX_POINTS}")
        return self


class _Bundled(_Model):
    """A table that comes with the client, whose users have known clusters. `coterie_client/data/files/ORIGIN.md` says where it is from."""

    feature_columns: tuple[str, ...]
    test_fraction: TestFraction = 0.2

    @model_validator(mode="after")
    def _columns_are_distinct(self) -> _Bundled:
        for column in self.feature_columns:
            if self.feature_columns.count(column) > 1:
                raise ValueError(f"feature_columns names {column!r} more than once, want it once")
        return self


class HsbData(_Bundled):
    """High School and Beyond, 1982: 7,185 students of 160 schools.

    A user is a school, its cluster the sector (Public or Catholic), the target a student's mathematics achievement.
    """

    source: Literal["hsb"]
    feature_columns: tuple[Literal["minority", "female", "ses", "meanses", "cses"], ...] = Field(
        default=("ses", "minority", "female"), min_length=1
    )
    standardize_target: bool = False  # by the constants of the whole table, which are public; nothing is exchanged


class ExamsData(_Bundled):
    """A-level chemistry in Britain, 1997: 24,963 students of the 1,091 schools with at least 10 of them.

    A user is a school, its cluster the local education authority (129), the label whether a student has a grade A or B, +1, or less, -1.
    """

    source: Literal["exams"]
    feature_columns: tuple[Literal["female", "age", "gcsescore"], ...] = Field(default=("female", "age", "gcsescore"), min_length=1)


class GrowthData(_Bundled):
    """Growth in mathematics (Sustaining Effects Study): 5,594 yearly tests of the 1,174 children with at least 4 of them.

    A user is a child, its cluster the school (57), the target the test's score. Only year, grade and retained vary within a child.
    """

    source: Literal["growth"]
    feature_columns: tuple[Literal["year", "grade", "retained", "female", "black", "hispanic", "size", "lowinc", "mobility"], ...] = Field(
        default=("year",), min_length=1
    )
    standardize_target: bool = False  # by the constants of the whole table, which are public; nothing is exchanged


class PythonData(_Model):
    """Users made by a function of the client's own code, marked `@coterie_client.data.user_source`."""

    source: Literal["python"]
    path: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]  # package.module:function
    options: dict[str, JsonValue] = Field(default_factory=dict)
    test_fraction: TestFraction = 0.2  # for users that come without test rows


DataConfig = Annotated[
    CsvData | ParquetData | NpzData | EllipsesData | HlmData | HsbData | ExamsData | GrowthData | RepresentationData | PythonData,
    Field(discriminator="source"),
]
