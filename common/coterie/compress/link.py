"""Messages of one direction, compressed and as their receiver gets them.

A message whose vectors or weights are compressed travels as two: `packed_kind` and, if scales or places are needed, its `Aside`. Messages
of steps that every run has, such as the models that users judge, travel as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.compress.draws import Draws
from coterie.compress.factors import Factors
from coterie.compress.memory import Memory
from coterie.compress.packing import Packing
from coterie.errors import ProtocolError
from coterie.experiment.compress import Thin, Up
from coterie.experiment.config import Experiment
from coterie.experiment.reveals import AFTER, BEFORE
from coterie.v1 import session_pb2
from coterie.wire.messages import (
    Aside,
    Broadcast,
    Message,
    Rows,
    Spec,
    aside_kind,
    has_rows,
    is_packable,
    kind_class,
    packed_kind,
    unpacked_kind,
)
from coterie.wire.precision import FLOAT64, AnyArray, Precision

_OF_EVERY_RUN = frozenset((*BEFORE, *AFTER))
_COMMON, _OF_CLUSTER = -1, -2  # owners of vectors that are no user's: common to all, or of cluster c, which is _OF_CLUSTER - c


@dataclass(frozen=True)
class Place:
    """Where in the run a message is. `numbers_of` gives the numbers in the run of users that a message names; None: all of the host.

    `task`: for an answer, the messages of the task, as the host got them. `memory`: what this end remembers, where it remembers something.
    """

    stage: int
    round: int
    numbers_of: Callable[[Indices | None], Indices]
    task: Sequence[Message] = ()
    memory: Memory | None = None


@dataclass(frozen=True)
class Link:
    """One direction of all links of a run."""

    rule: Thin
    packing: Packing
    weights: Packing
    precision: Precision
    seed: int

    @staticmethod
    def of(rule: Thin, experiment: Experiment, model: Callable[[], str] = lambda: "") -> Link:
        """`model` gives the tensors of the run's network, as hosts describe them; it is asked for when there are weights."""
        precision, shrinks = Precision.of_run(experiment), isinstance(rule, Up) and rule.remembers
        factors = None
        if isinstance(rule, Up) and rule.low_rank is not None:
            factors = Factors(rule.low_rank, model)
        vectors = Packing.of(rule, precision.dtype, shrinks=shrinks)
        weights = Packing.of(rule, precision.weights, shrinks=shrinks, factors=factors)
        return Link(rule, vectors, weights, precision, experiment.seed)

    @property
    def looks_at_tasks(self) -> bool:
        """Whether answers may be differences from what their tasks brought."""
        return self.rule.loses and isinstance(self.rule, Up) and self.rule.against != "nothing"

    @property
    def looks_back(self) -> bool:
        """Whether answers are differences from earlier ones, which both ends remember."""
        return isinstance(self.rule, Up) and self.rule.against == "last"

    @property
    def adds_losses(self) -> bool:
        """Whether the sender remembers what was lost."""
        return isinstance(self.rule, Up) and self.rule.feedback

    def packed(self, messages: Iterable[Message], place: Place) -> list[Message]:
        """The messages as they travel. Where something is to be remembered, `place.memory` does from now on."""
        return [part for message in messages for part in self._packed(message, place)]

    def unpacked(self, messages: Sequence[Message], place: Place) -> list[Message]:
        """The messages as the receiver sees them. ProtocolError for bytes that are none of their shapes."""
        found: list[Message] = []
        waiting: Message | None = None
        for message in (*messages, None):
            aside = message if isinstance(message, Aside) else None
            if waiting is not None:
                found.append(self._unpacked(waiting, aside, place))
            elif aside is not None:
                raise ProtocolError(f"{aside.kind} came without the numbers that it is needed for")
            waiting = None
            if message is not None and aside is None:
                if unpacked_kind(type(message)) is None:
                    self._remember_whole(message, place)
                    found.append(message)
                else:
                    waiting = message
        return found

    def check_announced(self, frame: session_pb2.Task | session_pb2.Reply) -> None:
        """ProtocolError if compressed fields of a frame announce other sizes than their shapes have."""
        for place, part in enumerate(frame.parts):
            if (cls := unpacked_kind(kind_class(part.kind))) is None:
                continue
            after = frame.parts[place + 1] if place + 1 < len(frame.parts) else None
            beside = aside_kind(cls)
            asides = _by_field(beside, after.tensors) if after is not None and after.kind == beside.kind else {}
            listed = _by_field(kind_class(part.kind), part.tensors)
            for name, spec in cls.specs:
                if not is_packable(spec):
                    continue
                aside = asides.get(f"{name}_aside")
                sizes = _size(listed[f"{name}_values"]), 0 if aside is None else _size(aside)
                shape = tuple(listed[name].shape[:-1])
                n, d = _rows(shape)
                if not self._packing(spec).fits(*sizes, n, d):
                    raise ProtocolError(f"{cls.kind}.{name} of shape {list(shape)} announces {sizes[0]} and {sizes[1]} compressed bytes")

    def _packing(self, spec: Spec) -> Packing:
        return self.weights if spec.is_weights else self.packing

    def _packed(self, message: Message, place: Place) -> Sequence[Message]:
        cls = type(message)
        names = self._fields_of(message, place)
        if not names:
            self._remember_whole(message, place)
            return (message,)
        columns: dict[str, Any] = {}
        beside: dict[str, AnyArray] = {}
        for name, spec in message.specs:
            array = getattr(message, name)
            if not is_packable(spec):
                columns[name] = array
                continue
            before = self._before(message, name, spec, array.shape, place)
            rows = _as_rows(array) if before is None else _as_rows(array) - _as_rows(before)
            lost = self._lost(message, name, spec, array.shape, place)
            if lost is not None:
                rows = rows + lost
            draws = self._draws(message, name, spec, array.shape, place)
            values, aside = self._packing(spec).pack(rows, draws)
            if lost is not None:
                lost = rows - self._packing(spec).unpack(values, aside, *_rows(rows.shape), draws)
                self._remember(message, name, lost, place)
            columns[name], columns[f"{name}_values"] = np.zeros((*array.shape, 0), np.uint8), values
            beside[f"{name}_aside"] = aside
        if isinstance(message, Rows):
            columns["users"] = message.users
        made: list[Message] = [packed_kind(cls)(**columns)]
        if any(aside.size for aside in beside.values()):
            made.append(aside_kind(cls)(**beside))
        if self.looks_back:  # as the other end does
            self._unpacked(made[0], made[1] if len(made) > 1 else None, place)
        return made

    def _fields_of(self, message: Message, place: Place) -> Sequence[str]:
        """The fields that are compressed: all that may be, or none."""
        names = _packable(message)
        if names and self.looks_at_tasks:
            shapes = {name: getattr(message, name).shape for name in names}
            specs = dict(message.specs)
            if any(self._before(message, name, specs[name], shapes[name], place) is None for name in names):
                return ()
        return names

    def _before(self, message: Message, name: str, spec: Spec, shape: tuple[int, ...], place: Place) -> AnyArray | None:
        """What an answer is the difference from, in its shape: earlier answers of its users, or the task; None if there is nothing."""
        if not self.looks_at_tasks or not isinstance(message, Rows) or not has_rows(spec):
            return None
        brought = self._brought(message, name, spec, shape, place)
        if not self.looks_back or place.memory is None or not self._is_one_each(message, shape, place):
            return brought
        known = place.memory.of(_field(message, name), place.numbers_of(message.users))
        rows = [one if one is not None and one.shape == shape[1:] else None for one in known]
        if brought is None and any(one is None for one in rows):
            return None
        listed = [brought[place] if one is None else one for place, one in enumerate(rows)]  # type: ignore[index]
        return np.stack(listed) if listed else brought

    def _is_one_each(self, message: Rows, shape: tuple[int, ...], place: Place) -> bool:
        """Whether each user has one row, and is named once: only then its rows can be told from each other later."""
        numbers = place.numbers_of(message.users)
        return shape[0] == numbers.size == np.unique(numbers).size

    def _lost(self, message: Message, name: str, spec: Spec, shape: tuple[int, ...], place: Place) -> AnyArray | None:
        """(n, d) what earlier answers of the users have lost of a field; None where nobody remembers it."""
        if not self.adds_losses or place.memory is None or not isinstance(message, Rows) or not has_rows(spec):
            return None
        if not self._is_one_each(message, shape, place):
            return None
        found = np.zeros(shape)
        for row, one in enumerate(place.memory.of(_field(message, name), place.numbers_of(message.users))):
            if one is not None and one.shape == shape[1:]:
                found[row] = one
        return _as_rows(found)

    def _remember(self, message: Message, name: str, rows: AnyArray, place: Place) -> None:
        if isinstance(message, Rows) and place.memory is not None:
            shape = getattr(message, name).shape[1:]
            numbers = place.numbers_of(message.users)
            place.memory.put(_field(message, name), numbers, rows.reshape(numbers.size, *shape))

    def _remember_whole(self, message: Message, place: Place) -> None:
        """What travels whole, because there was nothing to differ from, is what the next answers differ from."""
        if not self.looks_back or not isinstance(message, Rows):
            return
        [seen] = rounded([message], self.precision)
        for name in _packable(message):
            array = getattr(seen, name)
            if has_rows(dict(message.specs)[name]) and self._is_one_each(message, array.shape, place):
                self._remember(message, name, array, place)

    def _brought(self, message: Rows, name: str, spec: Spec, shape: tuple[int, ...], place: Place) -> AnyArray | None:
        """What the task brought of a field of an answer, in the shape of the field; None if nothing did.

        That is the field of a task with the same axes, and the same name if there are several.
        """
        axes = spec.shape[1:]
        listed = [
            (one, other, field)
            for one in place.task
            for other, field in one.specs
            if is_packable(field) and field.is_weights == spec.is_weights and axes == (field.shape[1:] if has_rows(field) else field.shape)
        ]
        named = [found for found in listed if found[1] == name]
        if len(listed if len(listed) == 1 else named) != 1:
            return None
        [(task, other, field)] = listed if len(listed) == 1 else named
        array: AnyArray = getattr(task, other)
        if has_rows(field) and isinstance(task, Rows):
            owners, wanted = place.numbers_of(task.users), place.numbers_of(message.users)
            order = np.argsort(owners, kind="stable")
            at = np.minimum(np.searchsorted(owners, wanted, sorter=order), owners.size - 1)
            if not owners.size or (owners[order[at]] != wanted).any() or np.unique(owners).size < owners.size:
                return None
            array = array[order[at]]
        elif not has_rows(field):
            array = np.broadcast_to(array, (shape[0], *array.shape))
        return array if array.shape == shape else None

    def _draws(self, message: Message, name: str, spec: Spec, shape: tuple[int, ...], place: Place) -> Draws:
        n, _ = _rows(shape)
        owners = np.full(1, _COMMON, np.int64)
        if isinstance(message, Rows) and has_rows(spec):
            owners = place.numbers_of(message.users)
        elif "clusters" in spec.shape[:1]:
            owners = _OF_CLUSTER - np.asarray(message.clusters)  # type: ignore[attr-defined]
        each = np.repeat(owners, n // max(1, owners.size)).tolist()
        seen: dict[int, int] = {}
        listed = []
        for owner in each:
            listed.append((owner, seen.setdefault(owner, 0)))
            seen[owner] += 1
        return Draws(self.seed, (_kind(message), name, place.stage, place.round), listed)

    def _unpacked(self, message: Message, aside: Message | None, place: Place) -> Message:
        cls = unpacked_kind(type(message))
        assert cls is not None  # noqa: S101 - the caller looked
        if aside is not None and aside.of is not cls:  # type: ignore[attr-defined]
            raise ProtocolError(f"{aside.kind} came after {message.kind}")
        whole: dict[str, Any] = {"users": message.users} if isinstance(message, Rows) else {}
        empty = np.zeros(0, np.uint8)
        shaped = cls(**{name: getattr(message, name) for name, _ in cls.specs}, **whole)  # the answer that `_before` looks at has extents
        for name, spec in cls.specs:
            if not is_packable(spec):
                whole[name] = getattr(message, name)
                continue
            shape = getattr(message, name).shape[:-1]
            beside = empty if aside is None else getattr(aside, f"{name}_aside")
            if self.looks_at_tasks and (before := self._before(shaped, name, spec, shape, place)) is None:
                raise ProtocolError(f"{cls.kind}.{name} came as a difference, but its task brought nothing to differ from")
            draws = self._draws(message, name, spec, shape, place)
            with np.errstate(over="ignore", invalid="ignore"):  # of infinite scales too; the parent refuses infinite numbers
                found = self._packing(spec).unpack(getattr(message, f"{name}_values"), beside, *_rows(shape), draws).reshape(shape)
                if self.looks_at_tasks:
                    found = before + found
                whole[name] = found.astype(self.precision.model if spec.is_weights else FLOAT64)
            whole[name].flags.writeable = False
            if self.looks_back and isinstance(shaped, Rows) and has_rows(spec) and self._is_one_each(shaped, shape, place):
                assert place.memory is not None  # noqa: S101 - both ends have one
                place.memory.put(_field(shaped, name), place.numbers_of(shaped.users), whole[name])
        return cls(**whole)


def rounded(messages: Iterable[Message], precision: Precision) -> list[Message]:
    """The messages with vectors and weights as a receiver sees them that gets them whole."""
    found: list[Message] = []
    for message in messages:
        listed = {
            name: precision.rounded_weights(getattr(message, name)) if spec.is_weights else precision.rounded(getattr(message, name))
            for name, spec in message.specs
            if is_packable(spec)
        }
        found.append(replace(message, **listed) if listed else message)
    return found


def _packable(message: Message) -> list[str]:
    """The fields of a message that may be compressed."""
    if message.is_whole or message.method in _OF_EVERY_RUN or not isinstance(message, Rows | Broadcast):
        return []
    return [name for name, spec in message.specs if is_packable(spec)]


def _kind(message: Message) -> str:
    return message.kind if (cls := unpacked_kind(type(message))) is None else cls.kind


def _field(message: Message, name: str) -> str:
    return f"{_kind(message)}.{name}"


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Vectors, and numbers in each, of an array of this shape."""
    n = 1
    for extent in shape[:-1]:
        n *= extent
    return n, shape[-1]


def _as_rows(array: AnyArray) -> AnyArray:
    return np.asarray(array, dtype=np.float64).reshape(_rows(array.shape))


def _by_field(cls: type[Message], tensors: Iterable[Any]) -> dict[str, Any]:
    """The tensors of a frame by the names that they must have, which are checked when it is decoded."""
    return {name: tensor for (name, _), tensor in zip(cls.specs, tensors, strict=False)}


def _size(tensor: Any) -> int:
    return int(tensor.shape[0]) if len(tensor.shape) == 1 else -1
