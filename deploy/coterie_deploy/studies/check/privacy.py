"""Check that nothing private is sent: it searches the frames that leave a host for its rows, and for the private state of its users.

Eight bytes in a row are a mark: one float64, two float32 side by side, four float16, or eight bytes of an image. Common numbers, such as 0,
1 and 0.5, make no mark. The check changes private state by small random amounts, so nobody else computes the same numbers. What a task has
brought is no secret.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.wire.codec import Encoded
from coterie_client.hosting.host import Host
from coterie_client.interface.half import client_half
from coterie_deploy.studies.check.trial import Failed, NotApplicable, Trial
from coterie_deploy.studies.check.world import World, WorldLink

Marks = NDArray[np.uint64]

_BYTES = 8  # of a mark
_NONE: Marks = np.zeros(0, np.uint64)
_FINE = 2.0**12  # a number that is whole when multiplied by this makes no mark
_AMOUNT = 1e-3  # by which private state is changed, at most
_WIDTHS = ("<f8", "<f4", "<f2")  # of floats in a frame


def private(trial: Trial) -> str:
    """The frames of a run have no mark of rows or private state."""
    world = trial.world(Heard, "heard", trial.seed)
    trial.run(world)
    if found := world.first_leak():
        raise Failed(found)
    if world.fields:
        return f"looked for rows and {', '.join(sorted(world.fields))}"
    if not world.has_marks:
        raise NotApplicable("rows of whole or round numbers cannot be recognised, and the method names no private state")
    return "looked for rows alone: the method names no private state"


class Heard(World):
    """A run whose hosts are listened to, and whose private state is changed."""

    def __init__(self, seed: int, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.fields: set[str] = set()  # of states, that have been changed
        self._draws = np.random.default_rng(seed)
        self._frames: list[tuple[str, bool, Encoded]] = []  # with whom, whether after the change, and what: in order
        self._rows: dict[str, Marks] = {}  # by what is marked, in words
        self._kept: dict[str, list[Marks]] = {}
        self._changed: set[tuple[str, str]] = set()  # host and room

    @property
    def has_marks(self) -> bool:
        return any(marks.size for marks in self._rows.values())

    def task(self, link: WorldLink, encoded: Encoded) -> None:
        """Changes private state as soon as there is any, and hands over the task."""
        host = link.host
        self._hear(host, encoded)
        for room, state in host.states.items():
            if (host.name, room) not in self._changed and (fields := _private_fields(room, state)):
                self._changed.add((host.name, room))
                self.fields.update(f"{room}.{name}" for name in fields)
                for name in fields:
                    state = _with(state, name, self._shaken(_value(state, name)))  # noqa: PLW2901
                host.states[room] = state
        super().task(link, encoded)

    def reply(self, link: WorldLink, encoded: Encoded) -> None:
        """Notes a reply, and what the host has now."""
        host = link.host
        self._hear(host, encoded)
        standardised = host.local.users if host.local.users is not host.users else ()
        for what, users in (("the rows", host.users), ("the standardised rows", standardised)):
            for user in users:
                if (place := f"{what} of user {user.name!r}") not in self._rows:
                    self._rows[place] = _marks_of([user.features, user.target, user.test_features, user.test_target])
        for room, state in host.states.items():
            if (host.name, room) in self._changed:
                for name in _private_fields(room, state):
                    self._kept.setdefault(f"{room}.{name} of host {host.name!r}", []).append(_marks_of(_value(state, name)))

    def _hear(self, host: Host, encoded: Encoded) -> None:
        self._frames.append((host.name, any(name == host.name for name, _ in self._changed), encoded))

    def first_leak(self) -> str:
        """The first reply with a mark that no task has brought before, and of what; "" for none."""
        marks = {**self._rows, **{what: _together(found) for what, found in self._kept.items()}}
        rows, every = _together(self._rows.values()), _together(marks.values())
        public = _NONE
        for name, is_after, encoded in self._frames:
            there = _marks_in(b"".join(encoded.frames()), every)
            if encoded.is_task:
                public = np.union1d(public, there)
                continue
            found = np.setdiff1d(there if is_after else np.intersect1d(there, rows), public)
            if found.size:
                what = next(what for what, own in marks.items() if found[0] in own)
                kinds = ", ".join(entry.kind for entry in encoded.entries[:-1])
                return f"host {name!r} has sent numbers of {what}, in a reply with {kinds}"
        return ""

    def _shaken(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._shaken(item) for name, item in value.items()}
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            return (value + _AMOUNT * self._draws.random(value.shape)).astype(value.dtype)
        return value


def _private_fields(room: str, state: Any) -> Sequence[str]:
    found = client_half(room)
    return () if found is None else found[1].private(state)


def _value(state: Any, place: str) -> Any:
    """A field "name" of a state, or an item "name.key" of a field that is a mapping."""
    name, _, key = place.partition(".")
    return getattr(state, name)[key] if key else getattr(state, name)


def _with(state: Any, place: str, value: Any) -> Any:
    """The state with this value at the place."""
    name, _, key = place.partition(".")
    return dataclasses.replace(state, **{name: {**getattr(state, name), key: value} if key else value})


def _together(marks: Iterable[Marks]) -> Marks:
    """All of them (n,), ascending."""
    return np.unique(np.concatenate([_NONE, *marks]))


def _marks_of(value: Any) -> Marks:
    """(n,) the marks that the arrays of a value would leave in a frame, by rows or by columns."""
    return _together(marks for array in _arrays(value) for marks in _marks(array))


def _arrays(value: Any) -> Iterator[NDArray[Any]]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(item)


def _marks(array: NDArray[Any]) -> Iterator[Marks]:
    for order in ("C", "F") if array.ndim > 1 else ("C",):
        numbers = array.reshape(-1, order=order)
        if array.dtype == np.uint8:
            yield _neighbours(numbers, lambda windows: (np.diff(np.sort(windows, axis=1), axis=1) > 0).sum(axis=1) >= _BYTES // 2)
        elif array.dtype.kind == "f":
            for width in _WIDTHS:
                with np.errstate(over="ignore"):
                    yield _neighbours(numbers.astype(width), _are_fine)


def _are_fine(windows: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) whether all numbers of a window (n, k) are finite, not round, and not all equal."""
    scaled = windows.astype(np.float64) * _FINE
    fine: NDArray[np.bool_] = np.isfinite(scaled).all(axis=1) & (scaled != np.rint(scaled)).all(axis=1)
    return fine if windows.shape[1] == 1 else np.logical_and(fine, (windows != windows[:, :1]).any(axis=1))


def _neighbours(numbers: NDArray[Any], are_marks: Callable[[NDArray[Any]], NDArray[np.bool_]]) -> Marks:
    """(n,) each run of neighbouring numbers (m,) that takes eight bytes, where it makes a mark."""
    count = _BYTES // numbers.itemsize
    if numbers.size < count:
        return _NONE
    windows = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(numbers, count))
    marks: Marks = windows[are_marks(windows)].reshape(-1).view("<u8").astype(np.uint64)
    return marks


def _marks_in(data: bytes, wanted: Marks) -> Marks:
    """Which of these marks (ascending) are in the bytes, wherever they start."""
    found = [_NONE]
    for start in range(min(_BYTES, max(len(data) - _BYTES + 1, 0)) if wanted.size else 0):
        windows = np.frombuffer(data, "<u8", (len(data) - start) // _BYTES, start)
        places = np.minimum(np.searchsorted(wanted, windows), wanted.size - 1)
        found.append(windows[wanted[places] == windows].astype(np.uint64))
    return np.concatenate(found)
