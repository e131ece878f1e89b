"""What a host's owner consents to: the parts of an experiment that decide which rows are read and what is sent about them, and their hash.

These parts count:

    data          the source, its paths and columns: which rows are read, and as what
    standardize   sums of the features are sent
    problem       the loss decides what a gradient or a Hessian reveals
    model         for networks: the tensors, and code that builds them
    method        all settings, since many of them decide what is sent, and when
    references    methods that run beside it
    evaluate      users evaluate the models on their rows
    inference     users send second moments of their rows, for standard errors
    payload       the precision of sent vectors
    exact_sums    users' answers are sent, or only their sums
    compress      with what precision answers are sent
    sums          sums are masked, of how many hosts totals are seen, and whether and how many hosts can take masks off
    topology      who sees what a user sends
    privacy       what is clipped and noised, and for how many rounds
    code          what is imported on the host
    packages      installed packages whose code is used, with their versions

These do not: the name and the description, seeds (`seed`; those in `data` count), the fold of a cross-validation, stop rules, times and
numbers of hosts, links, and snapshots. They change how long a run takes, but not what one round reveals. Under masked sums the number of
hosts does, and whether hosts may be lost: with `sums` these count.

Default values are left out, so a hash stays the same when a later version has more keys. The host's own version decides what a default
means. Nothing is fetched: for code the hash contains only names, for packages name and version.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, named_code
from coterie.findings import Finding

HEX: Final = 32  # digits: 128 bits, because an attacker may choose two experiments and search for a collision
ANY: Final = "any"
_FORMAT: Final = "coterie consent 1"
_HASH = re.compile(rf"[0-9a-f]{{{HEX}}}")


def consent_parts(experiment: Experiment) -> dict[str, Any]:
    """The parts that count, as plain JSON values."""
    data = experiment.data.model_dump(mode="json", exclude_defaults=True, exclude={"fold", "standardize"})
    method = experiment.method.model_dump(mode="json", exclude_defaults=True)
    asked: dict[str, Any] = {
        "data": {"source": experiment.data.source, **data},
        "standardize": experiment.data.standardize,
        "problem": experiment.problem.model_dump(mode="json", exclude_defaults=True),
        "method": {**method, "name": experiment.method.name},
        "references": list(experiment.references),
        "evaluate": experiment.evaluate,
        "payload": experiment.payload,
        "topology": experiment.federation.topology,
        "code": named_code(experiment),
    }
    if experiment.inference:
        asked["inference"] = True
    if experiment.exact_sums:
        asked["exact_sums"] = True
    if experiment.privacy is not None:  # `stop.rounds` decides how much noise an epsilon means
        asked["privacy"] = {**experiment.privacy.model_dump(mode="json", exclude_none=True), "rounds": experiment.stop.rounds}
    if experiment.federation.compress is not None:
        asked["compress"] = experiment.federation.compress.model_dump(mode="json", exclude_defaults=True)
    if experiment.masks_sums:
        rules = experiment.federation
        hosts, shares = (
            rules.hosts_per_cluster if rules.is_two_tier else rules.min_hosts or rules.hosts,
            "skip" in (rules.on_loss, rules.late),
        )
        asked["sums"] = {"sums": rules.sums, "threshold": rules.threshold, "min_summed": rules.min_summed, "hosts": hosts, "shares": shares}
        if rules.is_two_tier:
            asked["sums"]["aggregators"] = rules.hosts
    if experiment.packages:
        asked["packages"] = dict(experiment.packages)
    if experiment.model is not None:
        asked["model"] = {"name": experiment.model.name, **experiment.model.model_dump(mode="json", exclude_defaults=True)}
    return asked


def consent_hash(experiment: Experiment) -> str:
    """The first 128 bits of the SHA-256 of the parts that count, as hexadecimal digits."""
    return hash_of(consent_parts(experiment))


def hash_of(asked: Mapping[str, Any]) -> str:
    """As `consent_hash`, of the parts themselves."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(f"{_FORMAT}\n{text}".encode()).hexdigest()[:HEX]


def check_accept(text: str) -> str:
    """The value of --accept, in lower case. ConfigError when it is neither a hash nor "any"."""
    value = text.strip().lower()
    if value != ANY and not _HASH.fullmatch(value):
        raise ConfigError(f"--accept is {text[:80]!r}, want the {HEX} digits of `coterie data EXPERIMENT --hash`, or {ANY}")
    return value


def changed_parts(accepted: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The keys in which two experiments differ, such as "data.feature_columns", in alphabetical order."""
    old, new = _flat(accepted), _flat(asked)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def refusal(sentence: str, changed: Sequence[str] = ()) -> ConfigError:
    """The error that ends a host whose owner has not accepted the experiment."""
    part = changed[0].partition(".")[0] if changed else ""
    place = {"standardize": "data.standardize", "topology": "federation.topology", "sums": "federation.sums", "code": ""}.get(
        part, part
    )  # of the first change
    return ConfigError(sentence, Finding("C1", place=place))


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat
