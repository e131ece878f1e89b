"""The batch script for Slurm: what it asks for and quotes, when none is written, and the certificates and signals that it counts on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.experiment.consent import consent_hash
from coterie.session.tls import Identity, load_tls
from coterie_deploy.containers.certs import federation
from coterie_deploy.engines.slurm import SlurmEngine
from coterie_deploy.engines.slurm_script import Asked, script
from coterie_deploy.read.shipped import load
from coterie_deploy.terminal import signals


def written(**changes: object) -> str:
    asked = Asked(**{"experiment": "hsb", "folder": Path("runs/hsb"), "n_hosts": 3, **changes})  # type: ignore[arg-type]
    return script(asked, load("hsb", asked.overrides, hosts=asked.n_hosts), "coterie slurm hsb")


def directives(text: str) -> tuple[list[str], list[str]]:
    """Of the coordinator's component, and of the hosts'."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    middle = lines.index("hetjob")
    return lines[:middle], lines[middle + 1 :]


def test_both_components_get_what_both_need_and_the_hosts_what_is_theirs() -> None:
    head, hosts = directives(
        written(time="1-00:00:00", partition="long", requeue=True, sbatch=["--account=lab"], host_sbatch=["--gres=gpu:1"])
    )
    assert {"--ntasks=1", "--requeue", "--signal=B:USR1@60", "--open-mode=append"} <= {*head}
    assert "--ntasks=3" in hosts
    for option in ("--time=1-00:00:00", "--partition=long", "--account=lab"):
        assert option in head
        assert option in hosts
    assert "--gres=gpu:1" in hosts
    assert "--gres=gpu:1" not in head
    assert "--no-requeue" in directives(written())[0]


def test_hosts_serve_shares_and_accept_this_experiment_alone() -> None:
    text = written(overrides=["stop.rounds=7"])
    assert '--users "$i/3" --name "host-$i"' in text
    assert f"--accept {consent_hash(load('hsb', ['stop.rounds=7'], hosts=3))}" in text
    assert "--set stop.rounds=7 --set federation.join_timeout_s=600" in text
    assert "join_timeout_s=600" not in written(overrides=["federation.join_timeout_s=5"]), "what the experiment says holds"


def test_an_image_runs_every_command() -> None:
    lines = [line for line in written(apptainer="my image.sif").splitlines() if "coterie " in line and not line.startswith("#")]
    assert len(lines) == 3
    assert all('apptainer exec --bind "$PWD" "$image" coterie ' in line for line in lines)
    assert "image='my image.sif'" in written(apptainer="my image.sif")


def test_names_with_spaces_and_quotes_stay_whole_in_a_script_that_bash_takes(tmp_path: Path) -> None:
    folder, data = Path("it's a run"), Path("o'data")
    text = written(folder=folder, data=data, overrides=["description=it's; rm -rf x"])
    (tmp_path / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, capture_output=True, check=False).returncode == 0
    exported = next(line for line in text.splitlines() if line.startswith("export "))
    said = subprocess.run(
        ["bash", "-c", f'{exported}; printf "%s|%s|%s" "$run" "$certs" "$data"'], capture_output=True, text=True, check=True
    )
    assert said.stdout == "it's a run|it's a run.certs|o'data"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_hosts": 161}, "161 hosts for 160 users: want at most one host for each user"),
        ({"time": "2 hours"}, "--time is '2 hours', want minutes, H:MM:SS or D-HH:MM:SS"),
        ({"sbatch": ["account=lab"]}, "--sbatch is 'account=lab', want an option of sbatch on one line"),
        ({"host_sbatch": ["--a\nrm -rf x"]}, r"--sbatch is '--a\\nrm -rf x', want an option of sbatch on one line"),
        ({"overrides": ["problem.loss=mine:Loss"]}, "the experiment wants to import 'mine:Loss' on the hosts; allow it with --allow-code"),
        ({"overrides": ["federation.topology=clusters"]}, "an experiment with federation.topology 'clusters' has aggregators"),
    ],
)
def test_what_could_not_run_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        written(**changes)


def test_without_sbatch_a_job_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = SlurmEngine(Asked("hsb", tmp_path / "run", 3), load("hsb", hosts=3), "coterie run hsb --engine slurm")
    with pytest.raises(ConfigError, match=r"^sbatch is not here: want a login node of a Slurm cluster"):
        engine.submit()
    assert not (tmp_path / "run").exists()


def test_certificates_of_a_federation_are_made_once_and_fit_its_members(tmp_path: Path) -> None:
    assert federation(tmp_path / "certs", 2, ["coordinator.my"]) == 3
    kept = (tmp_path / "certs/host-1/tls.crt").read_bytes()
    assert federation(tmp_path / "certs", 3, ["coordinator.my"]) == 1, "the third host's"
    assert (tmp_path / "certs/host-1/tls.crt").read_bytes() == kept
    assert load_tls(tmp_path / "certs/coordinator", is_server=True).identity(is_server=True) == Identity("coordinator", "coordinator")
    assert load_tls(tmp_path / "certs/host-3", is_server=False).identity(is_server=False) == Identity("host", "host-3")


def test_the_echo_of_a_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one would end these tests."""
    monkeypatch.setattr(signals, "ECHO_S", 0.2)

    async def asked_twice() -> None:
        with signals.stopping_on_signals() as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
            assert stop.by == "SIGTERM"
            async with asyncio.timeout(5):
                while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    await asyncio.sleep(0.01)

    asyncio.run(asked_twice())
