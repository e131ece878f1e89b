"""`coterie kubernetes`: manifests with which an experiment runs in a cluster of machines.

The coordinator and the aggregators are StatefulSets with a volume each. A StatefulSet starts again whatever ends; so its container stays
when its run is over, no longer ready, with the run folder at hand, until it is scaled to 0. Hosts are Indexed Jobs, which end with the
run. One Job is all hosts of a parent, and keeps their state in the pods, where a container that is started again finds it, though no new
pod does; where hosts have private data or certificates, each is a Job of its own, with its state on a volume.

Network policies deny all but DNS and the way from each member to its parent: what the networks of `coterie compose` allow, less the ways
between hosts.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.session.dial import SERVICE
from coterie_deploy.containers.member_commands import (
    CERTIFICATES,
    DATA,
    EXPERIMENT,
    METRICS_PORT,
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
from coterie_deploy.containers.members import COORDINATOR, Member, Plan
from coterie_deploy.containers.plain_yaml import as_yaml

PATIENCE_S = 600.0  # machines may have to fetch images first
RETRIES = 10  # of a host
NAME, INSTANCE, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"
MEMBER, JOINS = "coterie/member", "coterie/joins"  # labels: a server's name, and whom a member joins
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]{0,17}([EPTGMk]|[EPTGMK]i)?")
_RESOURCES = {
    "server": {"cpu": "250m", "memory": "256Mi"},
    "client": {"cpu": "500m", "memory": "256Mi"},
    "client-torch": {"cpu": "1", "memory": "1Gi"},
}
# Runs "$@" as a child, so that the first process, which hears no signal but those it traps, can pass SIGTERM on; that interrupts `wait`.
KEPT = """\
"$@" & child=$!
trap 'asked=1; kill -TERM "$child"' TERM
wait "$child"; code=$?
while test -n "$asked"; do asked=; wait "$child"; code=$?; done
test "$code" -eq 0 || exit "$code"
trap 'exit 0' TERM
echo "the run is over; what it has left is here until this StatefulSet is scaled to 0"
sleep infinity & wait "$!"
"""


@dataclass(frozen=True)
class Where:
    """The cluster's side of it."""

    namespace: str | None = None  # None: that of whoever applies the manifests
    storage_class: str | None = None  # None: the cluster's default
    storage: str = "1Gi"  # of each volume

    def __post_init__(self) -> None:
        for option, name in (("--namespace", self.namespace), ("--storage-class", self.storage_class)):
            if name is not None and not _LABEL.fullmatch(name):
                raise ConfigError(f"{option} is {name!r}, want at most 63 lower-case letters, digits and inner hyphens")
        if not _QUANTITY.fullmatch(self.storage):
            raise ConfigError(f"--storage is {self.storage!r}, want a size such as 500Mi or 10Gi")


def manifests(plan: Plan, where: Where, output: Path | None) -> str:
    """The text of all manifests. ConfigError when the experiment cannot be read."""
    writer = _Writer(plan, where, plan.short_name)
    documents = [
        writer.experiment(),
        *writer.policies(),
        *(writer.service(member) for member in plan.members if member.role != "host"),
        *writer.claims(),
        *(writer.stateful_set(member) for member in plan.members if member.role != "host"),
        *writer.jobs(),
    ]
    return header(_notes(writer, output)) + "---\n".join(map(as_yaml, documents))


@dataclass(frozen=True)
class _Writer:
    plan: Plan
    where: Where
    run: str

    # ---- names and what all objects have

    def called(self, name: str) -> str:
        """An object's name."""
        return f"{self.run}-{name}"

    @property
    def is_alone(self) -> bool:
        """Whether each host has something of its own, and so a Job of its own."""
        return self.plan.asked.private_data is not None or self.plan.asked.certificates is not None

    def _metadata(self, name: str, **labels: str) -> dict[str, Any]:
        namespace = {} if self.where.namespace is None else {"namespace": self.where.namespace}
        return {"name": self.called(name), **namespace, "labels": {NAME: "coterie", INSTANCE: self.run, **labels}}

    def _labels(self, member: Member) -> dict[str, str]:
        """Of a pod."""
        labels = {NAME: "coterie", INSTANCE: self.run, COMPONENT: member.role}
        labels |= {MEMBER: member.name} if member.role != "host" else {}
        return labels | ({JOINS: member.parent} if member.parent is not None else {})

    def _claim(self) -> dict[str, Any]:
        storage_class = {} if self.where.storage_class is None else {"storageClassName": self.where.storage_class}
        return {"accessModes": ["ReadWriteOnce"], **storage_class, "resources": {"requests": {"storage": self.where.storage}}}

    # ---- objects

    def experiment(self) -> dict[str, Any]:
        try:
            text = self.plan.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the experiment {self.plan.file}: {error}") from None
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata("experiment"),
            "data": {EXPERIMENT.strip("/"): text},
        }

    def policies(self) -> Iterator[dict[str, Any]]:
        """Nothing; DNS for all; each server from its children, and its children to it; with monitoring each server's metrics."""
        everybody = {"matchLabels": {INSTANCE: self.run}}
        port = [{"port": PORT, "protocol": "TCP"}]
        yield self._policy("deny", everybody, policyTypes=["Ingress", "Egress"])
        dns = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
        ports = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
        yield self._policy("dns", everybody, policyTypes=["Egress"], egress=[{"to": [dns], "ports": ports}])
        for member in self.plan.members:
            if member.role != "host":
                itself = {"matchLabels": {INSTANCE: self.run, MEMBER: member.name}}
                children = {"matchLabels": {INSTANCE: self.run, JOINS: member.name}}
                ingress = [{"from": [{"podSelector": children}], "ports": port}]
                egress = [{"to": [{"podSelector": itself}], "ports": port}]
                yield self._policy(f"into-{member.name}", itself, policyTypes=["Ingress"], ingress=ingress)
                yield self._policy(f"to-{member.name}", children, policyTypes=["Egress"], egress=egress)
                if self.plan.asked.monitoring:
                    reader = {"namespaceSelector": {}, "podSelector": {"matchLabels": {NAME: PROMETHEUS}}}
                    scrape = [{"from": [reader], "ports": [{"port": METRICS_PORT, "protocol": "TCP"}]}]
                    yield self._policy(f"scrape-{member.name}", itself, policyTypes=["Ingress"], ingress=scrape)

    def _policy(self, name: str, pods: dict[str, Any], **rules: Any) -> dict[str, Any]:
        spec = {"podSelector": pods, **rules}
        return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": self._metadata(name), "spec": spec}

    def service(self, member: Member) -> dict[str, Any]:
        spec = {
            "clusterIP": "None",
            "selector": {INSTANCE: self.run, MEMBER: member.name},
            "ports": [{"name": "grpc", "port": PORT, "targetPort": PORT, "protocol": "TCP"}],
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(member.name), "spec": spec}

    def claims(self) -> Iterator[dict[str, Any]]:
        """The volumes for the state of hosts with Jobs of their own."""
        for host in self._hosts() if self.is_alone else ():
            metadata = self._metadata(f"state-{host.name}")
            yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": self._claim()}

    def stateful_set(self, member: Member) -> dict[str, Any]:
        folder = "runs" if member.role == "coordinator" else "state"
        volumes = [{"name": "tmp", "emptyDir": {}}, *self._certificates(member)]
        if member.role == "coordinator":
            volumes.append({"name": "experiment", "configMap": {"name": self.called("experiment")}})
        spec = {
            "serviceName": self.called(member.name),
            "replicas": 1,
            "selector": {"matchLabels": {INSTANCE: self.run, MEMBER: member.name}},
            "template": self._pod(member, [self._server(member)], volumes),
            "volumeClaimTemplates": [{"metadata": {"name": folder}, "spec": self._claim()}],
        }
        return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": self._metadata(member.name), "spec": spec}

    def jobs(self) -> Iterator[dict[str, Any]]:
        hosts = self._hosts()
        if self.is_alone:
            for host in hosts:
                yield self._job(host.name, [host])
            return
        for parent in dict.fromkeys(host.parent for host in hosts):
            name = "hosts" if parent == COORDINATOR else f"hosts-{str(parent).removeprefix('aggregator-')}"
            yield self._job(name, [host for host in hosts if host.parent == parent])

    def _job(self, name: str, hosts: Sequence[Member]) -> dict[str, Any]:
        host = hosts[0]
        volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}, *self._certificates(host)]
        state = {"persistentVolumeClaim": {"claimName": self.called(f"state-{host.name}")}} if self.is_alone else {"emptyDir": {}}
        volumes.append({"name": "state", **state})
        if self.plan.reads_data:
            volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": self.data_claim(host), "readOnly": True}})
        pod = self._pod(host, [self._host(hosts)], volumes)
        pod["spec"]["restartPolicy"] = "OnFailure"
        spec = {
            "completionMode": "Indexed",
            "completions": len(hosts),
            "parallelism": len(hosts),
            "backoffLimit": RETRIES * len(hosts),
            "template": pod,
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata(name), "spec": spec}

    def data_claim(self, host: Member) -> str:
        """The volume, made by others, with the data of a host, or of all."""
        return self.called("data" if self.plan.asked.private_data is None else f"data-{host.name}")

    def _hosts(self) -> list[Member]:
        return [member for member in self.plan.members if member.role == "host"]

    # ---- pods

    def _pod(self, member: Member, containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
        spec = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 30,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": containers,
            "volumes": volumes,
        }
        return {"metadata": {"labels": self._labels(member), **self._annotations(member)}, "spec": spec}

    def _annotations(self, member: Member) -> dict[str, Any]:
        """By which Prometheus, in its usual configuration, finds the metrics of a server."""
        if member.role == "host" or not self.plan.asked.monitoring:
            return {}
        values = {"scrape": "true", "port": str(METRICS_PORT), "path": "/metrics"}
        values |= {"scheme": "https"} if self.plan.asked.certificates is not None else {}
        return {"annotations": {f"prometheus.io/{key}": value for key, value in values.items()}}

    def _container(self, name: str, member: Member, mounts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "image": self.plan.image(member.role),
            **{key: _without_variables(value) if key in ("command", "args") else value for key, value in more.items()},
            "resources": {"requests": _RESOURCES[self.plan.target(member.role)]},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],  # noqa: S108
        }

    def _arguments(self, member: Member) -> list[str]:
        return arguments(self.plan, member, f"{self.called(str(member.parent))}:{PORT}", PATIENCE_S)

    def _server(self, member: Member) -> dict[str, Any]:
        mounts = [{"name": "runs", "mountPath": RUNS} if member.role == "coordinator" else {"name": "state", "mountPath": STATE}]
        if member.role == "coordinator":
            mounts.append({"name": "experiment", "mountPath": EXPERIMENT, "subPath": EXPERIMENT.strip("/")})
        grpc = {"grpc": {"port": PORT, "service": SERVICE}}
        if self.plan.asked.certificates is not None:  # the kubelet has none
            grpc = {"exec": {"command": health(self.plan)}}
        return self._container(
            member.role,
            member,
            [*mounts, *self._certificate_mount()],
            command=["sh", "-c", KEPT, "kept", "coterie", *self._arguments(member)],
            ports=[
                {"name": "grpc", "containerPort": PORT, "protocol": "TCP"},
                *([{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}] if self.plan.asked.monitoring else []),
            ],
            readinessProbe={**grpc, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3},
        )

    def _host(self, hosts: Sequence[Member]) -> dict[str, Any]:
        mounts = [{"name": "state", "mountPath": STATE}, *self._certificate_mount()]
        mounts += [{"name": "data", "mountPath": DATA, "readOnly": True}] if self.plan.reads_data else []
        if len(hosts) == 1:
            return self._container("host", hosts[0], mounts, args=self._arguments(hosts[0]))
        cases = "".join(f"{i}) set -- {shlex.join(self._arguments(host))} ;;\n" for i, host in enumerate(hosts))
        script = f'case "$JOB_COMPLETION_INDEX" in\n{cases}esac\nexec coterie "$@"\n'
        return self._container("host", hosts[0], mounts, command=["sh", "-c", script])

    def _certificates(self, member: Member) -> list[dict[str, Any]]:
        if self.plan.asked.certificates is None:
            return []
        return [{"name": "certificates", "secret": {"secretName": self.secret(member), "defaultMode": 0o440}}]

    def _certificate_mount(self) -> list[dict[str, Any]]:
        if self.plan.asked.certificates is None:
            return []
        return [{"name": "certificates", "mountPath": CERTIFICATES, "readOnly": True}]

    def secret(self, member: Member) -> str:
        """The secret, made by others, with a member's certificate."""
        return self.called(f"tls-{member.name}")


def _without_variables(words: Sequence[str]) -> list[str]:
    """The same with $( doubled: Kubernetes puts variables of the environment in the place of $(NAME)."""
    return [word.replace("$(", "$$(") for word in words]


def _notes(writer: _Writer, output: Path | None) -> list[str]:
    plan, where, run = writer.plan, writer.where, writer.run
    options = {"namespace": where.namespace, "storage-class": where.storage_class, "output": output}
    options["storage"] = where.storage if where.storage != Where.storage else None
    kubectl = "kubectl" if where.namespace is None else f"kubectl -n {where.namespace}"
    file = "FILE" if output is None else shlex.quote(os.fspath(output))
    written = [f"Written by: {command_line('kubernetes', plan.asked, options)}", ""]
    lines = _first(writer, kubectl)
    jobs = f"job -l {INSTANCE}={run}"
    images = [f"  {command}" for command in build_commands(plan)]
    return [
        *written,
        "The images, from a clone of the repository, where the cluster's nodes find them (pushed to a registry: --registry):",
        *images,
        "",
        *([] if where.namespace is None else [f"  kubectl create namespace {where.namespace}      if there is none yet"]),
        *lines,
        f"  {kubectl} apply -f {file}      starts the run",
        f"  {kubectl} logs -f {run}-{COORDINATOR}-0 -c {COORDINATOR}      follows it",
        f"  {kubectl} wait --for=condition=complete --timeout=24h {jobs}      waits for its end",
        f"  {kubectl} cp -c {COORDINATOR} {run}-{COORDINATOR}-0:{RUNS}/{plan.name} {plan.name}      takes the run folder out of its volume",
        f"  {kubectl} scale statefulset -l {INSTANCE}={run} --replicas=0      ends the servers, which stay for that; volumes remain",
        f"  {kubectl} delete -f {file}; {kubectl} delete pvc -l {INSTANCE}={run}      removes everything",
        "",
        *_about_metrics(plan),
        "The policies need a network plugin that enforces them, and DNS servers with the label k8s-app: kube-dns.",
        *(
            ["Members speak in plain text; --mtls gives each a certificate."]
            if plan.asked.certificates is None
            else ["Readiness is asked by a command: the kubelet's own gRPC probe has no certificate."]
        ),
        *(
            []
            if writer.is_alone
            else [
                "The hosts' state is in their pods: it outlives a container, and not a pod. With --private-data or --mtls it is on volumes."
            ]
        ),
    ]


def _about_metrics(plan: Plan) -> list[str]:
    if not plan.asked.monitoring:
        return []
    lines = [f"Metrics are at port {METRICS_PORT} of each server, for pods of any namespace with the label {NAME}: {PROMETHEUS}."]
    if plan.asked.certificates is not None:
        lines += [
            f"Prometheus shows the certificate {plan.asked.certificates / PROMETHEUS} for them (tls_config of its scrape configuration)."
        ]
    return lines


def _first(writer: _Writer, kubectl: str) -> list[str]:
    """What must be there before: volumes with data, secrets with certificates."""
    plan, lines = writer.plan, []
    hosts = [member for member in plan.members if member.role == "host"]
    if plan.asked.private_data is not None:
        lines += ["Volumes with the hosts' data, as claims that are there before:"]
        lines += [f"  {writer.data_claim(host)} with what is in {plan.asked.private_data / host.name}" for host in hosts] + [""]
    elif plan.reads_data:
        lines += [f"A volume that many can read, as a claim that is there before: {writer.data_claim(hosts[0])} with {plan.asked.data}", ""]
    if plan.asked.certificates is not None:
        folder = plan.asked.certificates
        lines += ["Once, the certificates:"]
        lines += [f"  {line}" for line in certificate_commands(plan, folder, {one.name: writer.called(one.name) for one in plan.members})]
        lines += [
            f"  {kubectl} create secret generic {writer.secret(member)} --from-file={shlex.quote(os.fspath(folder / member.name))}"
            for member in plan.members
        ]
        lines += [""]
    return lines
