"""Named random streams: the only source of randomness in a run.

A stream is fixed by the run's seed and by names (what it is for, whose it is, which round), never by the order of calls, the
host or the process, so that a simulated and a distributed run draw the same numbers.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


def philox(seed: int, purpose: str, *index: int | str) -> np.random.Philox:
    """The raw words of one stream; JSON keeps the parts of its name apart, SHA-256 the streams."""
    digest = hashlib.sha256(json.dumps([seed, purpose, *index]).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def stream(seed: int, purpose: str, *, member: str = "", round_number: int = 0) -> np.random.Generator:
    """The generator of one named stream."""
    return np.random.Generator(philox(seed, purpose, member, round_number))
