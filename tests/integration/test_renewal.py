"""Certificates that end during a run: files that are replaced count from the next handshake on, on both sides, without a restart."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_to_json
from coterie.session.dial import serve_member
from coterie.session.tls import load_tls
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_server.transport.serve import serving
from tests.cutting_proxy import Cutter, cutting
from tests.integration.test_session import Block, expected, experiment, hosts, inputs, maker, new_hub, notes, ready, run

SHORT_S = 6.0


def issued(folder: Path, days: float) -> None:
    """New certificates of the coordinator and of host a, at the place of those before."""
    for asked in (Asked("coordinator", "coordinator", ("127.0.0.1",), days=days), Asked("host", "a", days=days)):
        new = issue(folder / "authority", asked)
        target = folder / asked.name
        target.mkdir(exist_ok=True)
        for file in new.iterdir():
            file.replace(target / file.name)
        shutil.rmtree(new)


@pytest.mark.slow
@pytest.mark.parametrize("renewed", ["both", "host", "coordinator"])
def test_a_certificate_that_is_replaced_in_time_is_shown_when_the_member_dials_again(renewed: str, tmp_path: Path) -> None:
    async def test() -> None:
        init(tmp_path / "authority")
        issued(tmp_path, SHORT_S / 86_400)
        end = time.monotonic() + SHORT_S
        tls = load_tls(tmp_path / "coordinator", is_server=True), load_tls(tmp_path / "a", is_server=False)
        former = {name: tmp_path / f"former-{name}" for name in ("coordinator", "a")}
        for name, kept in former.items():
            shutil.copytree(tmp_path / name, kept)
        hub, blocks = new_hub(silence_s=20.0, absence_timeout_s=20.0), inputs(1, 3, 2)
        text = experiment_to_json(experiment(**hub.rules.model_dump(exclude_none=True)))
        cutter = Cutter(longest_s=SHORT_S + 1.0)  # a running connection outlives its certificates
        async with (
            serving(hub, text, "127.0.0.1:0", tls[0]) as server,
            cutting(f"127.0.0.1:{server.port}", cutter),
            hosts(serve_member(maker("a", ["u0"]), cutter.address, name="a", tls=tls[1], patience_s=5.0)) as (host,),
        ):
            await ready(hub)
            await hub.exchange(Block(blocks[0]))
            issued(tmp_path, 1.0)
            for name in {"both": (), "host": ("coordinator",), "coordinator": ("a",)}[renewed]:
                shutil.copytree(former[name], tmp_path / name, dirs_exist_ok=True)
            await asyncio.sleep(end - time.monotonic())
            if renewed != "both":
                whose = "the certificate .*/a/tls.crt is no good" if renewed == "coordinator" else "its certificate is not believed"
                with pytest.raises(ConfigError, match=f"{whose}: it has expired"):
                    await host
                return
            assert cutter.n_cuts == 0
            answer = (await hub.exchange(Block(blocks[1])))[Block].x
            while not cutter.n_cuts:
                await asyncio.sleep(0.1)
            np.testing.assert_array_equal(answer, expected(blocks)[1])
            while [kind for kind, _ in notes(hub).events].count("join") < 2:
                await asyncio.sleep(0.05)
            await hub.exchange(Block(blocks[1]))
            await hub.finish("all done", failed=False)
            assert await host == "all done"

    run(test())


def test_files_that_do_not_belong_together_leave_the_former_certificate_in_use(tmp_path: Path) -> None:
    init(tmp_path / "authority")
    issued(tmp_path, 1.0)
    first = load_tls(tmp_path / "a", is_server=False)
    key = (tmp_path / "a" / "tls.key").read_bytes()
    issued(tmp_path, 2.0)
    new_key = (tmp_path / "a" / "tls.key").read_bytes()
    (tmp_path / "a" / "tls.key").write_bytes(key)
    assert first.renewed(is_server=False) is first, "the certificate is new, the key is not"
    (tmp_path / "a" / "tls.key").unlink()
    assert first.renewed(is_server=False) is first
    (tmp_path / "a" / "tls.key").write_bytes(new_key)
    second = first.renewed(is_server=False)
    assert second.certificate != first.certificate
    assert second.renewed(is_server=False) is second
