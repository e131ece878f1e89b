"""What a coordinator makes of hosts that answer for other users than it asked, twice, or with too little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import CoterieError
from coterie.experiment.config import experiment_from
from coterie.experiment.model import TensorInfo
from coterie.families.partial import Scores, Start, TrainingLoss, Updated
from coterie.methods.fedrep import Config
from coterie.methods.fedrep_linear import UpdatedRepresentation
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.families import partial
from coterie_client.interface.half import Inbox, Local
from coterie_client.methods import fedrep_linear
from coterie_server.families.partial import PartialSharing
from coterie_server.interface.half import Members, Replies, Setting
from tests.networks import network_experiment, write_users
from tests.simulation import World

Change = Callable[[Any, int], Message]  # of a message, and how many users the host has


def _wrong(monkeypatch: pytest.MonkeyPatch, module: Any, cls: type[Message], change: Change) -> None:
    """The client half answers otherwise."""
    honest = module.CLIENT

    def step(state: Any, inbox: Inbox, local: Local) -> tuple[Any, list[Message]]:
        state, replies = honest.step(state, inbox, local)
        return state, [change(message, local.n_own) if isinstance(message, cls) else message for message in replies]

    monkeypatch.setattr(module, "CLIENT", replace(honest, step=step))


def _everyone(message: Updated, n_own: int) -> Updated:
    return Updated(np.repeat(message.weights[:1], n_own, axis=0), np.repeat(message.counts[:1], n_own, axis=0))


def _others(message: Updated, n_own: int) -> Updated:
    assert message.users is not None
    others = np.setdiff1d(np.arange(n_own), message.users)[:1]
    return Updated(message.weights[:1], message.counts[:1], users=others)


def _twice(message: Start, n_own: int) -> Start:
    return Start(np.repeat(message.weights, 2, axis=0), np.repeat(message.counts, 2, axis=0), users=np.arange(2))


CASES: dict[str, tuple[type[Message], Change, str]] = {
    "updates of users that were not drawn": (Updated, _others, "partial.Updated came for members"),
    "updates of everyone": (Updated, _everyone, "partial.Updated came for members"),
    "no update": (Updated, lambda m, _: Updated(m.weights[:0], m.counts[:0], users=m.users[:0]), r"partial.Updated came for members \[\]"),
    "losses of everyone": (TrainingLoss, lambda _, n: TrainingLoss(np.ones(n)), r"partial.TrainingLoss came for members \[0, 1, 2, 3\]"),
    "no loss": (TrainingLoss, lambda m, _: TrainingLoss(m.loss[:0], users=m.users[:0]), r"partial.TrainingLoss came for members \[\]"),
    "scores in no mode": (Scores, lambda m, _: Scores(m.loss[:, :0], m.metric[:, :0]), "partial.Scores.loss: axis 'modes' is 0, wanted 1"),
    "scores twice": (Scores, lambda m, _: replace(m, loss=m.loss[:2], metric=m.metric[:2], users=np.zeros(2, int)), "partial.Scores"),
    "two starts": (Start, _twice, r"partial.Start came for members \[0, 1\], wanted it once for each of \[0\]"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reply_that_was_not_asked_for_ends_the_run(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, change, sentence = CASES[case]
    experiment = network_experiment(write_users(tmp_path / "users.npz"), {"name": "fedrep", "head_epochs": 1}, stop={"rounds": 1})
    _wrong(monkeypatch, partial, cls, change)
    with pytest.raises(CoterieError, match=sentence):
        World(experiment, tmp_path / "run", 1).run()


def test_representations_of_users_that_were_not_drawn_are_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"source": "representation", "users": 8, "d": 4, "k": 2, "rows_per_user": 5}
    experiment = experiment_from({"name": "linear", "data": data, "method": {"name": "fedrep_linear"}, "stop": {"rounds": 1}})
    _wrong(monkeypatch, fedrep_linear, UpdatedRepresentation, lambda m, n: UpdatedRepresentation(np.repeat(m.b[:1], n, axis=0)))
    with pytest.raises(CoterieError, match=r"UpdatedRepresentation came for members \[0, 1, 2, 3\], wanted it once for each of \[0\]"):
        World(experiment, tmp_path / "run", 1).run()


def test_members_of_skipped_hosts_are_not_awaited() -> None:
    asked = np.array([1, 2, 4])
    assert Replies({}, None).awaited(asked).tolist() == [1, 2, 4]
    assert Replies({}, np.array([0, 2, 3, 4])).awaited(asked).tolist() == [2, 4]


def test_skipped_users_were_sent_what_they_did_not_return() -> None:
    config = Config(users_per_round=4, batch_size=2)
    members = Members(tuple("abcdefg"), ("",) * 7)
    rows = np.full(7, 5)
    tensors = (TensorInfo("w", (3,), is_integer=False, part="representation"),)
    half = PartialSharing(config, Setting(0, "fedrep", members, Precision.of("float32")), tensors, rows, rows, are_personal=False)
    expected = half.expected_vectors([{"users": 4.0}, {"users": 3.0}])
    assert expected["shared", "down"] == 8
    assert expected["shared", "up"] == 7
