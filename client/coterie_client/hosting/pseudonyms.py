"""Users under pseudonyms: keyed hashes, whose key and list stay with the host.

    u- and the first 16 hexadecimal digits of HMAC-SHA256(key, name)

Without the key, nobody can try names. The same key gives the same pseudonyms, so a restarted host has the same users. Known clusters keep
their names, because aggregators are made for them and experiments list them. Rows are dealt and held out by true names, so results differ
only by the order of the members.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coterie.errors import ConfigError, RunError
from coterie.findings import Finding
from coterie.record.files import private_folder, written_whole
from coterie.text.names import natural_key
from coterie_client.data import UserData

KEY_BYTES: Final = 32
DIGITS: Final = 16
_OTHERS: Final = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH  # a group of services may read a key that is mounted for it
_UNUSABLE: Final = Finding("C8")
_TOO_FEW: Final = Finding("C6")


@dataclass(frozen=True)
class Admitted:
    """The users that take part, in natural order of their names in the run, with their true names."""

    users: tuple[UserData, ...]
    true_names: Mapping[str, str]
    n_left_out: int = 0


def admitted(users: Sequence[UserData], min_rows: int, key: bytes | None) -> Admitted:
    """Users with at least `min_rows` training rows, under pseudonyms if there is a key. ConfigError if no user is left."""
    kept = [user for user in users if len(user.features) >= min_rows]
    if not kept:
        raise ConfigError(f"none of {len(users)} users has the {min_rows} training rows that the policy's min_rows wants", _TOO_FEW)
    if key is None:
        return Admitted(tuple(kept), {user.name: user.name for user in kept}, len(users) - len(kept))
    true_names = {pseudonym(key, user.name): user.name for user in kept}
    if len(true_names) < len(kept):
        raise ConfigError("two users have the same pseudonym: want another key", _UNUSABLE)
    renamed = sorted((replace(user, name=pseudonym(key, user.name)) for user in kept), key=lambda user: natural_key(user.name))
    return Admitted(tuple(renamed), true_names, len(users) - len(kept))


def pseudonym(key: bytes, name: str) -> str:
    return "u-" + hmac.new(key, name.encode(), hashlib.sha256).hexdigest()[:DIGITS]


def key_in(*paths: Path) -> bytes:
    """The key in the first of these files that exists. Otherwise a new one in the last of them, which only its owner may read."""
    for path in paths:
        if path.exists():
            return _read(path)
    made = paths[-1]
    try:
        private_folder(made.parent)
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:  # another host of this folder was faster
        pass
    except OSError as error:
        raise RunError(f"cannot write the key of the pseudonyms {made}: {error.strerror or error}") from error
    return _read(made)


def _read(path: Path) -> bytes:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(f"cannot read the key of the pseudonyms {path}: {error.strerror or error}", _UNUSABLE) from None
    except ValueError:
        key = b""
    if mode & _OTHERS:
        raise ConfigError(f"{path} has mode {mode:04o}: others may read or change the key of the pseudonyms, want chmod 600", _UNUSABLE)
    if len(key) < KEY_BYTES:
        raise ConfigError(f"{path} is no key of pseudonyms, want {2 * KEY_BYTES} hexadecimal digits", _UNUSABLE)
    return key


def write_list(path: Path, true_names: Mapping[str, str]) -> None:
    """Writes the list of true names, readable only by the owner of the host."""
    with written_whole(path, "the list of pseudonyms") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(dict(true_names), indent=1, ensure_ascii=False, sort_keys=True).encode())
