"""The role of a client host: the users of this process, in the run of a server elsewhere.

Imports no server and no scipy: a client starts in well under a second.
"""

import asyncio
import secrets
import socket
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, named_code
from coterie.experiment.consent import check_accept
from coterie.experiment.features import in_a_line, listed
from coterie.findings import Finding
from coterie.record.files import private_folder
from coterie.record.snapshot import SnapshotFile
from coterie.session.dial import serve_member
from coterie.session.where import Where
from coterie.text.names import natural_key, parse_users, similar_names
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.roles.consent import Asked, accepted, terminal
from coterie_deploy.roles.health import beating
from coterie_deploy.roles.host_policy import host_policy
from coterie_deploy.roles.joining import exit_code, member_process, own_identity, own_tls, state_name, waits
from coterie_deploy.telemetry.logs import NOTE, Log, LogLevel

_MAX_SHOWN = 3  # clusters
_UNSIGNED = (
    "without --tls nobody signs the keys of masked sums: whoever passes them on could put its own between hosts, and see the sums of each"
)


@dataclass(frozen=True)
class Client:
    """The options of a client."""

    server: str
    users: str | None  # a selection, None: all of the data
    name: str | None
    data: Path | None  # None: the working directory
    state: Path
    patience_s: float
    insecure: bool
    launched: bool  # by `coterie run`: ends with its launcher, and trusts the paths of the experiment
    allow_code: bool = False  # the experiment may name modules to import
    cluster: str | None = None  # all users of this known cluster, instead of a selection
    tls: Path | None = None  # the folder of its certificate
    tls_name: str | None = None  # the name in the server's, if that is another than the one dialled
    log: Log = field(default_factory=Log)
    accept: str | None = None  # the hash of the experiment that its owner has accepted, or "any"
    policy: Path | None = None  # of its owner; None: policy.yaml in the data folder, if it is there


def default_name(users: str | None, cluster: str | None = None) -> str:
    """The machine and the users, the same after a restart."""
    return ":".join(part for part in (socket.gethostname(), cluster, users) if part is not None)


def store_of(folder: Path, name: str, run_id: str) -> SnapshotFile:
    """The state of a host of a run."""
    return SnapshotFile(folder, state_name(name, run_id))


def run_client(client: Client) -> int:
    """Serves the run to its end: 0; 130 or 143 when stopped before, with the state written down. Raises CoterieError."""
    if client.accept is not None:
        client = replace(client, accept=check_accept(client.accept))
    return asyncio.run(_serve(client))


async def _serve(client: Client) -> int:
    where = Where(client.server, client.insecure, client.tls_name, client.tls is not None)
    policy = None if client.launched else host_policy(client.policy, client.data or Path(), client.state)
    users = client.users if policy is None else policy.called(client.users)
    tls = own_tls(client.tls, client.log.with_(role="host"), is_server=False)
    identity = own_identity(tls, "host", client.cluster)
    name = client.name or (default_name(users, client.cluster) if identity is None else identity.name)
    log = client.log.with_(role="host", host=name)

    if policy is not None:
        log.say("policy", f"host {name!r} keeps to the policy {policy.path}", policy=str(policy.path))
        policy.check_certificate(tls)

    def make_host(experiment: Experiment, run_id: str) -> Host | None:
        if policy is not None:
            policy.check(experiment, log)
        if not client.launched:
            asked = Asked(name, client.server, experiment, client.state, client.accept)
            if not accepted(asked, log, terminal(stop.is_set)):
                return None
        _check_code(client, experiment)
        data = client.data if client.data is not None or client.launched else Path()
        users = _users(client, experiment, data)
        store = store_of(client.state, name, run_id)
        admit = None if policy is None else partial(policy.admit, name, log)
        instance = secrets.token_hex(8)
        host = build_host(name, experiment, run_id, users, data_dir=data, store=store, instance=instance, admit=admit, tls=tls)
        _check_writable(client.state)
        if experiment.masks_sums and tls is None and not client.launched:
            log.say("masks", f"warning: {_UNSIGNED}", LogLevel.warning)
        _say_data(host, log)
        sentence = f"host {name!r} with {len(host.users)} users joins run {run_id} at {client.server}"
        log.say("join", sentence, run=run_id, server=client.server, users=len(host.users))
        return host

    with member_process(client.state, launched=client.launched, allow_code=client.allow_code) as stop:
        async with beating(client.state):
            waiting = waits(log, "a server", client.server, client.patience_s, stop)
            outcome = await serve_member(make_host, where, name=name, tls=tls, **waiting)
    return exit_code(outcome, stop, log)


def _say_data(host: Host, log: Log) -> None:
    """Writes the notes on the data, in full, and the features."""
    for note in host.notes:
        log.say("note", f"{NOTE}{note.sentence}", rule=note.finding.rule, count=note.finding.count)
    schema = host.users[0].schema
    lines = [f"features ({len(schema):,}): {in_a_line(schema)}"] if log.is_json else listed(schema)
    for line in lines if schema else ():
        log.say("features", line)


def _users(client: Client, experiment: Experiment, data: Path | None) -> list[str] | None:
    """The names of the users to serve, None for all. ConfigError for an unknown user or cluster."""
    if client.users is None and client.cluster is None:
        return None
    heads = list_users(experiment.data, experiment.seed, data)
    if client.users is not None:
        return parse_users(client.users, [head.name for head in heads])
    own = [head.name for head in heads if head.cluster == client.cluster]
    if not own:
        known = sorted({head.cluster for head in heads if head.cluster}, key=natural_key)
        similar = similar_names(client.cluster or "", known) or known[:_MAX_SHOWN]
        listed = f"want one like {', '.join(map(repr, similar))}" if similar else "none of its users has a known cluster"
        raise ConfigError(f"cluster {client.cluster!r} is not in the data: {listed}", Finding("J3"))
    return own


def _check_code(client: Client, experiment: Experiment) -> None:
    """ConfigError if a server elsewhere names code to import and the command line does not allow it."""
    if (named := named_code(experiment)) and not client.launched and not client.allow_code:
        wanted = f"the coordinator's experiment wants to import {' and '.join(map(repr, named))} on this machine"
        raise ConfigError(f"{wanted}; allow it with --allow-code", Finding("L5"))


def _check_writable(state: Path) -> None:
    """Fails before the run rather than at its first snapshot."""
    try:
        private_folder(state)
    except OSError as error:
        raise RunError(f"cannot write the state folder {state}: {error.strerror or error}", Finding("R5")) from error
