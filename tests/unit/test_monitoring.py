"""Prometheus and Grafana beside a federation: what they read fits what is exported and one another, and who reaches whom."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coterie.record.ledger import UP, Row
from coterie_deploy.cli import app as cli
from coterie_deploy.containers.compose import compose_file
from coterie_deploy.containers.members import Asked, planned
from coterie_deploy.containers.monitoring import DATA_SOURCE, files, folder_of
from coterie_deploy.telemetry.metrics import Subject, registry_of
from coterie_server.record.rundb import RunDatabase
from coterie_server.session.hub import Hub
from tests.simulation import small_experiment

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = {"sum", "by", "rate", "increase", "max", "time", "timestamp", "topk", "vector", "or", "last_over_time", "max_over_time"}
FILES = ["prometheus.yml", "datasources.yml", "dashboards.yml", "coterie.json"]


def panels() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(files(planned(Asked("hsb", hosts=2, monitoring=True)))["coterie.json"])["panels"]
    return listed


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of all samples of a run, with their labels."""
    folder = tmp_path_factory.mktemp("run")
    database = RunDatabase(folder / "run.db")
    database.put("status", "running")
    database.stage(0, "pdmm", "pdmm", 0, "", 0.0)
    database.figures(0, 1, {"objective": 1.0, "clusters": 2.0})
    for useful in (1, 0):
        database.book("a", (0, 1), [(Row(1, 1, 0, UP, "pdmm.UpdatedModels", 1, 3, 24, 30, 1), None)], bool(useful))
    database.flush()
    hub = Hub(small_experiment({"name": "oracle"}), "r", database, lambda: 0.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry_of(Subject(hub, folder, "coordinator", "small"))).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    database.close()
    return found


def test_the_dashboard_asks_for_what_is_exported_and_by_labels_that_it_has(exported: dict[str, set[str]]) -> None:
    targets = [target for panel in panels() for target in panel.get("targets", ())]
    assert len(targets) > 20
    for target in targets:
        query = re.sub(r'"[^"]*"', '""', target["expr"])
        names = set(re.findall(r"(?:coterie|process)_\w+", query))
        assert names
        assert names <= exported.keys(), query
        known = {"instance", "job"}.union(*(exported[name] for name in names))
        labels = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        labels |= set(re.findall(r"(\w+)=", query)) | set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert labels <= known, target
        words = set(re.findall(r"[a-z_]+", re.sub(r"\$__\w+|\d+s|\{[^}]*\}|by \([^)]*\)", "", query))) - names
        assert words <= FUNCTIONS, words - FUNCTIONS
        for name in names:
            assert not name.endswith("_total") or re.search(rf"(rate|increase|last_over_time)\({name}", query), (
                "a bare counter tells little"
            )


def test_the_dashboard_has_panels_of_its_own_that_do_not_overlap() -> None:
    listed = panels()
    assert len({panel["id"] for panel in listed}) == len(listed)
    taken: set[tuple[int, int]] = set()
    for panel in listed:
        place = panel["gridPos"]
        own = set(itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])))
        assert own
        assert not own & taken
        assert max(x for x, _ in own) < 24
        taken |= own
        if panel["type"] != "row":
            assert panel["title"]
            assert [target["refId"] for target in panel["targets"]] == ["A", "B"][: len(panel["targets"])]
            assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "s", "Bps", "bytes", "decbytes", "percentunit"}


def test_the_dashboard_and_its_source_fit_together(tmp_path: Path) -> None:
    written = files(planned(Asked("hsb", hosts=2, monitoring=True)))
    assert list(written) == FILES
    [source] = yaml.safe_load(written["datasources.yml"])["datasources"]
    assert {"type": source["type"], "uid": source["uid"]} == DATA_SOURCE
    board = json.loads(written["coterie.json"])
    used = [place["datasource"] for panel in board["panels"] for place in [panel, *panel.get("targets", ())] if "datasource" in place]
    assert used
    assert all(one == DATA_SOURCE for one in used)
    [provider] = yaml.safe_load(written["dashboards.yml"])["providers"]
    services = yaml.safe_load(compose_file(planned(Asked("hsb", hosts=2, monitoring=True)), None))["services"]
    mounted = {Path(mount["source"]).name: mount["target"] for mount in services["grafana"]["volumes"]}
    assert Path(mounted["coterie.json"]).parent == Path(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == mounted["coterie.json"]
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_scrapes_every_server_at_its_port_and_with_certificates_as_a_monitor() -> None:
    asked = Asked("schools", hosts=2, monitoring=True)
    for certificates in (None, Path("certs")):
        plan = planned(Asked(**{**vars(asked), "certificates": certificates}))
        content = yaml.safe_load(compose_file(plan, Path("sub/c.yml")))
        [job] = yaml.safe_load(files(plan)["prometheus.yml"])["scrape_configs"]
        servers = [member.name for member in plan.members if member.role != "host"]
        assert job["static_configs"][0]["targets"] == [f"{name}:9464" for name in servers]
        for name, service in content["services"].items():
            assert ("--metrics" in service.get("command", ())) == (name in servers)
        mounts = {mount["target"]: mount["source"] for mount in content["services"]["prometheus"]["volumes"]}
        assert mounts["/etc/prometheus/prometheus.yml"] == "./c.monitoring/prometheus.yml"
        assert mounts.get("/certs") == (None if certificates is None else "../certs/prometheus")
        assert (job.get("scheme") == "https") == (certificates is not None)
    assert job["tls_config"] == {"ca_file": "/certs/ca.crt", "cert_file": "/certs/tls.crt", "key_file": "/certs/tls.key"}
    said = compose_file(plan, Path("sub/c.yml"))
    assert "coterie certs issue certs prometheus --role monitor\n" in said
    assert "sudo chown -R 65534:65534 certs/prometheus\n" in said


def test_prometheus_shares_a_network_with_servers_alone_and_only_grafana_is_seen_from_this_machine() -> None:
    for topology in ("flat", "clusters"):
        content = yaml.safe_load(compose_file(planned(Asked("schools", topology=topology, hosts=2, monitoring=True)), None))
        networks = {name: set(service["networks"]) for name, service in content["services"].items()}
        near = {name for name in networks if name != "prometheus" and networks[name] & networks["prometheus"]}
        assert near == {name for name in networks if name.startswith(("coordinator", "aggregator"))} | {"grafana"}
        assert {name for name in networks if networks[name] & networks["grafana"]} == {"prometheus", "grafana"}
        is_open = {name for name, network in content["networks"].items() if not network.get("internal")}
        assert [name for name in networks if networks[name] & is_open] == ["grafana"]
        assert [service["ports"] for service in content["services"].values() if "ports" in service] == [["127.0.0.1:3000:3000"]]


def test_both_have_images_of_a_version_and_belong_to_the_profile() -> None:
    services = yaml.safe_load(compose_file(planned(Asked("hsb", hosts=2, monitoring=True)), None))["services"]
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", services[name]["image"])
        assert services[name]["profiles"] == ["monitoring"]
        assert services[name]["read_only"] is True
    assert "profiles" not in services["coordinator"]


def test_the_shipped_files_are_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = Path("deploy/compose/monitored.yml")
    plan = planned(Asked("schools", hosts=2, monitoring=True))
    wanted = {file: compose_file(plan, file, Path()), **{folder_of(file) / name: text for name, text in files(plan).items()}}
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, f"write it again: {wanted[file].splitlines()[0]}"
    assert {path.name for path in folder_of(file).iterdir()} == set(FILES)


def test_the_command_writes_the_files_beside_the_compose_file_and_wants_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._run(["compose", "hsb", "--hosts", "2", "--monitoring"]) == 2
    assert capsys.readouterr().err == "error: --monitoring writes files beside the Compose file, want one with --output FILE\n"
    assert cli._run(["compose", "hsb", "--hosts", "2", "--monitoring", "--output", "c.yml"]) == 0
    assert sorted(path.name for path in Path("c.monitoring").iterdir()) == sorted(FILES)
    Path("d.monitoring").write_text("in the way")
    assert cli._run(["compose", "hsb", "--hosts", "2", "--monitoring", "--output", "d.yml"]) == 2
    assert capsys.readouterr().err == "error: cannot write d.monitoring: File exists\n"
    assert not Path("d.yml").exists()


def test_promtool_takes_the_configuration_where_it_is_installed(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool on this machine")
    (tmp_path / "p.yml").write_text(files(planned(Asked("schools", hosts=2, monitoring=True)))["prometheus.yml"])
    subprocess.run(["promtool", "check", "config", "--syntax-only", tmp_path / "p.yml"], timeout=30, check=True)
