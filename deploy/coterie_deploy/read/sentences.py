"""Sentences about a run's features, held-out rows and steps."""

import contextlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.experiment.data import DataConfig
from coterie.experiment.features import Feature, from_plain, listed
from coterie.experiment.reveals import answered_by
from coterie.registry import room
from coterie_deploy.terminal.printable import printable

_WITHOUT_OWN = ("csv", "parquet", "stata", "spss", "npz", "digits", "hsb", "exams", "growth", "ilea")  # sources that have no test rows


def features_in(facts: Mapping[str, str]) -> tuple[Feature, ...]:
    """The features that a run has recorded; empty if its data names none, and before its hosts have joined."""
    return from_plain(json.loads(facts.get("features", "[]")))


def feature_lines(features: Sequence[Feature], width: int | None) -> list[str]:
    """The features in a bounded number of lines, none longer than `width` (None: any length). Empty for no features."""
    lines = [printable(line) for line in listed(features)] if features else []
    if width is None:
        return lines
    return [piece for line in lines for piece in textwrap.wrap(line, width, subsequent_indent=" " * 4, drop_whitespace=True)]


def held_out_sentence(data: DataConfig) -> str:
    """How many rows models are judged on, and the key that says so; "" for sources with test rows of their own."""
    if data.fold is not None:
        return f"fold {data.fold.number} of {data.fold.of} of each user's training rows is held out (data.fold)"
    fraction = getattr(data, "test_fraction", None)
    if fraction is None or getattr(data, "test_features", None) is not None:
        return ""
    if not fraction:
        return "no rows are held out (data.test_fraction: 0)"
    may_bring = "" if data.source in _WITHOUT_OWN else ", unless the source has test rows of its own"
    return f"{100 * fraction:.4g} % of each user's rows are held out (data.test_fraction){may_bring}"


def carried(facts: Mapping[str, str]) -> dict[str, str]:
    """What each step of a run carries. Steps of a method that is not installed here are left out."""
    found = {"control": "hello, heartbeats, books, the envelopes of tasks and replies"}
    with contextlib.suppress(ConfigError, KeyError):
        for name in sorted({step.partition("/")[0] for step in answered_by(experiment_from(json.loads(facts["experiment"])))}):
            found |= room(name).steps
    return found


def steps_said(steps: Iterable[str], facts: Mapping[str, str], *, paper: bool = False) -> str:
    """One sentence on these steps, in order of appearance; with `paper` only on those with numbers for names, and control."""
    words = carried(facts)
    named = [step for step in dict.fromkeys(steps) if not paper or step == "control" or step[1:2].isdigit()]
    return "; ".join(f"{step}: {words[step]}" for step in named if step in words)
