"""Checks what a host says of its data when it joins, and whether its features fit those of the hosts before.

The owners of both hosts read the refusal. So it names only columns that the experiment names, and counts the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coterie.experiment.features import KINDS, Feature, column_of
from coterie.v1 import session_pb2
from coterie_server.session.refusal import Refusal, short_name

MAX_FINDINGS = 1000
_MAX_NAME_CHARS = 1000
_MAX_NAMED = 5  # columns of a sentence
_REMEDY = "list data.feature_columns, or declare data.columns"


def check_schema(host: str, hello: session_pb2.Hello) -> None:
    """Refusal of features and findings that are malformed, too many, or too long: the run keeps them as long as it lasts."""
    longest = max((len(text) for feature in hello.schema for text in (feature.name, feature.column)), default=0)
    if longest > _MAX_NAME_CHARS:
        wanted = f"wanted at most {_MAX_NAME_CHARS}"
        raise Refusal("INVALID_ARGUMENT", f"the longest feature name of host {host!r} has {longest} characters, {wanted}")
    wrong = next((feature for feature in hello.schema if feature.kind not in KINDS), None)
    if wrong is not None:
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} has a feature of kind {short_name(wrong.kind)!r}, wanted one of the protocol's")
    if len({feature.name for feature in hello.schema}) < len(hello.schema):
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} has two features of the same name, wanted each once")
    if len(hello.findings) > MAX_FINDINGS:
        raise Refusal("INVALID_ARGUMENT", f"host {host!r} has {len(hello.findings)} notes on its data, wanted at most {MAX_FINDINGS}")


def schema_of(hello: session_pb2.Hello) -> tuple[Feature, ...]:
    """The features of a hello that was checked."""
    return tuple(Feature(frame.name, frame.kind, frame.column) for frame in hello.schema)  # type: ignore[arg-type]


def why_not(found: Sequence[Feature], before: Sequence[Feature], named: Collection[str]) -> str:
    """How features differ from those of the hosts before: the rest of a sentence, or "". `named`: columns that the experiment names."""
    if tuple(found) == tuple(before):
        return ""
    here, there = _by_column(found), _by_column(before)
    columns = [column for column in {**there, **here} if here.get(column) != there.get(column)]
    said = [_of_column(column, here.get(column, ()), there.get(column, ())) for column in columns if column in named]
    if len(said) > _MAX_NAMED:
        said = [*said[:_MAX_NAMED], f"{len(said) - _MAX_NAMED} more columns of the experiment differ"]
    n_extra = sum(len(here.get(column, ())) for column in columns if column not in named and column in here)
    n_missing = sum(len(there[column]) for column in columns if column not in named and column not in here)
    if n_extra:
        said.append(f"{n_extra} of its features {'are' if n_extra > 1 else 'is'} not those of the hosts before: {_REMEDY}")
    elif n_missing:
        are = "s of the hosts before are" if n_missing > 1 else " of the hosts before is"
        said.append(f"{n_missing} feature{are} missing: {_REMEDY}")
    if said:
        return "; ".join(said)
    # The same features, but not in the same order.
    place = next(i for i, (one, other) in enumerate(zip(found, before, strict=True)) if one != other)
    own, theirs = column_of(found[place]), column_of(before[place])
    if own in named and theirs in named:
        return f"its features are in another order: feature {place + 1} is of column {own!r}, the hosts before have {theirs!r}"
    return f"its features are in another order than those of the hosts before, from feature {place + 1} on: {_REMEDY}"


def _of_column(column: str, here: Sequence[Feature], there: Sequence[Feature]) -> str:
    if not here:
        return f"it has no feature of column {column!r}"
    if not there:
        return f"the hosts before have no feature of column {column!r}"
    kinds = _kinds(here), _kinds(there)
    if kinds[0] != kinds[1]:
        return f"column {column!r} is {kinds[0]}, the hosts before have {kinds[1]}"
    if {feature.name for feature in here} == {feature.name for feature in there}:
        return f"the levels of column {column!r} are in another order"
    return f"column {column!r} has other levels: declare them in data.columns"


def _kinds(features: Sequence[Feature]) -> str:
    return " and ".join(f"{'an' if kind[0] in 'aeio' else 'a'} {kind}" for kind in sorted({feature.kind for feature in features}))


def _by_column(features: Sequence[Feature]) -> dict[str, tuple[Feature, ...]]:
    columns: dict[str, tuple[Feature, ...]] = {}
    for feature in features:
        columns[column_of(feature)] = (*columns.get(column_of(feature), ()), feature)
    return columns
