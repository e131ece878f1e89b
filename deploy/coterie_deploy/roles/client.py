"""The role of a client host: the users of this process, in the run of a server elsewhere.

Imports no server and no scipy: a client starts in well under a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import check_accept, named_code
from coterie.experiment.features import in_a_line, listed
from coterie.experiment.plugins import code_allowed
from coterie.findings import Finding
from coterie.record.snapshot import SnapshotFile
from coterie.session.dial import serve_member
from coterie.session.failures import failures_left
from coterie.session.tls import load_tls
from coterie.text.names import natural_key, parse_users, similar_names
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.roles.consent import Asked, accepted, terminal
from coterie_deploy.roles.health import beating
from coterie_deploy.roles.host_policy import host_policy
from coterie_deploy.roles.joining import check_server_address, state_name
from coterie_deploy.telemetry.logs import NOTE, Log
from coterie_deploy.terminal.signals import stopping_at_end_of_input, stopping_on_signals

_MAX_SHOWN = 3  # clusters


@dataclass(frozen=True)
class Client:
    """What the command line says about a client."""

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
    log: Log = field(default_factory=Log)
    accept: str | None = None  # the hash of the experiment that its owner has accepted, or "any"
    policy: Path | None = None  # of its owner; None: policy.yaml in the data folder, if it is there


def default_name(users: str | None, cluster: str | None = None) -> str:
    """The same after a restart: the machine, and which users."""
    return ":".join(part for part in (socket.gethostname(), cluster, users) if part is not None)


def store_of(folder: Path, name: str, run_id: str) -> SnapshotFile:
    """Where a host of a run keeps its state."""
    return SnapshotFile(folder, state_name(name, run_id))


def run_client(client: Client) -> int:
    """Serves the run to its end: 0; 130 or 143 when stopped before, with the state written down. Raises CoterieError."""
    check_server_address(client.server, insecure=client.insecure or client.tls is not None)
    if client.accept is not None:
        client = replace(client, accept=check_accept(client.accept))
    return asyncio.run(_serve(client))


async def _serve(client: Client) -> int:
    policy = None if client.launched else host_policy(client.policy, client.data or Path(), client.state)
    users = client.users if policy is None else policy.called(client.users)
    name = client.name or default_name(users, client.cluster)
    log = client.log.with_(role="host", host=name)
    tls = None if client.tls is None else load_tls(client.tls, is_server=False)

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
        host = build_host(name, experiment, run_id, users, data_dir=data, store=store, instance=secrets.token_hex(8), admit=admit)
        _check_writable(client.state)
        _say_data(host, log)
        sentence = f"host {name!r} with {len(host.users)} users joins run {run_id} at {client.server}"
        log.say("join", sentence, run=run_id, server=client.server, users=len(host.users))
        return host

    def say_refused(reason: str) -> None:
        log.say("waiting", f"{reason}; trying again for up to {client.patience_s:g} s", server=client.server)

    def say_waiting() -> None:
        log.say("waiting", f"waiting for a server at {client.server} (up to {client.patience_s:g} s)", server=client.server)

    with contextlib.ExitStack() as stack:
        stack.enter_context(code_allowed(client.launched or client.allow_code))
        stop = stack.enter_context(stopping_on_signals())
        if client.launched:
            stack.enter_context(stopping_at_end_of_input(stop))
        stack.enter_context(failures_left(client.state if client.launched else None))
        async with beating(client.state):
            outcome = await serve_member(
                make_host,
                client.server,
                name=name,
                tls=tls,
                patience_s=client.patience_s,
                stop=stop,
                on_wait=say_waiting,
                on_refusal=say_refused,
            )
    if outcome is None:
        log.say("stopped", f"stopped by {stop.by}; the same command goes on from here", by=stop.by)
        return stop.exit_code
    log.say("finished", outcome)
    return 0


def _say_data(host: Host, log: Log) -> None:
    """What is to be known of the data, in full, and the features."""
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
    """What a server elsewhere names is imported only where the command line allows it."""
    named = named_code(experiment)
    if named and not client.launched and not client.allow_code:
        listed = " and ".join(map(repr, named))
        raise ConfigError(
            f"the coordinator's experiment wants to import {listed} on this machine; allow it with --allow-code", Finding("L5")
        )


def _check_writable(state: Path) -> None:
    """Better now than at the first snapshot."""
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write the state folder {state}: {error.strerror or error}", Finding("R5")) from error
