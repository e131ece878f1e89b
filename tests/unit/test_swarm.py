"""Stacks of Docker Swarm: what other machines get, which node a member belongs to, and that the tools read them. Nothing is deployed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from coterie.errors import ConfigError
from coterie_deploy.cli import app as cli
from coterie_deploy.containers.members import Asked, planned
from coterie_deploy.containers.swarm import stack_file
from tests.unit.test_compose import STACK, check, clusters, flat, here, mounts

__all__ = ["here"]  # a working directory with an experiment, its data and certificates


def read(asked: Asked) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(stack_file(planned(asked), Path("sub/stack.yml")))
    return content


def constraints(content: dict[str, Any]) -> dict[str, list[str]]:
    return {name: service["deploy"]["placement"]["constraints"] for name, service in content["services"].items()}


@pytest.mark.parametrize("name", ["flat", "clusters", "mtls", "private", "networks", "peers"])
def test_stacks_are_valid_by_the_schema_that_docker_stack_deploy_checks(here: Path, name: str) -> None:
    asked = {
        "flat": flat(data=here / "data"),
        "clusters": clusters(data=here / "data", registry="r.example", places=["*=site=north"]),
        "mtls": clusters(data=here / "data", certificates=Path("certs")),
        "private": flat(data=None, private_data=here / "data"),
        "networks": Asked("digits", hosts=2),
        "peers": replace(clusters(data=here / "data"), topology="peers"),
    }
    check(read(asked[name]), STACK)


@pytest.mark.parametrize("mistake", [{"configs": [{"source": 1}]}, {"deploy": {"endpoint_mod": "dnsrr"}}, {"secrets": {"x": "y"}}])
def test_the_schema_refuses_a_mistake(here: Path, mistake: dict[str, Any]) -> None:
    content = read(flat(data=here / "data"))
    content["services"]["host-1"] |= mistake
    with pytest.raises(jsonschema.ValidationError):
        check(content, STACK)


def test_other_nodes_get_the_experiment_and_the_certificates_by_the_swarm_and_no_path_of_this_machine(here: Path) -> None:
    content = read(clusters(data=here / "data", certificates=Path("certs")))
    assert content["configs"] == {"experiment": {"file": "../small.yaml"}}
    for name, service in content["services"].items():
        binds = {mount["target"]: mount["source"] for mount in service["volumes"] if mount["type"] == "bind"}
        assert binds == ({"/data": str(here / "data")} if name.startswith("host-") else {})
        assert ("configs" in service) == (name == "coordinator")
        own = {secret["target"]: secret for secret in service["secrets"]}
        assert list(own) == ["/certs/ca.crt", "/certs/tls.crt", "/certs/tls.key"]
        for target, secret in own.items():
            assert content["secrets"][secret["source"]] == {"file": f"../certs/{name}/{Path(target).name}"}
            assert (secret["uid"], secret["mode"]) == ("10001", 0o400)
    assert len(content["secrets"]) == 3 * len(content["services"])


def test_temporary_files_are_a_mount_since_stacks_drop_tmpfs(here: Path) -> None:
    for name, service in read(Asked("hsb", hosts=2))["services"].items():
        assert mounts({"services": {name: service}}, name)["/tmp"] == {"type": "tmpfs", "target": "/tmp"}  # noqa: S108
        assert not service.keys() & {"tmpfs", "restart", "security_opt", "build", "depends_on"}, "which stacks drop"
        assert service["healthcheck"] == {"disable": True}


def test_services_are_found_by_their_tasks_addresses_and_start_again_without_end_but_for_a_mistake(here: Path) -> None:
    content = read(clusters(data=here / "data"))
    assert all(network == {"driver": "overlay", "internal": True} for network in content["networks"].values())
    for service in content["services"].values():
        assert service["deploy"]["endpoint_mode"] == "dnsrr"
        assert service["deploy"]["restart_policy"] == {"condition": "on-failure", "delay": "5s"}
        assert service["environment"] == {"COTERIE_MISTAKE_EXIT_CODE": "0"}


def test_each_member_belongs_to_the_node_with_its_own_label_unless_a_place_says_where(here: Path) -> None:
    asked = flat(data=here / "data")
    assert constraints(read(asked)) == {
        name: [f"node.labels.small.{name} == true"] for name in ("coordinator", "host-1", "host-2", "host-3")
    }
    placed = replace(asked, places=["host-*=site=north", "host-2=hostname=node-b", "coordinator=zone=a.1"])
    assert constraints(read(placed)) == {
        "coordinator": ["node.labels.zone == a.1"],
        "host-1": ["node.labels.site == north"],
        "host-2": ["node.labels.site == north", "node.hostname == node-b"],
        "host-3": ["node.labels.site == north"],
    }


def test_the_header_labels_the_nodes_of_members_that_have_no_place(here: Path) -> None:
    text = stack_file(planned(flat(data=here / "data", places=["host-1=site=north"])), None)
    labelled = [line for line in text.splitlines() if "--label-add" in line]
    assert labelled == [f"#   docker node update --label-add small.{name}=true NODE" for name in ("coordinator", "host-2", "host-3")]
    assert "docker node update" not in stack_file(planned(flat(data=here / "data", places=["*=site=north"])), None)


def test_the_header_pushes_the_images_of_a_registry(here: Path) -> None:
    text = stack_file(planned(Asked("digits", hosts=2, registry="r.example/x")), None)
    pushed = [line.rpartition("/")[2].partition(":")[0] for line in text.splitlines() if line.startswith("#   docker push r.example/x/")]
    assert pushed == ["coterie-server", "coterie-client-torch"]
    assert "They must be on every node" in stack_file(planned(Asked("digits", hosts=2)), None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["small.yaml", "--data", "data"], "--data is 'data', which the nodes of a Swarm look for themselves: want an absolute path"),
        (["small.yaml", "--private-data", "data", "--hosts", "2"], "--private-data is 'data', which the nodes"),
        (["hsb", "--place", "host-1=site"], "--place is 'host-1=site', want MEMBER=LABEL=VALUE, such as host-1=site=north"),
        (["hsb", "--place", "host-1=si te=north"], "--place is 'host-1=si te=north', want"),
        (["hsb", "--hosts", "1", "--place", "host-2=a=b"], "no member is called 'host-2', want one of coordinator, host-1"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert cli._run(["swarm", *arguments]) == ConfigError.exit_code
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_the_command_writes_what_its_first_line_says(here: Path) -> None:
    arguments = ["swarm", "hsb", "--hosts", "2", "--place", "host-1=site=north", "--output", "stack.yml"]
    assert cli._run(arguments) == 0
    assert (here / "stack.yml").read_text().splitlines()[0] == f"# Written by: coterie {' '.join(arguments)}"


def test_docker_on_this_machine_reads_every_word_of_a_command_as_it_was_meant(here: Path) -> None:
    """No engine is needed for it."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "stack", "config", "--help"], capture_output=True, check=False).returncode
    ):
        pytest.skip("there is no docker stack on this machine")
    plan = planned(clusters(data=here / "data", overrides=["method.gamma=1e0", "description='${HOME} $x'"]))
    (here / "stack.yml").write_text(stack_file(plan, Path("stack.yml")))
    done = subprocess.run(["docker", "stack", "config", "-c", "stack.yml"], capture_output=True, text=True, timeout=30, check=True)
    services = yaml.safe_load(done.stdout)["services"]
    words = {name: [str(word).replace("$$", "$") for word in service["command"]] for name, service in services.items()}
    assert "description='${HOME} $x'" in words["coordinator"]
    assert words["aggregator-home"][words["aggregator-home"].index("--cluster") + 1] == "$HOME"
    assert json.dumps(services["coordinator"]["volumes"][0]) == json.dumps({"type": "tmpfs", "target": "/tmp"})  # noqa: S108
