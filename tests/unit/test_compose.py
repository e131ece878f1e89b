"""Compose files: who shares a network with whom, who sees which data, and that the tools read them. Nothing is run."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from coterie import __version__
from coterie.errors import ConfigError
from coterie.text.names import parse_users
from coterie_client.data import list_users
from coterie_deploy.cli import app as cli
from coterie_deploy.cli.commands import app
from coterie_deploy.containers.compose import compose_file
from coterie_deploy.containers.member_commands import _as_tokens, command_line
from coterie_deploy.containers.members import MAX_NAME, Asked, planned, safe_names
from coterie_deploy.containers.plain_yaml import as_yaml
from coterie_deploy.read.shipped import load

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = ROOT / "tests/fixtures/compose"
STACK, V1 = "config_schema_v3.8.json", "compose_spec_1.29.json"
EXPERIMENT = """
name: small
data: {source: csv, path: rows.csv, user_column: user, target_column: y, cluster_column: c}
problem: {loss: least_squares, l2: 0.1}
method: {name: async_l2gd, iterations: 10, gamma: 1.0, lam: 1.0}
"""
ROWS = [("u0", "A b"), ("u1", "A b"), ("u2", "a-b"), ("u3", "a-b"), ("u4", "$HOME"), ("u5", "$HOME"), ("u6", "1e3"), ("u7", "1e3")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an experiment, its data in a folder, and certificates."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    (tmp_path / "data").mkdir()
    lines = [f"{user},{cluster},{row / 7},{row}" for user, cluster in ROWS for row in range(5)]
    (tmp_path / "data/rows.csv").write_text("\n".join(["user,c,a,y", *lines]) + "\n")
    (tmp_path / "certs/coordinator").mkdir(parents=True)
    (tmp_path / "certs/coordinator/tls.key").write_text("PRIVATE KEY")
    return tmp_path


def read(asked: Asked, output: Path | None = None, build: Path | None = None) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(compose_file(planned(asked), output, build))
    return content


def flat(**more: Any) -> Asked:
    return Asked("small.yaml", topology="flat", hosts=3, **{"data": Path("data"), **more})


def clusters(**more: Any) -> Asked:
    return Asked("small.yaml", topology="clusters", hosts=2, **{"data": Path("data"), **more})


def neighbours(content: dict[str, Any]) -> set[frozenset[str]]:
    """The pairs of services that have a network in common."""
    networks = {name: set(service.get("networks", ())) for name, service in content["services"].items()}
    return {frozenset(pair) for pair in itertools.combinations(networks, 2) if networks[pair[0]] & networks[pair[1]]}


def mounts(content: dict[str, Any], service: str) -> dict[str, dict[str, Any]]:
    return {mount["target"]: mount for mount in content["services"][service]["volumes"]}


def hosts_of(content: dict[str, Any]) -> list[str]:
    return [name for name in content["services"] if name.startswith("host-")]


# ---- the shipped files


@pytest.mark.parametrize(("name", "experiment", "hosts"), [("flat", "hsb", 4), ("clusters", "schools", 2)])
def test_shipped_files_are_what_the_command_writes(
    name: str, experiment: str, hosts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    file = Path(f"deploy/compose/{name}.yml")
    wanted = compose_file(planned(Asked(experiment, hosts=hosts)), file, Path())
    assert file.read_text(encoding="utf-8") == wanted, f"write it again: {wanted.splitlines()[0]}"


def test_the_command_writes_the_same_text_to_a_file_and_to_standard_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["compose", "hsb", "--hosts", "2"]) == 0
    printed = capsys.readouterr().out
    assert cli._run(["compose", "hsb", "--hosts", "2", "--output", "c.yml"]) == 0
    written = (here / "c.yml").read_text()
    assert capsys.readouterr().out == "written: c.yml, which begins with what to do next\n"
    assert yaml.safe_load(printed) == yaml.safe_load(written)
    assert written.splitlines()[0] == "# Written by: coterie compose hsb --hosts 2 --output c.yml"
    assert compose_file(planned(Asked("hsb", hosts=2)), Path("c.yml")) == written


# ---- topologies


def test_in_a_flat_federation_all_are_on_one_closed_network(here: Path) -> None:
    content = read(flat())
    assert list(content["services"]) == ["coordinator", "host-1", "host-2", "host-3"]
    assert content["networks"] == {"federation": {"internal": True}}
    assert all(service["networks"] == ["federation"] for service in content["services"].values())


def test_with_clusters_a_host_shares_a_network_with_its_own_cluster_alone(here: Path) -> None:
    content = read(clusters())
    assert all(network == {"internal": True} for network in content["networks"].values())
    names = sorted(safe_names(sorted({cluster for _, cluster in ROWS})).values())
    assert names == ["1e3", "a-b", "a-b-2", "home"]
    wanted = set()
    for name in names:
        own = [f"aggregator-{name}", f"host-{name}-1", f"host-{name}-2"]
        wanted |= {frozenset(pair) for pair in itertools.combinations(own, 2)}
    backbone = ["coordinator", *(f"aggregator-{name}" for name in names)]
    wanted |= {frozenset(pair) for pair in itertools.combinations(backbone, 2)}
    assert neighbours(content) == wanted


def test_no_service_is_on_an_open_network_or_publishes_a_port(here: Path) -> None:
    for asked in (flat(), clusters(certificates=Path("certs"))):
        for service in read(asked)["services"].values():
            assert service["networks"]
            assert "ports" not in service


def test_with_peers_aggregators_share_a_network_of_their_own_and_say_names_that_exist_only_there() -> None:
    found = yaml.safe_load(compose_file(planned(Asked("schools", ("references=[]",), topology="peers", hosts=1)), None))
    aggregators = {name: one for name, one in found["services"].items() if name.startswith("aggregator-")}
    assert [name for name, one in found["services"].items() if "peers" in one["networks"]] == list(aggregators)
    assert found["networks"]["peers"] == {"internal": True}
    for one in aggregators.values():
        said = one["command"][one["command"].index("--announce") + 1]
        assert [name for name, network in one["networks"].items() if network.get("aliases") == [said]] == ["peers"]
        assert said not in found["services"]


def test_names_of_clusters_become_short_safe_and_different() -> None:
    names = ["A b", "a-b", "a/b", "\u00c5", "!!", "x" * 300, "x" * 301, "a-b-2"]
    safe = safe_names(names)
    assert len(set(safe.values())) == len(names)
    assert all(re.fullmatch(rf"[a-z0-9]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?", name) for name in safe.values())


# ---- users and what members see


@pytest.mark.parametrize("asked", [Asked("hsb", hosts=7), Asked("schools", hosts=3), Asked("schools", hosts=1)])
def test_every_user_is_served_by_one_host(asked: Asked) -> None:
    plan = planned(asked)
    heads = list_users(load(asked.experiment).data, 0)
    served: list[str] = []
    for host in (member for member in plan.members if member.role == "host"):
        option, value = host.selection
        own = [head.name for head in heads if head.cluster == value]
        chosen = own if option == "--cluster" else parse_users(value, [head.name for head in heads])
        assert tuple(chosen) == host.users
        assert {head.cluster for head in heads if head.name in chosen} == {host.cluster} or host.cluster is None
        served += chosen
    assert sorted(served) == sorted(head.name for head in heads)


def test_only_the_coordinator_is_told_the_experiment(here: Path) -> None:
    content = read(clusters(overrides=["method.gamma=2"], seed=3))
    assert mounts(content, "coordinator")["/experiment.yaml"]["source"] == "./small.yaml"
    for name, service in content["services"].items():
        told = name == "coordinator"
        assert ("/experiment.yaml" in mounts(content, name)) == told
        assert ("/experiment.yaml" in service["command"] and "method.gamma=2" in service["command"]) == told
        assert "small.yaml" not in json.dumps(service) or told
    assert read(Asked("hsb", hosts=2))["services"]["coordinator"]["command"][:2] == ["server", "hsb"]


def test_data_is_mounted_read_only_and_in_hosts_alone(here: Path) -> None:
    content = read(clusters())
    for name in content["services"]:
        data = mounts(content, name).get("/data")
        assert (data is not None) == name.startswith("host-")
        assert data is None or data == {"type": "bind", "source": "./data", "target": "/data", "read_only": True}
    assert not any("/data" in mounts(read(Asked("hsb", hosts=2)), name) for name in ("host-1", "host-2"))


def test_private_data_is_mounted_by_its_owner_alone_and_nobody_has_the_volume_of_another(here: Path) -> None:
    asked = [
        flat(data=None, private_data=Path("data")),
        clusters(data=None, private_data=Path("data"), overrides=["federation.clusters=[x,y]"]),
    ]
    for content in map(read, asked):
        seen: list[str] = []
        for name in content["services"]:
            data = mounts(content, name).get("/data")
            assert (data is not None) == name.startswith("host-")
            assert data is None or (data["source"], data["read_only"]) == (f"./data/{name}", True)
            seen += [mount["source"] for mount in mounts(content, name).values()]
            assert "--users" not in content["services"][name]["command"]
        assert len(set(seen)) == len(seen)
        assert set(content["volumes"]) <= set(seen)


def test_a_certificate_is_mounted_by_its_owner_alone_and_no_secret_is_in_the_file(here: Path) -> None:
    text = compose_file(planned(clusters(certificates=Path("certs"))), None)
    content = yaml.safe_load(text)
    for name, service in content["services"].items():
        assert mounts(content, name)["/certs"] == {"type": "bind", "source": f"./certs/{name}", "target": "/certs", "read_only": True}
        assert service["command"][-2:] == ["--tls", "/certs"]
        assert "--insecure" not in service["command"]
    assert "PRIVATE" not in text
    assert "#   coterie certs issue certs host-home-2 --role host --cluster '$HOME' --users u5\n" in text
    assert "#   coterie certs issue certs aggregator-home --role aggregator --address aggregator-home --cluster '$HOME'\n" in text
    assert "--role host --users u0..u1\n" in compose_file(planned(flat(certificates=Path("certs"))), None)


def test_a_certificate_lists_ranges_of_users_whose_last_numbers_follow_each_other() -> None:
    assert _as_tokens(("7", "8", "u8", "u9", "u10", "u012", "u013", "u0", "u1", "x2")) == "7..8,u8..u10,u012,u013,u0..u1,x2"


def test_paths_are_those_that_the_folder_of_the_file_sees(here: Path) -> None:
    content = read(flat(certificates=here / "certs"), Path("sub/c.yml"), Path("clone"))
    assert mounts(content, "host-1")["/data"]["source"] == "../data"
    assert mounts(content, "host-1")["/certs"]["source"] == str(here / "certs/host-1")
    assert content["services"]["host-1"]["build"] == {"context": "../clone", "dockerfile": "deploy/Dockerfile", "target": "client"}


def test_an_image_is_built_once_and_the_services_that_share_it_do_not_look_for_it_elsewhere(here: Path) -> None:
    services = read(flat(), build=Path("clone"))["services"]
    assert [name for name, service in services.items() if "build" in service] == ["coordinator", "host-1"]
    assert [name for name, service in services.items() if service.get("pull_policy") == "never"] == ["host-2", "host-3"]
    assert not any("pull_policy" in service for service in read(flat())["services"].values())


def test_the_coordinator_waits_as_long_as_it_takes_unless_the_experiment_says_how_long(here: Path) -> None:
    waits = ["--set", "federation.join_timeout_s=none"]
    command = read(flat())["services"]["coordinator"]["command"]
    assert command[command.index("--set") :][:2] == waits
    for asked in (flat(overrides=["federation.join_timeout_s=5"]), Asked("own.yaml", topology="flat", hosts=3, data=Path("data"))):
        (here / "own.yaml").write_text(EXPERIMENT + "federation: {join_timeout_s: 5}\n")
        assert waits[1] not in read(asked)["services"]["coordinator"]["command"]


def test_the_file_says_what_must_be_there_before_docker_makes_it(here: Path) -> None:
    text = compose_file(planned(flat(certificates=Path("certs"))), None)
    assert "#   ./small.yaml ./certs/coordinator ./data ./certs/host-1 ./certs/host-2 ./certs/host-3\n" in text
    assert "before `up`" not in compose_file(planned(Asked("hsb", hosts=2)), None)


def test_containers_are_confined_and_start_again_without_end_but_for_mistakes(here: Path) -> None:
    for service in read(clusters())["services"].values():
        assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])  # noqa: S108
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "on-failure"
        assert service["environment"] == {"COTERIE_MISTAKE_EXIT_CODE": "0"}


def test_the_image_of_a_host_is_that_of_its_method() -> None:
    images = {name: read(Asked(name, hosts=1, registry="r.example/x/"))["services"] for name in ("hsb", "digits")}
    assert images["hsb"]["coordinator"]["image"] == f"r.example/x/coterie-server:{__version__}"
    assert images["hsb"]["host-1"]["image"] == f"r.example/x/coterie-client:{__version__}"
    assert images["digits"]["host-1"]["image"] == f"r.example/x/coterie-client-torch:{__version__}"


def test_containers_say_what_they_say_for_machines(here: Path) -> None:
    for service in read(clusters())["services"].values():
        place = service["command"].index("--log-format")
        assert service["command"][place + 1] == "json"


# ---- what the tools read


def check(content: Any, schema: str) -> None:
    """ValidationError as that tool has it, with the draft of JSON schema that it takes its schema for."""
    draft = {STACK: jsonschema.Draft4Validator, V1: jsonschema.Draft7Validator}[schema]
    draft(json.loads((SCHEMAS / schema).read_text())).validate(content)


def plans() -> dict[str, Asked]:
    return {
        "flat": flat(),
        "clusters": clusters(overrides=["method.gamma=1e0"], seed=1, registry="r.example"),
        "mtls": clusters(certificates=Path("certs")),
        "private": flat(data=None, private_data=Path("data")),
        "networks": Asked("digits", hosts=2),
        "peers": replace(clusters(), topology="peers"),
    }


@pytest.mark.parametrize("name", ["flat", "clusters", "mtls", "private", "networks", "peers", "monitoring"])
def test_files_are_valid_by_the_schema_of_docker_compose_1_29(here: Path, name: str) -> None:
    check(read({**plans(), "monitoring": flat(monitoring=True)}[name], None, Path("clone")), V1)


@pytest.mark.parametrize("mistake", [{"read_onyl": True}, {"tmpfs": 1}, {"volumes": [{"source": "x"}]}])
def test_the_schema_refuses_a_mistake(here: Path, mistake: dict[str, Any]) -> None:
    content = read(flat())
    content["services"]["host-1"] |= mistake
    with pytest.raises(jsonschema.ValidationError):
        check(content, V1)


TOOLS = {
    "docker compose": (["docker", "compose", "version"], ["docker", "compose", "-f", "c.yml", "config", "--format", "json"]),
    "docker-compose": (["docker-compose", "version"], ["docker-compose", "-f", "c.yml", "config"]),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_tools_on_this_machine_read_every_word_of_a_command_as_it_was_meant(here: Path, tool: str) -> None:
    """No engine is needed for it."""
    known, config = TOOLS[tool]
    if shutil.which(known[0]) is None or subprocess.run(known, capture_output=True, timeout=30, check=False).returncode != 0:
        pytest.skip(f"there is no {tool} on this machine")
    plan = planned(clusters(overrides=["method.gamma=1e0", "description='${HOME} $x'"]))
    (here / "c.yml").write_text(compose_file(plan, Path("c.yml")))
    done = subprocess.run(config, capture_output=True, text=True, timeout=30, check=True)
    assert "version" not in done.stderr  # a warning
    services = yaml.safe_load(done.stdout)["services"]
    commands = {name: [str(word).replace("$$", "$") for word in service["command"]] for name, service in services.items()}
    assert "description='${HOME} $x'" in commands["coordinator"]
    assert commands["aggregator-home"][commands["aggregator-home"].index("--cluster") + 1] == "$HOME"
    assert commands["aggregator-1e3"][commands["aggregator-1e3"].index("--cluster") + 1] == "1e3"


def test_dollars_are_doubled_so_that_no_tool_takes_them_for_variables(here: Path) -> None:
    services = read(clusters(overrides=["description=${HOME}"]))["services"]
    assert "$$HOME" in services["aggregator-home"]["command"]
    assert "description=$${HOME}" in services["coordinator"]["command"]


def test_text_that_begins_like_a_number_stays_text() -> None:
    words = ["1e3", "0o7", "0-39", "-1", ".5", "+2", "yes", "null", "a: b", "# c", "", "line\nline", "tab\t", "x" * 300]
    text = as_yaml({"words": words, "again": words, "block": "one\ntwo\n"})
    assert yaml.safe_load(text) == {"words": words, "again": words, "block": "one\ntwo\n"}
    assert all(f'"{word}"' in text for word in words[:6])
    assert "&" not in text


def test_nothing_in_the_header_ends_the_comment(here: Path) -> None:
    asked = flat(overrides=["description='a\nservices: {}\r\u2028b'"])
    text = compose_file(planned(asked), None)
    assert all(line.startswith("#") for line in text.partition("\nservices:\n")[0].splitlines())
    assert "\n" in command_line("compose", asked, {})
    assert len(yaml.safe_load(text)["services"]) == 4


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["hsb", "--topology", "clusters"], "method 'pdmm' has no clusters of its own, want federation.topology 'flat'"),
        (
            ["small.yaml"],
            "the hosts read 'rows.csv': want its folder with --data DIR, or one for each host with --private-data DIR",
        ),
        (["small.yaml", "--data", "data", "--private-data", "data"], "want one of the two"),
        (["small.yaml", "--data", "data", "--set", "data.path=/etc/rows.csv"], "data path '/etc/rows.csv' leaves the folder"),
        (["small.yaml", "--data", "data", "--set", "data.path=../rows.csv"], "data path '../rows.csv' leaves the folder"),
        (["small.yaml", "--data", "nowhere"], "data folder 'nowhere' is missing"),
        (["small.yaml", "--private-data", "data"], "nothing says how many hosts have private data: want --hosts N"),
        (["small.yaml", "--private-data", "data", "--topology", "clusters"], "want their names as federation.clusters"),
        (["small.yaml", "--data", "data", "--hosts", "9"], "9 hosts for 8 users: want at most one host for each user"),
        (["small.yaml", "--data", "data", "--topology", "clusters", "--hosts", "3"], "3 hosts for the 2 users of cluster"),
        (["cifar10"], "data.name is 'uoft-cs/cifar10' of a hub that closed networks do not reach"),
        (
            ["small.yaml", "--data", "data", "--set", "problem.loss=mine:loss"],
            "the experiment imports 'mine:loss', which the images do not have",
        ),
        (["hsb", "--output", "missing/c.yml"], "cannot write missing/c.yml: No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert cli._run(["compose", *arguments]) == ConfigError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]


def test_a_user_that_a_certificate_cannot_list_is_told(here: Path) -> None:
    table = here / "data/rows.csv"
    table.write_text(table.read_text().replace("u3,", '"u,3",'))
    compose_file(planned(flat()), None)
    with pytest.raises(ConfigError, match="user 'u,3' has a comma"):
        compose_file(planned(flat(certificates=Path("certs"))), None)


# ---- what coterie takes


@pytest.mark.parametrize("name", ["flat", "clusters", "mtls", "private", "networks", "peers"])
def test_every_command_in_the_files_is_one_that_coterie_takes(here: Path, name: str) -> None:
    """Parsed and not run; what the header says of certificates, as well."""
    text = compose_file(planned(plans()[name]), None)
    services = yaml.safe_load(text)["services"].values()
    lines = [service["command"] for service in services]
    lines += [shlex.split(line.lstrip("# "))[1:] for line in text.splitlines() if line.startswith("#   coterie")]
    assert (len(lines) > len(services)) == (name == "mtls")
    for words in lines:
        command: Any = typer.main.get_command(app)
        context = command.make_context("coterie", [word.replace("$$", "$") for word in words])
        while hasattr(command, "resolve_command"):
            rest = [*context._protected_args, *context.args]
            word, command, rest = command.resolve_command(context, rest)
            context = command.make_context(word, rest, parent=context)
