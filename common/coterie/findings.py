"""Findings: what a process may say about a failure, or about its data, to another process.

The full sentence, with values, headers and paths, stays in the log of the host. A `Finding` crosses: the code of a rule, a count, the role
of what is at fault, and a place in the experiment, which both sides have. The receiver makes the sentence from its own table. So no error
can leak a value by accident, and a peer that lies cannot choose the words.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

Role = Literal["", "user", "cluster", "target", "feature", "column", "row", "file", "label", "array", "model", "loss", "source"]
ROLES: Final = frozenset(get_args(Role))

# For each rule: the sentence for one, and for several. `{count}` is a number, `{a_role}` "a feature", `{at}` " (data.target_column)" or "".
RULES: Final[dict[str, tuple[str, str]]] = {
    # X: errors without a rule of their own.
    "X1": ("it cannot go on", "it cannot go on"),
    "X2": ("a mistake of the program itself", "mistakes of the program itself"),
    # D: data of any kind.
    "D1": ("its data does not fit the experiment{at}", "its data does not fit the experiment in {count} places{at}"),
    "D2": ("a data file or folder is missing or cannot be opened{at}", "{count} data files or folders cannot be opened{at}"),
    "D4": ("a user has too few rows", "{count} users have too few rows"),
    "D5": ("its rows cannot be dealt to users{at}", "its rows cannot be dealt to users{at}"),
    "D6": ("an image cannot be read", "{count} images cannot be read"),
    # N: arrays.
    "N1": ("an array that the experiment names is missing{at}", "{count} arrays that the experiment names are missing{at}"),
    "N2": ("{a_role} array has the wrong type or shape{at}", "{count} {role} arrays have the wrong type or shape{at}"),
    "N3": ("1 number of {a_role} is not finite", "{count} numbers of {a_role} are not finite"),
    # C: consent and the host's policy.
    "C1": ("its owner has not accepted this experiment{at}", "its owner has not accepted this experiment{at}"),
    "C2": ("its policy does not let this column be {a_role}{at}", "its policy does not let {count} columns be {a_role}{at}"),
    "C3": ("its policy wants data.feature_columns to be listed", "its policy wants data.feature_columns to be listed"),
    "C4": ("its policy does not let this run{at}", "its policy does not let this run{at}"),
    "C5": ("its policy does not let code be imported{at}", "its policy does not let code be imported{at}"),
    "C6": ("no user has as many rows as its policy wants", "no user has as many rows as its policy wants"),
    "C7": ("its policy and the data source do not fit{at}", "its policy and the data source do not fit{at}"),
    "C8": ("its policy cannot be used", "its policy cannot be used"),
    "C9": ("the parent asks for a step that this experiment does not have", "the parent asks for steps that this experiment does not have"),
    "C10": ("the parent's settings are not those of this experiment", "the parent's settings are not those of this experiment"),
    "C11": ("the parent asks for more than the total of masked sums", "the parent asks for more than the total of masked sums"),
    # T: tables.
    "T1": ("its data file cannot be read", "{count} data files cannot be read"),
    "T2": ("a column that the experiment names is missing{at}", "{count} columns that the experiment names are missing{at}"),
    "T3": ("1 cell of {a_role} is not a number", "{count} cells of {a_role} are not numbers"),
    "T4": ("1 cell of {a_role} is missing", "{count} cells of {a_role} are missing"),
    "T5": ("1 cell of {a_role} is not a date", "{count} cells of {a_role} are not dates"),
    "T6": ("1 cell of {a_role} is not true or false", "{count} cells of {a_role} are not true or false"),
    "T7": ("1 cell of {a_role} has an undeclared level", "{count} cells of {a_role} have undeclared levels"),
    "T8": ("a row has another number of fields than the header", "{count} rows have other numbers of fields than the header"),
    "T9": ("its data file has another format than declared{at}", "its data file has another format in {count} places{at}"),
    "T10": ("1 name of {a_role} is invalid", "{count} names of {a_role} are invalid"),
    "T11": ("a user has two clusters{at}", "{count} users have two clusters{at}"),
    "T12": ("its data has no rows", "{count} of its users have no rows"),
    "T13": ("no columns are left for features", "no columns are left for features"),
    "T14": ("a column occurs twice", "{count} columns occur twice"),
    "T15": ("a column that the experiment names has no type that fits{at}", "{count} columns have no types that fit{at}"),
    "T16": ("its files and the experiment disagree about who names the users{at}", "{count} files disagree about who names the users{at}"),
    "T17": ("1 row with a missing cell was dropped", "{count} rows with missing cells were dropped"),
    "T18": ("1 column is not used", "{count} columns are not used"),
    "T19": ("1 column was converted to numbers", "{count} columns were converted to numbers"),
    "T21": ("a library that reads this data is not installed", "{count} libraries that read this data are not installed"),
    "T22": ("the formula cannot be used{at}", "the formula cannot be used{at}"),
    "T40": (
        "{a_role} that is not declared has a different whole number in every row, as an identifier has",
        "{count} features that are not declared have different whole numbers in every row, as identifiers have",
    ),
    "T41": (
        "{a_role} that is not declared is one whole number in all rows of a user, as an identifier of users is",
        "{count} features that are not declared are one whole number in all rows of a user, as identifiers of users are",
    ),
    "T42": (
        "{a_role} is of a very different size than others: models may have few right digits without data.standardize",
        "{count} features are of very different sizes: models may have few right digits without data.standardize",
    ),
    # L: losses, models, and other code that the experiment names. Its exceptions stay in the host's log.
    "L1": ("the loss of the experiment raised an error{at}", "the loss of the experiment raised {count} errors{at}"),
    "L2": ("the model of the experiment raised an error{at}", "the model of the experiment raised {count} errors{at}"),
    "L3": ("the data source of the experiment raised an error{at}", "the data source of the experiment raised {count} errors{at}"),
    "L4": ("code that the experiment names cannot be used{at}", "code that the experiment names cannot be used{at}"),
    "L5": ("its owner has not allowed the code that the experiment names", "its owner has not allowed the code that the experiment names"),
    "L6": ("1 {role} does not suit the loss{at}", "{count} {role}s do not suit the loss{at}"),
    "L7": ("its rows do not fit the model{at}", "the rows of {count} users do not fit the model{at}"),
    "L8": ("a package of the experiment is not installed{at}", "{count} packages of the experiment are not installed{at}"),
    "L9": ("a name of the experiment is of two packages{at}", "{count} names of the experiment are of two packages each{at}"),
    "L10": ("a package of the experiment has another version{at}", "{count} packages of the experiment have other versions{at}"),
    # M: what methods compute.
    "M1": ("1 number of its models is not finite", "{count} numbers of its models are not finite"),
    "M2": ("its local computation failed", "{count} of its local computations failed"),
    "M3": ("the local problem of a user has no minimiser that can be found", "{count} local problems have no minimiser that can be found"),
    # The count is the exponent of the range.
    "M4": (
        "a number of {a_role} exceeds 2^{count}, the range of its exact sum{at}",
        "a number of {a_role} exceeds 2^{count}, the range of its exact sum{at}",
    ),
    # J: joining, names, TLS.
    "J1": ("it wants TLS, but this server speaks plain text (start it with --tls)", "they want TLS, but this server speaks plain text"),
    "J2": ("a user that it was started for is not in its data", "{count} users that it was started for are not in its data"),
    "J3": ("its data has no user of the cluster that it was started for", "its data has no user of the clusters that it was started for"),
    "J5": ("its state cannot be read, or is not of this run", "its states cannot be read, or are not of this run"),
    "J6": ("its parent broke the protocol", "its parent broke the protocol"),
    # R: a run, as its coordinator or an aggregator sees it.
    "R1": ("another member cannot go on; its parent's log names it", "other members cannot go on; their parent's log names them"),
    "R2": ("too few members joined in time", "too few members joined in time"),
    "R3": ("a member was absent, or did not answer, for too long", "{count} members were absent, or did not answer, for too long"),
    "R4": ("it was stopped", "it was stopped"),
    "R5": ("a file cannot be written", "{count} files cannot be written"),
    "R6": ("the coordinator's log says why", "the coordinator's log says why"),
    "R7": ("a member broke the protocol", "{count} members broke the protocol"),
    "R8": ("another aggregator could not be reached for too long", "{count} other aggregators could not be reached for too long"),
}
_PLACE = re.compile(r"([a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*|\[[0-9]{1,6}\])*)?")
_MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class Finding:
    """A rule with its parts. ValueError for anything outside the tables, so the first test of a mistake finds it."""

    rule: str
    count: int = 1
    role: Role = ""
    place: str = ""  # a key of the experiment, such as "data.feature_columns[1]", which both sides can look up

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule {self.rule[:20]!r} is not in the table")
        if self.role not in ROLES:
            raise ValueError(f"role {self.role[:20]!r} is not in the table")
        if not _PLACE.fullmatch(self.place) or len(self.place) > 200:
            raise ValueError("the place is no key of an experiment")
        if not 0 <= self.count <= _MAX_COUNT:
            raise ValueError(f"the count is {self.count}")

    @property
    def sentence(self) -> str:
        """For others: "2 cells of a feature are not numbers (rule T3)"."""
        return self.with_declared(None)

    def with_declared(self, value: str | float | None) -> str:
        """The sentence, with the value in the receiver's own experiment at the place, if it can be shown."""
        one, more = RULES[self.rule]
        role = self.role or "column"
        a_role = f"{'an' if role[:1] in tuple('aeio') else 'a'} {role}"
        said = "" if value is None else f": {value!r}"
        at = f" ({self.place}{said})" if self.place else ""
        return (one if self.count == 1 else more).format(count=self.count, role=role, a_role=a_role, at=at) + f" (rule {self.rule})"


NO_RULE: Final = Finding("X1")
