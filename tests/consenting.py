"""Clients of tests run without a terminal: unless a test says otherwise, they serve any experiment. Nothing here is tested itself."""

from __future__ import annotations

from collections.abc import Sequence


def accepting(arguments: Sequence[str]) -> list[str]:
    """The arguments of `coterie`, of a client with `--accept any` where they say nothing about it."""
    says_nothing = list(arguments[:1]) == ["client"] and not {"--accept", "--launched"} & set(arguments)
    return [*arguments, *(["--accept", "any"] if says_nothing else [])]
