"""What the steps of a run carry, in words: methods say it beside their messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.experiment.reveals import answered_by
from coterie.registry import room


def carried(facts: Mapping[str, str]) -> dict[str, str]:
    """By step, of a run with these facts. Steps of a method that is not installed here are left out."""
    found = {"control": "hello, heartbeats, books, the envelopes of tasks and replies"}
    with contextlib.suppress(ConfigError, KeyError):
        for name in sorted({step.partition("/")[0] for step in answered_by(experiment_from(json.loads(facts["experiment"])))}):
            found |= room(name).steps
    return found


def steps_said(steps: Iterable[str], facts: Mapping[str, str], *, paper: bool = False) -> str:
    """One sentence on these steps, in order of appearance; with `paper` only on those whose names are no words."""
    listed = [step for step in dict.fromkeys(steps) if not paper or step == "control" or step[1:2].isdigit()]
    words = carried(facts)
    return "; ".join(f"{step}: {words[step]}" for step in listed if step in words)
