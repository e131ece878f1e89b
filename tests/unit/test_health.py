"""A member says that it is alive by the time of a file, which `sh` tests: no probe starts Python."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from coterie_deploy.containers.member_commands import ALIVE as PROBE
from coterie_deploy.roles.health import ALIVE, ALIVE_FILE, beating

ROOT = Path(__file__).parents[2]


def probed(file: Path) -> bool:
    return subprocess.run(PROBE, env={**os.environ, ALIVE_FILE: str(file)}, capture_output=True, check=False).returncode == 0


def test_the_file_is_young_while_the_member_is_alive_and_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, state = tmp_path / "alive", tmp_path / "state"
    monkeypatch.setenv(ALIVE_FILE, str(file))

    async def alive() -> None:
        async with beating(state):
            await asyncio.sleep(0)  # the first beat
            assert (state / ALIVE).exists()
            assert await asyncio.to_thread(probed, file)
            hour = time.time() - 3600
            os.utime(file, (hour, hour))  # as one whose event loop stands still leaves it
            assert not await asyncio.to_thread(probed, file)

    assert not probed(file)
    asyncio.run(alive())
    assert not file.exists()
    assert not (state / ALIVE).exists()


def test_a_server_says_it_without_a_state_folder_and_a_file_that_cannot_be_written_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def alive() -> None:
        async with beating():
            await asyncio.sleep(0)  # the first beat

    monkeypatch.setenv(ALIVE_FILE, "/proc/no/such")
    asyncio.run(alive())
    monkeypatch.delenv(ALIVE_FILE)
    asyncio.run(alive())


def test_the_images_are_checked_by_the_same_probe_and_name_the_file() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", text, re.MULTILINE)
    assert check == PROBE[-1]
    assert re.search(rf"^ENV .*\b{ALIVE_FILE}=/tmp/alive$", text, re.MULTILINE)
