"""`ifca` against Algorithm 1 of Ghosh, Chung, Yin and Ramchandran (2020), an efficient framework for clustered federated learning."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import ProtocolError
from coterie.experiment.model import TensorInfo, named_tensors, stacked
from coterie.families.partial import ALL_TUNED, AS_IS, AskScores, AskStart, Delivery, Scores, Shared, Start, Trial, Updated
from coterie.methods.ifca import Chosen, Config
from coterie.wire.precision import Precision
from coterie_client.families.partial import CLIENT
from coterie_client.interface.half import Inbox
from coterie_client.learning import Rows
from coterie_client.methods.ifca import CHOICE
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.models import finished_run, models_of
from coterie_server.families.partial import PartialSharing, SharedState
from coterie_server.interface.half import Members, Replies, Setting
from coterie_server.methods import ifca as server
from coterie_server.methods.ifca import CHOICES
from tests.local_updates import PLAIN, STAGE, Tensors, Users, a_model, assert_close, combined, gradient, hand, loss_by_hand
from tests.networks import WIDTH, network_experiment, write_users
from tests.simulation import Faults, World

LR, N_ROWS = 0.05, 30
SETTING = Setting(0, "stage", Members((), ()), Precision.of("float64"))
NO_COUNTS = np.zeros(0, np.int64)


def flat(users: Users, models: Sequence[Tensors]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """All models, as messages have them: tensor by tensor, each of all models."""
    return np.concatenate([np.concatenate([model[name].reshape(-1) for model in models]) for name in models[0]])


def answers(users: Users, number: int, messages: dict[Any, Any]) -> dict[type, Any]:
    users.state, replies = CLIENT.step(users.state, Inbox(STAGE, number, messages), users.local)
    return {type(reply): reply for reply in replies}


def best(users: Users, position: int, models: Sequence[Tensors]) -> int:
    """argmin_j F_i(theta_j), by hand."""
    user = users.users[position]
    rows = torch.tensor(user.features, dtype=torch.float64), torch.tensor(user.target, dtype=torch.int64)
    return int(np.argmin([float(loss_by_hand(hand(model), *rows)) for model in models]))


def several(users: Users, n: int = 3, seed: int = 1) -> list[Tensors]:
    return [a_model(users, seed=seed * 100 + j) for j in range(n)]


def test_users_train_the_model_that_fits_them_best() -> None:
    """ "cluster identity estimate j^ = argmin_j F_i(theta_j)"; "theta~_i = LocalUpdate(theta_j^, gamma, tau)"."""
    users = Users({"name": "ifca", "clusters": 3, **PLAIN})
    seen = set()
    for number, asked in ((1, (0, 1, 2)), (2, (0, 2))):
        models = several(users, seed=number)
        said = answers(users, number, {Shared: Shared(flat(users, models), NO_COUNTS, users=np.array(asked))})
        wanted = [best(users, position, models) for position in asked]
        assert said[Chosen].model.tolist() == wanted
        seen |= set(wanted)
        for row, (position, choice) in enumerate(zip(asked, wanted, strict=True)):
            w = hand(models[choice])
            for batch in users.batches(position, number):
                w = combined(lambda a, g: a - LR * g, w, gradient(w, batch))
            assert_close(users.named(said[Updated].weights[row]), w)
    assert len(seen) > 1


def test_users_judge_and_fine_tune_the_model_that_fits_their_training_rows() -> None:
    users = Users({"name": "ifca", "clusters": 3, "fine_tune": ["all"]})
    models = several(users, seed=2)
    ask, modes = flat(users, models), AskScores(np.array([AS_IS, ALL_TUNED]))
    delivered = answers(users, 1, {Delivery: Delivery(ask, NO_COUNTS, users=np.arange(3)), AskScores: modes})
    tried = answers(users, 1, {Trial: Trial(ask, NO_COUNTS, users=np.arange(3)), AskScores: modes})
    scores: Scores = delivered[Scores]
    np.testing.assert_array_equal(tried[Scores].loss, scores.loss)
    for position, user in enumerate(users.users):
        choice = best(users, position, models)
        assert (delivered[Chosen].model[position], users.kept(position)[CHOICE]) == (choice, choice)
        own = users.network.judge(models[choice], Rows(user.test_features, user.test_target))
        assert (scores.loss[position, 0], scores.metric[position, 0]) == own
    assert (scores.loss[:, 0] != scores.loss[:, 1]).all()


def test_a_trial_leaves_the_choice_that_was_delivered() -> None:
    users = Users({"name": "ifca", "clusters": 3})
    models, modes = several(users, seed=2), AskScores(np.array([AS_IS]))
    answers(users, 1, {Delivery: Delivery(flat(users, models), NO_COUNTS, users=np.arange(3)), AskScores: modes})
    before = [int(users.kept(position)[CHOICE]) for position in range(3)]
    answers(users, 1, {Trial: Trial(flat(users, models[::-1]), NO_COUNTS, users=np.arange(3)), AskScores: modes})
    assert [int(users.kept(position)[CHOICE]) for position in range(3)] == before


def test_the_models_start_from_different_seeds() -> None:
    """The first is that of the other methods; all are those of a user that is built again."""
    starts = []
    for _ in range(2):
        users = Users({"name": "ifca", "clusters": 3})
        start: Start = answers(users, 0, {AskStart: AskStart(users=np.array([0]))})[Start]
        starts.append(named_tensors(start.weights[0], start.counts[0], stacked(users.network.tensors, 3)))
    for name, first in users.network.initial().items():
        np.testing.assert_array_equal(starts[0][name], starts[1][name])
        np.testing.assert_array_equal(starts[0][name][0], first)
        assert len({array.tobytes() for array in starts[0][name]}) == 3


def half(n_models: int = 3) -> PartialSharing:
    tensors = (TensorInfo("w", (2,), False, "representation"), TensorInfo("n", (), True, "representation"))
    rows, none = np.array([10, 20, 30, 40]), np.zeros(4, np.int64)
    config, setting = Config(clusters=n_models), SETTING
    return PartialSharing(config, setting, stacked(tensors, n_models), rows, none, are_personal=True, own=server.OWN, one=tensors)


def choosing(weights: Any, counts: Any, choices: Any) -> SharedState:
    return SharedState(weights, counts, beside={CHOICES: choices})


def replied(users: Sequence[int], models: Sequence[int]) -> Replies:
    """Users whose w is their own number."""
    updates = [Updated(np.full((1, 2), i, np.float32), np.array([[10 * i]]), users=np.array([i])) for i in users]
    return Replies({Chosen: Chosen(np.array(models), users=np.array(users))}, None, {Updated: updates})


def test_the_server_averages_by_choice() -> None:
    """ "theta_j^{t+1} = sum over M_t of s_ij theta~_i / sum over M_t of s_ij", here by rows; a model that nobody has chosen stays."""
    before = choosing(np.array([5, 5, 6, 6, 7, 7], np.float32), np.array([1, 2, 3]), np.zeros(4, np.int64))
    after = server.taken(half(), before, replied([0, 1, 3], [2, 0, 2]), np.array([0, 1, 3]))
    mean = (10 * 0 + 40 * 3) / 50
    np.testing.assert_allclose(after.weights, [1, 1, 6, 6, mean, mean], rtol=1e-6)
    assert after.counts.tolist() == [10, 2, round(10 * mean)]
    assert after.beside[CHOICES].tolist() == [2, 0, 0, 2]
    assert server.labels_of(after).tolist() == [0, 1, 1, 0]
    assert before.weights.tolist() == [5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize("model", [-1, 3])
def test_a_choice_that_there_is_not_is_refused(model: int) -> None:
    before = choosing(np.zeros(6, np.float32), np.zeros(3, np.int64), np.zeros(4, np.int64))
    with pytest.raises(ProtocolError, match=rf"ifca.Chosen came with models \[0, {model}\], wanted numbers from 0 to 2"):
        server.taken(half(), before, replied([0, 1], [0, model]), np.array([0, 1]))


def test_a_choice_of_somebody_who_was_not_asked_is_refused() -> None:
    replies = Replies(
        {Chosen: Chosen(np.array([0, 1]), users=np.array([0, 2]))}, None, {Updated: replied([0, 1], [0, 0]).one_by_one(Updated)}
    )
    with pytest.raises(ProtocolError, match=r"ifca\.Chosen came for members \[0, 2\]"):
        server.taken(half(), SharedState(np.zeros(6, np.float32), np.zeros(3, np.int64)), replies, np.array([0, 1]))


def test_one_model_is_fedavg_to_the_bit() -> None:
    """K = 1: what users return and judge, and what the server makes of it."""
    ifca, fedavg = Users({"name": "ifca", "clusters": 1, "epochs": 2}), Users({"name": "fedavg", "epochs": 2})
    for number, asked in ((1, (0, 1, 2)), (2, (0, 2))):
        sent = a_model(fedavg, seed=number)
        said, (returned, losses) = ifca.round(number, sent, asked), fedavg.round(number, sent, asked)
        np.testing.assert_array_equal(said[0], returned)
        np.testing.assert_array_equal(said[1], losses)
        np.testing.assert_array_equal(ifca.judged(number, sent).loss, fedavg.judged(number, sent).loss)
    before = choosing(np.array([5, 6], np.float32), np.array([1]), np.zeros(4, np.int64))
    users, replies = np.array([0, 1, 3]), replied([0, 1, 3], [0, 0, 0])
    after, wanted = server.taken(half(1), before, replies, users), half(1).averaged(before, replies, users)
    np.testing.assert_array_equal(after.weights, wanted.weights)
    np.testing.assert_array_equal(after.counts, wanted.counts)


def test_whoever_is_away_at_the_end_stays_in_its_cluster() -> None:
    state = choosing(np.zeros(6, np.float32), np.zeros(3, np.int64), np.array([2, 1, 0, 1]))
    replies = Replies({Chosen: Chosen(np.array([1, 0]), users=np.array([0, 2]))}, np.array([0, 2]))
    assert server.clusters(half(), state, replies).tolist() == [0, 0, 1, 0]
    assert server.clusters(half(), state, Replies({}, np.array([], np.int64))).tolist() == [0, 1, 2, 1]


def test_batch_norms_statistics_are_those_of_each_model_whoever_dies(tmp_path: Path) -> None:
    model = {"build": "tests.fixture_nets:normed", "options": {"width": WIDTH}}
    experiment = network_experiment(write_users(tmp_path / "users.npz"), {"name": "ifca", "clusters": 2}, model=model)
    once = World(experiment, tmp_path / "one", 1).run().outcomes["ifca"]
    faults = Faults(hosts_before={4: "h1"}, hosts_after={7: "h0"}, coordinator=(6, 9))
    again = World(experiment, tmp_path / "all killed", 2, faults, keeps_hosts=False).run().outcomes["ifca"]
    assert once.labels is not None
    assert again.labels is not None
    assert again.labels.tolist() == once.labels.tolist()
    assert again.figures == once.figures
    for name, array in once.shared.items():
        np.testing.assert_array_equal(again.shared[name], array)
        assert len(array) == 2


def test_planted_clusters_are_found_and_everyone_has_its_model(tmp_path: Path) -> None:
    """Users of three kinds, who call the same labels by other names; what they judge by is what `coterie models` writes."""
    rng = np.random.default_rng(1)
    kinds = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    features = rng.standard_normal((len(kinds) * N_ROWS, 3))
    target = (features.argmax(axis=1) + np.repeat(kinds, N_ROWS)) % 3
    names = np.repeat([f"u{number}" for number in range(len(kinds))], N_ROWS)
    np.savez(tmp_path / "users.npz", features=features, target=target, user=names)
    method = {"name": "ifca", "clusters": 3, "participation": 1.0, "optimizer": {"lr": 0.5}, "fine_tune": []}
    model = {"name": "linear", "classes": 3}
    experiment = network_experiment(tmp_path / "users.npz", method, model=model, stop={"rounds": 4})
    finished = asyncio.run(launch(experiment, Launch("loopback", folder=tmp_path / "run")))
    outcome = finished.outcomes["ifca"]
    assert outcome.labels is not None
    assert outcome.labels.tolist() == kinds.tolist()
    assert outcome.figures["heldout_metric"] > 0.8
    assert outcome.warnings == ()
    models = models_of(finished_run(tmp_path / "run"), None)
    found = [models[f"u{number}"]["head.weight"] for number in range(len(kinds))]
    for kind, weight in zip(kinds, found, strict=True):
        np.testing.assert_array_equal(weight, found[kind])
        assert any(np.array_equal(weight, each) for each in outcome.shared["head.weight"])


def test_models_that_no_user_has_taken_are_told(tmp_path: Path) -> None:
    """Users of one kind agree on one of the models."""
    method = {"name": "ifca", "clusters": 9, "participation": 1.0, "fine_tune": []}
    experiment = network_experiment(write_users(tmp_path / "users.npz"), method, model={"name": "linear", "classes": 3})
    outcome = asyncio.run(launch(experiment, Launch("loopback", folder=tmp_path / "run"))).outcomes["ifca"]
    assert outcome.labels is not None
    n_taken = int(outcome.labels.max()) + 1
    assert n_taken < 9
    assert outcome.warnings == (
        f"users have taken only {n_taken} of the 9 models: fewer models, other steps or another seed may do better",
    )
