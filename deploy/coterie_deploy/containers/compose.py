"""`coterie compose`: a Compose file in which an experiment runs, each member in a container of its own.

The file has no version: Compose v2 and docker-compose 1.29 both read it by the Compose specification. No service depends on another one,
since members wait for their servers themselves. What fails is started again without end. Compose cannot tell by its exit code a mistake,
which stays one, from a failure: so a mistake ends with 0 there. Stacks of Docker Swarm have a writer of their own (`swarm`).
"""

import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie.errors import MISTAKE_CODE
from coterie_deploy.containers import member_commands as commands
from coterie_deploy.containers import monitoring
from coterie_deploy.containers.member_commands import CERTIFICATES, DATA, EXPERIMENT, PORT, PROMETHEUS, RUNS, STATE, USER_ID
from coterie_deploy.containers.members import COORDINATOR, PEERS, Member, Plan
from coterie_deploy.containers.plain_yaml import as_yaml

PATIENCE_S = 120.0  # the members of a machine are started together
_MAX_NETWORKS = 25  # Docker's default address pools have about 30
_CONFINED = {"read_only": True, "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}  # noqa: S108


def compose_file(plan: Plan, output: Path | None, build: Path | None = None) -> str:
    """The text of the file. Relative paths become relative to its folder, or to the working directory without one.

    `build` is a clone of the repository from which Compose builds the images.
    """
    folder = Path() if output is None else output.parent
    # One service of each image builds it.
    builders = {plan.image(member.role): member.name for member in reversed(plan.members)}
    services = {
        one.name: _service(plan, one, folder, build if one.name in builders.values() else None, is_built=build is not None)
        for one in plan.members
    }
    networks: dict[str, Any] = {network: {"internal": True} for network in plan.networks}
    volumes: dict[str, Any] = {volume_of(member)[0]: {} for member in plan.members}
    if plan.asked.monitoring:
        services |= {name: {**service, **_CONFINED} for name, service in monitoring.services(plan, output, partial(_bind, folder)).items()}
        networks |= monitoring.NETWORKS
        volumes |= {name: {} for name in monitoring.VOLUMES}
    content = {"services": services, "networks": networks, "volumes": volumes}
    return commands.header(_notes(plan, output, build)) + as_yaml(without_variables(content))


def _service(plan: Plan, member: Member, folder: Path, build: Path | None, *, is_built: bool) -> dict[str, Any]:
    target, is_server = plan.target(member.role), member.role != "host"
    built = {} if build is None else {"build": {"context": path_from(folder, build), "dockerfile": "deploy/Dockerfile", "target": target}}
    return {
        "image": plan.image(member.role),
        **built,
        **({"pull_policy": "never"} if is_built and build is None else {}),
        "environment": {MISTAKE_CODE: "0"},
        "command": arguments_of(plan, member, PATIENCE_S),
        "networks": networks_of(member, *[monitoring.METRICS] * (plan.asked.monitoring and is_server)),
        "volumes": _mounts(plan, member, folder),
        **_CONFINED,
        "stop_grace_period": "30s",  # for writing the state down
        "restart": "on-failure",
    }


def arguments_of(plan: Plan, member: Member, patience_s: float) -> list[str]:
    """The arguments of a member that finds others by the names of their services, and shipped experiments in its image."""
    experiment = plan.asked.experiment if plan.is_shipped else EXPERIMENT
    return commands.arguments(plan, member, f"{member.parent}:{PORT}", patience_s, member.among_peers, experiment)


def networks_of(member: Member, *more: str) -> list[str] | dict[str, Any]:
    """The networks of a member's service."""
    names = [*member.networks, *more]
    return {name: {"aliases": [member.among_peers]} if name == PEERS else {} for name in names} if PEERS in names else names


def volume_of(member: Member) -> tuple[str, str]:
    """The volume with what a member writes, and where its container has it."""
    return ("runs", RUNS) if member.role == "coordinator" else (f"state-{member.name}", STATE)


def _mounts(plan: Plan, member: Member, folder: Path) -> list[dict[str, Any]]:
    """What a member may see: its state, its own certificate; the coordinator the experiment, a host its data."""
    source, target = volume_of(member)
    files = [(plan.file, EXPERIMENT)] if member.role == "coordinator" and not plan.is_shipped else []
    if (data := plan.data_of(member)) is not None:
        files.append((data, DATA))
    if plan.asked.certificates is not None:
        files.append((plan.asked.certificates / member.name, CERTIFICATES))
    return [{"type": "volume", "source": source, "target": target}, *(_bind(folder, *file) for file in files)]


def _bind(folder: Path, source: Path, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": path_from(folder, source), "target": target, "read_only": True}


def path_from(folder: Path, path: Path) -> str:
    """How a file in the folder calls a path."""
    if path.is_absolute():
        return os.fspath(path)
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith("..") else os.path.join(".", relative)


def without_variables(content: Any) -> Any:
    """The same with $ doubled: the tools replace ${NAME} by a variable of the environment."""
    if isinstance(content, Mapping):
        return {key: without_variables(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_variables(value) for value in content]
    return content.replace("$", "$$") if isinstance(content, str) else content


def _notes(plan: Plan, output: Path | None, build: Path | None) -> list[str]:
    asked, run = plan.asked, f"docker compose -p {plan.short_name} -f {commands.file_named(output)}"
    lines = [f"Written by: {commands.command_line('compose', asked, {'build': build, 'output': output})}", ""]
    if (folder := asked.certificates) is not None:
        names, place = {one.name: one.name for one in plan.members}, shlex.quote(os.fspath(folder))
        lines += ["Once, the certificates, whose keys the images' user must be able to read:"]
        lines += [f"  {command}" for command in commands.certificate_commands(plan, folder, names)]
        lines += [f"  sudo chown -R {USER_ID}:{USER_ID} {place}/*/"]
        if asked.monitoring:
            own, user = shlex.quote(os.fspath(folder / PROMETHEUS)), monitoring.PROMETHEUS_USER
            lines += [f"  sudo chown -R {user}:{user} {own}"]
        lines += [""]
    if binds := dict.fromkeys(mount["source"] for one in plan.members for mount in _mounts(plan, one, Path()) if mount["type"] == "bind"):
        lines += [
            "These must be there before `up`. For one that is missing it makes an empty folder, which belongs to root:",
            f"  {shlex.join(binds)}",
            "",
        ]
    if build is None:
        lines += ["The images, from a clone of the repository (or pushed to a registry: --registry):"]
        lines += [f"  {command}" for command in commands.build_commands(plan)] + [""]
    lines += [
        "Compose v2, or docker-compose 1.29 instead of docker compose:",
        f"  {run} up{' --build' if build is not None else ''}      runs the experiment, or goes on with a run that was stopped",
        f'  docker cp "$({run} ps -aq {COORDINATOR}):{RUNS}/{plan.name}" .      takes the run folder out of its volume',
        f"  {run}{' --profile monitoring' if asked.monitoring else ''} down -v      removes everything",
        "A run that has finished is not begun again: `up` ends in seconds. What fails is started again until it succeeds. But a mistake",
        "in the experiment or the data ends its container with code 0, after a sentence in its log: mend it, then `up` again.",
    ]
    if asked.monitoring:
        up = f"  {run} --profile monitoring up"
        lines += [f"{up}      with Prometheus and Grafana, at {monitoring.URL}; they stay until they are stopped"]
        lines += [f"Their files are in {monitoring.folder_of(output)}/, and must be readable by all."]
    if not plan.is_secured:
        closed = "all networks" if not asked.monitoring else "all networks but Grafana's own"
        lines += [f"Members speak in plain text; {closed} are internal. --mtls gives each a certificate."]
    if len(plan.networks) > _MAX_NETWORKS:
        lines += [f"{len(plan.networks)} networks: more than Docker has addresses for unless its default-address-pools say so."]
    return lines
