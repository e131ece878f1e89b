"""Hosts that lie, for drills in this process. Nothing of a run, a file or a message can make a host do so: a drill changes the object.

What a user returns is x; b is the model that it was sent, where it was sent one (0 elsewhere); h are the answers of the honest users to the
same task, those that were sent the same model. Those who lie know them all, which is more than hosts of a real run see. They answer

- sign_flip: b - s (x - b)
- gauss: b + s |x - b| z, z standard normal over the square root of its length
- label_flip: what training on wrong labels gives: class c becomes the last class less c, other targets change their sign
- little_is_enough: the mean of h less s standard deviations of each number. Baruch, Baruch and Goldberg (2019)
- inner_product: b - s (mean of h - b). Xie, Koyejo and Gupta (2020)

with the strength s. Only answers to the method itself lie. Scores, losses, counts and the derivatives of references and refits are those
of an honest host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.draws.streams import normal, stream
from coterie.registry import method
from coterie.session.member import Asked
from coterie.wire.codec import Encoded
from coterie.wire.messages import Message, Rows
from coterie_client.data import UserData
from coterie_client.hosting.host import Host

Kind = Literal["sign_flip", "gauss", "label_flip", "little_is_enough", "inner_product"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
STRENGTHS: Final[dict[str, float]] = {"sign_flip": 10.0, "gauss": 10.0, "label_flip": 1.0, "little_is_enough": 1.5, "inner_product": 10.0}

Numbers = NDArray[np.floating[Any]]


@dataclass
class Lies:
    """Makes the named hosts lie. One for each run: it keeps what honest hosts have answered."""

    kind: Kind
    hosts: frozenset[str]
    strength: float
    seed: int
    _honest: dict[tuple[int, str], list[tuple[Numbers, Numbers]]] = field(default_factory=dict)  # by exchange and kind: (x, b)

    def __call__(self, host: Host) -> None:
        """Changes a host before it joins."""
        lies = host.name in self.hosts
        if lies and self.kind == "label_flip":
            host.users = tuple(map(_flipped, host.users))
            host.losses = None  # they are built again
        elif self.kind != "label_flip":
            host.close = functools.partial(self._close, host, host.close, lies=lies)  # type: ignore[method-assign]

    def _close(self, host: Host, close: Any, asked: Asked, answers: Iterable[Message], *, lies: bool) -> Encoded | None:
        listed = [self._answer(host, asked, message, lies=lies) for message in answers]
        found: Encoded | None = close(asked, listed)
        return found

    def _answer(self, host: Host, asked: Asked, message: Message, *, lies: bool) -> Message:
        """The message, or another one. Honest ones are kept until the next exchange."""
        names = [name for name, spec in message.specs if spec.counts_vectors and spec.shape[:1] == ("rows",) and spec.is_float]
        name = host.experiment.method.name
        if (
            not isinstance(message, Rows)
            or not names
            or message.method not in (name, method(name).room)
            or message.step in ("start", "models")
        ):
            return message
        at, changed = (asked.task.seq, message.kind), dict[str, Any]()
        for name in names:
            rows: Numbers = getattr(message, name)
            before = np.stack([_sent(asked.messages or (), message, row) for row in rows])
            if lies:
                changed[name] = self._lie(host.name, at, rows, before)
            else:
                self._honest = {place: kept for place, kept in self._honest.items() if place[0] == at[0]}
                self._honest.setdefault(at, []).append((rows, before))
        return replace(message, **changed)

    def _lie(self, host: str, at: tuple[int, str], rows: Numbers, before: Numbers) -> Numbers:
        honest = self._honest.get(at, [(rows, before)])  # nobody else was asked: those who lie know each other
        theirs, sent = (np.concatenate([pair[place] for pair in honest]).astype(np.float64) for place in (0, 1))
        found = []
        for number, (x, b) in enumerate(zip(rows.astype(np.float64), before.astype(np.float64), strict=True)):
            alike = theirs[(sent == b).all(axis=1)]
            mean = alike.mean(axis=0) if len(alike) else x
            if self.kind == "sign_flip":
                found.append(b - self.strength * (x - b))
            elif self.kind == "inner_product":
                found.append(b - self.strength * (mean - b))
            elif self.kind == "little_is_enough":
                found.append(mean - self.strength * (alike.std(axis=0) if len(alike) else np.zeros_like(x)))
            else:
                z = normal(stream(self.seed, "attack", host, at[0], number), x.size)
                found.append(b + self.strength * np.linalg.norm(x - b) * z / np.sqrt(x.size))
        return np.stack(found).astype(rows.dtype)


def _sent(messages: Sequence[Message], answer: Message, row: Numbers) -> Numbers:
    """The model that the answer comes from: of several in one message that which is nearest. Zero where the task brought none."""
    for message in messages:
        if (message.method, message.step) == (answer.method, answer.step) and message.carries_weights:
            weights = next(getattr(message, name) for name, spec in message.specs if spec.is_weights)
            if weights.ndim == 1 and weights.size == row.size:
                return np.asarray(weights)
    return np.zeros_like(row)


def _flipped(user: UserData) -> UserData:
    """The user with wrong targets in training."""
    target = user.target
    is_class = target.size > 0 and target.min() >= 0 and bool(np.all(target == np.round(target)))
    wrong = target.max() - target if is_class else -target
    wrong.flags.writeable = False
    return replace(user, target=wrong)
