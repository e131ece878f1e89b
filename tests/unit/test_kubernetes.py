"""Kubernetes manifests: valid by the schemas of Kubernetes, policies that allow the intended ways alone, and commands that start the
plan's members. Nothing is applied."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
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
from coterie_deploy.containers.manifest_check import checked
from coterie_deploy.containers.member_commands import ALIVE, arguments
from coterie_deploy.containers.members import Asked, Plan, planned
from coterie_deploy.read.shipped import find
from tests.slow import slow_after

VERSIONS = ["1.29", "1.37"]  # the first whose schemas take rules for exit codes alone, and the newest that the validator knows
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
    return Asked("small.yaml", hosts=2, **{"topology": "clusters", "data": Path("data"), **more})


def plans() -> dict[str, Plan]:
    asked = {
        "flat": flat(),
        "flat of one": Asked("hsb", hosts=1, monitoring=True),
        "clusters": clusters(monitoring=True, registry="r.example"),
        "hosts of clusters": replace(clusters(), hosts=1),
        "peers": clusters(topology="peers"),
        "mtls": clusters(certificates=Path("certs")),
        "private": flat(data=None, private_data=Path("data")),
        "networks": Asked("digits", hosts=2),
    }
    return {name: planned(one) for name, one in asked.items()}


PLANS = ["flat", "flat of one", "clusters", "hosts of clusters", "peers", "mtls", "private", "networks"]


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
    where = Where("ns", "fast", "10Gi", "3Gi", "registry", ["*=gpu", "coordinator=a.b/c=d:NoSchedule"])
    for document in documents(plans()[name], where):
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "replica"), 1),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "readinessProbe", "grpc", "prot"), 1),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"), "grpc"),
        ("Job", ("spec", "backoffLimit"), "three"),
        ("Job", ("spec", "podFailurePolicy", "rules", 0, "onExitCode"), {}),
        ("PodDisruptionBudget", ("spec", "minAvailabel"), 1),
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
    assert len(set(names)) == len(names) == 1 + 3 + 6


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
        if workload["kind"] == "Job":
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
            assert set(container["resources"]["limits"]) == {"memory"}


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
                assert probe["exec"]["command"] == ALIVE
            assert "livenessProbe" not in container  # it would end a container that stays when its run is over


def test_a_namespace_is_that_of_all_objects_and_a_class_that_of_all_volumes(here: Path) -> None:
    found = documents(planned(flat(data=None, private_data=Path("data"))), Where("ns", "fast", "10Gi"))
    assert (found[0]["kind"], found[0]["metadata"]) == ("Namespace", {"name": "ns"})
    assert {document["metadata"]["namespace"] for document in found[1:]} == {"ns"}
    assert not of_kind(documents(planned(flat())), "Namespace")
    specs = [document["spec"] for document in of_kind(found, "PersistentVolumeClaim")]
    specs += [claim["spec"] for document in of_kind(found, "StatefulSet") for claim in document["spec"]["volumeClaimTemplates"]]
    assert len(specs) == 1 + 3
    assert all(spec["storageClassName"] == "fast" and spec["resources"]["requests"]["storage"] == "10Gi" for spec in specs)


# ---- nodes, failures, evictions


def node_of(workload: Manifest) -> Manifest:
    return {key: value for key, value in pod_of(workload).items() if key in {"nodeSelector", "tolerations", "imagePullSecrets"}}


def test_each_member_belongs_to_nodes_with_the_labels_of_its_place_and_with_taints_that_it_tolerates(here: Path) -> None:
    asked = flat(places=["host-*=site=north", "host-2=kubernetes.io/hostname=node-b"])
    found = documents(planned(asked), Where(tolerations=["host-1=dedicated=study:NoSchedule", "host-1=gpu"], pull_secret="ours"))  # noqa: S106
    coordinator, first, second, third = map(node_of, workloads(found))
    secrets = {"imagePullSecrets": [{"name": "ours"}]}
    assert coordinator == secrets
    taints = [{"key": "dedicated", "operator": "Equal", "value": "study", "effect": "NoSchedule"}, {"key": "gpu", "operator": "Exists"}]
    assert first == {"nodeSelector": {"site": "north"}, "tolerations": taints, **secrets}
    assert second == {"nodeSelector": {"site": "north", "kubernetes.io/hostname": "node-b"}, **secrets}
    assert third == {"nodeSelector": {"site": "north"}, **secrets}
    assert all(node_of(workload) == {} for workload in workloads(documents(planned(flat()))))


def test_the_memory_of_containers_has_a_limit_which_an_option_sets(here: Path) -> None:
    for asked, limit in ((flat(), "2Gi"), (Asked("digits", hosts=1), "4Gi")):
        host = of_kind(documents(planned(asked)), "Job")[0]
        assert pod_of(host)["containers"][0]["resources"]["limits"] == {"memory": limit}
    for workload in workloads(documents(planned(flat()), Where(memory="8Gi"))):
        resources = pod_of(workload)["containers"][0]["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"] == "8Gi"


def test_what_must_be_mended_ends_a_host_at_once_evictions_are_no_failures_and_others_are_tried_for_hours(here: Path) -> None:
    for job in of_kind(documents(planned(clusters())), "Job"):
        fail, ignore = job["spec"]["podFailurePolicy"]["rules"]
        assert fail["action"] == "FailJob"
        assert fail["onExitCodes"] == {"containerName": "host", "operator": "In", "values": [ConfigError.exit_code]}
        assert fail["onExitCodes"]["containerName"] == pod_of(job)["containers"][0]["name"]
        assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        assert pod_of(job)["restartPolicy"] == "Never", "rules for failures are refused with any other"
        waits = [min(10 * 2**i, 360) for i in range(job["spec"]["backoffLimit"])]
        assert sum(waits) > 8 * 3600


def test_a_budget_keeps_all_members_on_their_nodes_until_they_are_not_ready(here: Path) -> None:
    for plan in (planned(clusters()), planned(flat())):
        found = documents(plan)
        [budget] = [document["spec"] for document in of_kind(found, "PodDisruptionBudget")]
        assert budget["minAvailable"] == sum(pod.is_selected(budget["selector"]) for pod in pods(plan, found)) == len(plan.members)
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


KUBECTL = """\
echo "$*" >>"$LOG"
case "$*" in
*"wait "*) test "$(cat "$STATE")" = Complete || sleep 0.1; grep -q Complete "$STATE" ;;
*jsonpath*) cat "$STATE" ;;
*) echo "the jobs" ;;
esac
"""


@pytest.mark.parametrize("ends", ["Complete", "FailureTarget Failed"])
def test_the_wait_of_the_header_ends_when_hosts_are_done_and_when_one_has_failed(
    here: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    [line] = [line for line in manifests(planned(flat()), Where("ns"), None).splitlines() if "kubectl -n ns wait" in line]
    stub(here, monkeypatch, KUBECTL)
    (here / "state").write_text("SuccessCriteria")
    monkeypatch.setenv("LOG", f"{here}/log")
    monkeypatch.setenv("STATE", f"{here}/state")
    command = line.removeprefix("#   ").partition("      ")[0]
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        (here / "state").write_text(ends)
        printed, _ = process.communicate(timeout=20)
    assert printed == "the jobs\n"
    assert all("-n ns" in call and "app.kubernetes.io/instance=run-2-tiers" in call for call in (here / "log").read_text().splitlines())


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
    made = [Pod(member.name, labels_of(workload)) for member, workload in zip(plan.members, workloads(found), strict=True)]
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
    peers = [member.name for member in plan.members if "peers" in member.networks]
    return {(member.name, member.parent) for member in plan.members if member.parent is not None} | set(itertools.permutations(peers, 2))


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
        listens = len(roles) == 2 or "peers" in shared  # siblings share a network there, though none listens
        assert either == (bool(shared) and listens)


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


def words_of(container: Manifest) -> list[str]:
    """What a kubelet starts, which would put variables for a single $(NAME)."""
    words = [*container.get("command", ["coterie"]), *container.get("args", ())]
    assert not any(re.search(r"(?<!\$)\$\(", word) for word in words)
    return [word.replace("$$(", "$(") for word in words]


@pytest.mark.parametrize("name", ["flat", "flat of one", "clusters", "hosts of clusters", "mtls"])
def test_each_job_starts_its_host_of_the_plan(here: Path, name: str) -> None:
    plan = plans()[name]
    for host, job in zip(plan.hosts, of_kind(documents(plan), "Job"), strict=True):
        wanted = arguments(plan, host, f"{plan.short_name}-{host.parent}:7000", PATIENCE_S, "")
        assert words_of(pod_of(job)["containers"][0]) == ["coterie", *wanted]


def test_servers_run_what_the_plan_says(here: Path) -> None:
    plan = planned(clusters(overrides=["method.gamma=2"]))
    for member, workload in zip(plan.members, of_kind(documents(plan), "StatefulSet"), strict=False):
        container = pod_of(workload)["containers"][0]
        wanted = arguments(plan, member, f"run-2-tiers-{member.parent}:7000", PATIENCE_S, "")
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


def test_a_server_with_a_mistake_is_not_started_again_before_somebody_has_mended_it() -> None:
    with kept("sh", "-c", "exit 2") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("this mistake stays one until it is mended")
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
        (["--memory", "big"], "--memory is 'big', want a size such as 500Mi or 10Gi"),
        (["--pull-secret", "Ours!"], "--pull-secret is 'Ours!', want"),
        (["--place", "host-9=a=b"], "--place is 'host-9=a=b', but no member is called 'host-9'"),
        (["--tolerate", "*=gpu:Never"], "--tolerate is '*=gpu:Never', want MEMBER=TAINT, MEMBER=TAINT=VALUE or either with :EFFECT"),
        (["--tolerate", "host-9=gpu"], "no member is called 'host-9'"),
        (["--storage", "big"], "--storage is 'big', want a size such as 500Mi or 10Gi"),
        (["--hosts", "161"], "161 hosts for 160 users: want at most one host for each user"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert cli._run(["kubernetes", "hsb", *arguments]) == ConfigError.exit_code
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_the_command_writes_what_its_first_line_says(here: Path) -> None:
    options = ["--place", "host-1=a=b", "--place", "host-2=a=c", "--output", "k.yml", "--memory", "1Gi", "--tolerate", "*=gpu"]
    assert cli._run(["kubernetes", "hsb", "--hosts", "2", *options]) == 0
    assert (here / "k.yml").read_text().splitlines()[0] == f"# Written by: coterie kubernetes hsb --hosts 2 {shlex.join(options)}"


def stub(here: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A kubectl that answers like this."""
    (here / "bin").mkdir(exist_ok=True)
    (here / "bin/kubectl").write_text(f"#!/bin/sh\n{script}")
    (here / "bin/kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")


def test_a_check_says_what_no_cluster_was_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(here, monkeypatch, "echo 'noise' >&2; echo 'connection refused' >&2; exit 1")
    assert cli._run(["kubernetes", "hsb", "--hosts", "2", "--check", "--output", "k.yml"]) == 0
    schemas, cluster = capsys.readouterr().err.splitlines()
    n_documents = len(list(yaml.safe_load_all((here / "k.yml").read_text())))
    assert re.fullmatch(rf"{n_documents} manifests are valid by the schemas of Kubernetes 1\.[0-9]+", schemas)
    assert cluster == "no cluster was asked, since none answers kubectl: connection refused"
    monkeypatch.setenv("PATH", str(here))
    assert list(checked("---\n"))[-1] == "no cluster was asked, since kubectl is not installed"


def test_a_check_asks_the_cluster_of_kubectl_to_take_them_all_and_applies_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(here, monkeypatch, f'echo "$*" >>{here}/log; cat >{here}/asked; exit 0')
    assert cli._run(["kubernetes", "hsb", "--hosts", "2", "--check", "--output", "k.yml"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "the cluster of kubectl's context would take them all"
    assert (here / "log").read_text().splitlines()[1:] == ["apply --dry-run=server -f - --request-timeout=60s"]
    assert (here / "asked").read_text() == (here / "k.yml").read_text()
    stub(here, monkeypatch, 'test "$1" = version && exit; echo "forbidden: exceeded quota" >&2; exit 1')
    assert cli._run(["kubernetes", "hsb", "--check", "--output", "other.yml"]) == ConfigError.exit_code
    assert (
        capsys.readouterr().err.splitlines()[-1].endswith("the cluster of kubectl's context refuses a manifest: forbidden: exceeded quota")
    )
    assert not (here / "other.yml").exists()


def test_a_check_names_the_object_and_the_place_that_the_schemas_refuse(here: Path) -> None:
    text = manifests(planned(flat()), Where(), None).replace("backoffLimit: 100", "backoffLimit: many")
    with pytest.raises(
        ConfigError, match=r"Job run-2-tiers-host-1 is not valid by the schemas of Kubernetes .*, at spec.backoffLimit: 'many'"
    ):
        list(checked(text))
