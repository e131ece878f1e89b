"""Two ledgers beside each other: what every user was sent and has sent, whatever hosts and aggregators were between."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

import yaml

from coterie.record.ledger import of_ranges
from coterie.text.names import parse_users

CENTRES = (("within-average", "down"), ("gap", "down"))  # steps and directions that go once to each host, for all users of a cluster
Key = tuple[int, int, str, str, str]  # stage, round, step, direction, user


def users_of_links(connection: sqlite3.Connection, compose_file: Path | None) -> dict[str, list[str]]:
    """The users at the end of each link to a client host: as the run says, or for hosts of aggregators as the Compose file does."""
    members = connection.execute("SELECT name, cluster, host FROM members ORDER BY position").fetchall()
    found: dict[str, list[str]] = {}
    for name, _, host in members:
        found.setdefault(host, []).append(name)
    services = {} if compose_file is None else yaml.safe_load(compose_file.read_text())["services"]
    for service in services.values():
        command = service["command"]
        option = {key: command[command.index(key) + 1] for key in ("--server", "--name", "--users", "--cluster") if key in command}
        if command[0] == "client":
            of_cluster = [name for name, cluster, _ in members if cluster == option.get("--cluster")]
            users = parse_users(option["--users"], [name for name, _, _ in members]) if "--users" in option else of_cluster
            found[option["--name"]] = users
            found[f"{option['--server'].partition(':')[0]}/{option['--name']}"] = users
    return found


def per_user(run: Path, compose_file: Path | None) -> dict[Key, tuple[float, float]]:
    """Vectors and scalars of each user's messages by stage, round, step and direction, on the link to its host.

    What all users of a host are sent in common counts for each of them, and so do rows of users that were sent together. Control (sessions,
    heartbeats, envelopes) and the parameters of the clusters that a host has are the links' own, and left out.
    """
    found: Counter[tuple[Key, str]] = Counter()
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        links = users_of_links(connection, compose_file)
        names = [name for (name,) in connection.execute("SELECT name FROM members ORDER BY position")]
        sets = {number: [names[i] for i in of_ranges(text)] for number, text in connection.execute("SELECT id, members FROM user_sets")}
        rows = connection.execute(
            "SELECT stage, round, step, direction, link, user_set, is_broadcast, vectors, scalars FROM ledger"
            " WHERE useful AND scope != 'between-cluster' AND step NOT IN ('control', 'parameters')"
        )
        for stage, number, step, direction, link, user_set, is_broadcast, vectors, scalars in rows:
            users = links[link] if user_set is None else sets[user_set]
            for user in users:
                share = 1 if is_broadcast else len(users)
                found[(stage, number, step, direction, user), "vectors"] += vectors / share
                found[(stage, number, step, direction, user), "scalars"] += scalars / share
    keys = {key for key, _ in found}
    return {key: (found[key, "vectors"], found[key, "scalars"]) for key in keys}


def same_ledger(run: Path, other: Path, compose_file: Path | None = None) -> None:
    """Both have the same vectors and scalars by round, step and user. `compose_file` says who was where in the first."""
    both = per_user(run, compose_file), per_user(other, None)
    found, wanted = ({key: row for key, row in one.items() if key[2:4] not in CENTRES} for one in both)
    assert wanted
    different = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    assert not different, [(key, found.get(key), wanted.get(key)) for key in different[:8]]


def centres_by_round(run: Path) -> dict[tuple[int, int], int]:
    """Vectors of clusters' centres by stage and round. A centre goes once to each host with users of the cluster, for all of them."""
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        rows = connection.execute(
            "SELECT stage, round, SUM(vectors) FROM ledger WHERE useful AND scope != 'between-cluster'"
            " AND (step, direction) IN (VALUES (?, ?), (?, ?)) GROUP BY stage, round",
            [text for pair in CENTRES for text in pair],
        )
        return {(stage, number): vectors for stage, number, vectors in rows}


def wire_bytes(run: Path, scope: str, aggregator: str) -> int:
    """Message bytes and gRPC frame headers of the links of a scope that end at an aggregator."""
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        query = "SELECT COALESCE(SUM(message_bytes + 5 * frames), 0) FROM ledger WHERE scope = ? AND (link = ? OR link LIKE ?)"
        return int(connection.execute(query, (scope, aggregator, f"{aggregator}/%")).fetchone()[0])
