"""Sums of gradients and Hessians with noise: what is shortened, how often noise is drawn, and how models come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.draws import secret
from coterie.draws.accountant import Steps, epsilon
from coterie.draws.secret import KEY_BYTES, Secret
from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.privacy import symmetric_noise
from coterie.families.consensus import Curvatures, GroupModel, Slopes
from coterie_client.data import load_users
from coterie_client.families.consensus import CLIENT
from coterie_client.hosting.build import build_host
from coterie_client.interface.half import Inbox
from coterie_deploy.studies.check.federations import clustered_experiment, write_clustered
from coterie_server.families.perturbed import newton_steps
from coterie_server.maths.hlm import nearest_convex
from tests.convex import convex_experiment, write_rows
from tests.integration.test_privacy import Heard, events
from tests.simulation import query, random_faults

ROW = {"unit": "row", "clip": 2.0, "clip_hessian": 4.0, "noise_multiplier": 2.0, "delta": 1e-3}
USER = {**ROW, "unit": "user"}
GLOBAL = {"name": "global"}
KEY = Secret(bytes(KEY_BYTES))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("privacy") / "users.npz")


def run(folder: Path, archive: Path, method: dict[str, Any], privacy: dict[str, Any] | None, **more: Any) -> Any:
    return Heard(convex_experiment(archive, method, privacy=privacy, **more), folder, 2).run()


def model_of(finished: Any) -> np.ndarray[Any, Any]:
    return np.asarray(finished.outcomes[finished.final_stage].models)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_parts_are_shortened_and_their_sums_get_noise_and_the_whole_penalty(reduction: str, archive: Path) -> None:
    problem = {"loss": "logistic", "l2": 0.3, "reduction": reduction} if reduction == "sum" else {"loss": "least_squares", "l2": 0.3}
    if reduction == "sum":
        archive = write_rows(archive.parent / "labels.npz", "logistic")
    experiment = convex_experiment(archive, GLOBAL, privacy=ROW, problem=problem, stop={"rounds": 3})
    host = build_host("h", experiment, "run", ["u1"])
    host.indices, host.n_members = np.arange(1), 1
    local, x = host.local, np.array([[0.4, -0.2, 0.1, 0.3]])
    state = CLIENT.init({"ridge": None, "with_hessians": True}, local, None)
    state, (slopes, curvatures) = CLIENT.step(state, Inbox("stage", 1, {GroupModel: GroupModel(x)}, KEY), local)
    assert isinstance(slopes, Slopes)
    assert isinstance(curvatures, Curvatures)
    user = local.users[0]
    a = np.column_stack([user.features, -np.ones(len(user.features))])
    s, y, shrink = a @ x[0], user.target, np.array([0.3, 0.3, 0.3, 0.0])
    p = 1 / (1 + np.exp(-s))
    slope, bend = (-y / (1 + np.exp(y * s)), p * (1 - p)) if reduction == "sum" else (s - y, np.ones(len(y)))
    lengths = np.linalg.norm(a, axis=1)
    factor = np.min([np.ones(len(y)), 2.0 / (np.abs(slope) * lengths), 4.0 / (bend * lengths**2)], axis=0)
    assert reduction == "sum" or (factor < 1).any()
    weight, numbers = (1.0 if reduction == "sum" else 1 / len(y)), KEY.child("u1").numbers()
    scale = weight * np.sqrt(2) * 2.0
    gradient = weight * (factor * slope) @ a + scale * 2.0 * numbers.normal(4) + shrink * x[0]
    hessian = weight * (a * (factor * bend)[:, None]).T @ a + scale * 4.0 * symmetric_noise(numbers, 4) + np.diag(shrink)
    np.testing.assert_allclose(slopes.gradient[0], gradient, rtol=1e-10)
    np.testing.assert_allclose(curvatures.triangle[0], hessian[np.triu_indices(4)], rtol=1e-10)
    assert slopes.value[0] == 0


def test_no_row_moves_the_two_sums_by_more_than_their_clips(archive: Path) -> None:
    experiment = convex_experiment(archive, GLOBAL, privacy=ROW)
    host = build_host("h", experiment, "run", ["u0"])
    host.indices, host.n_members = np.arange(1), 1
    problem, user = host.local.problem, host.local.users[0]
    for value, wanted in ((1e6, -1e9), (np.inf, -1e9), (50.0, 149.0)):  # a long gradient, no number, and a long Hessian alone
        features, target = user.features.copy(), user.target.copy()
        features[0], target[0] = value, wanted
        with np.errstate(invalid="ignore", over="ignore"):
            one = problem.block("u0", features, target) if np.isfinite(value) else problem.block("u0", user.features, user.target)
            if not np.isfinite(value):
                one.rows[0, 0] = value
            found = one.clipped_sums(np.ones((1, 4)), 2.0, 4.0)
        features[0], target[0] = 0.0, 0.0
        none = problem.block("u0", features, target)
        none.rows[0, 0] = 0.0
        for moved, without, clip in zip(found, none.clipped_sums(np.ones((1, 4)), 2.0, 4.0), (2.0, 4.0), strict=True):
            assert np.linalg.norm(moved - without) * len(target) <= clip * (1 + 1e-9)


def test_noise_of_a_symmetric_matrix_is_that_of_a_vector_with_its_norm() -> None:
    numbers = KEY.numbers()
    drawn = np.array([symmetric_noise(numbers, 3) for _ in range(6_000)])
    assert np.array_equal(drawn, drawn.transpose(0, 2, 1))
    spread = drawn.std(axis=0)
    np.testing.assert_allclose(np.diag(spread), 1.0, rtol=0.05)
    np.testing.assert_allclose(spread[np.triu_indices(3, 1)], 2**-0.5, rtol=0.05)
    assert np.square(np.linalg.norm(drawn, axis=(1, 2))).mean() == pytest.approx(6.0, rel=0.05)  # of a normal vector of 6 numbers


@pytest.mark.parametrize("unit", ["row", "user"])
@pytest.mark.parametrize("loss", ["least_squares", "logistic"])
def test_without_much_noise_the_model_is_that_of_global(unit: str, loss: str, archive: Path, tmp_path: Path) -> None:
    if loss == "logistic":
        archive = write_rows(tmp_path / "labels.npz", "logistic")
    quiet = {"unit": unit, "clip": 1e4, "clip_hessian": 1e4, "noise_multiplier": 1e-11, "delta": 1e-3}
    more = {"problem": {"loss": loss, "l2": 0.1}}
    found, wanted = (
        model_of(run(tmp_path / name, archive, GLOBAL, privacy, stop={"rounds": 60 if privacy else 100}, **more))
        for name, privacy in (("noised", quiet if loss == "least_squares" else {**quiet, "clip_hessian": 50.0}), ("plain", None))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("unit", ["row", "user"])
def test_least_squares_has_noise_once_and_other_losses_have_it_in_each_round(unit: str, archive: Path, tmp_path: Path) -> None:
    asked = {**ROW, "unit": unit}
    once = run(tmp_path / "once", archive, GLOBAL, asked, stop={"rounds": 9})
    assert once.outcomes["global"].figures["epsilon"] == pytest.approx(epsilon(Steps(2.0, 1), 1e-3))
    assert query(tmp_path / "once", "select outcome from stages where name = 'global'") == [("converged",)]
    labels = write_rows(tmp_path / "labels.npz", "logistic")
    often = run(tmp_path / "often", labels, GLOBAL, asked, problem={"loss": "logistic", "l2": 0.1}, stop={"rounds": 5})
    assert often.outcomes["global"].figures["epsilon"] == pytest.approx(epsilon(Steps(2.0, 5), 1e-3))
    assert len(query(tmp_path / "often", "select * from figures where name = 'noised_gradient_norm'")) == 5
    said = [text for text in events(tmp_path / "often", "note") if "Hessians" in text]
    assert said == [
        f"privacy: gradients of {unit}s are clipped at 2, and their Hessians at 4; "
        "the noise of each sum is 2.83 of its clips, in at most 5 rounds; delta is 0.001"
    ]
    scores = {name for (name,) in query(tmp_path / "once", "select distinct name from figures")}
    assert ("sum_of_losses" in once.outcomes["global"].figures) == (unit == "user"), scores
    assert np.isfinite(once.outcomes["global"].figures["heldout_metric"])


def test_the_noise_that_is_asked_for_by_epsilon_is_that_of_the_rounds_with_noise(archive: Path, tmp_path: Path) -> None:
    asked = {**ROW, "noise_multiplier": None, "epsilon": 2.0}
    found = run(tmp_path / "run", archive, GLOBAL, asked, stop={"rounds": 9}).outcomes["global"].figures
    assert 1.98 < found["epsilon"] <= 2.0


def test_what_is_inverted_has_no_eigenvalue_below_that_of_the_noise() -> None:
    rng = np.random.default_rng(0)
    hessians = rng.standard_normal((2, 4, 4))
    hessians = hessians + hessians.transpose(0, 2, 1) + 20 * np.array([0, 1])[:, None, None] * np.eye(4)
    gradients, kappa = rng.standard_normal((2, 4)), np.array([0.5, 0.5])
    steps, n_raised = newton_steps(gradients, hessians, kappa)
    values, axes = np.linalg.eigh(hessians[0])
    assert n_raised == (values < 0.5).sum() > 0
    for step, gradient, hessian in zip(steps, gradients, (axes @ np.diag(np.maximum(values, 0.5)) @ axes.T, hessians[1]), strict=True):
        np.testing.assert_allclose(hessian @ step, -gradient, rtol=1e-9)


def test_users_are_shortened_and_noised_once_for_each_group(tmp_path: Path) -> None:
    path = write_clustered(tmp_path / "users.npz")
    large = {"unit": "user", "clip": 1e2, "clip_hessian": 1e2, "noise_multiplier": 1e-12, "delta": 1e-3}
    small = {**large, "clip": 1e-3}
    found = {}
    for name, privacy in (("plain", None), ("large", large), ("small", small)):
        found[name] = Heard(clustered_experiment(path, {"name": "oracle"}, privacy=privacy), tmp_path / name, 2).run()
    np.testing.assert_allclose(model_of(found["large"]), model_of(found["plain"]), atol=1e-5)
    assert query(tmp_path / "small", "select value from figures where name = 'shortened_users' and round > 0") == [(12.0,)]
    experiment = clustered_experiment(path, {"name": "oracle"})
    users = load_users(experiment.data, experiment.seed, None)
    gradients = [user.features.T @ user.target / len(user.target) for user in users]
    hessians = [user.features.T @ user.features / len(user.target) + 0.1 * np.eye(3) for user in users]
    for first in (0, 4, 8):  # users whose lengths are all beyond the clip count equally, by the directions of their gradients
        shares = [1 / np.linalg.norm(gradient) for gradient in gradients[first : first + 4]]
        sums = [sum(s * a for s, a in zip(shares, of[first : first + 4], strict=True)) for of in (gradients, hessians)]
        np.testing.assert_allclose(model_of(found["small"])[first], np.linalg.solve(sums[1], sums[0]), rtol=1e-5)


def test_sufficient_statistics_have_noise_once_and_models_stay_near_those_without(tmp_path: Path) -> None:
    path = write_clustered(tmp_path / "users.npz")
    method = {"name": "hlm_exact", "alpha": 0.5, "gamma": 1.0}
    quiet = {**ROW, "clip": 1e2, "clip_hessian": 1e2, "noise_multiplier": 1e-11}
    loud = {**ROW, "noise_multiplier": 5.0}
    found = {}
    for name, privacy in (("plain", None), ("quiet", quiet), ("loud", loud)):
        found[name] = Heard(clustered_experiment(path, method, privacy=privacy), tmp_path / name, 2).run()
    np.testing.assert_allclose(model_of(found["quiet"]), model_of(found["plain"]), atol=1e-6)
    assert found["loud"].outcomes["hlm_exact"].figures["epsilon"] == pytest.approx(epsilon(Steps(5.0, 1), 1e-3))
    assert np.isfinite(model_of(found["loud"])).all()
    with pytest.raises(ConfigError, match="cannot protect it: its server makes the model of each user from the sums of that user alone"):
        clustered_experiment(path, method, privacy=USER)


def test_noise_leaves_no_negative_curvature_in_the_sums_of_a_user() -> None:
    rng = np.random.default_rng(0)
    noised = rng.standard_normal((5, 3, 3))
    noised = noised + noised.transpose(0, 2, 1)
    assert np.linalg.eigvalsh(noised).min() < -0.5
    found = nearest_convex(noised)
    assert np.linalg.eigvalsh(found).min() > -1e-12
    np.testing.assert_allclose(nearest_convex(found), found, atol=1e-12)


@pytest.mark.parametrize("privacy", [ROW, USER], ids=["row", "user"])
def test_sums_with_noise_survive_kills_with_the_same_bits(privacy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits_after_kills(privacy, tmp_path, monkeypatch, range(2))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("privacy", [ROW, USER], ids=["row", "user"])
def test_no_noise_of_sums_is_used_twice_after_kills_at_three_hundred_random_points(
    privacy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the runs has three kills."""
    same_bits_after_kills(privacy, tmp_path, monkeypatch, range(50))


def same_bits_after_kills(privacy: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.setattr(secret, "new_key", lambda: b"k" * KEY_BYTES)
    monkeypatch.setattr("coterie_server.run.coordinator.secrets.token_hex", lambda n: "ab" * n)
    path = write_rows(folder / "labels.npz", "logistic")
    problem = {"loss": "logistic", "l2": 0.1}
    experiment = convex_experiment(path, GLOBAL, privacy=privacy, problem=problem, stop={"rounds": 7})
    calm = Heard(experiment, folder / "calm", 3)
    wanted = model_of(calm.run()).tobytes()
    n_exchanges = query(folder / "calm", "select max(seq) from ledger")[0][0]
    for seed in seeds:
        world = Heard(experiment, folder / f"{seed}", 3, random_faults(seed, n_exchanges, list(calm.users)), keeps_hosts=seed % 2 == 0)
        assert model_of(world.run()).tobytes() == wanted
        assert {len(contents) for contents in world.sent.values()} == {1}


def test_masked_sums_of_rows_with_noise_are_those_of_open_ones(archive: Path, tmp_path: Path) -> None:
    masked = {"exact_sums": True, "federation": {"sums": "masked", "min_summed": 2, "hosts": 3}}
    quiet = {**ROW, "noise_multiplier": 1e-9}  # it is another one: keys of masks are tasks that count in the history
    found = [Heard(convex_experiment(archive, GLOBAL, privacy=quiet, **more), tmp_path / f"{len(more)}", 3).run() for more in ({}, masked)]
    np.testing.assert_allclose(model_of(found[0]), model_of(found[1]), rtol=1e-6)


def test_a_host_answers_no_more_rounds_than_the_noise_is_enough_for_and_no_other_questions(archive: Path) -> None:
    host = build_host("h", convex_experiment(archive, GLOBAL, privacy=ROW, stop={"rounds": 9}), "run", ["u0"])
    host.indices, host.n_members = np.arange(1), 1
    state = CLIENT.init({"ridge": None, "with_hessians": True}, host.local, None)
    inbox = Inbox("stage", 1, {GroupModel: GroupModel(np.zeros((1, 4)))}, KEY)
    state, _ = CLIENT.step(state, inbox, host.local)
    with pytest.raises(ProtocolError, match="asks for round 2 with noise, which is enough for 1 rounds"):
        CLIENT.step(CLIENT.init({"ridge": None, "with_hessians": True}, host.local, state), inbox, host.local)


@pytest.mark.parametrize(
    ("method", "privacy", "said"),
    [
        (
            GLOBAL,
            {**ROW, "clip_hessian": None},
            "sends sums of Hessians, and privacy.clip bounds gradients alone: want privacy.clip_hessian",
        ),
        ({"name": "fedavg", "participation": 1.0}, ROW, "clip_hessian is for sums of Hessians, and method 'fedavg' sends none"),
        (GLOBAL, {**USER, "adapt": {}}, "privacy.adapt follows changes of models, and method 'global' sends sums of derivatives"),
        ({"name": "squared", "penalty": 1.0}, ROW, "cannot protect it: its users send models of their own at the end"),
    ],
)
def test_what_sums_with_noise_need_is_said(method: dict[str, Any], privacy: dict[str, Any], said: str, archive: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        convex_experiment(archive, method, privacy=privacy)


def test_losses_of_distances_and_methods_without_hessians_are_refused(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whose Hessian has no parts of rows to shorten: want a loss with targets"):
        convex_experiment(archive, GLOBAL, privacy=ROW, problem={"loss": "squared_distance"})
    with pytest.raises(ConfigError, match="steps with noise need Hessians: want newton_up_to of 4 or more"):
        run(tmp_path / "run", archive, {"name": "global", "newton_up_to": 3}, ROW)
