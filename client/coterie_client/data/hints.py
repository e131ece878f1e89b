"""Notes on features that look like identifiers, and on features with very different scales.

These are only hints: a covariate may count rows, or be constant for each user. A feature that the experiment names is not checked for being
an identifier. Nor is a column that is not numeric in the table.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from coterie.arrays import Array, distinct
from coterie.experiment.features import column_of
from coterie.findings import Finding
from coterie.text.quoting import some
from coterie_client.data.users import Note, UserData

_FEWEST = 10  # rows: a few whole numbers may differ by chance
_FEWEST_CODES = 3  # values: two may mean yes and no
_FIRST_LOOK = 1000  # rows: enough to rule out most columns
_MAX_NAMED = 5
_MOST_APART = 1e4  # a Hessian contains squares of sizes, and loses half of its digits here
_REMEDY = "list data.feature_columns, or declare {it} ignore in data.columns"


def likely_identifiers(users: Sequence[UserData], named: Collection[str]) -> list[Note]:
    """At most two notes: on features with a different whole number in each row, and on features that encode the user."""
    schema = users[0].schema if users else ()
    rows, codes = [], []
    for place, feature in enumerate(schema):
        if feature.kind != "number" or column_of(feature) in named:
            continue
        if _is_of_rows(users, place):
            rows.append(feature.name)
        elif _is_of_users(users, place):
            codes.append(feature.name)
    notes = []
    row = ("has", "have", "a different whole number in every row", "")
    user = ("is", "are", "one whole number in all rows of a user", " of users")
    for found, rule, (one, several, what, whose) in ((rows, "T40", row), (codes, "T41", user)):
        is_one = len(found) == 1
        asked = f"is it an identifier{whose}?" if is_one else f"are they identifiers{whose}?"
        said = f"{_listed(found)} {one if is_one else several} {what}: {asked} {_REMEDY.format(it='it' if is_one else 'them')}"
        notes += [Note(said, Finding(rule, len(found), "feature"))] if found else []
    return notes


def unlike_sizes(users: Sequence[UserData]) -> list[Note]:
    """A note if features that are not standardised differ much in scale. The intercept counts with scale 1."""
    schema = users[0].schema if users else ()
    if not schema:
        return []
    with np.errstate(all="ignore"):
        squares = np.sum([np.nansum(np.square(user.features), axis=0) for user in users], axis=0)
        sizes = np.sqrt(squares / sum(len(user.features) for user in users))
    there = np.flatnonzero(np.isfinite(sizes) & (sizes > 0.0))
    if not len(there) or max(1.0, sizes[there].max()) <= _MOST_APART * min(1.0, sizes[there].min()):
        return []
    ends = dict.fromkeys((int(there[sizes[there].argmax()]), int(there[sizes[there].argmin()])))
    said = " and ".join(f"{schema[place].name!r} about 1e{np.floor(np.log10(sizes[place])):.0f}" for place in ends)
    found = f"features are of very different sizes ({said}, the intercept 1)"
    return [Note(f"{found}: models may have few right digits; want data.standardize: true", Finding("T42", len(ends), "feature"))]


def _listed(names: Sequence[str]) -> str:
    return f"{'column' if len(names) == 1 else 'columns'} {some(list(map(repr, names)), _MAX_NAMED)}"


def _is_of_rows(users: Sequence[UserData], place: int) -> bool:
    first: list[Array] = []
    n_first = 0
    for values in _parts(users, place):
        first.append(values[: _FIRST_LOOK - n_first])
        n_first += len(first[-1])
        if n_first >= _FIRST_LOOK:
            break
    if n_first < _FEWEST or not _are_distinct(np.concatenate(first)):
        return False
    return n_first < _FIRST_LOOK or _are_distinct(np.concatenate(list(_parts(users, place))))


def _are_distinct(values: Array) -> bool:
    return bool(np.all(values == np.rint(values))) and len(distinct(values)) == len(values)


def _is_of_users(users: Sequence[UserData], place: int) -> bool:
    """Whether the feature is a whole number that is constant for each user, and differs between users that have several rows."""
    codes: set[float] = set()
    n_several = 0
    for user in users:
        values = np.concatenate([user.features[:, place], user.test_features[:, place]])
        if not len(values) or np.any(values != values[0]) or values[0] != np.rint(values[0]):
            return False
        n_several += len(values) > 1
        codes.add(float(values[0]))
    return 2 * n_several > len(users) and len(codes) >= _FEWEST_CODES


def _parts(users: Sequence[UserData], place: int) -> Iterator[Array]:
    for user in users:
        yield user.features[:, place]
        yield user.test_features[:, place]
