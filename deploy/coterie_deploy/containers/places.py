"""Where members belong: the nodes of a cluster, by labels of nodes. A host belongs where its data is."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from coterie.errors import ConfigError
from coterie_deploy.containers.members import Plan

_WANTED = "want MEMBER=LABEL=VALUE, such as host-1=site=north"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TOLERATED = f"want MEMBER=TAINT, MEMBER=TAINT=VALUE or either with :EFFECT, one of {', '.join(_EFFECTS)}"
_KEY = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9.]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Toleration:
    """A taint of nodes that a member may run on all the same."""

    key: str
    value: str | None = None  # None: any
    effect: str | None = None  # None: all


def labels(plan: Plan, texts: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """The labels that the node of each member has, by --place. ConfigError for what cannot be read, and for members that are not there."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        pattern, key, value = [*text.split("=", 2), "", ""][:3]
        if not (_KEY.fullmatch(key) and _VALUE.fullmatch(value)):
            raise ConfigError(f"--place is {text!r}, {_WANTED}")
        for name in _members(plan, pattern, "--place", text):
            found.setdefault(name, {})[key] = value
    return found


def tolerations(plan: Plan, texts: Sequence[str]) -> Mapping[str, Sequence[Toleration]]:
    """The taints that each member tolerates, by --tolerate. ConfigError as with `labels`."""
    found: dict[str, list[Toleration]] = {}
    for text in texts:
        pattern, _, taint = text.partition("=")
        rest, has_effect, effect = taint.partition(":")
        key, has_value, value = rest.partition("=")
        fits = _KEY.fullmatch(key) and (not has_value or _VALUE.fullmatch(value)) and (not has_effect or effect in _EFFECTS)
        if not fits:
            raise ConfigError(f"--tolerate is {text!r}, {_TOLERATED}")
        for name in _members(plan, pattern, "--tolerate", text):
            found.setdefault(name, []).append(Toleration(key, value or None, effect or None))
    return found


def _members(plan: Plan, pattern: str, option: str, text: str) -> Iterator[str]:
    names = [member.name for member in plan.members]
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"{option} is {text!r}, but no member is called {pattern!r}, want one of {listed}")
    yield from matching
