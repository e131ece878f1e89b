"""`coterie kubernetes`: manifests with which an experiment runs in a cluster of machines.

The coordinator and the aggregators are StatefulSets with a volume each. A StatefulSet restarts whatever ends. So its container stays when
its run is over, no longer ready, and keeps the run folder until the set is scaled to 0. Each host is a Job, which ends with the run: a new
pod finds the state of the one before on a volume. A mistake that stays one ends the Job at once, and an evicted pod counts as no failure.

Network policies deny all but DNS and the way from each member to its parent: what the networks of `coterie compose` allow, without the ways
between hosts.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.session.dial import SERVICE
from coterie_deploy.containers import member_commands as commands
from coterie_deploy.containers.member_commands import CERTIFICATES, DATA, EXPERIMENT, METRICS_PORT, PORT, PROMETHEUS, RUNS, STATE, USER_ID
from coterie_deploy.containers.members import COORDINATOR, PEERS, Member, Plan
from coterie_deploy.containers.places import Toleration, labels, tolerations
from coterie_deploy.containers.plain_yaml import as_yaml

PATIENCE_S = 600.0  # machines may have to fetch images first
RETRIES = 100  # of a host, with waits that grow to minutes: enough for one that is hours late
# Exit code 2 asks for something to be mended. Who is evicted from a node has not failed.
_FAILURES = [
    {"action": "FailJob", "onExitCodes": {"containerName": "host", "operator": "In", "values": [ConfigError.exit_code]}},
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
_API = {  # others: v1
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "StatefulSet": "apps/v1",
    "Job": "batch/v1",
}
NAME, INSTANCE, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"
MEMBER, JOINS = "coterie/member", "coterie/joins"  # labels: a server's name, and whom a member joins
_KINDS = "statefulset,job,service,configmap,networkpolicy,poddisruptionbudget,pvc"  # of all that has the label of a run
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]{0,17}([EPTGMk]|[EPTGMK]i)?")
_REQUESTS = {
    "server": {"cpu": "250m", "memory": "256Mi"},
    "client": {"cpu": "500m", "memory": "256Mi"},
    "client-torch": {"cpu": "1", "memory": "1Gi"},
}
_LIMITS = {"server": "2Gi", "client": "2Gi", "client-torch": "4Gi"}  # of memory
# Runs "$@" as a child. The first process receives only signals that it traps: it passes SIGTERM on, which interrupts `wait`.
KEPT = """\
"$@" & child=$!
trap 'asked=1; kill -TERM "$child"' TERM
wait "$child"; code=$?
while test -n "$asked"; do asked=; wait "$child"; code=$?; done
case "$code" in
0) said="the run is over; what it has left is here until this StatefulSet is scaled to 0" ;;
2) said="this mistake stays one until it is mended: then apply the manifests again, and delete this pod" ;;
*) exit "$code" ;;
esac
trap 'exit 0' TERM
echo "$said"
sleep infinity & wait "$!"
"""


@dataclass(frozen=True)
class Where:
    """The settings of the cluster."""

    namespace: str | None = None  # None: that of whoever applies the manifests
    storage_class: str | None = None  # None: the cluster's default
    storage: str = "1Gi"  # of each volume
    memory: str | None = None  # of each container; None: by its image
    pull_secret: str | None = None  # for the registry of the images
    tolerations: Sequence[str] = ()  # MEMBER=TAINT, of nodes on which members run all the same

    def __post_init__(self) -> None:
        named = (("--namespace", self.namespace), ("--storage-class", self.storage_class), ("--pull-secret", self.pull_secret))
        for option, name in named:
            if name is not None and not _LABEL.fullmatch(name):
                raise ConfigError(f"{option} is {name!r}, want at most 63 lower-case letters, digits and inner hyphens")
        for option, size in (("--storage", self.storage), ("--memory", self.memory)):
            if size is not None and not _QUANTITY.fullmatch(size):
                raise ConfigError(f"{option} is {size!r}, want a size such as 500Mi or 10Gi")


def manifests(plan: Plan, where: Where, output: Path | None) -> str:
    """The text of all manifests. ConfigError when the experiment cannot be read."""
    places, tolerated = labels(plan, plan.asked.places), tolerations(plan, where.tolerations)
    writer = _Writer(plan, where, plan.short_name, places, tolerated)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": where.namespace}}
    documents = [
        *([] if where.namespace is None else [namespace]),
        writer.experiment(),
        *writer.policies(),
        *map(writer.service, plan.servers),
        *map(writer.claim, plan.hosts),
        writer.budget(),
        *map(writer.stateful_set, plan.servers),
        *map(writer.job, plan.hosts),
    ]
    return commands.header(_notes(writer, output)) + "---\n".join(map(as_yaml, documents))


@dataclass(frozen=True)
class _Writer:
    plan: Plan
    where: Where
    run: str
    places: Mapping[str, Mapping[str, str]]  # labels of nodes, by the member that belongs there
    tolerations: Mapping[str, Sequence[Toleration]]

    def called(self, name: str) -> str:
        return f"{self.run}-{name}"

    def data_claim(self, host: Member) -> str:
        """The name of the volume, made by others, with the data of a host, or of all."""
        return self.called("data" if self.plan.asked.private_data is None else f"data-{host.name}")

    def secret(self, member: Member) -> str:
        """The name of the secret, made by others, with a member's certificate."""
        return self.called(f"tls-{member.name}")

    def _object(self, kind: str, name: str, **content: Any) -> dict[str, Any]:
        namespace = {} if self.where.namespace is None else {"namespace": self.where.namespace}
        metadata = {"name": self.called(name), **namespace, "labels": {NAME: "coterie", INSTANCE: self.run}}
        return {"apiVersion": _API.get(kind, "v1"), "kind": kind, "metadata": metadata, **content}

    def _pods(self, **labels: str) -> dict[str, Any]:
        """A selector of this run's pods."""
        return {"matchLabels": {INSTANCE: self.run, **{f"coterie/{key}": value for key, value in labels.items()}}}

    def _claim(self) -> dict[str, Any]:
        storage_class = {} if self.where.storage_class is None else {"storageClassName": self.where.storage_class}
        return {"accessModes": ["ReadWriteOnce"], **storage_class, "resources": {"requests": {"storage": self.where.storage}}}

    # ---- objects

    def experiment(self) -> dict[str, Any]:
        try:
            text = self.plan.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the experiment {self.plan.file}: {error}") from None
        return self._object("ConfigMap", "experiment", data={EXPERIMENT.strip("/"): text})

    def policies(self) -> Iterator[dict[str, Any]]:
        """Nothing; DNS for all; each server from its children, and its children to it; with monitoring each server's metrics."""
        everybody, port = self._pods(), [_port(PORT)]
        yield self._policy("deny", everybody, policyTypes=["Ingress", "Egress"])
        dns = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
        ports = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
        yield self._policy("dns", everybody, policyTypes=["Egress"], egress=[{"to": [dns], "ports": ports}])
        for server in self.plan.servers:
            itself, children = self._pods(member=server.name), self._pods(joins=server.name)
            ingress = [{"from": [{"podSelector": children}], "ports": port}]
            egress = [{"to": [{"podSelector": itself}], "ports": port}]
            yield self._policy(f"into-{server.name}", itself, policyTypes=["Ingress"], ingress=ingress)
            yield self._policy(f"to-{server.name}", children, policyTypes=["Egress"], egress=egress)
            if PEERS in server.networks:
                others = [other.name for other in self.plan.servers if PEERS in other.networks and other is not server]
                peers = [{"podSelector": self._pods(member=name)} for name in others]
                rules = {"ingress": [{"from": peers, "ports": port}], "egress": [{"to": peers, "ports": port}]}
                yield self._policy(f"peers-{server.name}", itself, policyTypes=["Ingress", "Egress"], **rules)
            if self.plan.asked.monitoring:
                reader = {"namespaceSelector": {}, "podSelector": {"matchLabels": {NAME: PROMETHEUS}}}
                scrape = [{"from": [reader], "ports": [_port(METRICS_PORT)]}]
                yield self._policy(f"scrape-{server.name}", itself, policyTypes=["Ingress"], ingress=scrape)

    def _policy(self, name: str, pods: dict[str, Any], **rules: Any) -> dict[str, Any]:
        return self._object("NetworkPolicy", name, spec={"podSelector": pods, **rules})

    def service(self, server: Member) -> dict[str, Any]:
        selector = self._pods(member=server.name)["matchLabels"]
        ports = [{"name": "grpc", "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
        return self._object("Service", server.name, spec={"clusterIP": "None", "selector": selector, "ports": ports})

    def claim(self, host: Member) -> dict[str, Any]:
        """The volume for the state of a host."""
        return self._object("PersistentVolumeClaim", f"state-{host.name}", spec=self._claim())

    def budget(self) -> dict[str, Any]:
        """Whoever empties a node waits until the run is over; pods that are not ready, as those of a finished run, may go."""
        spec = {"minAvailable": len(self.plan.members), "selector": self._pods(), "unhealthyPodEvictionPolicy": "AlwaysAllow"}
        return self._object("PodDisruptionBudget", "members", spec=spec)

    def stateful_set(self, server: Member) -> dict[str, Any]:
        # The kubelet has no certificate for a probe of its own.
        probe = {"exec": {"command": commands.ALIVE}} if self.plan.is_secured else {"grpc": {"port": PORT, "service": SERVICE}}
        metrics = [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}] if self.plan.asked.monitoring else []
        template = self._pod(
            server,
            command=["sh", "-c", KEPT, "kept", "coterie", *self._arguments(server)],
            ports=[{"name": "grpc", "containerPort": PORT, "protocol": "TCP"}, *metrics],
            readinessProbe={**probe, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3},
        )
        folder = "runs" if server.role == "coordinator" else "state"
        spec = {
            "serviceName": self.called(server.name),
            "replicas": 1,
            "selector": self._pods(member=server.name),
            "template": template,
            "volumeClaimTemplates": [{"metadata": {"name": folder}, "spec": self._claim()}],
        }
        return self._object("StatefulSet", server.name, spec=spec)

    def job(self, host: Member) -> dict[str, Any]:
        pod = self._pod(host, args=self._arguments(host))
        pod["spec"]["restartPolicy"] = "Never"  # rules for failures want that
        return self._object("Job", host.name, spec={"backoffLimit": RETRIES, "podFailurePolicy": {"rules": _FAILURES}, "template": pod})

    # ---- pods

    def _pod(self, member: Member, **container: Any) -> dict[str, Any]:
        """A pod of one container, which is started with these settings."""
        storage = list(self._storage(member))
        labels = {NAME: "coterie", INSTANCE: self.run, COMPONENT: member.role}
        labels |= {MEMBER: member.name} if member.role != "host" else {}
        labels |= {JOINS: member.parent} if member.parent is not None else {}
        identity = {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
        whole = {
            "name": member.role,
            "image": self.plan.image(member.role),
            **{key: _without_variables(value) if key in ("command", "args") else value for key, value in container.items()},
            "resources": self._resources(member),
            "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": name, **mount} for name, mount, _ in storage],
        }
        spec = {
            **self._node(member),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 30,
            "securityContext": {**identity, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [whole],
            "volumes": [{"name": name, **volume} for name, _, volume in storage if volume is not None],
        }
        return {"metadata": {"labels": labels, **self._annotations(member)}, "spec": spec}

    def _resources(self, member: Member) -> dict[str, Any]:
        target, asked = self.plan.target(member.role), self.where.memory
        requests = _REQUESTS[target] | ({} if asked is None else {"memory": asked})
        return {"requests": requests, "limits": {"memory": asked or _LIMITS[target]}}

    def _node(self, member: Member) -> dict[str, Any]:
        """Where a pod may run, and with which secret its node fetches the image."""
        found = dict[str, Any]()
        if member.name in self.places:
            found["nodeSelector"] = self.places[member.name]
        if member.name in self.tolerations:
            found["tolerations"] = [_toleration(one) for one in self.tolerations[member.name]]
        if self.where.pull_secret is not None:
            found["imagePullSecrets"] = [{"name": self.where.pull_secret}]
        return found

    def _storage(self, member: Member) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
        """What a container mounts: name, mount, and volume; None for a volume that the StatefulSet claims."""
        yield "tmp", {"mountPath": "/tmp"}, {"emptyDir": {}}  # noqa: S108
        if member.role == "coordinator":
            yield "runs", {"mountPath": RUNS}, None
            file = {"mountPath": EXPERIMENT, "subPath": EXPERIMENT.strip("/")}
            yield "experiment", file, {"configMap": {"name": self.called("experiment")}}
        elif member.role == "aggregator":
            yield "state", {"mountPath": STATE}, None
        else:
            yield "state", {"mountPath": STATE}, {"persistentVolumeClaim": {"claimName": self.called(f"state-{member.name}")}}
        if self.plan.is_secured:
            secret = {"secret": {"secretName": self.secret(member), "defaultMode": 0o440}}
            yield "certificates", {"mountPath": CERTIFICATES, "readOnly": True}, secret
        if member.role == "host" and self.plan.reads_data:
            data = {"claimName": self.data_claim(member), "readOnly": True}
            yield "data", {"mountPath": DATA, "readOnly": True}, {"persistentVolumeClaim": data}

    def _annotations(self, member: Member) -> dict[str, Any]:
        """By which Prometheus, in its usual configuration, finds the metrics of a server."""
        if member.role == "host" or not self.plan.asked.monitoring:
            return {}
        values = {"scrape": "true", "port": str(METRICS_PORT), "path": "/metrics", **({"scheme": "https"} if self.plan.is_secured else {})}
        return {"annotations": {f"prometheus.io/{key}": value for key, value in values.items()}}

    def _arguments(self, member: Member) -> list[str]:
        return commands.arguments(self.plan, member, f"{self.called(str(member.parent))}:{PORT}", PATIENCE_S, self.called(member.name))


def _port(number: int) -> dict[str, Any]:
    return {"port": number, "protocol": "TCP"}


def _toleration(one: Toleration) -> dict[str, str]:
    value = {"operator": "Exists"} if one.value is None else {"operator": "Equal", "value": one.value}
    return {"key": one.key, **value, **({} if one.effect is None else {"effect": one.effect})}


def _without_variables(words: Sequence[str]) -> list[str]:
    """The same with $( doubled: Kubernetes replaces $(NAME) by a variable of the environment."""
    return [word.replace("$(", "$$(") for word in words]


def _notes(writer: _Writer, output: Path | None) -> list[str]:
    plan, where, run = writer.plan, writer.where, writer.run
    storage = where.storage if where.storage != Where.storage else None
    options: dict[str, object] = {"namespace": where.namespace, "storage-class": where.storage_class, "output": output, "storage": storage}
    options |= {"memory": where.memory, "pull-secret": where.pull_secret, "tolerate": list(where.tolerations)}
    kubectl = "kubectl" if where.namespace is None else f"kubectl -n {where.namespace}"
    lines = [
        f"Written by: {commands.command_line('kubernetes', plan.asked, options)}",
        "",
        "The images, from a clone of the repository, where the cluster's nodes find them (pushed to a registry: --registry):",
        *(f"  {command}" for command in commands.build_commands(plan)),
        "",
        *_first(writer, kubectl),
        f"  {kubectl} apply -f {commands.file_named(output)}      starts the run",
        f"  {kubectl} logs -f {run}-{COORDINATOR}-0 -c {COORDINATOR}      follows it",
        f"  {_wait(kubectl, f'{INSTANCE}={run}')}      waits for its end, also when a host has failed for good",
        f"  {kubectl} cp -c {COORDINATOR} {run}-{COORDINATOR}-0:{RUNS}/{plan.name} {plan.name}      takes the run folder out of its volume",
        f"  {kubectl} scale statefulset -l {INSTANCE}={run} --replicas=0      ends the servers, which stay for that; volumes remain",
        f"  {kubectl} delete {_KINDS} -l {INSTANCE}={run}      removes everything",
        "",
        "Nodes that are emptied wait for the end of the run; to let members move, which changes no result, delete the poddisruptionbudget.",
    ]
    if where.namespace is not None:
        lines.append(f"Do not use `kubectl delete -f`: it would remove the namespace {where.namespace}, with all else that is in it.")
    if plan.asked.monitoring:
        lines.append(f"Metrics are at port {METRICS_PORT} of each server, for pods of any namespace with the label {NAME}: {PROMETHEUS}.")
        if plan.asked.certificates is not None:
            place = plan.asked.certificates / PROMETHEUS
            lines.append(f"Prometheus shows the certificate {place} for them (tls_config of its scrape configuration).")
    lines.append("The policies need a network plugin that enforces them, and DNS servers with the label k8s-app: kube-dns.")
    if plan.is_secured:
        lines.append("Readiness is asked by a command: the kubelet's own gRPC probe has no certificate.")
    else:
        lines.append("Members speak in plain text; --mtls gives each a certificate.")
    return lines


def _wait(kubectl: str, label: str) -> str:
    """The command that ends when all hosts are done or one of them has failed for good, and within a day."""
    failed = f'{kubectl} get job -l {label} -o jsonpath="{{.items[*].status.conditions[*].type}}" | grep -qw Failed'
    done = f"{kubectl} wait --for=condition=complete --timeout=10s job -l {label} >/dev/null 2>&1"
    return f"timeout 24h sh -c 'until {done} || {failed}; do sleep 2; done'; {kubectl} get job -l {label}"


def _first(writer: _Writer, kubectl: str) -> list[str]:
    """What must be there before: volumes with data, secrets with certificates."""
    plan, where, lines = writer.plan, writer.where, list[str]()
    needed = plan.reads_data or plan.is_secured or where.pull_secret is not None
    if where.namespace is not None and needed:
        lines += [f"  kubectl create namespace {where.namespace}      if there is none yet", ""]
    if where.pull_secret is not None:
        lines += [f"The secret {where.pull_secret} for the registry, as `{kubectl} create secret docker-registry` makes it.", ""]
    if plan.asked.private_data is not None:
        lines += ["Volumes with the hosts' data, as claims that are there before:"]
        lines += [f"  {writer.data_claim(host)} with what is in {plan.asked.private_data / host.name}" for host in plan.hosts] + [""]
    elif plan.reads_data:
        claim = writer.data_claim(plan.hosts[0])
        lines += [f"A volume that many can read, as a claim that is there before: {claim} with {plan.asked.data}", ""]
    if (folder := plan.asked.certificates) is not None:
        names = {one.name: writer.called(one.name) for one in plan.members}
        lines += ["Once, the certificates:", *(f"  {line}" for line in commands.certificate_commands(plan, folder, names))]
        create = f"  {kubectl} create secret generic"
        lines += [f"{create} {writer.secret(one)} --from-file={shlex.quote(os.fspath(folder / one.name))}" for one in plan.members] + [""]
    return lines
