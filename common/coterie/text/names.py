"""User names: their natural order, which names are valid, and the command line's `--users` selection."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NoReturn

from coterie.errors import ConfigError, default_finding
from coterie.findings import Finding

NaturalKey = tuple[tuple[tuple[str, int, str], ...], str]

_NO_NAME = Finding("T10", role="user")
_RUN = re.compile(r"([^0-9]*)([0-9]*)")
_POSITIONS = re.compile(r"#([0-9]{1,9})(?:\s*-\s*#([0-9]{1,9}))?")
_NUMBERS = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?")


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


@default_finding(Finding("J2"))
def parse_users(selection: str, names: Iterable[str]) -> list[str]:
    """The users in `names` that `selection` chooses, in natural order, each once.

    A selection is a comma-separated list of names ("u30") and ranges of names ("u30-u39"). Integers are names too: "7" is the user called
    7. Positions in the naturally ordered list of all names, from 0, have a sign: "#25", "#0-#19". They take precedence over a name like
    "#25". Ranges include both ends. Any other token that is a name means this name, so names with hyphens work.

    Raises ConfigError for an empty token, a position outside the list, an unknown name, and a range with reversed ends.
    """
    ordered = sorted(set(names), key=natural_key)
    place = {name: position for position, name in enumerate(ordered)}
    chosen: set[int] = set()
    for token in (normal(part.strip()) for part in selection.split(",")):
        first, last = _ends(token, selection, ordered, place)
        if first > last:
            raise ConfigError(f"users {token!r} is a range from {first} down to {last}, want the first end before the last")
        chosen.update(range(first, last + 1))
    return [ordered[position] for position in sorted(chosen)]


def _ends(token: str, selection: str, ordered: Sequence[str], place: dict[str, int]) -> tuple[int, int]:
    """First and last position of one token."""
    if not token:
        raise ConfigError(f"users {selection!r} has an empty part, want names, #positions or ranges between the commas")
    if match := _POSITIONS.fullmatch(token):
        first = _position(match[1], token, len(ordered))
        return first, first if match[2] is None else _position(match[2], token, len(ordered))
    if token in place:
        return place[token], place[token]
    for hyphen in re.finditer("-", token):
        first_name, last_name = token[: hyphen.start()].strip(), token[hyphen.end() :].strip()
        if first_name in place and last_name in place:
            return place[first_name], place[last_name]
    if match := _NUMBERS.fullmatch(token):
        _refuse_numbers(token, match, len(ordered))
    # A range with one unknown end: name that end, not the whole token.
    head, hyphen_text, tail = token.partition("-")
    if hyphen_text and head.strip() in place:
        raise unknown_user(tail.strip(), ordered)
    head, hyphen_text, tail = token.rpartition("-")
    if hyphen_text and tail.strip() in place:
        raise unknown_user(head.strip(), ordered)
    raise unknown_user(token, ordered)


def _refuse_numbers(token: str, match: re.Match[str], n_users: int) -> NoReturn:
    """ConfigError for numbers that are not names, but may be meant as positions."""
    meant = f"#{match[1]}" if match[2] is None else f"#{match[1]}-#{match[2]}"
    what = f"user {token!r} is" if match[2] is None else f"the users {token!r} are"
    wanted = f"want a name, or {meant} for a position" if int(match[2] or match[1]) < n_users else "want a name"
    raise ConfigError(f"{what} not in the data, {wanted} among its {n_users} users (#0 to #{n_users - 1})")


def _position(digits: str, token: str, n_users: int) -> int:
    position = int(digits)
    if position >= n_users:
        raise ConfigError(
            f"users {token!r} asks for position {position} of {n_users} users, want #0 to #{n_users - 1}: positions count the "
            "users in this machine's data; leave --users out to serve all of them",
        )
    return position
