"""Kubernetes manifests: valid by the schemas of Kubernetes, policies that allow the intended ways alone, and commands that start the
plan's members. Nothing is applied."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.containers.compose import compose_file
from coterie_deploy.containers.kubernetes import KEPT, PATIENCE_S, Where, manifests
from coterie_deploy.containers.member_commands import arguments
from coterie_deploy.containers.members import Asked, Plan, planned
from coterie_deploy.read.shipped import find
from tests.slow import slow_after

VERSIONS = ["1.27", "1.37"]  # the first with gRPC probes for all, and the newest that the validator knows
EXPERIMENT = """
name: 2-Tiers
data: {source: csv, path: rows.csv, user_column: user, target_column: y, cluster_column: c}
problem: {loss: least_squares, l2: 0.1}
method: {name: async_l2gd, iterations: 10, gamma: 1.0, lam: 1.0}
"""
CLUSTERS = ["A b", "a-b", "$(HOME) 'x'"]  # of two users each
Manifest = dict[str, Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an experiment and its data in a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    (tmp_path / "data").mkdir()
    lines = [f"u{user},{CLUSTERS[user // 2]},{row / 7},{row}" for user in range(6) for row in range(5)]
    (tmp_path / "data/rows.csv").write_text("\n".join(["user,c,a,y", *lines]) + "\n")
    return tmp_path


def flat(**more: Any) -> Asked:
    return Asked("small.yaml", topology="flat", hosts=3, **{"data": Path("data"), **more})


def clusters(**more: Any) -> Asked:
    return Asked("small.yaml", topology="clusters", hosts=2, **{"data": Path("data"), **more})


def plans() -> dict[str, Plan]:
    asked = {
        "flat": flat(),
        "flat of one": Asked("hsb", hosts=1, monitoring=True),
        "clusters": clusters(monitoring=True, registry="r.example"),
        "hosts of clusters": replace(clusters(), hosts=1),
        "mtls": clusters(certificates=Path("certs")),
        "private": flat(data=None, private_data=Path("data")),
        "networks": Asked("digits", hosts=2),
    }
    return {name: planned(one) for name, one in asked.items()}


PLANS = ["flat", "flat of one", "clusters", "hosts of clusters", "mtls", "private", "networks"]


def documents(plan: Plan, where: Where | None = None) -> list[Manifest]:
    return list(yaml.safe_load_all(manifests(plan, where or Where(), None)))


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    return [document for document in found if document["kind"] == kind]


def workloads(found: list[Manifest]) -> list[Manifest]:
    return [*of_kind(found, "StatefulSet"), *of_kind(found, "Job")]


def pod_of(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def labels_of(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


# ---- validity


@pytest.mark.parametrize("version", slow_after(1, VERSIONS))
@pytest.mark.parametrize("name", PLANS)
def test_manifests_are_valid_by_the_schemas_of_kubernetes(here: Path, name: str, version: str) -> None:
    for document in documents(plans()[name], Where("ns", "fast", "10Gi")):
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "replica"), 1),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "readinessProbe", "grpc", "prot"), 1),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "grpc"),
        ("Job", ("spec", "completions"), "three"),
        ("Job", ("spec", "template", "spec", "securityContext", "runAsNonRoot"), "yes"),
        ("NetworkPolicy", ("spec", "engress"), []),
        ("Service", ("spec", "ports"), {}),
        ("ConfigMap", ("data",), "text"),
    ],
)
def test_the_schemas_refuse_a_mistake(here: Path, kind: str, path: tuple[Any, ...], value: object) -> None:
    document = of_kind(documents(planned(flat())), kind)[0]
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", PLANS)
def test_names_are_labels_of_dns_and_no_two_objects_of_a_kind_have_the_same(here: Path, name: str) -> None:
    found = documents(plans()[name])
    names = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert len(set(names)) == len(names)
    for kind, own in names:
        limit = 52 if kind == "StatefulSet" else 63  # a pod's label has the name and 11 characters of a revision
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", own)
        assert len(own) <= limit


def test_long_names_have_room_for_what_kubernetes_adds(here: Path) -> None:
    for cluster in CLUSTERS[:2]:
        (here / "data/rows.csv").write_text((here / "data/rows.csv").read_text().replace(f",{cluster},", f",{cluster * 20},"))
    found = workloads(documents(planned(clusters(overrides=["name=" + "7x" * 50]))))
    names = [document["metadata"]["name"] for document in found]
    assert max(map(len, names)) == 52
    assert len(set(names)) == len(names) == 1 + 3 + 3


# ---- selectors and volumes


@pytest.mark.parametrize("name", PLANS)
def test_every_selector_selects_its_own_pods(here: Path, name: str) -> None:
    found = documents(plans()[name])
    for workload in of_kind(found, "StatefulSet"):
        wanted = workload["spec"]["selector"]["matchLabels"]
        assert [one for one in workloads(found) if wanted.items() <= labels_of(one).items()] == [workload]
        assert workload["spec"]["serviceName"] in [service["metadata"]["name"] for service in of_kind(found, "Service")]
    for service in of_kind(found, "Service"):
        selected = [one for one in workloads(found) if service["spec"]["selector"].items() <= labels_of(one).items()]
        assert [one["metadata"]["name"] for one in selected] == [service["metadata"]["name"]]


@pytest.mark.parametrize("name", PLANS)
def test_every_mount_has_a_volume_and_every_volume_is_there(here: Path, name: str) -> None:
    found = documents(plans()[name])
    claims = {document["metadata"]["name"] for document in of_kind(found, "PersistentVolumeClaim")}
    for workload in workloads(found):
        volumes = {volume["name"]: volume for volume in pod_of(workload)["volumes"]}
        volumes |= {claim["metadata"]["name"]: claim for claim in workload["spec"].get("volumeClaimTemplates", ())}
        mounts = [mount for container in pod_of(workload)["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)
        if "persistentVolumeClaim" in volumes.get("state", {}):
            assert volumes["state"]["persistentVolumeClaim"]["claimName"] in claims


@pytest.mark.parametrize("name", PLANS)
def test_pods_are_confined(here: Path, name: str) -> None:
    for workload in workloads(documents(plans()[name])):
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == security
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}


def test_only_the_coordinator_has_the_experiment(here: Path) -> None:
    found = documents(planned(clusters()))
    [configured] = of_kind(found, "ConfigMap")
    assert configured["data"] == {"experiment.yaml": EXPERIMENT}
    for workload in workloads(found):
        is_coordinator = workload["metadata"]["name"] == "run-2-tiers-coordinator"
        assert any("configMap" in volume for volume in pod_of(workload)["volumes"]) == is_coordinator
    shipped = of_kind(documents(planned(Asked("hsb", hosts=1))), "ConfigMap")[0]
    assert shipped["data"]["experiment.yaml"] == find("hsb").read_text()


def test_private_data_is_in_the_pod_of_its_owner_alone_whose_state_is_on_a_volume(here: Path) -> None:
    jobs = of_kind(documents(planned(flat(data=None, private_data=Path("data")))), "Job")
    assert len(jobs) == 3
    for number, job in enumerate(jobs, 1):
        claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod_of(job)["volumes"]}
        assert claims["data"] == {"claimName": f"run-2-tiers-data-host-{number}", "readOnly": True}
        assert claims["state"] == {"claimName": f"run-2-tiers-state-host-{number}"}
        assert job["spec"]["completions"] == 1


def test_a_certificate_is_in_the_pod_of_its_owner_alone_and_no_secret_is_in_the_manifests(here: Path) -> None:
    text = manifests(planned(clusters(certificates=Path("certs"))), Where("ns"), Path("k.yml"))
    found = list(yaml.safe_load_all(text))
    assert not of_kind(found, "Secret")
    seen = []
    for workload in workloads(found):
        [secret] = [volume["secret"]["secretName"] for volume in pod_of(workload)["volumes"] if "secret" in volume]
        assert secret == workload["metadata"]["name"].replace("run-2-tiers-", "run-2-tiers-tls-")
        seen.append(secret)
        assert f"#   kubectl -n ns create secret generic {secret} --from-file=certs/{secret.removeprefix('run-2-tiers-tls-')}\n" in text
    assert len(set(seen)) == len(seen) == 10
    assert "certs issue certs aggregator-a-b --role aggregator --address run-2-tiers-aggregator-a-b --cluster 'A b'" in text
    assert text.splitlines()[0].endswith("--data data --mtls certs --namespace ns --output k.yml")


def test_the_kubelet_asks_servers_itself_but_for_tls_where_a_command_does(here: Path) -> None:
    for asked in (clusters(), clusters(certificates=Path("certs"))):
        for workload in of_kind(documents(planned(asked)), "StatefulSet"):
            container = pod_of(workload)["containers"][0]
            probe = container["readinessProbe"]
            if asked.certificates is None:
                assert probe["grpc"] == {"port": 7000, "service": "coterie.v1.FederationService"}
            else:
                assert probe["exec"]["command"] == ["coterie", "health", "127.0.0.1:7000", "--tls", "/certs"]
            assert "livenessProbe" not in container  # it would end a container that stays when its run is over


def test_a_namespace_is_that_of_all_objects_and_a_class_that_of_all_volumes(here: Path) -> None:
    found = documents(planned(flat(data=None, private_data=Path("data"))), Where("ns", "fast", "10Gi"))
    assert {document["metadata"]["namespace"] for document in found} == {"ns"}
    specs = [document["spec"] for document in of_kind(found, "PersistentVolumeClaim")]
    specs += [claim["spec"] for document in of_kind(found, "StatefulSet") for claim in document["spec"]["volumeClaimTemplates"]]
    assert len(specs) == 4
    assert all(spec["storageClassName"] == "fast" and spec["resources"]["requests"]["storage"] == "10Gi" for spec in specs)


# ---- policies


@dataclass(frozen=True)
class Pod:
    """A pod of the run: which member it is, and its labels."""

    member: str
    labels: dict[str, str]

    def is_selected(self, selector: Manifest) -> bool:
        assert set(selector) <= {"matchLabels"}
        wanted: dict[str, str] = selector.get("matchLabels", {})
        return wanted.items() <= self.labels.items()


def pods(plan: Plan, found: list[Manifest]) -> list[Pod]:
    """All pods that the workloads start, members of the plan in its order."""
    made: list[Pod] = []
    for workload in workloads(found):
        n_pods = workload["spec"].get("completions", 1)
        made += [Pod(plan.members[len(made) + i].name, labels_of(workload)) for i in range(n_pods)]
    assert [pod.member for pod in made] == [member.name for member in plan.members]
    return made


def allowed(found: list[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Whether the policies let the source's pod reach the target's, as Kubernetes has it: both must, and a pod that none selects may."""
    sides = (("Egress", "egress", "to", source, target), ("Ingress", "ingress", "from", target, source))
    for kind, rules, peers, own, other in sides:
        policies = [policy["spec"] for policy in of_kind(found, "NetworkPolicy")]
        policies = [spec for spec in policies if kind in spec["policyTypes"] and own.is_selected(spec["podSelector"])]
        if policies and not any(is_allowed(rule, peers, other, port) for spec in policies for rule in spec.get(rules, ())):
            return False
    return True


def is_allowed(rule: Manifest, peers: str, other: Pod, port: int) -> bool:
    ports = [(one["protocol"], one["port"]) for one in rule["ports"]]
    return ("TCP", port) in ports and any(other.is_selected(peer["podSelector"]) for peer in rule[peers])


def links(plan: Plan) -> set[tuple[str, str]]:
    return {(member.name, member.parent) for member in plan.members if member.parent is not None}


@pytest.mark.parametrize("name", PLANS)
def test_policies_allow_each_member_the_way_to_its_parent_and_no_other(here: Path, name: str) -> None:
    plan = plans()[name]
    found = documents(plan)
    ways = {(one.member, other.member) for one, other in itertools.permutations(pods(plan, found), 2) if allowed(found, one, other, 7000)}
    assert ways == links(plan)
    for one, other in itertools.permutations(pods(plan, found), 2):
        assert not any(allowed(found, one, other, port) for port in (22, 53, 443, 7001))


@pytest.mark.parametrize("name", PLANS)
def test_policies_mirror_the_networks_of_compose_less_the_ways_between_hosts(here: Path, name: str) -> None:
    plan = plans()[name]
    found = documents(plan)
    services = yaml.safe_load(compose_file(plan, None))["services"]
    for one, other in itertools.combinations(pods(plan, found), 2):
        shared = set(services[one.member]["networks"]) & set(services[other.member]["networks"])
        either = allowed(found, one, other, 7000) or allowed(found, other, one, 7000)
        roles = {pod.labels["app.kubernetes.io/component"] for pod in (one, other)}
        assert either == (bool(shared) and len(roles) == 2)  # siblings share a network there, though none listens


def test_with_monitoring_prometheus_reaches_the_metrics_of_servers_and_nothing_else(here: Path) -> None:
    prometheus = Pod("prometheus", {"app.kubernetes.io/name": "prometheus"})
    for asked in (clusters(monitoring=True), clusters()):
        plan = planned(asked)
        found = documents(plan)
        for pod, member in zip(pods(plan, found), plan.members, strict=True):
            assert allowed(found, prometheus, pod, 9464) == (asked.monitoring and member.role != "host")
            assert not allowed(found, prometheus, pod, 7000)
            assert not allowed(found, pod, prometheus, 9090)
            assert not allowed(found, Pod("stranger", {"app.kubernetes.io/name": "other"}), pod, 9464)
            assert not any(allowed(found, other, pod, 9464) for other in pods(plan, found))


def test_with_monitoring_servers_say_where_their_metrics_are(here: Path) -> None:
    for certificates, scheme in ((None, None), (Path("certs"), "https")):
        found = documents(planned(clusters(monitoring=True, certificates=certificates)))
        for workload in workloads(found):
            annotations = workload["spec"]["template"]["metadata"].get("annotations", {})
            container = pod_of(workload)["containers"][0]
            assert (annotations.get("prometheus.io/port") == "9464") == (workload["kind"] == "StatefulSet")
            assert annotations.get("prometheus.io/scheme") == (scheme if annotations else None)
            assert ("0.0.0.0:9464" in container.get("command", ())) == bool(annotations)
    assert not any("annotations" in workload["spec"]["template"]["metadata"] for workload in workloads(documents(planned(clusters()))))


def test_another_pod_of_the_namespace_reaches_nobody_and_is_reached_by_nobody(here: Path) -> None:
    plan = planned(clusters())
    found = documents(plan)
    stranger = Pod("stranger", {"app.kubernetes.io/name": "coterie", "app.kubernetes.io/instance": "other", "coterie/joins": "coordinator"})
    for pod in pods(plan, found):
        assert not allowed(found, stranger, pod, 7000)
        assert not allowed(found, pod, stranger, 7000)


def test_runs_in_one_namespace_do_not_meet(here: Path) -> None:
    first, second = (planned(clusters(overrides=[f"name={name}"])) for name in ("first", "second"))
    found = [*documents(first), *documents(second)]
    for one, other in itertools.product(pods(first, documents(first)), pods(second, documents(second))):
        assert not allowed(found, one, other, 7000)
        assert not allowed(found, other, one, 7000)


def test_all_may_ask_the_names_of_others_and_only_the_servers_of_names(here: Path) -> None:
    plan = planned(clusters())
    found = documents(plan)
    [policy] = [document["spec"] for document in of_kind(found, "NetworkPolicy") if document["metadata"]["name"].endswith("-dns")]
    assert all(pod.is_selected(policy["podSelector"]) for pod in pods(plan, found))
    assert policy["policyTypes"] == ["Egress"]
    [rule] = policy["egress"]
    assert rule["to"] == [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}]
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {("UDP", 53), ("TCP", 53)}


# ---- what the containers run


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """An environment in which `coterie` prints its arguments, one in a line."""
    command = tmp_path / "bin/coterie"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "HOME": "/wrong"}


def words_of(container: Manifest) -> list[str]:
    """What a kubelet starts, which would put variables in the place of a single $(NAME)."""
    words = [*container.get("command", ["coterie"]), *container.get("args", ())]
    assert not any(re.search(r"(?<!\$)\$\(", word) for word in words)
    return [word.replace("$$(", "$(") for word in words]


def started(container: Manifest, index: int, environment: dict[str, str]) -> list[str]:
    """The arguments that `coterie` gets in the container of this completion index."""
    done = subprocess.run(
        words_of(container), env={**environment, "JOB_COMPLETION_INDEX": str(index)}, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["flat", "flat of one", "clusters", "hosts of clusters", "mtls"])
def test_each_completion_index_starts_its_host_of_the_plan(here: Path, fake: dict[str, str], name: str) -> None:
    plan = plans()[name]
    run = plan.short_name
    hosts: Iterator[list[str]] = (
        started(pod_of(job)["containers"][0], index, fake)
        for job in of_kind(documents(plan), "Job")
        for index in range(job["spec"]["completions"])
    )
    wanted = [arguments(plan, member, f"{run}-{member.parent}:7000", PATIENCE_S) for member in plan.members if member.role == "host"]
    assert list(hosts) == wanted


def test_servers_run_what_the_plan_says(here: Path) -> None:
    plan = planned(clusters(overrides=["method.gamma=2"]))
    for member, workload in zip(plan.members, of_kind(documents(plan), "StatefulSet"), strict=False):
        container = pod_of(workload)["containers"][0]
        wanted = arguments(plan, member, f"run-2-tiers-{member.parent}:7000", PATIENCE_S)
        assert words_of(container) == ["sh", "-c", KEPT, "kept", "coterie", *wanted]


@contextlib.contextmanager
def kept(*words: str) -> Iterator[subprocess.Popen[str]]:
    """What keeps a server's container, with another command in the server's place; ends with all that it has started."""
    with subprocess.Popen(["sh", "-c", KEPT, "kept", *words], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_server_that_fails_ends_its_container_with_its_exit_code() -> None:
    with kept("sh", "-c", "exit 3") as process:
        process.communicate(timeout=20)
        assert process.returncode == 3


def test_a_server_whose_run_is_over_stays_until_it_is_asked_to_stop() -> None:
    with kept("echo", "report") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "report\n"
        assert process.stdout.readline().startswith("the run is over")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


def test_a_server_hears_sigterm_and_has_the_time_to_write_its_state_down() -> None:
    with kept("sh", "-c", "trap 'echo written; exit 3' TERM; echo started; while :; do sleep 0.01; done") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=20)
        assert (text, process.returncode) == ("written\n", 3)


# ---- the command


def test_the_command_writes_the_same_text_to_a_file_and_to_standard_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["kubernetes", "schools", "--hosts", "2", "--storage", "2Gi"]) == 0
    printed = capsys.readouterr().out
    assert cli._run(["kubernetes", "schools", "--hosts", "2", "--storage", "2Gi", "--output", "k.yml"]) == 0
    written = (here / "k.yml").read_text()
    assert written.splitlines()[0] == "# Written by: coterie kubernetes schools --hosts 2 --output k.yml --storage 2Gi"
    assert list(yaml.safe_load_all(printed)) == list(yaml.safe_load_all(written))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--namespace", "No Good"], "--namespace is 'No Good', want at most 63 lower-case letters, digits and inner hyphens"),
        (["--storage-class", "-"], "--storage-class is '-', want"),
        (["--storage", "big"], "--storage is 'big', want a size such as 500Mi or 10Gi"),
        (["--hosts", "161"], "161 hosts for 160 users: want at most one host for each user"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert cli._run(["kubernetes", "hsb", *arguments]) == ConfigError.exit_code
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line
