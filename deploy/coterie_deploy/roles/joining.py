"""What client hosts and aggregators share when they join: who they are, how they wait and stop, and the name of their state."""

import contextlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.experiment.plugins import code_allowed
from coterie.session.dial import SAY_AGAIN_S
from coterie.session.failures import failures_left
from coterie.session.tls import Identity, Tls, load_tls
from coterie_deploy.telemetry.logs import Log, LogLevel
from coterie_deploy.terminal.signals import Stop, stopping_at_end_of_input, stopping_on_signals

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME, _MAX_RUN_ID = 100, 64  # characters of it in the name of a file


def state_name(name: str, run_id: str) -> str:
    """The name of a member's state in a run: each run and each member has its own."""
    safe = _UNSAFE.sub("_", name)
    own = safe if safe == name else f"{safe[:_MAX_NAME]}-{zlib.crc32(name.encode()):08x}"
    return f"{own}.{_UNSAFE.sub('_', run_id)[:_MAX_RUN_ID]}"


def own_tls(folder: Path | None, log: Log, *, is_server: bool) -> Tls | None:
    """The certificates of a role; the log warns of those that end soon. ConfigError for those that cannot be used."""
    if folder is None:
        return None
    tls = load_tls(folder, is_server=is_server)
    for sentence in tls.soon_expired(is_server=is_server):
        log.say("certificate", f"warning: {sentence}", LogLevel.warning)
    return tls


def own_identity(tls: Tls | None, role: str, cluster: str | None) -> Identity | None:
    """Who the certificate of a host or an aggregator says it is; None without one. ConfigError if `cluster` is another one."""
    identity = None if tls is None else tls.identity(is_server=role == "aggregator")
    if tls is None or identity is None or identity.role != role:  # the parent says what is wrong with it
        return None
    if cluster is not None and identity.cluster and cluster != identity.cluster:
        raise ConfigError(f"the certificate in {tls.folder} is for cluster {identity.cluster!r}, but --cluster is {cluster!r}")
    return identity


@contextlib.contextmanager
def member_process(state: Path, *, launched: bool, allow_code: bool) -> Iterator[Stop]:
    """A process of a member: the block may import code if this is allowed, and learns when to stop."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(code_allowed(launched or allow_code))
        stop = stack.enter_context(stopping_on_signals())
        if launched:
            stack.enter_context(stopping_at_end_of_input(stop))
        stack.enter_context(failures_left(state if launched else None))
        yield stop


def waits(log: Log, noun: str, server: str, patience_s: float, stop: Stop) -> dict[str, Any]:
    """Arguments of `serve_member`. The waits for a server, and what keeps the member from it, are lines of the log."""

    longest = f"up to {patience_s:g} s"

    def on_wait(why: str, waited_s: float) -> None:
        so_far = longest if waited_s < SAY_AGAIN_S else f"{waited_s:.0f} s so far, {longest}"
        log.say("waiting", f"waiting for {noun} at {server} ({so_far}){why and f': {why}'}", server=server, waited_s=round(waited_s))

    return {
        "patience_s": patience_s,
        "stop": stop,
        "leave": stop.leave,
        "on_wait": on_wait,
        "on_back": lambda waited_s: log.say("back", f"{noun} is at {server} again, after {waited_s:.0f} s", server=server),
        "on_trouble": lambda reason: log.say("waiting", f"{reason}; trying again for {longest}", server=server),
    }


def exit_code(outcome: str | None, stop: Stop, log: Log) -> int:
    """Says how a member has ended: its exit code."""
    if outcome is None:
        log.say("stopped", f"stopped by {stop.by}; the same command goes on from here", by=stop.by)
        return stop.exit_code
    log.say("finished", outcome)
    return 0
