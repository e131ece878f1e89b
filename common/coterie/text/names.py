"""User names: their natural order, which names are valid, and the command line's `--users` selection."""

import difflib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from coterie.errors import ConfigError, default_finding
from coterie.findings import Finding

NaturalKey = tuple[tuple[tuple[str, int, str], ...], str]

_NO_NAME = Finding("T10", role="user")
_RUN = re.compile(r"([^0-9]*)([0-9]*)")
_POSITION = re.compile(r"#[0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_SHARE = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


def normal(name: str) -> str:
    """The NFC spelling, which is the same for names that look alike. An accent may be a separate character or part of its letter."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def natural_key(name: str) -> NaturalKey:
    """Sort key of the natural order: runs of digits compare as numbers, the rest by code point, so "u2" < "u10".

    Names that differ only in leading zeros ("u2", "u02") are compared as text, so the order is total.
    """
    # Numbers compare by length, then digits. This equals comparing integers, without int()'s limit of 4300 digits.
    runs = []
    for text, digits in _RUN.findall(name):
        number = digits.lstrip("0")
        runs.append((text, len(number) if digits else -1, number))
    return tuple(runs), name


def check_name(name: str, where: str) -> str:
    """The normalised name, if it is valid for a user or cluster. Otherwise a ConfigError that begins with `where`."""
    if not name:
        raise ConfigError(f"{where}: the name is empty, want at least one character", _NO_NAME)
    if name != name.strip() or not name.isprintable():
        raise ConfigError(f"{where}: the name {name!r} has spaces around it or unprintable characters, want none", _NO_NAME)
    return normal(name)


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Up to three of `names` that look like `name`, most similar first."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)


def unknown_user(name: str, names: Sequence[str]) -> ConfigError:
    """The error for a user that is not among `names`."""
    similar = similar_names(normal(name), names)
    if similar:
        return ConfigError(f"user {name!r} is not in the data, want one like {', '.join(map(repr, similar))}", Finding("J2"))
    return ConfigError(f"user {name!r} is not in the data, want one of its {len(names)} users", Finding("J2"))


def split_users(selection: str) -> list[str]:
    """The parts of a list of users, normalised. ConfigError for an empty one."""
    parts = [normal(part.strip()) for part in selection.split(",")]
    if not all(parts):
        raise ConfigError(f"users {selection!r} has an empty part, want names, #positions or ranges between the commas")
    return parts


def ends_of(part: str) -> tuple[str, str] | None:
    """The two ends of a range FIRST..LAST; None for a single name."""
    first, dots, last = part.partition("..")
    return (first.strip(), last.strip()) if dots else None


def hyphen_ranges(part: str) -> Iterator[tuple[str, str]]:
    """What would be the ends of a range if a hyphen were its sign."""
    for hyphen in re.finditer("-", part):
        yield part[: hyphen.start()].strip(), part[hyphen.end() :].strip()


@default_finding(Finding("J2"))
def parse_users(selection: str, names: Iterable[str]) -> list[str]:
    """The users in `names` that `selection` chooses, in natural order, each once.

    A selection is a comma-separated list of names ("u30") and ranges of names ("u30..u39"). Integers are names too: "7" is the user called
    7. Positions in the naturally ordered list of all names, from 0, have a sign: "#25", "#0..#19". They take precedence over a name like
    "#25". Ranges include both ends. Any other part that is a name means this name. A selection that is "I/N", and no name, is the share of
    the I-th of N hosts, from 1.

    Raises ConfigError for an empty part, a position outside the list, an unknown name, a range with reversed ends, and no such share.
    """
    ordered = sorted(set(names), key=natural_key)
    place = {name: position for position, name in enumerate(ordered)}
    if (share := _SHARE.fullmatch(selection.strip())) and selection.strip() not in place:
        number, n_hosts = int(share[1]), int(share[2])
        if not 0 < number <= n_hosts <= len(ordered):
            wanted = f"want I/N with I from 1 to N, and N at most {len(ordered)}"
            raise ConfigError(f"users {selection!r} is share {number} of {n_hosts} of {len(ordered)} users, {wanted}")
        return [ordered[position] for position in shares(len(ordered), n_hosts)[number - 1]]
    chosen: set[int] = set()
    for part in split_users(selection):
        first, last = _places(part, ordered, place)
        if first > last:
            raise ConfigError(f"users {part!r} is a range from {first} down to {last}, want the first end before the last")
        chosen.update(range(first, last + 1))
    return [ordered[position] for position in sorted(chosen)]


def shares(n: int, n_hosts: int) -> list[range]:
    """The positions of `n` users spread evenly over the hosts, in order."""
    bounds = [n * i // n_hosts for i in range(n_hosts + 1)]
    return [range(*ends) for ends in itertools.pairwise(bounds)]


def _places(part: str, ordered: Sequence[str], place: dict[str, int]) -> tuple[int, int]:
    """First and last position of one part."""
    ends = (part,) if part in place else ends_of(part) or (part,)
    if all(end in place or _POSITION.fullmatch(end) for end in ends):
        found = [_position(end, part, len(ordered)) if _POSITION.fullmatch(end) else place[end] for end in ends]
        return found[0], found[-1]
    if all(map(_NUMBER.fullmatch, ends)):
        # Numbers that are not names, but may be meant as positions.
        n, meant = len(ordered), "..".join(f"#{end}" for end in ends)
        what = f"user {part!r} is" if len(ends) == 1 else f"the users {part!r} are"
        wanted = f"want a name, or {meant} for a position" if int(ends[-1]) < n else "want a name"
        raise ConfigError(f"{what} not in the data, {wanted} among its {n} users (#0 to #{n - 1})")
    for first, last in hyphen_ranges(part):
        if (first in place and last in place) or (_POSITION.fullmatch(first) and _POSITION.fullmatch(last)):
            raise ConfigError(f"users {part!r}: want {first}..{last} for a range")
    raise unknown_user(next(end for end in ends if end not in place and not _POSITION.fullmatch(end)), ordered)


def _position(sign_and_digits: str, token: str, n_users: int) -> int:
    position = int(sign_and_digits[1:])
    if position >= n_users:
        raise ConfigError(
            f"users {token!r} asks for position {position} of {n_users} users, want #0 to #{n_users - 1}: positions count the "
            "users in this machine's data; leave --users out to serve all of them"
        )
    return position
