"""The `data` section of an experiment: where the users' rows come from.

Only configuration. The readers and generators are in `coterie_client.data`; the coordinator never sees a row. Every source names its users,
may give each a known cluster label, and holds out test rows per user by seed, unless the source has test rows of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, NonNegativeFloat, StringConstraints, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.partition import Partition
from coterie.experiment.plugins import check_known, is_path, is_there
from coterie.experiment.settings import Settings
from coterie.experiment.source import USER, FilePath, SourceSettings, TestFraction
from coterie.experiment.tables import CsvData, ParquetData, SpssData, StataData

MAX_USERS = 1_000_000
MAX_POINTS = 10_000_000  # of generated data, in memory: a quarter of a gigabyte


class _Labelled(SourceSettings):
    """Rows with integer labels, which a partition gives to users."""

    test_fraction: TestFraction = 0.2  # of a user's rows; ignored if the source has test rows


class _Pooled(_Labelled):
    """Rows without users."""

    partition: Partition

    @model_validator(mode="after")
    def _users_are_made(self) -> _Pooled:
        if self.partition.by == "user":
            raise ValueError("partition.by is 'user', but the rows of this source have no users: want classes or dirichlet")
        return self


class Encoded(Settings):
    """Images as JPEG or PNG files, concatenated in an array of bytes."""

    bytes: Name  # (total,) uint8
    offsets: Name  # (n + 1,) integers: image i is bytes[offsets[i]:offsets[i + 1]]


class NpzData(_Labelled):
    """A NumPy archive of arrays with n rows each; the fields name its arrays.

    Either one archive has the rows of all users. Or a folder, or a pattern such as "users/{user}.npz", has one archive per user.
    """

    source: Literal["npz"]
    path: FilePath
    features: Name = "features"  # (n, p) numbers, or images or sequences (n, ...)
    encoded: Encoded | None = None  # images as files, instead of `features`
    # The type of a row. numbers: float64; bytes: uint8, which networks divide by 255; symbols: int64. Absent: two axes are numbers, more
    # are bytes or numbers by their type.
    read_as: Literal["numbers", "bytes", "symbols"] | None = None
    # The axis of channels in bytes; it becomes the first axis of a row. Absent: (n, h, w) gets one channel. With four axes it is the last
    # if only the last has size 1, 3 or 4, else the first.
    channels: Literal["first", "last", "none"] | None = None
    target: Name | None = "target"  # (n,) numbers; null: the loss has no target, and targets are 0
    user: Name = "user"  # (n,) integers or text
    cluster: Name | None = None  # (n,) integers or text, constant within a user
    # Test rows in another archive, with the same array names unless given here, or in the same archive.
    test_path: FilePath | None = None
    test_features: Name | None = None
    test_target: Name | None = None
    test_user: Name | None = None
    partition: Partition | None = None  # absent: by user

    @property
    def has_test_rows(self) -> bool:
        """Whether the data has test rows; otherwise some of each user's rows are held out."""
        return self.test_path is not None or self.test_features is not None

    @property
    def is_by_user(self) -> bool:
        """Whether rows belong to natural users."""
        return self.partition is None or self.partition.by == "user"

    @model_validator(mode="after")
    def _arrays_agree(self) -> NpzData:
        if self.path.count(USER) > 1:
            raise ValueError(f"path {self.path!r} has {self.path.count(USER)} places for {USER}, want at most one")
        if self.encoded is not None and (self.test_features is not None or self.read_as not in (None, "bytes")):
            raise ValueError("encoded images are bytes, and their test rows are in test_path: want neither test_features nor read_as")
        if not self.has_test_rows and (self.test_target is not None or self.test_user is not None):
            raise ValueError("test_target or test_user is there without test rows, want test_features or test_path as well")
        if self.test_path is None and self.test_features is not None and (self.test_target is None) != (self.target is None):
            raise ValueError(f"test_features is {self.test_features!r} and test_target is {self.test_target!r}, want both")
        if self.target is None and self.partition is not None and (self.partition.by != "user" or self.partition.classes is not None):
            raise ValueError("target is null, but the partition is by labels: want the name of the array of labels")
        if self.partition is None and self.test_path is None and self.test_features is not None and self.test_user is None:
            raise ValueError(f"test_features is {self.test_features!r} and test_user is missing, want the users of these rows")
        return self


class LeafData(_Labelled):
    """LEAF's JSON files of numbers, such as FEMNIST and Synthetic: a file, or a folder with `*.json`, each with users and user_data."""

    source: Literal["leaf"]
    path: FilePath
    test_path: FilePath | None = None  # likewise, with test rows of the same users
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(min_length=1, max_length=6)] | None = None  # of a row
    partition: Partition | None = None  # absent: by user

    @property
    def is_by_user(self) -> bool:
        """Whether rows stay with the users of the file."""
        return self.partition is None or self.partition.by == "user"


class DigitsData(_Pooled):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, 10 classes; needs the extra `data` on the client.

    Pixels 0 to 16 become bytes, round(255 v / 16). So a network that divides bytes by 255 sees v / 16 to within 0.002.
    """

    source: Literal["digits"]


class ImagesData(_Pooled):
    """A folder of classes, each a folder of images: `path`/CLASS/*.png or .jpg; needs the extra `data` (Pillow) on the client.

    Labels are places in the sorted names of the classes, and images are in the sorted order of their names.
    """

    source: Literal["images"]
    path: FilePath
    test_path: FilePath | None = None  # a folder with the same classes
    channels: Literal[1, 3] | None = None  # grey or colour; absent: as the first image is
    resize: tuple[Annotated[int, Field(ge=1, le=10_000)], Annotated[int, Field(ge=1, le=10_000)]] | None = None  # height, width


class TorchvisionData(_Pooled):
    """A data set in torchvision's folder layout: its `root`. Neither torch nor torchvision is needed."""

    source: Literal["torchvision"]
    path: FilePath
    dataset: Literal["MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100"]


class HuggingfaceData(_Labelled):
    """A data set of the Hugging Face hub by name, or a local one by path; needs the extra `data` (datasets) on the client.

    Images are decoded by Pillow; text becomes words hashed to `symbols` numbers (`coterie_client.data.words`).
    """

    source: Literal["huggingface"]
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", max_length=200)] | None = None
    path: FilePath | None = None  # a folder that `datasets.load_dataset` or `load_from_disk` reads
    subset: Name | None = None  # the hub's name of a configuration
    revision: Name | None = None
    split: Name = "train"
    test_split: Name | None = None
    image: Name | None = None  # the columns
    text: Name | None = None
    label: Name = "label"
    user: Name | None = None
    channels: Literal[1, 3] | None = None
    resize: tuple[Annotated[int, Field(ge=1, le=10_000)], Annotated[int, Field(ge=1, le=10_000)]] | None = None  # height, width
    symbols: Annotated[int, Field(ge=2, le=1_000_000)] = 10_000
    length: Annotated[int, Field(ge=1, le=10_000)] = 25  # words of a row, T
    partition: Partition

    @model_validator(mode="after")
    def _one_of_each(self) -> HuggingfaceData:
        for first, second in (("name", "path"), ("image", "text")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise ValueError(f"want one of {first} and {second}, found {'neither' if getattr(self, first) is None else 'both'}")
        if self.partition.by == "user" and self.user is None:
            raise ValueError("partition.by is 'user' and user is missing, want the column of users")
        return self


class RolesData(_Labelled):
    """The speaking roles of plays in a text file: a row is `sequence_length` symbols of a role's text, its label the symbol that follows.

    A speech is "Name:" in a line of its own, then lines of text up to an empty line; a role's speeches are joined by line ends. Symbols
    are numbered in the sorted order of the characters of the whole file. Test rows are those of the last part of a role's text.
    """

    source: Literal["roles"]
    path: FilePath
    min_characters: Annotated[int, Field(ge=2)] = 2000  # roles with less are left out
    sequence_length: Annotated[int, Field(ge=1, le=100_000)] = 80  # T
    stride: Annotated[int, Field(ge=1, le=1_000_000)] = 10  # characters from one row to the next
    partition: Partition = Partition(by="user")

    @model_validator(mode="after")
    def _roles_are_users(self) -> RolesData:
        if self.partition.by != "user":
            raise ValueError(f"partition.by is {self.partition.by!r}, but the users of plays are their roles: want user")
        return self


class TweetsData(_Labelled):
    """A CSV of texts with their authors and labels, such as Sent140, whose columns and two classes (0 and 4) are the defaults.

    Text becomes words hashed to `symbols` numbers (`coterie_client.data.words`).
    """

    source: Literal["tweets"]
    path: FilePath
    encoding: Literal["utf-8", "latin-1"] = "latin-1"
    header: bool = False  # whether the first line names the columns
    user_column: Name | Annotated[int, Field(ge=0)] = 4  # by name, or by place from 0
    text_column: Name | Annotated[int, Field(ge=0)] = 5
    label_column: Name | Annotated[int, Field(ge=0)] = 0
    symbols: Annotated[int, Field(ge=2, le=1_000_000)] = 10_000
    length: Annotated[int, Field(ge=1, le=10_000)] = 25  # words of a row, T
    partition: Partition = Partition(by="user", classes=(0, 4), relabel=True)

    @model_validator(mode="after")
    def _columns_are_named_by_a_header(self) -> TweetsData:
        columns = (self.user_column, self.text_column, self.label_column)
        for column in columns:
            if isinstance(column, str) and not self.header:
                raise ValueError(f"column {column!r} is a name and header is false, want header: true, or places from 0")
        if len(set(columns)) < len(columns):
            raise ValueError(f"user_column, text_column and label_column are {columns}, want three columns")
        return self


class EllipsesData(SourceSettings):
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


class HlmData(SourceSettings):
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
    design: Literal["gaussian", "orthogonal"] = "gaussian"  # orthogonal: X'X = m I
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


class RepresentationData(SourceSettings):
    """Synthetic regressions that share a representation: y = w_i' B*' x + noise, x in R^d, B* (d, k) with orthonormal columns.

    Section 5.1 of Collins, Hassani, Mokhtari and Shakkottai (2021); `coterie.experiment.representation` says how the truth is drawn. Rows
    are fresh on demand: a method may draw as many as it wants. There is no intercept in it.
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


class _Bundled(SourceSettings):
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


def _known_source(path: str) -> str:
    return check_known("source", path, ())


class PythonData(SourceSettings):
    """Users, or labelled rows, from code of a package or of the client itself (`coterie_client.data.python_source`)."""

    source: Literal["python"]
    path: Annotated[str, AfterValidator(_known_source)]  # the name that a package gives it, or package.module:name
    options: dict[str, JsonValue] = Field(default_factory=dict)
    test_fraction: TestFraction = 0.2  # for users that come without test rows
    partition: Partition | None = None  # of labelled rows; absent: by user


PooledData = NpzData | LeafData | DigitsData | ImagesData | TorchvisionData | HuggingfaceData | RolesData | TweetsData  # by `Partition`
SOURCES = (
    *("csv", "parquet", "stata", "spss", "npz", "leaf", "python", "images", "torchvision", "huggingface", "roles", "tweets"),
    *("ellipses", "hlm", "representation", "hsb", "exams", "growth", "digits"),
)


def _of_a_package(value: Any) -> Any:
    """`source: NAME` of a package, and `source: package.module:name`, mean python sources."""
    name = value.get("source") if isinstance(value, dict) else None
    if isinstance(name, str) and name not in SOURCES and (is_path(name) or is_there("source", name)):
        return {"path": name, **value, "source": "python"}
    return value


DataConfig = Annotated[
    CsvData
    | ParquetData
    | StataData
    | SpssData
    | PooledData
    | EllipsesData
    | HlmData
    | HsbData
    | ExamsData
    | GrowthData
    | RepresentationData
    | PythonData,
    Field(discriminator="source"),
    BeforeValidator(_of_a_package),
]
