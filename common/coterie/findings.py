"""What a process may say of a failure, or of its data, to another process: a rule of the table, a count, and declared parts.

The full sentence, with values, headers and paths, stays in the log of the host. What crosses is a `Finding`: the code of a rule, a count,
the role of what is at fault, and a place in the experiment, which both sides have. The receiver writes the sentence from its own table. So
no error can carry a value across by accident, and a peer that lies cannot choose the words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

Role = Literal["", "user", "cluster", "target", "feature", "column", "row", "file", "label", "array", "model", "loss", "source"]
ROLES: Final = frozenset(get_args(Role))

# Of each rule: one count, and more. `{count}` is a number, `{a_role}` "a feature", `{at}` " (data.target_column)" or nothing.
RULES: Final[dict[str, tuple[str, str]]] = {
    # X: who has no rule of its own says no more than this.
    "X1": ("it cannot go on", "it cannot go on"),
    "X2": ("a mistake of the program itself", "mistakes of the program itself"),
    # T: tables.
    "T1": ("its data file cannot be read", "{count} data files cannot be read"),
    "T2": ("a column that the experiment names is missing{at}", "{count} columns that the experiment names are missing{at}"),
    "T3": ("1 cell of {a_role} is not a number", "{count} cells of {a_role} are not numbers"),
}
_PLACE = re.compile(r"([a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*|\[[0-9]{1,6}\])*)?")
_MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class Finding:
    """A rule with its parts. ValueError for what is not in the tables, so a mistake here is found by the first test that meets it."""

    rule: str
    count: int = 1
    role: Role = ""
    place: str = ""  # a key of the experiment, for example "data.feature_columns[1]": both sides can look up what it says

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
        one, more = RULES[self.rule]
        a_role = f"{'an' if self.role[:1] in tuple('aeio') else 'a'} {self.role}" if self.role else "a column"
        at = f" ({self.place})" if self.place else ""
        return (one if self.count == 1 else more).format(count=self.count, a_role=a_role, at=at) + f" (rule {self.rule})"


NO_RULE: Final = Finding("X1")
