"""A coordinator whose address nobody knows beforehand: it writes a file, its hosts read it, and certificates are for a name of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.session.where import Where
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.roles.listening import Listening
from tests.commands import LONG, Command, commands_in, events, in_one_process, models, n_rounds, wait_for

FILE = Path("runs/long/address")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "long.yaml").write_text(LONG)
    with commands_in(tmp_path) as run:
        yield run


def server(start: Callable[..., Command], *options: str) -> Command:
    return start("server", "long.yaml", "--listen", "127.0.0.1:0", "--hosts", "2", *options)


def address_in(file: Path) -> str:
    """The address that a coordinator writes when it listens."""
    return str(wait_for(lambda: file.exists() and file.read_text()).split()[0])


def client(start: Callable[..., Command], number: int, *options: str) -> Command:
    where = ("--server", f"@{FILE}", "--name", f"host-{number}", "--state", f"state-{number}")
    return start("client", *where, "--users", f"{number}/2", *options)


@pytest.mark.slow
def test_hosts_find_a_coordinator_that_starts_after_them_and_one_that_comes_back_elsewhere(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    hosts = [client(start, number) for number in (1, 2)]
    assert hosts[0].process.stdout is not None
    assert "(up to 60 s): there is no such file yet" in hosts[0].process.stdout.readline()
    first = server(start)
    wait_for(lambda: n_rounds(tmp_path / "runs/long") >= 5)
    was = (tmp_path / FILE).read_text()
    first.process.kill()
    first.process.wait()
    assert (tmp_path / FILE).read_text() == was, "of no use, but nobody was there to remove it"
    second = server(start, "--or-resume")
    for command in (second, *hosts):
        code, _, err = command.end()
        assert code == 0, err
    assert not (tmp_path / FILE).exists()
    assert models(tmp_path / "runs/long") == models(in_one_process(tmp_path, "long.yaml"))


def test_a_certificate_for_a_name_of_the_run_is_compared_with_this_name_wherever_the_coordinator_is(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    init(tmp_path / "ca")
    issue(tmp_path / "ca", Asked("coordinator", "coordinator", ["coordinator.long"]))
    for number in (1, 2):
        issue(tmp_path / "ca", Asked("host", f"host-{number}"))
    served = server(start, "--tls", "ca/coordinator", "--set", "stop.rounds=20")
    wait_for((tmp_path / FILE).exists)
    said = client(start, 1, "--tls", "ca/host-1", "--tls-name", "coordinator.large", "--patience", "3").fails(2)
    wanted = "its certificate is not for 'coordinator.large': issue one with --address coordinator.large, or correct --tls-name"
    assert said.endswith(wanted)
    hosts = [client(start, number, "--tls", f"ca/host-{number}", "--tls-name", "coordinator.long") for number in (1, 2)]
    for command in (served, *hosts):
        code, _, err = command.end()
        assert code == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("wants_tls", [False, True])
def test_a_host_waits_where_another_run_has_the_port_that_a_killed_coordinator_has_left_in_its_file(
    start: Callable[..., Command], tmp_path: Path, wants_tls: bool
) -> None:
    """The other run may have the same experiment, or want certificates that the host has not."""
    init(tmp_path / "ca")
    issue(tmp_path / "ca", Asked("coordinator", "coordinator", ["localhost"]))
    other = server(start, "--output", "other", *(("--tls", "ca/coordinator") * wants_tls))
    address = address_in(tmp_path / "other/address")
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(f"{address}\nthe-run-before\n")
    hosts = [client(start, number) for number in (1, 2)]
    for host in hosts:
        assert host.process.stdout is not None
        said = host.process.stdout.readline()
        assert ("it wants TLS" if wants_tls else "wanted run the-run-before") in said
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).parent.rmdir()
    for command in (server(start), *hosts):
        code, _, err = command.end()
        assert code == 0, err
    assert other.process.poll() is None
    assert not events(tmp_path / "other", "join")


@pytest.mark.slow
def test_hosts_in_the_middle_of_a_run_wait_where_another_run_has_the_port_of_their_killed_coordinator(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    hosts = [client(start, number) for number in (1, 2)]
    first, other = server(start), server(start, "--output", "other")
    address = address_in(tmp_path / "other/address")
    wait_for(lambda: n_rounds(tmp_path / "runs/long") >= 5)
    wanted = (tmp_path / FILE).read_text().split()[1]
    (tmp_path / FILE).write_text(f"{address}\n{wanted}\n")
    first.process.kill()
    first.process.wait()
    for host in hosts:
        host.said(f"wanted run {wanted}")
    assert all(host.process.poll() is None for host in hosts)
    second = server(start, "--or-resume")
    for command in (second, *hosts):
        code, _, err = command.end()
        assert code == 0, err
    assert other.process.poll() is None
    assert not events(tmp_path / "other", "join")
    assert not events(tmp_path / "other", "refused")


@pytest.mark.parametrize(
    ("said", "content", "sentence"),
    [
        ("@address", "n1:7000", "joining n1:7000 without TLS sends models in plain text: give a certificate with --tls, or allow it with"),
        ("@address", "", "the address in address is '', want HOST:PORT"),
        ("@address", "n1:70000", "the address in address is 'n1:70000', want HOST:PORT"),
        ("@.", "", "cannot read the address file .: Is a directory"),
        ("@", "", "--server is '@', want @FILE with the file's name"),
        ("n1", "", "--server is 'n1', want HOST:PORT"),
    ],
)
def test_a_file_with_something_else_than_an_address_that_may_be_dialled_is_refused(
    said: str, content: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("address").write_text(content)
    with pytest.raises(ConfigError) as error:
        Where(said).place()
    assert str(error.value).startswith(sentence)


def test_a_name_to_compare_with_a_certificate_wants_certificates() -> None:
    with pytest.raises(ConfigError, match=r"^--tls-name is 'x', but there is no certificate to compare it with: want --tls too$"):
        Where("@address", tls_name="x")


def test_the_file_names_this_machine_where_the_coordinator_listens_on_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "n1")

    def found_at(address: str, announce: str | None = None) -> str:
        return Listening("coordinator", "", "", "", Path(), address, None, False, None, Path(), announce).found_at(7000)

    assert [found_at("0.0.0.0:0"), found_at("[::]:0"), found_at("127.0.0.1:0")] == ["n1:7000", "n1:7000", "127.0.0.1:7000"]
    assert found_at("0.0.0.0:0", "n1-ib0") == "n1-ib0:7000"
