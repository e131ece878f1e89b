"""The `data` section of an experiment: where the users' rows come from.

Only configuration. The readers and generators are in `coterie_client.data`; the coordinator never sees a row. Every source names its users,
may give each a known cluster label, and holds out test rows per user by seed, unless the source has test rows of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, NonNegativeFloat, StringConstraints, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.labelled import ImagesData, Labelled, Pooled
from coterie.experiment.partition import Partition
from coterie.experiment.plugins import check_known, is_path, is_there
from coterie.experiment.settings import USER, FilePath, Settings, SourceSettings, TestFraction
from coterie.experiment.tables import CsvData, ParquetData, SpssData, StataData

MAX_USERS = 1_000_000
MAX_POINTS = 10_000_000  # of generated data, in memory: a quarter of a gigabyte


class Encoded(Settings):
    """Images as JPEG or PNG files, concatenated in an array of bytes."""

    bytes: Name  #: Array of bytes (total,), uint8: all images one after the other, as JPEG or PNG.
    offsets: Name  #: Array of integers (n + 1,): image i is bytes[offsets[i]:offsets[i + 1]].


class NpzData(Labelled):
    """A NumPy archive of arrays with n rows each; the fields name its arrays.

    Either one archive has the rows of all users. Or a folder, or a pattern such as "users/{user}.npz", has one archive per user.
    """

    source: Literal["npz"]
    #: An archive with the rows of all users; or a folder, or a pattern such as "users/{user}.npz", with one archive per user.
    path: FilePath
    features: Name = "features"  #: Array of features: (n, p) numbers, or images or sequences (n, ...).
    encoded: Encoded | None = None  #: Arrays of images as JPEG or PNG files, instead of `features`.
    #: Type of a row. numbers: float64. bytes: uint8, which networks divide by 255. symbols: int64. Absent: numbers for two axes, else bytes
    #: or numbers by the array's type.
    read_as: Literal["numbers", "bytes", "symbols"] | None = None
    #: The axis of channels in bytes, which becomes the first axis of a row. Absent: (n, h, w) gets one channel. Of four axes it is the last
    #: if only that has size 1, 3 or 4, else the first.
    channels: Literal["first", "last", "none"] | None = None
    target: Name | None = "target"  #: Array of targets or labels (n,); null: the loss has no target.
    user: Name = "user"  #: Array of users (n,), integers or text.
    cluster: Name | None = None  #: Array of known clusters (n,), integers or text, the same in all rows of a user.
    test_path: FilePath | None = None  #: Archive with test rows. Its arrays have the same names unless the next keys name others.
    test_features: Name | None = None  #: Array of the features of test rows, here or in `test_path`.
    test_target: Name | None = None  #: Array of the targets of test rows.
    test_user: Name | None = None  #: Array of the users of test rows.
    partition: Partition | None = None  #: How labelled rows are divided among users. Absent: each user keeps its own.

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
        is_alone = self.partition is None and self.test_path is None and USER not in self.path  # one archive with the rows of all users
        if is_alone and self.test_features is not None and self.test_user is None:
            wanted = 'want the users of these rows, or one archive per user and path: "users/{user}.npz"'
            raise ValueError(f"test_features is {self.test_features!r} and test_user is missing, {wanted}")
        return self


class LeafData(Labelled):
    """LEAF's JSON files of numbers, such as FEMNIST and Synthetic: a file, or a folder with `*.json`, each with users and user_data."""

    source: Literal["leaf"]
    path: FilePath  #: A JSON file of LEAF, or a folder with *.json.
    test_path: FilePath | None = None  #: The same, with test rows of the same users.
    #: Shape of a row, such as [1, 28, 28]. Absent: a row is a vector.
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(min_length=1, max_length=6)] | None = None
    partition: Partition | None = None  #: How rows are divided among users. Absent: each user keeps its own.

    @property
    def is_by_user(self) -> bool:
        """Whether rows stay with the users of the file."""
        return self.partition is None or self.partition.by == "user"


class DigitsData(Pooled):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, 10 classes; needs the extra `data` on the client.

    Pixels 0 to 16 become bytes, round(255 v / 16). So a network that divides bytes by 255 sees v / 16 to within 0.002.
    """

    source: Literal["digits"]


class TorchvisionData(Pooled):
    """A data set in torchvision's folder layout: its `root`. Neither torch nor torchvision is needed."""

    source: Literal["torchvision"]
    path: FilePath  #: The `root` folder of torchvision, with the files already downloaded.
    dataset: Literal["MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100"]  #: Name of the data set.


class HuggingfaceData(Labelled):
    """A data set of the Hugging Face hub by name, or a local one by path; needs the extra `data` (datasets) on the client.

    Images are decoded by Pillow; text becomes words hashed to `symbols` numbers (`coterie_client.data.words`).
    """

    source: Literal["huggingface"]
    #: Name of a data set on the Hugging Face hub, which is downloaded.
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", max_length=200)] | None = None
    path: FilePath | None = None  #: A folder that `datasets.load_dataset` or `load_from_disk` reads, instead of `name`.
    subset: Name | None = None  #: Name of a configuration of the data set.
    revision: Name | None = None  #: Branch, tag or commit of the data set on the hub. Absent: the newest, which may change.
    split: Name = "train"  #: Split with the training rows.
    test_split: Name | None = None  #: Split with the test rows. Absent: a part of each user's rows.
    image: Name | None = None  #: Column of images; either this or `text`.
    text: Name | None = None  #: Column of texts; either this or `image`.
    label: Name = "label"  #: Column of labels.
    user: Name | None = None  #: Column of users, which partition by: user needs.
    channels: Literal[1, 3] | None = None  #: 1: grey; 3: colour. Absent: as the first image is.
    #: Height and width in pixels to which images are scaled. Absent: all images must have the same size.
    resize: tuple[Annotated[int, Field(ge=1, le=10_000)], Annotated[int, Field(ge=1, le=10_000)]] | None = None
    #: Number of symbols to which words are hashed. More of them mean fewer collisions and a larger embedding.
    symbols: Annotated[int, Field(ge=2, le=1_000_000)] = 10_000
    length: Annotated[int, Field(ge=1, le=10_000)] = 25  #: Words of a row. Longer texts are cut, shorter ones padded with 0 at the front.
    partition: Partition  #: How the rows are divided among users.

    @model_validator(mode="after")
    def _one_of_each(self) -> HuggingfaceData:
        for first, second in (("name", "path"), ("image", "text")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise ValueError(f"want one of {first} and {second}, found {'neither' if getattr(self, first) is None else 'both'}")
        if self.partition.by == "user" and self.user is None:
            raise ValueError("partition.by is 'user' and user is missing, want the column of users")
        return self


class RolesData(Labelled):
    """The speaking roles of plays in a text file: a row is `sequence_length` symbols of a role's text, its label the symbol that follows.

    A speech is "Name:" in a line of its own, then lines of text up to an empty line; a role's speeches are joined by line ends. Symbols
    are numbered in the sorted order of the characters of the whole file. Test rows are those of the last part of a role's text.
    """

    source: Literal["roles"]
    path: FilePath  #: A text file of plays.
    min_characters: Annotated[int, Field(ge=2)] = 2000  #: Roles with less text than this many characters are left out.
    sequence_length: Annotated[int, Field(ge=1, le=100_000)] = 80  #: Characters of a row.
    #: Characters from the start of one row to the next. A smaller stride gives more rows, which overlap.
    stride: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    partition: Partition = Partition(by="user")  #: Which roles are users: `by: user`, with `max_users` or `rows_per_user`.

    @model_validator(mode="after")
    def _roles_are_users(self) -> RolesData:
        if self.partition.by != "user":
            raise ValueError(f"partition.by is {self.partition.by!r}, but the users of plays are their roles: want user")
        return self


class TweetsData(Labelled):
    """A CSV of texts with their authors and labels, such as Sent140, whose columns and two classes (0 and 4) are the defaults.

    Text becomes words hashed to `symbols` numbers (`coterie_client.data.words`).
    """

    source: Literal["tweets"]
    path: FilePath  #: A CSV file of texts.
    encoding: Literal["utf-8", "latin-1"] = "latin-1"  #: Text encoding of the file.
    header: bool = False  #: Whether the first line names the columns.
    user_column: Name | Annotated[int, Field(ge=0)] = 4  #: Column of authors, by name or by place from 0.
    text_column: Name | Annotated[int, Field(ge=0)] = 5  #: Column of texts, by name or by place from 0.
    label_column: Name | Annotated[int, Field(ge=0)] = 0  #: Column of labels, by name or by place from 0.
    #: Number of symbols to which words are hashed. More of them mean fewer collisions and a larger embedding.
    symbols: Annotated[int, Field(ge=2, le=1_000_000)] = 10_000
    length: Annotated[int, Field(ge=1, le=10_000)] = 25  #: Words of a row. Longer texts are cut, shorter ones padded with 0 at the front.
    partition: Partition = Partition(by="user", classes=(0, 4), relabel=True)  #: Which authors are users, and which labels count.

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
    clusters: int = Field(default=3, ge=1, le=1000)  #: Number of clusters.
    users_per_cluster: int = Field(default=20, ge=1, le=100_000)  #: Number of users in each cluster.
    rows_per_user: int = Field(default=10, ge=2, le=2_000_000)  #: Training rows of a user. With 2, each user holds both classes.
    #: Points of each class in the pool of a cluster, from which its users draw.
    points_per_class: int = Field(default=100, ge=1, le=1_000_000)
    test_per_class: int = Field(default=2000, ge=0, le=1_000_000)  #: Points of each class in the test set that a cluster's users share.
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  #: Seed of the data. Absent: that of the experiment.

    @model_validator(mode="after")
    def _pool_is_large_enough(self) -> EllipsesData:
        if self.rows_per_user > 2 * self.points_per_class:
            said = f"rows_per_user is {self.rows_per_user}, want at most the {2 * self.points_per_class} points of a cluster's pool"
            raise ValueError(said)
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
    clusters: int = Field(default=20, ge=1, le=100_000)  #: Number of clusters.
    users_per_cluster: int = Field(default=20, ge=1, le=100_000)  #: Number of users in each cluster.
    d: int = Field(default=20, ge=1, le=10_000)  #: Number of features.
    rows_per_user: int = Field(default=10, ge=1, le=1_000_000)  #: Training rows of a user.
    test_per_user: int = Field(default=10, ge=0, le=1_000_000)  #: Test rows of a user.
    sigma_global: NonNegativeFloat = 0.0  #: Standard deviation of the centre around 0.
    sigma_cluster: NonNegativeFloat = 1.0  #: Standard deviation of a cluster's parameters around the centre.
    sigma_user: NonNegativeFloat = 1.0  #: Standard deviation of a user's parameters around its cluster's.
    sigma_noise: NonNegativeFloat = 1.0  #: Standard deviation of the noise in the targets.
    #: gaussian: features are independent normal numbers. orthogonal: X'X is m times the identity, where m is rows_per_user.
    design: Literal["gaussian", "orthogonal"] = "gaussian"
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  #: Seed of the data. Absent: that of the experiment.

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
    users: int = Field(default=100, ge=1, le=100_000)  #: Number of users.
    d: int = Field(default=10, ge=1, le=10_000)  #: Number of features.
    k: int = Field(default=2, ge=1, le=10_000)  #: Dimension of the shared representation, at most `d`.
    rows_per_user: int = Field(default=5, ge=1, le=1_000_000)  #: Training rows of a user, or of a fresh batch.
    test_per_user: int = Field(default=0, ge=0, le=1_000_000)  #: Test rows of a user.
    #: Size of the noise in the targets, in the sense of `noise_is`. The paper writes N(., 1e-3); its figure fits a standard deviation.
    noise: NonNegativeFloat = 1e-3
    noise_is: Literal["std", "variance"] = "std"  #: Whether `noise` is a standard deviation or a variance.
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  #: Seed of the data. Absent: that of the experiment.

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

    feature_columns: tuple[str, ...]  #: Columns of the features.
    test_fraction: TestFraction = 0.2  #: Share of each user's rows that is held out, by seed.

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
    #: Columns of the features. `meanses` is the school's mean of `ses`, and `cses` the difference from it.
    feature_columns: tuple[Literal["minority", "female", "ses", "meanses", "cses"], ...] = Field(
        default=("ses", "minority", "female"), min_length=1
    )
    #: Whether the target is centred and scaled, by public constants of the whole table. Nothing is exchanged for it.
    standardize_target: bool = False

    @property
    def target_scale(self) -> tuple[float, float] | None:
        """Over the whole table."""
        return (12.748, 6.878) if self.standardize_target else None


class ExamsData(_Bundled):
    """A-level chemistry in Britain, 1997: 24,963 students of the 1,091 schools with at least 10 of them.

    A user is a school, its cluster the local education authority (129), the label whether a student has a grade A or B, +1, or less, -1.
    """

    source: Literal["exams"]
    #: Columns of the features.
    feature_columns: tuple[Literal["female", "age", "gcsescore"], ...] = Field(default=("female", "age", "gcsescore"), min_length=1)


class GrowthData(_Bundled):
    """Growth in mathematics (Sustaining Effects Study): 5,594 yearly tests of the 1,174 children with at least 4 of them.

    A user is a child, its cluster the school (57), the target the test's score. Only year, grade and retained vary within a child.
    """

    source: Literal["growth"]
    #: Columns of the features.
    feature_columns: tuple[Literal["year", "grade", "retained", "female", "black", "hispanic", "size", "lowinc", "mobility"], ...] = Field(
        default=("year",), min_length=1
    )
    #: Whether the target is centred and scaled, by public constants of the whole table. Nothing is exchanged for it.
    standardize_target: bool = False

    @property
    def target_scale(self) -> tuple[float, float] | None:
        """Over the whole table."""
        return (-0.450, 1.531) if self.standardize_target else None


class IleaData(SourceSettings):
    """Examination scores of 15,362 pupils in 139 schools of the Inner London Education Authority, 1985 to 1987; 28 coded features.

    A user is a school. The target is a pupil's score, 1 to 70, as (score - 1) / 69. `coterie_client/data/files/ORIGIN.md` says where it is
    from.
    """

    source: Literal["ilea"]
    test_fraction: TestFraction = 0.3  #: Share of each user's rows that is held out, by seed.
    #: Whether each school centres and scales its features by its own training rows. Nothing is exchanged for it, and nothing is noised.
    standardize_own: bool = True


class PythonData(SourceSettings):
    """Users, or labelled rows, from code of a package or of the client itself (`coterie_client.data.python_source`)."""

    source: Literal["python"]
    #: Name that a package gives the source, or package.module:name.
    path: Annotated[str, AfterValidator(partial(check_known, "source", built_in=()))]
    options: dict[str, JsonValue] = Field(default_factory=dict)  #: Settings for the code, which checks them.
    test_fraction: TestFraction = 0.2  #: Share of a user's rows that is held out, for users that come without test rows.
    partition: Partition | None = None  #: How labelled rows are divided among users. Absent: the code names the users.


PooledData = NpzData | LeafData | DigitsData | ImagesData | TorchvisionData | HuggingfaceData | RolesData | TweetsData  # by `Partition`
SOURCES = (
    *("csv", "parquet", "stata", "spss", "npz", "leaf", "python", "images", "torchvision", "huggingface", "roles", "tweets"),
    *("ellipses", "hlm", "representation", "hsb", "exams", "growth", "ilea", "digits"),
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
    | IleaData
    | RepresentationData
    | PythonData,
    Field(discriminator="source"),
    BeforeValidator(_of_a_package),
]
