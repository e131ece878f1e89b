"""`coterie project`: how long a finished run would take on other links, from its ledger and its measured time.

The model: a parent makes one exchange after another. Each costs two delays, and the transmission of task and reply on its slowest link.
Clusters run side by side, so in each round of the coordinator the slowest cluster counts, and then the exchange between clusters. The
session costs five delays in each scope (request for the experiment, its answer, hello, finish, books; the welcome travels with the first
task) and the transmission of its own messages. Aggregators that are peers ask each other in each exchange: two delays, and the
transmission of the larger direction, since all send at once. Around a ring one waits for the other: a delay for each message, and the
transmission of all. All other time counts as computing and stays the same. This is too much if waiting for one host overlaps with the
computing of another. It is too little by some milliseconds a turn, because after a wait a process finds its caches used by others. Both
errors are small if turns take tens of milliseconds.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coterie.errors import ConfigError
from coterie.experiment.links import LinkRule, link_rule
from coterie.record.ledger import DOWN, peers_of
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie_deploy.terminal.tables import count, duration, is_narrow, say, say_left_out, size, table_of
from coterie_server.record import summary
from coterie_server.record.rundb import BETWEEN, DIRECT, PEERS, WITHIN, read_run

SCOPES = {"direct": DIRECT, "between": BETWEEN, "within": WITHIN, "peers": PEERS}  # as the experiment and as the ledger call them
DELAYS_OF_A_TURN = 2
DELAYS_OF_THE_SESSION = 5
NOTES = (
    "turns: exchanges one after another; where clusters run side by side, those of the slowest in each round; around a ring half of the "
    "messages. down, up: wire bytes of all "
    "links of the scope. computing: what is left of the measured time, starting processes included."
)


@dataclass(frozen=True)
class Turns:
    """The exchanges of one parent in one round: how many, and the bytes on the slowest link of each."""

    n_turns: int
    wire_bytes: int

    def seconds(self, rule: LinkRule | None) -> float:
        """The time on such links; None: links that take no time."""
        return 0.0 if rule is None else self.n_turns * DELAYS_OF_A_TURN * rule.delay_s + rule.transmission_s(self.wire_bytes)


@dataclass(frozen=True)
class Scope:
    rounds: Sequence[Sequence[Turns]]  # of each round of the coordinator those of every parent, which run side by side
    session_bytes: int  # on the slowest link: hello, welcome, finish and books, heartbeats, and the experiment
    down_bytes: int
    up_bytes: int
    measured_on: LinkRule | None  # what its links were shaped to
    session_delays: int = DELAYS_OF_THE_SESSION

    def seconds(self, rule: LinkRule | None) -> float:
        """The time on such links."""
        if rule is None:
            return 0.0
        session_s = self.session_delays * rule.delay_s + rule.transmission_s(self.session_bytes)
        return session_s + sum(max(turns.seconds(rule) for turns in parents) for parents in self.rounds)

    def n_turns(self, rule: LinkRule | None) -> int:
        """The turns of the slowest parents."""
        return sum(max(parents, key=lambda turns: (turns.seconds(rule), turns.n_turns)).n_turns for parents in self.rounds)


@dataclass(frozen=True)
class Projection:
    """The measured run, and its scopes by their names in the experiment."""

    title: str
    measured_s: float
    scopes: Mapping[str, Scope]
    cautions: Sequence[str]

    @property
    def computing_s(self) -> float:
        """The time that the run's own links do not account for."""
        return max(0.0, self.measured_s - sum(scope.seconds(scope.measured_on) for scope in self.scopes.values()))

    def seconds(self, rules: Mapping[str, LinkRule]) -> float:
        """The wall time on these links; those of a scope without one stay what they were."""
        return self.computing_s + sum(scope.seconds(rules.get(name, scope.measured_on)) for name, scope in self.scopes.items())


def print_projection(folder: Path, links: Mapping[str, str | None], console: Console) -> None:
    """Measured and estimated time by scope. ConfigError for a run that has not finished in one go, and for links that it does not have."""
    rules = _rules_of(links)
    found = projection_of(folder)
    for wrong in (name for name in rules if name not in found.scopes):
        raise ConfigError(f"--{wrong} is given, but the run has no such links: want {' and '.join(f'--{name}' for name in found.scopes)}")
    say(console, found.title, style="bold")
    console.print()
    console.print(_table(found, rules, narrow=is_narrow(console)))
    say_left_out(console, ["links", "turns", "down", "up"] if is_narrow(console) else [])
    console.print()
    say(console, NOTES, style="dim")
    say(console, *(f"warning: {caution}" for caution in found.cautions), style="yellow")


def _rules_of(links: Mapping[str, str | None]) -> dict[str, LinkRule]:
    rules = {}
    for name, text in links.items():
        try:
            if text is not None:
                rules[name] = link_rule(text)
        except ValueError as error:
            raise ConfigError(f"--{name} {error}") from None
    if not rules:
        raise ConfigError("no links are given, want one of --direct, --between, --within and --peers, such as --direct 20Mbit/40ms")
    return rules


def projection_of(folder: Path) -> Projection:
    """Reads a run folder. ConfigError if its run did not finish in one go."""
    with read_run(folder) as connection:
        facts = summary.facts(connection)
        measured_s = _measured_s(connection, folder, facts)
        scopes = _scopes(connection, facts.get("experiment", ""))
        if not scopes:
            raise ConfigError(f"the run in {folder} has booked no traffic, want one that has")
        title = f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}"
        return Projection(title, measured_s, scopes, _cautions(connection))


def _measured_s(connection: sqlite3.Connection, folder: Path, facts: Mapping[str, str]) -> float:
    status = facts.get("status", "?")
    if status != "finished":
        raise ConfigError(f"the run in {folder} is {status}, want a finished one")
    if facts.get("attempt") != "1":
        raise ConfigError(f"the run in {folder} was resumed, so that nobody knows how long it computed: want one that finished in one go")
    times = dict(connection.execute("SELECT kind, at FROM events WHERE kind IN ('start', 'finished') ORDER BY rowid"))
    if len(times) < 2:
        raise ConfigError(f"the run in {folder} has not written down when it started and finished, want one of this version")
    return float(times["finished"] - times["start"])


_BYTES = f"""
SELECT link, seq, MIN(stage), MIN(round),
    SUM(CASE WHEN direction = '{DOWN}' THEN w ELSE 0 END), SUM(CASE WHEN direction = '{DOWN}' THEN 0 ELSE w END)
FROM (SELECT *, message_bytes + {GRPC_FRAME_HEADER_BYTES} * frames AS w FROM ledger WHERE scope = ?) GROUP BY link, seq
"""  # noqa: S608 - constants of ours


def _scopes(connection: sqlite3.Connection, experiment_json: str) -> dict[str, Scope]:
    links = [json.loads(data) for (data,) in connection.execute("SELECT data FROM events WHERE kind = 'links'")]
    shaped = {link["scope"]: LinkRule(link["bits_per_s"], link["delay_s"]) for link in links}
    found = {name: connection.execute(_BYTES, (scope,)).fetchall() for name, scope in SCOPES.items()}
    scopes = {
        name: _scope(rows, len(experiment_json), shaped.get(name), is_within=name == "within")
        for name, rows in found.items()
        if rows and name != "peers"
    }
    if found["peers"]:
        n_clusters = len({end for link, *_ in found["peers"] for end in peers_of(link) or ()})
        is_ring = n_clusters > json.loads(experiment_json)["federation"]["ring_above"]
        scopes["peers"] = among_peers(found["peers"], is_ring=is_ring, measured_on=shaped.get("peers"))
    return scopes


def among_peers(rows: Sequence[tuple[str, int, int, int, int, int]], *, is_ring: bool, measured_on: LinkRule | None = None) -> Scope:
    """The links between aggregators: one exchange after another, all links of it at once, or around a ring one after another."""
    exchanges: dict[tuple[int, int], dict[int, Turns]] = {}
    for _, seq, stage, number, down, up in rows:
        if seq:
            found = exchanges.setdefault((stage, number), {})
            before = found.get(seq, Turns(0, 0))
            if is_ring:
                found[seq] = Turns(before.n_turns + 1, before.wire_bytes + down + up)
            else:
                found[seq] = Turns(1, max(before.wire_bytes, down, up))
    rounds = [
        [Turns(sum(one.n_turns for one in found.values()), sum(one.wire_bytes for one in found.values()))] for found in exchanges.values()
    ]
    return Scope(rounds, 0, sum(row[4] for row in rows), sum(row[5] for row in rows), measured_on, session_delays=0)


def _scope(rows: Sequence[tuple[str, int, int, int, int, int]], experiment_bytes: int, rule: LinkRule | None, *, is_within: bool) -> Scope:
    slowest: dict[tuple[int, int], dict[str, dict[int, int]]] = {}  # round -> parent -> exchange -> bytes on its slowest link
    session_bytes = 0
    for link, seq, stage, number, down, up in rows:
        if seq == 0:
            session_bytes = max(session_bytes, down + up)
            continue
        exchanges = slowest.setdefault((stage, number), {}).setdefault(link.partition("/")[0] if is_within else "", {})
        exchanges[seq] = max(exchanges.get(seq, 0), down + up)
    rounds = [[Turns(len(exchanges), sum(exchanges.values())) for exchanges in parents.values()] for parents in slowest.values()]
    down_bytes, up_bytes = sum(row[4] for row in rows), sum(row[5] for row in rows)
    return Scope(rounds, session_bytes + experiment_bytes, down_bytes, up_bytes, rule)


def _cautions(connection: sqlite3.Connection) -> list[str]:
    said = []
    if connection.execute("SELECT 1 FROM decisions LIMIT 1").fetchone():
        said.append("the run has decided by the clock (events skip, limits of time), and would decide otherwise on other links")
    if connection.execute("SELECT 1 FROM events WHERE kind = 'lost' LIMIT 1").fetchone():
        said.append("members were lost on the way: waiting for them counts as computing, and their traffic may be missing")
    return said


def _table(found: Projection, rules: Mapping[str, LinkRule], *, narrow: bool) -> object:
    listed = [(scope, rules.get(name, scope.measured_on)) for name, scope in found.scopes.items()]
    measured = [found.computing_s, *(scope.seconds(scope.measured_on) for scope, _ in listed), found.measured_s]
    estimated = [found.computing_s, *(scope.seconds(rule) for scope, rule in listed), found.seconds(rules)]
    numbers = {
        "links": ["as fast as may be" if rule is None else rule.text for _, rule in listed],
        "turns": [count(scope.n_turns(rule)) for scope, rule in listed],
        "down": [size(scope.down_bytes) for scope, _ in listed],
        "up": [size(scope.up_bytes) for scope, _ in listed],
    }
    columns: dict[str, Sequence[str] | None] = {"": ["computing", *found.scopes, "total"]}
    columns |= {name: None if narrow else ["", *cells, ""] for name, cells in numbers.items()}
    columns |= {"measured": [*map(duration, measured)], "estimated": [*map(duration, estimated)]}
    return table_of("Wall time", columns, n_text=1 if narrow else 2, last=1)
