"""`coterie swarm`: a stack of Docker Swarm in which an experiment runs on several machines, each member as a service of one task.

A member's state is in a local volume of one node, and a host's data is on one node. So each member is bound to its node by a label. The
experiment and the certificates travel by the Swarm: other nodes have none of the files of the machine from which the stack is deployed.

Names lead to the task itself (`dnsrr`): a service of one task needs no virtual address, and not all kernels have what these need. The
health checks of the images are off: Swarm ends what is not healthy, and nobody finds a server before its first check.
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.errors import MISTAKE_CODE, ConfigError
from coterie.session.tls import CA, CERTIFICATE, KEY
from coterie_deploy.containers import member_commands as commands
from coterie_deploy.containers.compose import arguments_of, networks_of, path_from, volume_of, without_variables
from coterie_deploy.containers.member_commands import CERTIFICATES, DATA, EXPERIMENT, RUNS, USER_ID
from coterie_deploy.containers.members import COORDINATOR, Member, Plan
from coterie_deploy.containers.places import labels
from coterie_deploy.containers.plain_yaml import as_yaml

PATIENCE_S = 600.0  # nodes may have to fetch images first
HOSTNAME = "hostname"  # --place MEMBER=hostname=NODE names a node itself, and no label of nodes
# Without end. Swarm cannot tell a mistake by its code, so a mistake ends with 0.
_RESTARTS = {"condition": "on-failure", "delay": "5s"}
_FILES = (CA, CERTIFICATE, KEY)
_ALWAYS = {
    "environment": {MISTAKE_CODE: "0"},
    "read_only": True,
    "cap_drop": ["ALL"],
    "healthcheck": {"disable": True},
    "stop_grace_period": "30s",  # for writing the state down
}


def stack_file(plan: Plan, output: Path | None) -> str:
    """The text of the file. Relative paths of the experiment and of certificates become relative to its folder.

    ConfigError for a folder of data that other machines cannot find.
    """
    for option, folder in (("--data", plan.asked.data), ("--private-data", plan.asked.private_data)):
        if folder is not None and not folder.is_absolute():
            raise ConfigError(f"{option} is {os.fspath(folder)!r}, which the nodes of a Swarm look for themselves: want an absolute path")
    writer = _Writer(plan, Path() if output is None else output.parent)
    content: dict[str, Any] = {
        "version": "3.8",
        "services": {member.name: writer.service(member) for member in plan.members},
        "networks": {network: {"driver": "overlay", "internal": True} for network in plan.networks},
        "volumes": {volume_of(member)[0]: {} for member in plan.members},
    }
    if not plan.is_shipped:
        content["configs"] = {"experiment": {"file": path_from(writer.folder, plan.file)}}
    if plan.asked.certificates is not None:
        place = plan.asked.certificates
        content["secrets"] = {
            _secret(one, file): {"file": path_from(writer.folder, place / one.name / file)} for one in plan.members for file in _FILES
        }
    return commands.header(_notes(writer, output)) + as_yaml(without_variables(content))


def _secret(member: Member, file: str) -> str:
    return f"{member.name}-{file}"


class _Writer:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.labels = labels(plan, plan.asked.places)

    def own_label(self, member: Member) -> str:
        """The label of the node of a member for which nothing else says where it belongs."""
        return f"{self.plan.short_name}.{member.name}"

    def unplaced(self) -> list[Member]:
        return [member for member in self.plan.members if member.name not in self.labels]

    def service(self, member: Member) -> dict[str, Any]:
        plan = self.plan
        wanted = self.labels.get(member.name) or {self.own_label(member): "true"}
        constraints = [f"node.{key if key == HOSTNAME else f'labels.{key}'} == {value}" for key, value in wanted.items()]
        return {
            "image": plan.image(member.role),
            "command": arguments_of(plan, member, PATIENCE_S),
            "networks": networks_of(member),
            "volumes": list(self._mounts(member)),
            **self._files(member),
            **_ALWAYS,
            "deploy": {"endpoint_mode": "dnsrr", "placement": {"constraints": constraints}, "restart_policy": _RESTARTS},
        }

    def _mounts(self, member: Member) -> Iterator[dict[str, Any]]:
        """Temporary files in memory, the member's state, and a host's data from its node."""
        source, target = volume_of(member)
        yield {"type": "tmpfs", "target": "/tmp"}  # noqa: S108
        yield {"type": "volume", "source": source, "target": target}
        if (data := self.plan.data_of(member)) is not None:
            yield {"type": "bind", "source": os.fspath(data), "target": DATA, "read_only": True}

    def _files(self, member: Member) -> dict[str, Any]:
        """What the Swarm brings to a member's node, which its container alone sees."""
        found = dict[str, Any]()
        if member.role == "coordinator" and not self.plan.is_shipped:
            found["configs"] = [{"source": "experiment", "target": EXPERIMENT}]
        if self.plan.is_secured:
            owner = {"uid": str(USER_ID), "gid": str(USER_ID), "mode": 0o400}
            found["secrets"] = [{"source": _secret(member, file), "target": f"{CERTIFICATES}/{file}", **owner} for file in _FILES]
        return found


def _notes(writer: _Writer, output: Path | None) -> list[str]:
    plan, asked, run, file = writer.plan, writer.plan.asked, writer.plan.short_name, commands.file_named(output)
    lines = [f"Written by: {commands.command_line('swarm', asked, {'output': output})}", ""]
    if (folder := asked.certificates) is not None:
        names = {one.name: one.name for one in plan.members}
        lines += ["Once, the certificates, which `docker stack deploy` reads here:"]
        lines += [f"  {command}" for command in commands.certificate_commands(plan, folder, names)] + [""]
    lines += ["The images, from a clone of the repository:", *(f"  {command}" for command in commands.build_commands(plan))]
    if asked.registry:
        lines += [f"  docker push {shlex.quote(image)}" for image in dict.fromkeys(plan.image(one.role) for one in plan.members)] + [""]
    else:
        lines += ["They must be on every node: --registry names a registry from which nodes fetch them.", ""]
    if unplaced := writer.unplaced():
        lines += ["Once, on a manager, which node (of `docker node ls`) has the volumes and the data of each member:"]
        lines += [f"  docker node update --label-add {writer.own_label(member)}=true NODE" for member in unplaced] + [""]
    volumes = [f"{run}_{volume_of(member)[0]}" for member in plan.members]
    newest = f"docker ps -aq -n 1 --filter label=com.docker.swarm.service.name={run}_{COORDINATOR}"
    lines += [
        "On a manager:",
        f"  docker stack deploy --with-registry-auth -c {file} {run}      starts the run, or goes on with one that was stopped",
        f"  docker service ps {run}_{COORDINATOR}      its node, and its state: Complete when the run is over or has a mistake",
        f"  docker service logs -f {run}_{COORDINATOR}      follows it; tells a mistake in the experiment or the data",
        f"  docker stack rm {run}      stops it; what its members have written stays in volumes of their nodes",
        "On the coordinator's node, before the stack is removed:",
        f'  docker cp "$({newest}):{RUNS}/{plan.name}" .      takes the run folder out of its volume',
        "On each node, to remove everything:",
        f"  docker volume rm -f {' '.join(volumes)}",
        "",
    ]
    if asked.data is not None or asked.private_data is not None:
        lines += ["A task whose node lacks the folder of its data is rejected, and tried again: `docker service ps` says so."]
    lines += [
        "What fails is started again until it succeeds. A mistake ends its container: mend it, remove the stack, and deploy it again."
    ]
    if not plan.is_secured:
        lines += ["Members speak in plain text, between machines too: --mtls gives each a certificate."]
    lines += ["Swarm knows no no-new-privileges; containers have no capabilities, and only volumes and /tmp can be written."]
    return lines
