"""Averages of known clusters with noise: what a user can move, how many averages are counted, and what users receive without noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.draws import secret
from coterie.draws.accountant import Steps, epsilon
from coterie.draws.secret import KEY_BYTES, Secret
from coterie.errors import ConfigError
from coterie.families.known_clusters import Weights
from coterie_deploy.studies.check.federations import clustered_experiment, write_clustered
from coterie_server.families.cluster_noise import ClusterNoise
from coterie_server.families.known_clusters import averages_of, clusters_of
from coterie_server.interface.half import Members
from coterie_server.run.coordinator import Finished
from tests.integration.test_privacy import Heard, events
from tests.simulation import query, random_faults

USER = {"unit": "user", "clip": 0.5, "noise_multiplier": 3.0, "delta": 1e-3}
L2GD = {"name": "async_l2gd", "gamma": 1.0, "alpha": 0.5, "eta": 0.1, "p0": 0.1, "p": 0.2, "iterations": 60, "round_iterations": 20}
KEY = Secret(bytes(KEY_BYTES))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clustered(tmp_path_factory.mktemp("privacy") / "users.npz")


def run(folder: Path, archive: Path, privacy: dict[str, Any] | None, **changes: Any) -> Finished:
    return Heard(clustered_experiment(archive, {**L2GD, **changes}, privacy=privacy), folder, 2).run()


def members(n_clusters: int, size: int) -> Members:
    n = n_clusters * size
    return Members(tuple(f"u{i}" for i in range(n)), tuple(f"c{i // size}" for i in range(n)))


def weights(**given: Any) -> Weights:
    return Weights.model_validate({"alpha": 0.5, **given})


def test_no_user_moves_the_sum_by_more_than_the_largest_weight_times_the_clip() -> None:
    clusters = clusters_of(weights(gamma={f"u{i}": 1.0 + i for i in range(6)}), members(2, 3))
    noise, before = ClusterNoise(0.5, 0.0, KEY), np.array([[1.0, 1.0], [2.0, 0.0]])
    rng = np.random.default_rng(0)
    models = np.repeat(before, 3, axis=0) + 0.1 * rng.standard_normal((6, 2))
    places, at = np.arange(2), np.array([5, 5])
    np.testing.assert_allclose(noise.averages(clusters, places, models, before, at), averages_of(clusters, places, models), rtol=1e-12)
    for user in range(6):
        moved, gone = models.copy(), models.copy()
        moved[user], gone[user] = 1e6, before[user // 3]
        found = [noise.averages(clusters, places, each, before, at)[user // 3] for each in (moved, gone)]
        length = np.linalg.norm(found[0] - found[1]) * clusters.gamma_sums[user // 3]
        assert length == pytest.approx(0.5 * clusters.gamma[user])
        assert length <= 0.5 * clusters.segments.maxima(clusters.gamma)[user // 3] * (1 + 1e-9)


def test_noise_is_of_the_clip_times_the_largest_weight_and_another_one_in_each_iteration() -> None:
    clusters = clusters_of(weights(gamma=2.0), members(2, 4))
    models, before, noise = np.zeros((4, 10_000)), np.zeros((1, 10_000)), ClusterNoise(0.5, 3.0, KEY)
    one, again, later = (noise.averages(clusters, np.array([1]), models, before, np.array([at]))[0] for at in (7, 7, 8))
    assert one.std() == pytest.approx(3.0 * 0.5 / 4, rel=0.05)
    assert (one == again).all()
    assert abs(np.corrcoef(one, later)[0, 1]) < 0.05


def test_without_much_noise_averages_are_those_without(archive: Path, tmp_path: Path) -> None:
    quiet = {**USER, "clip": 1e3, "noise_multiplier": 1e-13}
    found, plain = (run(tmp_path / name, archive, privacy) for name, privacy in (("quiet", quiet), ("plain", None)))
    for name in ("objective", "sum_of_losses"):
        assert found.outcomes["async_l2gd"].figures[name] == pytest.approx(plain.outcomes["async_l2gd"].figures[name], rel=1e-6)


@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_epsilon_counts_the_averages_that_were_really_made(
    reuse: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, averages = list[tuple[int, int]](), ClusterNoise.averages

    def counted(self: ClusterNoise, clusters: Any, places: Any, models: Any, before: Any, at: Any) -> Any:
        made.extend(zip(places.tolist(), at.tolist(), strict=True))
        return averages(self, clusters, places, models, before, at)

    def most(until: int) -> int:
        return max(sum(place == one and at < until for one, at in made) for place in range(3))

    monkeypatch.setattr(ClusterNoise, "averages", counted)
    figures = run(tmp_path / "run", archive, USER, reuse=reuse).outcomes["async_l2gd"].figures
    assert figures["epsilon"] == pytest.approx(epsilon(Steps(3.0, most(60)), 1e-3))
    spent = [value for (value,) in query(tmp_path / "run", "select value from figures where name = 'epsilon' order by round")]
    ends, between = (
        [
            int(value)
            for (value,) in query(tmp_path / "run", f"select value from figures where name = '{name}' and round > 0 order by round")
        ]
        for name in ("iteration", "between_rounds")
    )
    has_pair = np.diff(between, prepend=0) > 0  # such a round ends with the averages for the iteration after it
    wanted = [epsilon(Steps(3.0, most(end + pair)), 1e-3) for end, pair in zip(ends, has_pair.tolist(), strict=True)]
    assert spent == pytest.approx(wanted)
    assert len(set(spent)) > 3
    said = [text for text in events(tmp_path / "run", "note") if "averages of a cluster" in text]
    assert f"in at most {most(60)} averages of a cluster" in said[0]


def test_noise_follows_from_epsilon_and_users_receive_no_average_without_noise(archive: Path, tmp_path: Path) -> None:
    found = run(tmp_path / "run", archive, {**USER, "noise_multiplier": None, "epsilon": 4.0}).outcomes["async_l2gd"].figures
    assert 3.95 < found["epsilon"] <= 4.0
    assert "gradient_norm" not in found
    assert not query(tmp_path / "run", "select * from ledger where step = 'gap'")


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(100), marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_averages_with_noise_survive_kills_with_the_same_bits(
    seeds: range, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the runs has three kills."""
    monkeypatch.setattr(secret, "new_key", lambda: b"k" * KEY_BYTES)
    monkeypatch.setattr("coterie_server.run.coordinator.secrets.token_hex", lambda n: "ab" * n)
    experiment = clustered_experiment(archive, L2GD, privacy=USER)
    calm = Heard(experiment, tmp_path / "calm", 3)
    wanted = calm.run().outcomes["async_l2gd"].figures
    n_exchanges = query(tmp_path / "calm", "select max(seq) from ledger")[0][0]
    for seed in seeds:
        world = Heard(experiment, tmp_path / f"{seed}", 3, random_faults(seed, n_exchanges, list(calm.users)), keeps_hosts=seed % 2 == 0)
        assert world.run().outcomes["async_l2gd"].figures == wanted
        assert {len(contents) for contents in world.sent.values()} == {1}


@pytest.mark.parametrize(
    ("changes", "privacy", "said"),
    [
        ({"eta": None}, USER, "method.eta follows from the users' losses, without noise: want a number beside privacy"),
        ({"collect_models": True}, USER, "method.collect_models would put models into the run folder"),
        ({}, {**USER, "unit": "row"}, "cannot protect it: the steps of its users have no noise, only averages have"),
        ({"name": "async_al2sgd"}, USER, "its rates follow from single rows, and the averages of its anchors have no noise"),
    ],
)
def test_what_has_no_noise_is_refused(changes: dict[str, Any], privacy: dict[str, Any], said: str, archive: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        clustered_experiment(archive, {**L2GD, **changes}, privacy=privacy)
