"""Differential privacy in whole runs: what is clipped and noised, what is not sent, and that noise is drawn once for what is sent."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.draws import secret
from coterie.draws.secret import KEY_BYTES, Secret, SecretNumbers
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.consent import consent_hash
from coterie.experiment.privacy import ClipRule, uncounted
from coterie.families.evaluation import FinalModels
from coterie.families.partial import Shared, TrainingLoss, Updated
from coterie.record.snapshot import SnapshotFile
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded
from coterie_client.data import load_users
from coterie_client.families.evaluation import CLIENT as EVALUATION
from coterie_client.families.partial import CLIENT
from coterie_client.hosting import host as hosting
from coterie_client.hosting.build import build_host
from coterie_client.hosting.noise_keys import NoiseKeys
from coterie_client.interface.half import Inbox, Local
from coterie_client.learning.private import RowPrivacy, clipped
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.adapt import adapted_from
from coterie_deploy.studies.check.world import WorldLink
from coterie_deploy.view.run_view import view_of
from coterie_server.families.privacy import noised_sum
from coterie_server.run import coordinator
from coterie_server.run.coordinator import Finished
from tests.convex import convex_experiment, write_rows
from tests.networks import network_experiment, write_users
from tests.simulation import Faults, World, bits, query, random_faults

ROW = {"unit": "row", "clip": 0.7, "noise_multiplier": 2.0, "delta": 1e-3}
USER = {**ROW, "unit": "user"}
MR_MTL = {"name": "fed_mtl", "mu": 0.5, "participation": 1.0}
OF_ROWS: Mapping[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "participation": 1.0},
    "ditto": {"name": "ditto", "participation": 1.0},
    "fed_mtl": MR_MTL,
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("privacy") / "users.npz")


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and names of runs are the same in all runs of a test."""
    monkeypatch.setattr(secret, "new_key", lambda: b"k" * KEY_BYTES)
    monkeypatch.setattr(coordinator.secrets, "token_hex", lambda n: "ab" * n)


def events(folder: Path, kind: str) -> list[str]:
    return [text for (text,) in query(folder, f"select text from events where kind = '{kind}'")]


class Heard(World):
    """A world that notes what each host has ever sent in answer to each exchange."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sent: dict[tuple[str, int], set[bytes]] = defaultdict(set)

    def reply(self, link: WorldLink, encoded: Encoded) -> None:
        found = session_pb2.JoinRequest.FromString(encoded.head).reply
        found.attempt = found.resent = found.durable_seq = 0
        content = found.SerializeToString(deterministic=True) + b"".join(bytes(tail) for tail in encoded.tails)
        self.sent[link.name, found.seq].add(content)


# ---- steps on rows


def stepped(experiment: Any, rows: int, key: Secret) -> tuple[Any, Local, Any]:
    """The client half of the experiment's first user after one round from zero."""
    found = build_host("h", experiment, "run", ["u0"])
    found.indices, found.n_members = np.arange(1), 1
    local = found.local
    options = experiment.method.client_options()
    state = CLIENT.init(options, local, None)
    sent = Shared(np.full(rows, 0.1), np.zeros(0, np.int64), users=np.arange(1))
    state, replies = CLIENT.step(state, Inbox("stage", 1, {Shared: sent}, key), local)
    return state, local, {type(reply): reply for reply in replies}


def test_a_step_shortens_the_gradient_of_each_row_with_its_pull_and_adds_noise_to_their_sum(archive: Path) -> None:
    method = {**MR_MTL, "batch_size": None, "optimizer": {"lr": 0.1, "momentum": 0.0}, "updates": 1}
    experiment = convex_experiment(archive, method, privacy=ROW)
    key = Secret(bytes(KEY_BYTES))
    _, local, replies = stepped(experiment, 4, key)
    user = local.users[0]
    a = np.column_stack([user.features, -np.ones(len(user.features))])
    w, pulled_to = np.zeros(4), np.full(4, 0.1)
    each = (a @ w - user.target)[:, None] * a + 0.1 * w * [1, 1, 1, 0] + 0.5 * (w - pulled_to)
    norms = np.linalg.norm(each, axis=1)
    assert (norms > 0.7).any()
    total = (each * np.minimum(1, 0.7 / norms)[:, None]).sum(axis=0) + 2.0 * 0.7 * key.child("u0").numbers().normal(4)
    np.testing.assert_allclose(replies[Updated].weights[0], w - 0.1 * total / len(a), rtol=1e-12)
    assert TrainingLoss not in replies


def test_rows_take_part_at_random_and_the_divisor_is_their_mean_number(archive: Path) -> None:
    method = {"name": "fedavg", "batch_size": 4, "optimizer": {"lr": 0.1, "momentum": 0.0}, "updates": 1, "participation": 1.0}
    experiment = convex_experiment(archive, method, privacy=ROW, problem={"loss": "least_squares", "intercept": False})
    key = Secret(bytes(KEY_BYTES))
    _, local, replies = stepped(experiment, 3, key)
    a, y = local.users[0].features, local.users[0].target
    numbers, w = key.child("u0").numbers(), np.full(3, 0.1)
    taken = numbers.uniform(len(a)) < 4 / len(a)
    assert 0 < taken.sum() < len(a)
    each = clipped((a @ w - y)[taken, None] * a[taken], 0.7)
    total = each.sum(axis=0) + 2.0 * 0.7 * numbers.normal(3)
    np.testing.assert_allclose(replies[Updated].weights[0], w - 0.1 * total / 4, rtol=1e-12)


def test_an_update_without_a_key_or_beyond_the_rounds_that_the_noise_is_enough_for_is_refused(archive: Path) -> None:
    experiment = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW, stop={"rounds": 2})
    state, local, _ = stepped(experiment, 4, Secret(bytes(KEY_BYTES)))
    sent = Shared(np.zeros(4), np.zeros(0, np.int64), users=np.arange(1))
    with pytest.raises(RunError, match=r"^rows are to be protected by noise, but this task has no key for it"):
        CLIENT.step(state, Inbox("stage", 1, {Shared: sent}), local)
    state, _ = CLIENT.step(state, Inbox("stage", 1, {Shared: sent}, Secret(bytes(KEY_BYTES))), local)
    assert isinstance(local.row_privacy, RowPrivacy)
    again = CLIENT.init(experiment.method.client_options(), local, state)  # a new stage gives no new budget
    with pytest.raises(ProtocolError, match=r"^the parent asks for round 3 with noise, which is enough for 2 rounds"):
        CLIENT.step(again, Inbox("stage", 1, {Shared: sent}, Secret(bytes(KEY_BYTES))), local)


@pytest.mark.parametrize("method", OF_ROWS)
def test_a_run_with_noise_has_a_figure_of_epsilon_and_sends_no_training_loss(method: str, archive: Path, tmp_path: Path) -> None:
    experiment = convex_experiment(archive, OF_ROWS[method], privacy={**ROW, "noise_multiplier": None, "epsilon": 3.0}, stop={"rounds": 8})
    finished = Heard(experiment, tmp_path / "run", 2).run()
    spent = [value for (value,) in query(tmp_path / "run", "select value from figures where name = 'epsilon' order by round")]
    assert len(spent) == 8
    assert np.all(np.diff(spent) > 0)
    assert 2.95 < spent[-1] <= 3.0
    assert finished.outcomes[method].figures["epsilon"] == spent[-1]
    assert not query(tmp_path / "run", "select * from ledger where step = 'loss'")
    view = view_of(tmp_path / "run")
    assert f"epsilon {spent[-1]:.3g} at delta 0.001, with clip 0.7 and noise of at most " in " ".join(view.results)
    charts = {chart.key for section in view.sections for chart in section.all_charts}
    assert "squared_error-epsilon" in charts
    assert [text for text in events(tmp_path / "run", "note") if "gradients of rows are clipped at 0.7; the noise of their sum is " in text]


def test_two_runs_of_one_seed_differ_by_their_noise(archive: Path, tmp_path: Path) -> None:
    experiment = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW)
    first, second = (bits(World(experiment, tmp_path / name, 2).run()) for name in ("a", "b"))
    assert first != second


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("privacy", [ROW, USER], ids=["row", "user"])
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_run_with_noise_survives_kills_with_the_same_bits_and_never_sends_two_answers(
    method: str, privacy: dict[str, Any], archive: Path, tmp_path: Path
) -> None:
    same_bits_after_kills(OF_ROWS[method], privacy, archive, tmp_path, range(3))


@pytest.mark.usefixtures("repeatable")
def test_masked_sums_of_noised_updates_survive_kills_with_the_same_bits(archive: Path, tmp_path: Path) -> None:
    """Noise is drawn again as it was, also where the coordinator sees totals alone."""
    rules = {"exact_sums": True, "federation": {"sums": "masked", "min_summed": 2, "hosts": 3}}
    experiment = convex_experiment(archive, {**OF_ROWS["fedavg"], "average": "plain"}, privacy=ROW, stop={"rounds": 4}, **rules)
    calm = World(experiment, tmp_path / "calm", 3)
    wanted = calm.run().outcomes["fedavg"]
    n_exchanges = query(tmp_path / "calm", "select max(seq) from ledger")[0][0]
    for seed in range(2):
        faults = random_faults(seed, n_exchanges, list(calm.users))
        found = World(experiment, tmp_path / f"{seed}", 3, faults).run().outcomes["fedavg"]
        assert {name: array.tobytes() for name, array in found.shared.items()} == {
            name: array.tobytes() for name, array in wanted.shared.items()
        }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("privacy", [ROW, USER], ids=["row", "user"])
def test_no_noise_is_used_twice_after_kills_at_a_thousand_random_points(privacy: dict[str, Any], archive: Path, tmp_path: Path) -> None:
    """Each of the runs has three kills."""
    same_bits_after_kills(OF_ROWS["ditto"], privacy, archive, tmp_path, range(167))


def same_bits_after_kills(method: dict[str, Any], privacy: dict[str, Any], archive: Path, folder: Path, seeds: range) -> None:
    if privacy["unit"] == "user":
        method = {**method, "participation": 0.6}
    experiment = convex_experiment(archive, method, privacy=privacy, stop={"rounds": 7})
    calm = World(experiment, folder / "calm", 3)
    wanted = final(calm.run())
    n_exchanges = query(folder / "calm", "select max(seq) from ledger")[0][0]
    for seed in seeds:
        world = Heard(experiment, folder / f"{seed}", 3, random_faults(seed, n_exchanges, list(calm.users)), keeps_hosts=seed % 2 == 0)
        assert final(world.run()) == wanted
        assert {len(contents) for contents in world.sent.values()} == {1}


def final(finished: Finished) -> Any:
    outcome = finished.outcomes[finished.final_stage]
    scores = [(name, values.tobytes()) for name, values in sorted(outcome.by_user.items())]
    return scores, [(name, array.tobytes()) for name, array in sorted(outcome.shared.items())]


@pytest.mark.usefixtures("repeatable")
def test_a_host_that_keeps_no_history_would_send_two_answers_and_is_found(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has power: with a new key after each restart it fails."""
    made = iter(range(1000))
    monkeypatch.setattr(hosting.NoiseKeys, "secret", property(lambda _: Secret(bytes(KEY_BYTES)).child(next(made))))
    experiment = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW, stop={"rounds": 7})
    world = Heard(experiment, tmp_path / "run", 3, Faults({}, {5: "h1", 6: "h2", 7: "h0"}, ()))
    world.run()
    assert max(len(contents) for contents in world.sent.values()) == 2


def test_a_host_whose_key_is_lost_does_not_go_on(archive: Path, tmp_path: Path) -> None:
    experiment = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW)
    world = World(experiment, tmp_path / "run", 1)
    finished = world.run()
    key = tmp_path / "run" / "hosts" / "h0" / "host.key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.unlink()
    with pytest.raises(RunError, match=r"host.key is missing: without it noise would be drawn twice, so start a new run"):
        world.host("h0", finished.run_id)


def test_a_host_that_has_lost_its_state_folder_does_not_answer_again_with_other_noise(archive: Path, tmp_path: Path) -> None:
    class Forgetful(Heard):
        def host(self, name: str, run_id: str) -> hosting.Host:
            shutil.rmtree(self.folder / "hosts" / name, ignore_errors=True)
            return super().host(name, run_id)

    experiment = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW, stop={"rounds": 7})
    world = Forgetful(experiment, tmp_path / "run", 3, Faults({}, {5: "h1"}, ()))
    with pytest.raises(RunError, match=r"^host 'h1': its state cannot be read, or is not of this run \(rule J5\)"):
        world.run()
    assert {len(contents) for contents in world.sent.values()} == {1}


def test_another_clip_or_multiplier_gets_other_noise_from_the_same_key_and_tasks(archive: Path, tmp_path: Path) -> None:
    """Else the difference of two replies would show the noise, and hence the gradients."""
    users = load_users(convex_experiment(archive, OF_ROWS["fedavg"]).data, 0, None)
    store, task = SnapshotFile(tmp_path, "host"), session_pb2.Task(seq=4, stage=1, round=1)
    keys = []
    for privacy in (ROW, ROW, {**ROW, "noise_multiplier": 1.0}, {**ROW, "clip": 1.0}):
        found = NoiseKeys.of(convex_experiment(archive, OF_ROWS["fedavg"], privacy=privacy), "run", users, store, None)
        found.saw(task, [])
        keys.append(found.secret.key)
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    lost = NoiseKeys.of(convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW), "run", users, None, None)
    with pytest.raises(RunError, match=r"the key of the noise is gone: answers with other noise would spend more than epsilon says"):
        lost.saw(session_pb2.Task(seq=4, stage=1, round=1, replay=1), [])


def test_a_row_whose_gradient_is_no_number_counts_as_zero() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        found = clipped(np.array([[3.0, 4.0], [np.inf, 0.0], [np.nan, 1.0], [1e200, 1e200]]), 1.0)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0], [0, 0], [0, 0]])


def test_a_host_that_protects_rows_judges_no_models_on_them(archive: Path) -> None:
    found = {}
    for privacy in (ROW, USER):
        host = build_host("h", convex_experiment(archive, OF_ROWS["fedavg"], privacy=privacy), "run", ["u0"])
        host.indices, host.n_members = np.arange(1), 1
        _, (scores,) = EVALUATION.step(None, Inbox("stage", 1, {FinalModels: FinalModels(np.zeros((1, 4)))}), host.local)
        found[privacy["unit"]] = scores
    assert found["row"].objective[0] == np.inf
    assert np.isfinite(found["user"].objective[0])
    assert found["row"].test_loss == found["user"].test_loss


def test_a_run_says_what_epsilon_does_not_count(archive: Path, tmp_path: Path) -> None:
    World(convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW, stop={"rounds": 1}), tmp_path / "row", 1).run()
    assert any("scores on held-out rows have no noise" in text for text in events(tmp_path / "row", "note"))
    assert any("as if these were public" in sentence for sentence in uncounted(load("silos", [])))
    assert not any("as if these were public" in sentence for sentence in uncounted(load("silos", ["data.standardize_own=false"])))


def test_new_users_of_a_run_with_noise_train_their_heads_without_it(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.npz")
    trained = network_experiment(path, {"name": "fedrep", "participation": 0.5, "fine_tune": []}, privacy=USER)
    assert adapted_from(trained, trained.data.model_dump(mode="json"), [], 1).privacy is None


# ---- changes of users


def test_the_change_of_no_user_counts_for_more_than_the_clip() -> None:
    rng, before = np.random.default_rng(0), np.zeros(5)
    rows = [rng.standard_normal((3, 5)) * 10, rng.standard_normal((1, 5)) * 0.01]
    total = noised_sum(rows, before, 0.5, 0.0, Secret(bytes(KEY_BYTES)))
    wanted = sum(0.5 * row / np.linalg.norm(row) for row in rows[0]) + rows[1][0]
    np.testing.assert_allclose(total, wanted, rtol=1e-12)


def test_noise_has_the_deviation_of_clip_times_multiplier_and_is_another_one_for_another_sum() -> None:
    before, key = np.zeros(20_000), Secret(bytes(KEY_BYTES))
    one, other, same = (
        noised_sum([np.full((1, 20_000), value)], before, 0.5, 4.0, key) - clipped(np.full((1, 20_000), value), 0.5)[0]
        for value in (0.0, 1e-9, 0.0)
    )
    assert one.std() == pytest.approx(2.0, rel=0.03)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    assert (one == same).all()


def test_fedrep_clips_the_change_of_the_representation_and_heads_stay(tmp_path: Path) -> None:
    """CENTAUR: phi + (sum of clipped changes + noise) / users, against a run without noise whose average is that of these changes."""
    path = write_users(tmp_path / "users.npz")
    method = {"name": "fedrep", "head_epochs": 1, "participation": 1.0, "fine_tune": []}
    tiny = {**USER, "clip": 1e-9, "noise_multiplier": 1e-3}
    private = network_experiment(path, method, privacy=tiny, stop={"rounds": 2})
    found = World(private, tmp_path / "private", 2).run()
    start = World(network_experiment(path, {**method, "optimizer": {"lr": 1e-12}}), tmp_path / "start", 2).run()
    for name, array in start.outcomes["fedrep"].shared.items():
        np.testing.assert_allclose(found.outcomes["fedrep"].shared[name], array, atol=1e-6)
    large = network_experiment(path, {**method, "average": "plain"}, privacy={**USER, "clip": 1e6, "noise_multiplier": 1e-12})
    plain = network_experiment(path, {**method, "average": "plain"})
    ours, theirs = (World(one, tmp_path / name, 2).run().outcomes["fedrep"] for name, one in (("large", large), ("plain", plain)))
    for name, array in theirs.shared.items():
        np.testing.assert_allclose(ours.shared[name], array, atol=1e-5)


def test_users_are_drawn_in_secret_and_the_key_is_gone_when_the_run_is_over(archive: Path, tmp_path: Path) -> None:
    method = {"name": "fedavg", "participation": 0.4}
    drawn = []
    for name in ("a", "b"):
        World(convex_experiment(archive, method, privacy=USER, stop={"rounds": 20}), tmp_path / name, 2).run()
        drawn.append(query(tmp_path / name, "select seq, user_set from ledger where kind like '%Shared' order by row"))
        assert not list((tmp_path / name / "checkpoints").glob("*.key"))
    assert drawn[0] != drawn[1]


# ---- stop, and refusals


def test_a_run_stops_before_the_round_that_would_spend_more(archive: Path, tmp_path: Path) -> None:
    experiment = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW, stop={"rounds": 500, "epsilon": 6.0})
    World(experiment, tmp_path / "run", 1).run()
    ((ended,),) = query(tmp_path / "run", "select outcome from stages where name = 'fedavg'")
    spent = [value for (value,) in query(tmp_path / "run", "select value from figures where name = 'epsilon' order by round")]
    assert ended == f"epsilon {spent[-1]:.3g}: another round would spend more than 6"
    assert len(spent) < 500
    assert 2 * spent[-1] - spent[-2] > 5.9
    low = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW, stop={"epsilon": 0.1})
    with pytest.raises(ConfigError, match=r"^stop.epsilon is 0.1, but the first round of stage 'fedavg' spends "):
        World(low, tmp_path / "low", 1).run()


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ({"name": "pdmm", "penalty": 0.1}, {}, "method 'pdmm' cannot protect it: its server keeps a model of each user"),
        ({"name": "scaffold"}, {}, "method 'scaffold' cannot protect it: no mechanism is known to us"),
        ({"name": "fedavg", "participation": 0.5}, {}, "every user takes part in each round: want method.participation 1"),
        ({"name": "fedavg", "fine_tune": ["head"]}, {}, "method.fine_tune trains on rows without noise"),
        ({"name": "fedavg"}, {"references": ["local"]}, "references send models and derivatives without noise"),
        ({"name": "fed_mtl", "solver": "exact"}, {}, "method.solver is 'exact', but only steps on rows can be noised"),
        ({"name": "fed_mtl"}, {"privacy": USER}, "cannot protect it: its users return their own models, .* can have privacy.unit row"),
        ({"name": "fedavg", "average": "rows"}, {"privacy": USER}, "method.average is 'rows', but privacy.unit 'user'"),
        ({"name": "fedavg"}, {"changes": ["data.fold={number: 1, of: 2}"]}, "data.fold judges models on part of the training rows"),
        (
            {"name": "fedavg"},
            {"privacy": {**ROW, "epsilon": 1}},
            "noise_multiplier or epsilon says how much noise there is, but both are given",
        ),
        ({"name": "fedavg"}, {"privacy": None, "stop": {"epsilon": 1}}, "stop.epsilon is 1, but there is no key 'privacy'"),
    ],
)
def test_what_has_no_mechanism_or_would_send_numbers_without_noise_is_refused(
    method: dict[str, Any], changes: dict[str, Any], said: str, archive: Path
) -> None:
    usual = {} if "participation" in method or method["name"] == "pdmm" else {"participation": 1.0}
    with pytest.raises(ConfigError, match=said):
        convex_experiment(archive, {**method, **usual}, **{"privacy": ROW, **changes})


def test_owners_consent_to_clip_noise_and_the_number_of_rounds(archive: Path) -> None:
    one = convex_experiment(archive, OF_ROWS["fedavg"], privacy=ROW)
    hashes = {consent_hash(one)}
    for changes in ({"privacy": {**ROW, "noise_multiplier": 1.0}}, {"privacy": {**ROW, "clip": 1.0}}, {"stop": {"rounds": 7}}, {}):
        hashes.add(consent_hash(convex_experiment(archive, OF_ROWS["fedavg"], **{"privacy": ROW, **changes})))
    assert len(hashes) == 4


def test_numbers_of_one_key_are_drawn_once() -> None:
    numbers = SecretNumbers(bytes(KEY_BYTES))
    assert not np.isin(numbers.uniform(50), numbers.uniform(50)).any()


# ---- a clip that is adapted


def test_the_clip_follows_the_wanted_share_of_changes_that_are_no_longer(archive: Path, tmp_path: Path) -> None:
    """Algorithm 1 of Andrew, Thakkar, McMahan and Ramaswamy (2021), with hardly any noise: all of the changes are shorter, or none."""
    method = {"name": "fedavg", "participation": 1.0, "optimizer": {"lr": 0.05}}
    for first, up in ((1e-4, 1.0), (1e4, -1.0)):
        quiet = {**USER, "clip": first, "noise_multiplier": 1e-6, "adapt": {"rate": 0.3, "count_noise": 1e-3}}
        folder = tmp_path / f"{first}"
        World(convex_experiment(archive, method, privacy=quiet, stop={"rounds": 4}), folder, 2).run()
        clips = [value for (value,) in query(folder, "select value from figures where name = 'clip' order by round")]
        np.testing.assert_allclose(clips, first * np.exp(0.15 * up * np.arange(1, 5)), rtol=1e-2)


def test_changes_and_their_count_spend_together_what_the_multiplier_says() -> None:
    rule = ClipRule(count_noise=3.0)
    of_changes = rule.multiplier(2.0, 100)
    both = of_changes**-2 + (2 * 3.0) ** -2  # the count moves by 1/2
    assert both == pytest.approx(2.0**-2)
    assert ClipRule().count_deviation(100) == 5.0


def test_a_count_with_too_little_noise_is_refused_before_the_first_round(archive: Path, tmp_path: Path) -> None:
    loud = convex_experiment(archive, {"name": "fedavg", "participation": 1.0}, privacy={**USER, "adapt": {"count_noise": 1.0}})
    with pytest.raises(ConfigError, match=r"^privacy.adapt.count_noise is 1, want more than 1, half of the noise multiplier"):
        World(loud, tmp_path / "run", 2).run()
    with pytest.raises(ConfigError, match=r"adapt is for unit user: the clip of row stays as it is"):
        convex_experiment(archive, OF_ROWS["fedavg"], privacy={**ROW, "adapt": {}})


@pytest.mark.usefixtures("repeatable")
def test_a_clip_that_is_adapted_survives_kills(archive: Path, tmp_path: Path) -> None:
    same_bits_after_kills(OF_ROWS["fedavg"], {**USER, "adapt": {"count_noise": 4.0}}, archive, tmp_path, range(2))
