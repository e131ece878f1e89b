"""A long command says that it works, also into a file."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coterie.experiment.config import StopRule
from coterie_deploy.studies import progress as of_series
from coterie_deploy.terminal import waiting as under_test
from coterie_deploy.view import progress as of_run
from coterie_server.interface.stages import Stage
from coterie_server.run.engine import Progress
from tests.commands import wait_for


def said(seconds: float) -> list[str]:
    file = io.StringIO()
    with under_test.waiting(Console(file=file), "first") as say:
        time.sleep(seconds / 2)
        say("second")
        time.sleep(seconds / 2)
    return file.getvalue().splitlines()


def test_a_log_has_a_line_soon_and_then_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "FIRST_S", 0.05)
    monkeypatch.setattr(under_test, "EVERY_S", 0.2)
    lines = said(1.0)
    assert 3 <= len(lines) <= 6
    assert re.fullmatch(r"first \(0\.\d s so far\)", lines[0])
    assert lines[-1].startswith("second (")


def test_what_is_over_at_once_says_nothing() -> None:
    assert said(0.0) == []


@pytest.mark.parametrize("module", [of_run, of_series])
def test_a_round_that_takes_long_is_not_silent(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_EVERY_S", 0.01)
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    file = io.StringIO()
    console = Console(file=file, width=200)
    showing = of_run.display(console, quiet=False) if module is of_run else of_series.series_display(console, ["fedrep-0"], quiet=False)
    with showing as shown:
        if module is of_series:
            shown.begin(1)
        wait_for(lambda: "no round has ended yet" in file.getvalue(), file.getvalue)
        stage = Stage("fedrep", "fedrep", SimpleNamespace(), StopRule(rounds=9))
        shown(Progress(stage, 0, 1, 3, {}, 1 / 3))
        wait_for(lambda: re.search(r"round 3.* since", file.getvalue()), file.getvalue)
