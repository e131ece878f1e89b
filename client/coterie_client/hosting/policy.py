"""The policy of a host's owner: what any experiment may ask of it. A file `policy.yaml`, checked before data is opened.

An absent key allows everything, with one exception: with `columns.features`, the experiment has to list its features. The policy looks at
the experiment only. SECURITY.md says what others still learn from what it allows.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from coterie.errors import ConfigError
from coterie.experiment.columns import Name
from coterie.experiment.config import Experiment, named_code
from coterie.experiment.data import PythonData
from coterie.experiment.plugins import is_path
from coterie.experiment.settings import Settings, validated
from coterie.findings import Finding, Role
from coterie_client.data.tables.formula import asked_by
from coterie_client.data.users import Note

FILE: Final = "policy.yaml"
UNUSABLE: Final = Finding("C8")
_KINDS: Final[Mapping[Role, str]] = {"user": "users", "cluster": "clusters", "target": "targets", "feature": "features"}
# For each role, the keys of all data sections that name a column or an array of it.
_KEYS: Final[Mapping[Role, tuple[str, ...]]] = {
    "user": ("user_column", "user", "test_user"),
    "cluster": ("cluster_column", "cluster"),
    "target": ("target_column", "label_column", "target", "test_target", "label"),
    "feature": ("feature_columns", "indicator_columns", "text_column", "features", "test_features", "image", "text"),
}
_PUBLIC: Final = frozenset({"ellipses", "hlm", "representation", "hsb", "exams", "growth", "ilea", "digits"})  # come with the package


class Columns(Settings):
    """Which columns or arrays may take a role; absent: any."""

    users: tuple[Name, ...] | None = None
    clusters: tuple[Name, ...] | None = None
    targets: tuple[Name, ...] | None = None
    features: tuple[Name, ...] | None = None


class Policy(Settings):
    columns: Columns = Columns()
    min_rows: Annotated[int, Field(ge=1, le=1_000_000_000)] = 1  # users with fewer training rows are left out
    methods: tuple[Name, ...] | None = None
    references: tuple[Name, ...] | None = None
    standardize: bool = True
    pseudonyms: bool = False  # users take part under keyed hashes of their names
    code: bool = True  # whether code beside the experiment may be imported; it also needs --allow-code
    packages: tuple[Name, ...] | None = None  # installed packages whose code may be used


def read_policy(path: Path) -> Policy:
    """The policy in a file. ConfigError with all its mistakes."""
    from coterie.text import yaml_text  # noqa: PLC0415 - a client without a policy never reads YAML

    try:
        with path.open("rb") as file:
            text = file.read(yaml_text.MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror or error}", UNUSABLE) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the policy {path} is not UTF-8: {error.reason}", UNUSABLE) from None
    try:
        content = yaml_text.parsed(text, f"the policy {path}")
    except ConfigError as error:
        raise ConfigError(str(error), UNUSABLE) from None
    return validated(Policy, {} if content is None else content, f"the policy {path}", UNUSABLE)


def breaches(policy: Policy, experiment: Experiment) -> list[Note]:
    """All requests of the experiment beyond the policy: each a sentence for the owner, and a finding for others."""
    return [*_columns(policy.columns, experiment.data), *_methods(policy, experiment)]


def check_policy(policy: Policy, experiment: Experiment, where: str) -> None:
    """ConfigError that lists all breaches. Others receive the finding of the first one."""
    if found := breaches(policy, experiment):
        listed = "; ".join(breach.sentence for breach in found)
        raise ConfigError(f"the policy {where} does not allow what the coordinator asks for: {listed}", found[0].finding)


def _methods(policy: Policy, experiment: Experiment) -> Iterator[Note]:
    name = experiment.method.name
    if policy.methods is not None and name not in policy.methods:
        yield Note(f"method {name!r}, want one of {_listed(policy.methods)}", Finding("C4", place="method.name"))
    for i, reference in enumerate(experiment.references):
        if policy.references is not None and reference not in policy.references:
            yield Note(f"reference {reference!r}, want {_listed(policy.references)}", Finding("C4", place=f"references[{i}]"))
    if experiment.data.standardize and not policy.standardize:
        yield Note("standardize: true, which sends sums of each feature", Finding("C4", place="data.standardize"))
    if experiment.data.fills_missing and not policy.standardize:
        found = f"missing: {getattr(experiment.data, 'missing', '')}, which sends sums of each feature as standardize does"
        yield Note(found, Finding("C4", place="data.missing"))
    if not policy.code and (named := named_code(experiment)):
        yield Note(f"code to import, {' and '.join(map(repr, named))}", Finding("C5"))
    for package in experiment.packages:
        if policy.packages is not None and package not in policy.packages:
            yield Note(f"code of the package {package!r}, want one of {_listed(policy.packages)}", Finding("C5"))


def _columns(columns: Columns, data: Any) -> Iterator[Note]:
    if data.source in _PUBLIC:
        return
    for role, place, name in _roles(data):
        allowed: Sequence[str] | None = getattr(columns, _KINDS[role])
        if allowed is not None and name not in allowed:
            yield Note(f"column {name!r} as {role} ({place}), want {_listed(allowed)}", Finding("C2", role=role, place=place))
    is_open = hasattr(data, "formula") and data.feature_columns is None and data.formula is None  # a table in any format
    # An experiment that names a file's columns could give any of them an allowed name.
    if columns != Columns() and (dialect := getattr(data, "csv", None)) is not None and dialect.names is not None:
        sentence = "data.csv.names, by which any column may get any name: want a file with a header, or a policy without columns"
        yield Note(sentence, Finding("C7", place="data.csv.names"))
    if columns != Columns() and isinstance(data, PythonData) and not is_path(data.path):
        sentence = f"the source {data.path!r} of a package, whose columns a policy does not see: want a table, or a policy without columns"
        yield Note(sentence, Finding("C7", place="data.path"))
    if columns.features is not None and is_open:
        sentence = f"all columns as features: want data.feature_columns to list some of {_listed(columns.features)}"
        yield Note(sentence, Finding("C3", place="data.feature_columns"))


def _roles(data: Any) -> Iterator[tuple[Role, str, str]]:
    for role, key in ((role, key) for role, keys in _KEYS.items() for key in keys):
        value = getattr(data, key, None)
        if isinstance(value, tuple):
            yield from ((role, f"data.{key}[{i}]", str(name)) for i, name in enumerate(value))
        elif value is not None:
            yield role, f"data.{key}", str(value)
    several = getattr(data, "user_column", None)
    if isinstance(several, tuple) and len(several) > 1 and data.cluster_column is None:
        yield "cluster", "data.user_column[0]", several[0]  # its values are sent as names of known clusters
    if (encoded := getattr(data, "encoded", None)) is not None:
        yield "feature", "data.encoded.bytes", encoded.bytes
        yield "feature", "data.encoded.offsets", encoded.offsets
    if getattr(data, "formula", None) is not None:
        asked = asked_by(data.formula)  # the reader's own parser, so that it sees the same columns
        for name in asked.columns:
            yield ("target" if name == asked.target else "feature"), "data.formula", name


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
