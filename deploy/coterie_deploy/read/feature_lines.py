"""The features of a run for a person, in lines that fit, and from what a run says of itself."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence

from coterie.experiment.features import Feature, from_plain, listed
from coterie_deploy.terminal.printable import printable

_INDENT = "    "


def features_in(facts: Mapping[str, str]) -> tuple[Feature, ...]:
    """The features that a run has written down; none where its data names none, and before its hosts have joined."""
    return from_plain(json.loads(facts.get("features", "[]")))


def feature_lines(features: Sequence[Feature], width: int | None) -> list[str]:
    """The features, a bounded number of lines; no line is longer than `width` (None: a file, which has room). Nothing for no features."""
    lines = [printable(line) for line in listed(features)] if features else []
    if width is None:
        return lines
    return [piece for line in lines for piece in textwrap.wrap(line, width, subsequent_indent=_INDENT, drop_whitespace=True)]
