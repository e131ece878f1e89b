"""The key `partition` of a data section: how labelled rows are divided among users. `coterie_client.data.partition` implements it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.plugins import check_known
from coterie.experiment.settings import Settings

MAX_PARTS = 100_000  # users
MAX_CLASSES = 100_000


class Sizes(Settings):
    """Quantity skew: users with unequal numbers of rows."""

    #: Standard deviation of the logarithm of a user's share of the rows. Larger means more unequal users.
    lognormal: Annotated[float, Field(gt=0, le=10)]


_NEEDED = {"classes": ("users", "classes_per_user"), "dirichlet": ("users", "alpha"), "user": ()}
_OWN = "a rule of your own"
_POSSIBLE = {
    "users": ("classes", "dirichlet", _OWN),
    "classes_per_user": ("classes", "user"),
    "alpha": ("dirichlet",),
    "equal_rows": ("classes",),
    "min_rows": ("dirichlet", "user"),
    "max_users": ("user",),
    "sizes": ("classes", "dirichlet", "user"),
    "options": (_OWN,),
}


class Partition(Settings):
    """Who gets which of the labelled rows.

    by: classes    each of `users` users gets rows of `classes_per_user` distinct classes, and every class goes to equally many users.
    by: dirichlet  each class is divided among `users` users in proportions drawn from Dirichlet(alpha).
    by: user       the rows know their users; each keeps its own (of `classes_per_user` of its classes, drawn).

    Or `by` names a rule of a package, or of the client's own code (`coterie_client.data.sources`), which is given `options`.
    """

    #: classes: each user gets rows of a few classes. dirichlet: each class is divided in random proportions. user: rows stay with their
    #: users. Or a rule of your own.
    by: Annotated[str, AfterValidator(partial(check_known, "partition", built_in=tuple(_NEEDED)))]
    users: Annotated[int, Field(ge=1, le=MAX_PARTS)] | None = None  #: Number of users to make.
    #: Number of distinct classes of a user. Fewer classes make users more different.
    classes_per_user: Annotated[int, Field(ge=1, le=MAX_CLASSES)] | None = None
    #: Concentration of the Dirichlet distribution. Small: a user has few classes. Large: all users have the same mixture.
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    equal_rows: bool = True  #: Whether users get equally many rows, so that a rest belongs to nobody. false: every row belongs to somebody.
    #: Fewest rows of a user. dirichlet draws again until all users have them, by default 2; user leaves smaller users out, by default those
    #: without rows.
    min_rows: Annotated[int, Field(ge=1)] | None = (
        None  # dirichlet: drawn again until all users have them (default 2); user: left out below
    )
    max_users: Annotated[int, Field(ge=1)] | None = None  #: Number of natural users to draw. Absent: all of them.
    #: Labels whose rows count. Absent: all.
    classes: tuple[Annotated[int, Field(ge=0)] | Name, ...] | None = Field(default=None, min_length=1)
    relabel: bool = False  #: Whether a label becomes its place in `classes`, from 0.
    sizes: Sizes | None = None  #: Unequal numbers of rows. Absent: they follow from the other keys.
    options: dict[str, JsonValue] = Field(default_factory=dict)  #: Settings for a rule of your own, which checks them.
    rows_per_user: Annotated[int, Field(ge=1)] | None = None  #: The most training rows of a user, drawn in the proportions of its classes.
    test_rows_per_user: Annotated[int, Field(ge=1)] | None = None  #: The most test rows of a user, drawn likewise.
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)  #: Seed of the partition. Absent: that of the experiment.

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Partition:
        needed = _NEEDED.get(self.by, ())
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(f"by is {self.by!r} and {key} is missing, want {' and '.join(needed)}")
        kind = _OWN if self.is_own else self.by
        for key, kinds in _POSSIBLE.items():
            if kind not in kinds and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} is {getattr(self, key)} and by is {self.by!r}, want it with by: {' or '.join(kinds)}")
        if self.relabel and self.classes is None:
            raise ValueError("relabel is true without classes, want the list of classes whose places are the new labels")
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes is {list(self.classes)}, want each class once")
        return self

    @property
    def is_own(self) -> bool:
        """Whether the rule is code of a package, or beside the experiment."""
        return self.by not in _NEEDED
