"""Experiments in containers, end to end: images, networks, bits, ledgers, certificates, and whatever can be done to a container."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import coterie
from coterie_deploy.containers.certs import Asked, init, issue
from tests.commands import in_one_process
from tests.e2e.containers import (
    IMAGES,
    ROOT,
    Federation,
    docker,
    federation,
    images_built,
    same_models,
    wait_until,
    wants_an_engine,
)
from tests.e2e.ledgers import centres_by_round, same_ledger, wire_bytes

pytestmark = pytest.mark.e2e

# A link with a delay makes a round take milliseconds, so that there is time to disturb it; in one process there is no link.
PDMM = """
name: NAME
seed: 3
data: {source: ellipses, users_per_cluster: 2, test_per_class: 50}
problem: {loss: squared_hinge, l2: 0.001}
method: {name: pdmm, penalty: 0.07, evaluate_every: 0}
stop: {rounds: 1200, residual: null}
snapshots: {every_rounds: 60}
federation: {hosts: 2, absence_timeout_s: 40, links: {direct: 1Gbit/3ms}}
"""
LINEAR = """
name: NAME
seed: 3
data: {source: representation, users: 8, d: 6, k: 2, rows_per_user: 8}
method: {name: fedrep_linear, k: 2, eta: 0.5, users_per_round: 4}
stop: {rounds: 1200}
snapshots: {every_rounds: 60}
federation: {hosts: 2, absence_timeout_s: 40, links: {direct: 1Gbit/3ms}}
"""
TIERS = """
name: NAME
seed: 4
data: {source: hlm, clusters: 2, users_per_cluster: 3, rows_per_user: 6, d: 3}
problem: {loss: least_squares, l2: 0.1, intercept: false}
method: {name: METHOD, iterations: 4000, gamma: 1.0, alpha: 0.4, p0: 0.3, p: 0.3, collect_models: true}
snapshots: {every_rounds: 60}
federation: {topology: clusters, hosts: 2, absence_timeout_s: 40, links: {between: 1Gbit/2ms, within: 1Gbit/1ms}}
"""


@pytest.fixture(autouse=True, scope="module")
def engine() -> None:
    wants_an_engine()


def test_the_images_are_confined_and_say_what_they_are() -> None:
    images_built()
    for target, name in IMAGES.items():
        image = f"{name}:{coterie.__version__}"
        config = json.loads(docker("inspect", "-f", "{{json .Config}}", image))
        assert config["User"] == "10001:10001"
        assert config["Labels"]["org.opencontainers.image.title"] == name
        assert config["Labels"]["org.opencontainers.image.version"] == coterie.__version__
        packages = ("torch", "scipy", "dp_accounting", "coterie_server", "coterie_client")
        code = f"import importlib.util as u; print(*[name for name in {packages} if u.find_spec(name)])"
        found = docker("run", "--rm", "--read-only", "--network", "none", "--entrypoint", "python", image, "-c", code)
        assert found == {"server": "scipy dp_accounting coterie_server", "client": "coterie_client"}[target]
    refused = docker("run", "--rm", "--read-only", f"coterie-client:{coterie.__version__}", "run", "hsb", check=False)
    assert refused.startswith("error: this command needs coterie_server")


@pytest.mark.parametrize(("name", "experiment"), [("flat", "hsb"), ("clusters", "schools")])
def test_the_shipped_files_run_to_the_same_bits_and_ledger(tmp_path: Path, name: str, experiment: str) -> None:
    images_built()
    made = Federation(tmp_path, experiment, ROOT / f"deploy/compose/{name}.yml")
    made.down()
    try:
        if name == "clusters":
            made.up(*ISOLATED)  # without the other hosts the run does not begin, so that there is time to look around
            isolated(made)
        made.up()
        assert made.ends() == 0, made.logs("coordinator")
        run = made.run_folder()
        wanted = in_one_process(tmp_path, experiment)
        same_models(run, wanted)
        same_ledger(run, wanted, made.file)
        if name == "clusters":  # each cluster has two hosts, and in one process one
            assert centres_by_round(run) == {at: 2 * vectors for at, vectors in centres_by_round(wanted).items()}
    finally:
        made.down()


ISOLATED = ("coordinator", "aggregator-catholic", "aggregator-public", "host-public-1")


def isolated(made: Federation) -> None:
    """Hosts of a cluster reach their aggregator, and neither the coordinator nor the other cluster, by name or by address."""
    inside = {service: json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", made.container(service)))
              for service in ISOLATED}  # fmt: skip
    assert {service: sorted(name.removeprefix("schools_") for name in networks) for service, networks in inside.items()} == {
        "coordinator": ["backbone"],
        "aggregator-catholic": ["backbone", "cluster-catholic"],
        "aggregator-public": ["backbone", "cluster-public"],
        "host-public-1": ["cluster-public"],
    }
    addresses = [network["IPAddress"] for service in ("coordinator", "aggregator-catholic") for network in inside[service].values()]
    places = ["aggregator-public", "coordinator", "aggregator-catholic", *addresses]
    code = f"""
import socket
def reached(place):
    try:
        socket.create_connection((place, 7000), 1.5).close()
        return True
    except OSError:
        return False
print([reached(place) for place in {places!r}])"""
    found = wait_until(lambda: (answer := made.python("host-public-1", code, check=False)).startswith("[True") and answer, "the aggregator")
    assert found == str([True] + [False] * (len(places) - 1))


def test_traffic_within_and_between_clusters_runs_over_networks_of_its_own(tmp_path: Path) -> None:
    """What an aggregator's two interfaces have carried is the ledger's two scopes, and what HTTP/2 and TCP need beside."""
    experiment = TIERS.replace("METHOD", "async_l2gd").replace("NAME", "networks")
    with federation(tmp_path, "networks", experiment, "--hosts", "1") as made:
        made.up()
        latest: dict[str, int] = {}

        def has_ended() -> bool:
            latest.update(seen := made.carried("aggregator-c0"))
            return not seen

        wait_until(has_ended, "the end of the aggregator")
        assert made.ends() == 0
        run = made.run_folder()
    within, between = wire_bytes(run, "within-cluster", "aggregator-c0"), wire_bytes(run, "between-cluster", "aggregator-c0")
    # The last look is a moment before the end. What comes on top are the headers of HTTP/2, TCP, IP and Ethernet on many small messages.
    assert 0.7 * within < latest["cluster-c0"] < 6 * within
    assert 0.7 * between < latest["backbone"] < 6 * between


KILLS = [("pdmm", PDMM, 7), ("fedrep_linear", LINEAR, 8), ("async_l2gd", TIERS, 9), ("async_al2sgd", TIERS, 10)]


@pytest.mark.parametrize(("method", "experiment", "seed"), KILLS, ids=[method for method, *_ in KILLS])
def test_killed_containers_end_with_the_bits_of_an_undisturbed_run(tmp_path: Path, method: str, experiment: str, seed: int) -> None:
    name = method.replace("_", "-")
    experiment = experiment.replace("NAME", name).replace("METHOD", method)
    is_tiered = "topology: clusters" in experiment
    rng = random.Random(seed)  # noqa: S311 - chooses rounds
    with federation(tmp_path, name, experiment, *(("--hosts", "1") if is_tiered else ())) as made:
        made.up()
        services = made.compose("config", "--services").split()
        victims = [next(s for s in sorted(services) if s.startswith("host")), "coordinator"]
        victims += [next(s for s in services if s.startswith("aggregator"))] if is_tiered else []
        rng.shuffle(victims)
        for at, victim in zip(sorted(rng.sample(range(20, 800), len(victims))), victims, strict=True):
            made.reaches(at)
            made.kill(victim)
            made.start(victim)
        assert made.ends() == 0, made.logs("coordinator")
        run = made.run_folder()
    same_models(run, in_one_process(tmp_path, flat(tmp_path, name, experiment)))


def flat(folder: Path, name: str, experiment: str) -> str:
    """The file of the same experiment without aggregators, for one process."""
    path = folder / f"{name}-flat.yaml"
    path.write_text(experiment.replace("topology: clusters, hosts: 2", "topology: flat, hosts: 1"))
    return path.name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "pdmm.yaml").write_text(PDMM.replace("NAME", "one"))
    return in_one_process(folder, "pdmm.yaml")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Federation]:
    """The PDMM federation, under way."""
    with federation(
        tmp_path, "disturbed", PDMM.replace("NAME", "disturbed").replace("absence_timeout_s: 40", "absence_timeout_s: 6")
    ) as made:
        made.up()
        made.reaches(50)
        yield made


def test_a_cut_network_shorter_than_the_deadline_is_waited_for(running: Federation, undisturbed: Path) -> None:
    network, host = f"{running.name}_federation", running.container("host-1")
    docker("network", "disconnect", network, host)
    wait_until(lambda: "is gone" in running.logs("coordinator") or running.round(), "the coordinator")
    docker("network", "connect", network, host)
    assert running.ends() == 0, running.logs("coordinator")
    same_models(running.run_folder(), undisturbed)


def test_a_cut_network_longer_than_the_deadline_ends_the_run_which_goes_on_later(running: Federation, undisturbed: Path) -> None:
    network, host = f"{running.name}_federation", running.container("host-1")
    docker("network", "disconnect", network, host)
    wait_until(
        lambda: "(users " in running.logs("coordinator") and "absent since round" in running.logs("coordinator"), "the deadline", seconds=90
    )
    docker("network", "connect", network, host)
    running.up()  # the coordinator has been started again by its restart policy, or is now
    running.completes()
    same_models(running.run_folder(), undisturbed)


def test_a_paused_host_is_waited_for(running: Federation, undisturbed: Path) -> None:
    host = running.container("host-2")
    docker("pause", host)
    at = running.round()
    docker("unpause", host)
    running.reaches(at + 20)
    assert running.ends() == 0, running.logs("coordinator")
    same_models(running.run_folder(), undisturbed)


def test_a_slow_link_changes_no_bits(running: Federation, undisturbed: Path) -> None:
    process = docker("inspect", "-f", "{{.State.Pid}}", running.container("host-1"))
    slow = ["rate", "256kbit", "burst", "4kb", "latency", "400ms"]
    inside = ["nsenter", "-t", process, "-n", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow]
    done = subprocess.run(inside, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the kernel or the user cannot make a link slow: {done.stderr.strip()}")
    assert running.ends() == 0, running.logs("coordinator")
    same_models(running.run_folder(), undisturbed)


def test_containers_stop_when_they_are_asked_to_and_go_on(running: Federation, undisturbed: Path) -> None:
    running.compose("stop")
    codes = {service: running.ends(service, 1.0) for service in ("coordinator", "host-1", "host-2")}
    assert codes == {"coordinator": 143, "host-1": 143, "host-2": 143}, running.logs("coordinator")
    running.compose("start")
    running.completes()
    same_models(running.run_folder(), undisturbed)


def test_a_full_disk_is_said_and_with_room_again_the_run_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    with federation(tmp_path, "full", PDMM.replace("NAME", "full")) as made:
        small = '\n  runs:\n    driver_opts: {type: tmpfs, device: tmpfs, o: "size=8m,uid=10001,gid=10001"}\n'
        made.file.write_text(made.file.read_text().replace("\n  runs: {}\n", small))
        made.compose("create")
        # Another container holds the volume, a disk in memory, for as long as the test takes, and has filled most of it.
        ballast = "open('/runs/ballast', 'wb').write(bytes(7_900_000)); import time; time.sleep(600)"
        image = f"coterie-server:{coterie.__version__}"
        holder = docker("run", "-d", "--rm", "-v", "full_runs:/runs", "--entrypoint", "python", image, "-c", ballast)
        try:
            wait_until(lambda: docker("exec", holder, "sh", "-c", "wc -c < /runs/ballast", check=False) == "7900000", "the ballast")
            made.up()
            wait_until(lambda: "No space left on device" in made.logs("coordinator"), "the full disk")
            assert "Traceback" not in made.logs("coordinator")
            assert wait_until(lambda: made.state("coordinator")["ExitCode"], "the exit code") == 3
            docker("exec", holder, "rm", "/runs/ballast")
            made.up()
            made.completes()
            same_models(made.run_folder(), undisturbed)
        finally:
            docker("kill", holder, check=False)


def test_a_host_that_is_late_by_many_attempts_makes_the_run_and_up_on_a_finished_run_ends_in_seconds(
    tmp_path: Path, undisturbed: Path
) -> None:
    """With a joining time of seconds the coordinator fails and is started again while the host that was in time keeps its place."""
    short = ("--set", "federation.join_timeout_s=5")
    with federation(tmp_path, "late", PDMM.replace("NAME", "late"), *short) as made:
        made.up("coordinator", "host-1")
        restarts = "{{.RestartCount}}"
        wait_until(lambda: int(docker("inspect", "-f", restarts, made.container("coordinator"))) >= 4, "four attempts")
        assert docker("inspect", "-f", restarts, made.container("host-1")) == "0"
        made.up()
        made.completes(200)
        same_models(made.run_folder(), undisturbed)
        assert [made.ends(f"host-{i}", 20) for i in (1, 2)] == [0, 0]
        made.up()
        assert [made.ends(name, 30) for name in ("coordinator", "host-1", "host-2")] == [0, 0, 0]
        assert "has finished before" in made.logs("coordinator")


def test_a_mistake_ends_its_container_for_good_and_a_live_one_is_healthy(tmp_path: Path) -> None:
    with federation(tmp_path, "mistaken", PDMM.replace("NAME", "mistaken")) as made:
        text = made.file.read_text()
        made.file.write_text(text.replace("'#3..#5'", "'#3..#99'"))
        assert made.file.read_text() != text
        made.up()
        assert made.ends("host-2", 60) == 0
        assert '"code": 2' in made.logs("host-2")
        wait_until(lambda: made.state("coordinator").get("Health", {}).get("Status") == "healthy", "the health check")
        wait_until(lambda: made.state("host-1").get("Health", {}).get("Status") == "healthy", "the health check")
        assert docker("inspect", "-f", "{{.RestartCount}}", made.container("host-2")) == "0"
        made.file.write_text(text)
        made.up()
        assert made.ends() == 0, made.logs("coordinator")


def test_certificates_in_containers(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    init(certs)
    issue(certs, Asked("coordinator", "coordinator", ["coordinator"]))
    issue(certs, Asked("host", "host-1", users=["u0..u2"]))
    issue(certs, Asked("host", "host-2", users=["u3..u5"]))
    subprocess.run(["chown", "-R", "10001:10001", str(certs)], check=True)
    with federation(tmp_path, "mtls", PDMM.replace("NAME", "mtls"), "--mtls", "certs") as made:
        made.up()
        wait_until(lambda: made.state("coordinator").get("Health", {}).get("Status") == "healthy", "the health check")
        assert made.ends() == 0, made.logs("coordinator")
        same_models(made.run_folder(), in_one_process(tmp_path, "mtls.yaml"))
