"""`coterie compose`: a Compose file in which an experiment runs, each member in a container of its own.

The file is in the format 3.8, which Compose v2, docker-compose 1.29 and `docker stack deploy` all read; each passes over what is for
another (stacks over build, restart and security_opt; docker-compose 1.29 over deploy). Nobody waits for a condition of another service:
members wait for their servers themselves.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie_deploy.containers import monitoring
from coterie_deploy.containers.member_commands import (
    CERTIFICATES,
    DATA,
    EXPERIMENT,
    PORT,
    PROMETHEUS,
    RUNS,
    STATE,
    USER_ID,
    arguments,
    build_commands,
    certificate_commands,
    command_line,
    header,
    health,
)
from coterie_deploy.containers.members import COORDINATOR, Member, Plan, Role
from coterie_deploy.containers.plain_yaml import as_yaml

PATIENCE_S = 120.0  # the members of a machine are started together
_RUNS_VOLUME = "runs"
_MAX_NETWORKS = 25  # Docker's default address pools have about 30
_RESTARTS = 5
_CONFINED = {"read_only": True, "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}  # noqa: S108


def compose_file(plan: Plan, output: Path | None, build: Path | None = None) -> str:
    """The text of the file; paths in it are relative to its folder, or the working directory, where they were given as relative ones.

    `build` is a clone of the repository from which Compose builds the images.
    """
    folder = Path() if output is None else output.parent
    services = {member.name: _service(plan, member, folder, build) for member in plan.members}
    networks: dict[str, Any] = {network: {"internal": True} for network in plan.networks}
    volumes: dict[str, Any] = {_RUNS_VOLUME: {}, **{_state(member): {} for member in plan.members if member.name != COORDINATOR}}
    if plan.asked.monitoring:
        services |= {name: {**service, **_CONFINED} for name, service in monitoring.services(plan, output, partial(_bind, folder)).items()}
        networks |= monitoring.NETWORKS
        volumes |= {name: {} for name in monitoring.VOLUMES}
    content = {"version": "3.8", "services": services, "networks": networks, "volumes": volumes}
    return header(_notes(plan, output, build)) + as_yaml(_without_variables(content))


def _service(plan: Plan, member: Member, folder: Path, build: Path | None) -> dict[str, Any]:
    return {
        **_image(plan, member.role, folder, build),
        "command": arguments(plan, member, f"{member.parent}:{PORT}", PATIENCE_S, plan.asked.experiment if plan.is_shipped else EXPERIMENT),
        "networks": [*member.networks, *([monitoring.METRICS] if plan.asked.monitoring and member.role != "host" else [])],
        "volumes": _mounts(plan, member, folder),
        **_CONFINED,
        "stop_grace_period": "30s",  # for writing the state down
        "restart": f"on-failure:{_RESTARTS}",
        "deploy": {"restart_policy": {"condition": "on-failure", "delay": "5s", "max_attempts": _RESTARTS}},
        **({} if member.role == "host" else {"healthcheck": _check(plan)}),
    }


def _image(plan: Plan, role: Role, folder: Path, build: Path | None) -> dict[str, Any]:
    image: dict[str, Any] = {"image": plan.image(role)}
    if build is not None:
        image["build"] = {"context": _from(folder, build), "dockerfile": "deploy/Dockerfile", "target": plan.target(role)}
    return image


def _check(plan: Plan) -> dict[str, Any]:
    return {"test": ["CMD", *health(plan)], "interval": "10s", "timeout": "30s", "retries": 6, "start_period": "10s"}


def _state(member: Member) -> str:
    return f"state-{member.name}"


def _mounts(plan: Plan, member: Member, folder: Path) -> list[dict[str, Any]]:
    """What a member may see: what it keeps, its own certificate; the coordinator the experiment, a host its data."""
    if member.role == "coordinator":
        mounts = [{"type": "volume", "source": _RUNS_VOLUME, "target": RUNS}]
    else:
        mounts = [{"type": "volume", "source": _state(member), "target": STATE}]
    if member.role == "coordinator" and not plan.is_shipped:
        mounts.append(_bind(folder, plan.file, EXPERIMENT))
    if member.role == "host" and plan.asked.private_data is not None:
        mounts.append(_bind(folder, plan.asked.private_data / member.name, DATA))
    elif member.role == "host" and plan.reads_data and plan.asked.data is not None:
        mounts.append(_bind(folder, plan.asked.data, DATA))
    if plan.asked.certificates is not None:
        mounts.append(_bind(folder, plan.asked.certificates / member.name, CERTIFICATES))
    return mounts


def _bind(folder: Path, source: Path, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": _from(folder, source), "target": target, "read_only": True}


def _from(folder: Path, path: Path) -> str:
    """How a file in the folder calls a path."""
    if path.is_absolute():
        return os.fspath(path)
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith("..") else os.path.join(".", relative)


def _without_variables(content: Any) -> Any:
    """The same with $ doubled: all three tools put variables of the environment in the place of ${NAME}."""
    if isinstance(content, Mapping):
        return {key: _without_variables(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_variables(value) for value in content]
    return content.replace("$", "$$") if isinstance(content, str) else content


def _notes(plan: Plan, output: Path | None, build: Path | None) -> list[str]:
    file = "FILE" if output is None else shlex.quote(os.fspath(output))
    run = f"docker compose -p {plan.short_name} -f {file}"
    lines = [f"Written by: {command_line('compose', plan.asked, {'build': build, 'output': output})}", ""]
    if plan.asked.certificates is not None:
        lines += ["Once, the certificates, whose keys the images' user must be able to read:"]
        folder = plan.asked.certificates
        lines += [f"  {command}" for command in certificate_commands(plan, folder, {one.name: one.name for one in plan.members})]
        lines += [f"  sudo chown -R {USER_ID}:{USER_ID} {shlex.quote(os.fspath(folder))}/*/"]
        if plan.asked.monitoring:
            own = shlex.quote(os.fspath(folder / PROMETHEUS))
            lines += [f"  sudo chown -R {monitoring.PROMETHEUS_USER}:{monitoring.PROMETHEUS_USER} {own}"]
        lines += [""]
    if build is None:
        lines += ["The images, from a clone of the repository (or pushed to a registry: --registry):"]
        lines += [f"  {command}" for command in build_commands(plan)] + [""]
    lines += [
        "Compose v2, or docker-compose 1.29 in the place of docker compose:",
        f"  {run} up{' --build' if build is not None else ''}      runs the experiment, or goes on with a run that was stopped",
        f'  docker cp "$({run} ps -aq {COORDINATOR}):{RUNS}/{plan.name}" .      takes the run folder out of its volume',
        f"  {run}{' --profile monitoring' if plan.asked.monitoring else ''} down -v      removes everything",
        f"A run that has finished is not begun again: its hosts would wait {PATIENCE_S:g} s for nothing.",
    ]
    if plan.asked.monitoring:
        lines += [
            f"  {run} --profile monitoring up      with Prometheus and Grafana, at {monitoring.URL}; they stay until they are stopped"
        ]
        lines += [f"What these two read is in {monitoring.folder_of(output)}/, and must be readable by all."]
        lines += ["Swarm knows no profiles: write the file without --monitoring."]
    else:
        registry = "" if plan.asked.registry else " (--registry)"
        lines += [f"Swarm, with the images in a registry{registry}: docker stack deploy -c {file} {plan.short_name}"]
    if plan.asked.certificates is None:
        closed = "all networks" if not plan.asked.monitoring else "all networks but Grafana's own"
        lines += [f"Members speak in plain text; {closed} are internal. --mtls gives each a certificate."]
    if len(plan.networks) > _MAX_NETWORKS:
        lines += [f"{len(plan.networks)} networks: more than Docker has addresses for unless its default-address-pools say so."]
    return lines
