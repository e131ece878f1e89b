"""Converts failures and notes to what may cross a process boundary: a finding as a frame, and back to a sentence.

Error texts are never sent, so no value can leak. If a peer sends a finding that is in no table, it counts as a failure without a reason.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coterie.errors import ConfigError, CoterieError
from coterie.findings import NO_RULE, Finding
from coterie.v1 import session_pb2

FAILURE = "failure"  # in a launched member's state folder: the failure it sent to its parent, for its launcher
MISTAKE = Finding("X2")
_STEP = re.compile(r"([a-z_][a-z0-9_]*)|\[([0-9]+)\]")
_MAX_SHOWN = 60  # characters of an experiment's value


def finding_frame(finding: Finding) -> session_pb2.Finding:
    return session_pb2.Finding(rule=finding.rule, count=finding.count, role=finding.role, place=finding.place)


def finding_of(frame: session_pb2.Finding) -> Finding | None:
    """The finding of a frame; None if a part of it is in no table, so that no other text gets into a sentence."""
    try:
        return Finding(frame.rule, frame.count, frame.role, frame.place)  # type: ignore[arg-type]  # it checks the role itself
    except ValueError:
        return None


def failure_of(error: BaseException) -> session_pb2.Failure:
    """An error as a frame for the parent. An error that is not ours is a bug of the program."""
    finding = error.finding if isinstance(error, CoterieError) else MISTAKE
    return session_pb2.Failure(finding=finding_frame(finding), config=isinstance(error, ConfigError))


def finding_in(frame: session_pb2.Finding) -> Finding:
    """The finding of a frame; an empty one if a part of it is in no table."""
    return finding_of(frame) or NO_RULE


def sentence_of(finding: Finding, experiment: BaseModel | None) -> str:
    """The sentence of a peer's finding, with our own experiment's value at its place."""
    return finding.with_declared(None if experiment is None else declared(experiment, finding.place))


def declared(experiment: BaseModel, place: str) -> str | int | float | None:
    """The experiment's value at a place, if it is one short word or number."""
    value: Any = experiment if place else None
    for step in _STEP.finditer(place):
        name, number = step.groups()
        if name is not None and isinstance(value, BaseModel):
            value = getattr(value, name, None) if name in type(value).model_fields else None
        elif name is not None and isinstance(value, Mapping):
            value = value.get(name)
        elif number is not None and isinstance(value, Sequence) and not isinstance(value, str):
            value = value[int(number)] if int(number) < len(value) else None
        else:
            return None
    shows = isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) <= _MAX_SHOWN
    return value if shows else None


@contextlib.contextmanager
def failures_left(folder: Path | None) -> Iterator[None]:
    """Leaves in the folder, if any, the public part of an error that ends the block. If writing fails, the error is still raised."""
    try:
        yield
    except Exception as error:
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / FAILURE).write_bytes(failure_of(error).SerializeToString())
        raise


def left_failure(folder: Path) -> Finding | None:
    """The finding that a member left there; None if there is none that can be read."""
    try:
        return finding_in(session_pb2.Failure.FromString((folder / FAILURE).read_bytes()).finding)
    except Exception:  # DecodeError is not typed
        return None
