"""The commands of a federation's containers, and the comments at the top of the files that start them."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from coterie.errors import ConfigError
from coterie.session.tls import MONITOR
from coterie_deploy.containers.members import PEERS, Asked, Member, Plan, Role
from coterie_deploy.read.shipped import changing
from coterie_deploy.roles.health import ALIVE_FILE
from coterie_deploy.terminal.printable import printable

PORT = 7000
METRICS_PORT = 9464
PROMETHEUS = "prometheus"  # who reads the metrics, where there is one
RUNS, STATE, DATA, CERTIFICATES, EXPERIMENT = "/runs", "/state", "/data", "/certs", "/experiment.yaml"  # in a container
USER_ID = 10001  # of the images' user and group
ALIVE = ["sh", "-c", f'test -n "$(find "${ALIVE_FILE}" -mmin -0.5)"']  # whether a member was alive in the last half minute
_NUMBERED = re.compile(r"(|.*[^0-9])(0|[1-9][0-9]{0,8})", re.DOTALL)


def arguments(plan: Plan, member: Member, server: str, patience_s: float, called: str, experiment: str = EXPERIMENT) -> list[str]:
    """The arguments of `coterie` in a member's container.

    `server`: HOST:PORT of its parent; `called`: where peers find it; `experiment`: what the coordinator reads.
    """
    link = ["--log-format", "json", *(["--tls", CERTIFICATES] if plan.is_secured else ["--insecure"])]
    listen = ["--listen", f"0.0.0.0:{PORT}", "--hosts", str(member.n_children)]
    listen += ["--metrics", f"0.0.0.0:{METRICS_PORT}"] if plan.asked.monitoring else []
    if member.role == "coordinator":
        waits = ["--set", "federation.join_timeout_s=none"] if plan.waits else []
        return ["server", experiment, *listen, "--output", f"{RUNS}/{plan.name}", "--or-resume", *waits, *changes(plan.asked), *link]
    joins = ["--server", server, "--name", member.name]
    keeps = ["--state", STATE, "--patience", f"{patience_s:g}", *link]
    if member.role == "aggregator":
        announced = ["--announce", called] if PEERS in member.networks else []
        return ["aggregator", *joins, "--cluster", str(member.cluster), *listen, *announced, *keeps]
    own = [*member.selection, "--data", DATA, "--accept", plan.accepts]
    return ["client", *joins, *own, *keeps, *(["--allow-code"] if plan.asked.allow_code else [])]


def changes(asked: Asked) -> list[str]:
    """The options that change the experiment."""
    return changing(asked.overrides, asked.seed) + (["--topology", asked.topology] if asked.topology else [])


# ---- comments of the files


def command_line(name: str, asked: Asked, more: Mapping[str, object]) -> str:
    """The command that asks for this, with `more` options of its own; what is None, False or empty is left out."""
    options: dict[str, object] = {
        "hosts": asked.hosts,
        "data": asked.data,
        "private-data": asked.private_data,
        "mtls": asked.certificates,
        "monitoring": asked.monitoring,
        "registry": asked.registry,
        "allow-code": asked.allow_code,
        "place": list(asked.places),
        **more,
    }
    words = ["coterie", name, asked.experiment, *changes(asked)]
    for key, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one not in (None, False, ""):
                words += [f"--{key}"] if one is True else [f"--{key}", str(one)]
    return shlex.join(words)


def file_named(output: Path | None) -> str:
    """How these comments call the file that is written."""
    return "FILE" if output is None else shlex.quote(str(output))


def certificate_commands(plan: Plan, folder: Path, addresses: Mapping[str, str]) -> list[str]:
    """The commands that make the certificates; `addresses` are the DNS names at which servers are found."""
    commands = [f"coterie certs init {shlex.quote(str(folder))}"]
    for member in plan.members:
        words = ["coterie", "certs", "issue", str(folder), member.name, "--role", member.role]
        words += ["--address", addresses[member.name]] if member.role != "host" else []
        words += ["--cluster", member.cluster] if member.cluster else []
        words += ["--users", _as_tokens(member.users)] if member.users else []
        commands.append(shlex.join(words))
    if plan.asked.monitoring:
        commands.append(shlex.join(["coterie", "certs", "issue", str(folder), PROMETHEUS, "--role", MONITOR]))
    return commands


def _as_tokens(users: Sequence[str]) -> str:
    """User names as `coterie certs issue` takes them: u0..u19,u31."""
    for user in users:
        if "," in user or ".." in user:
            raise ConfigError(f"user {user!r} has a comma or two dots in its name, which a certificate cannot list: want another name")
    tokens: list[list[str]] = []
    for user in users:
        if tokens and _follows(tokens[-1][-1], user):
            tokens[-1].append(user)
        else:
            tokens.append([user])
    return ",".join(token[0] if len(token) == 1 else f"{token[0]}..{token[-1]}" for token in tokens)


def _follows(first: str, second: str) -> bool:
    """Whether the second name is the first with its last number, without leading zeros, one higher."""
    low, high = (_NUMBERED.fullmatch(name) for name in (first, second))
    return low is not None and high is not None and low[1] == high[1] and int(low[2]) + 1 == int(high[2])


def build_commands(plan: Plan) -> list[str]:
    """The commands that build the images that a plan needs, in a clone of the repository."""
    roles: list[Role] = ["coordinator", "host"]
    return [f"docker build -f deploy/Dockerfile --target {plan.target(role)} -t {shlex.quote(plan.image(role))} ." for role in roles]


def header(lines: Iterable[str]) -> str:
    """Lines as a comment of a YAML file, which nothing in them can end."""
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)
