"""`fedrep_linear` against Algorithm 2, Theorem 1 and Figures 3 and 4 of Collins, Hassani, Mokhtari and Shakkottai (2021).

The fixture was computed independently: d = 5, k = 2, ten users with six fixed rows each, all in every round, eta = 1.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

import coterie
from coterie.arrays import Array
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.data import RepresentationData
from coterie.experiment.representation import true_head, true_representation
from coterie_client.data import UserData, load_users
from coterie_client.data.representation import fresh
from coterie_client.data.sources import user_source
from coterie_client.methods.fedrep_linear import exact_head, gradient
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.studies.adapt import adapted_from
from coterie_server.interface.half import Outcome
from coterie_server.methods.fedrep_linear import distance, leading
from coterie_server.run.coordinator import Finished
from tests.simulation import Faults, World, query

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures/fedrep_linear.json").read_text(encoding="utf-8"))
X, B_STAR, W_STAR = (np.array(FIXTURE[name]) for name in ("X", "Bstar", "Wstar"))


def targets(kind: str) -> Array:
    y: Array = np.einsum("ijp,pk,ik->ij", X, B_STAR, W_STAR)
    return y + np.array(FIXTURE["noise"]) if kind == "noisy" else y


@user_source
def users(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """The fixture's users "u0" to "u9", without held-out rows."""
    y = targets(str(options["kind"]))
    return [UserData(f"u{i}", None, X[i], y[i], X[i, :0], y[i, :0]) for i in range(len(X))]


def fixture_experiment(kind: str, rounds: int = 20, **method: Any) -> Experiment:
    data = {"source": "python", "path": f"{__name__}:users", "options": {"kind": kind}, "test_fraction": 0}
    hyper = {"name": "fedrep_linear", "k": 2, "eta": FIXTURE["eta"], "participation": 1.0, "batch": "fixed", **method}
    return experiment_from({"name": "fixture", "data": data, "method": hyper, "stop": {"rounds": rounds}})


def synthetic(seed: int = 0, rounds: int = 50, data: Mapping[str, Any] | None = None, **method: Any) -> Experiment:
    section = {"source": "representation", **(data or {})}
    content = {
        "name": "synthetic",
        "seed": seed,
        "data": section,
        "method": {"name": "fedrep_linear", **method},
        "stop": {"rounds": rounds},
    }
    return experiment_from({**content, "snapshots": {"every_rounds": 4}})


def representation(finished: Finished) -> Array:
    found: Array = finished.outcomes["fedrep_linear"].shared["B"]
    return found


@pytest.mark.parametrize("kind", ["clean", "noisy"])
@pytest.mark.parametrize("orthonormalize", [False, True])
def test_the_fixtures_distances(kind: str, orthonormalize: bool, tmp_path: Path) -> None:
    wanted = FIXTURE[f"{kind}_dist_{'qr' if orthonormalize else 'noqr'}"]
    found = []
    for rounds in range(1, 21):
        if rounds in (1, 2, 5, 10, 20):  # the truth is not the engine's to know here, so it is compared where runs end
            finished = World(fixture_experiment(kind, rounds, orthonormalize=orthonormalize), tmp_path / str(rounds), 3).run()
            found.append((rounds, distance(representation(finished), B_STAR)))
    for rounds, value in found:
        assert value == pytest.approx(wanted[rounds], rel=0, abs=1e-10)
    size = np.linalg.norm(representation(finished))
    assert size == pytest.approx(FIXTURE[f"{kind}_frob_norm_B_final_{'qr' if orthonormalize else 'noqr'}"], abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clean", "noisy"])
@pytest.mark.parametrize("rounds", [1, 20])
def test_the_fixtures_distances_over_grpc(kind: str, rounds: int) -> None:
    experiment = fixture_experiment(kind, rounds)
    rules = experiment.federation.model_copy(update={"hosts": 3})
    finished = asyncio.run(launch(experiment.model_copy(update={"federation": rules}), Launch()))
    assert distance(representation(finished), B_STAR) == pytest.approx(FIXTURE[f"{kind}_dist_noqr"][rounds], rel=0, abs=1e-10)


@pytest.mark.parametrize("kind", ["clean", "noisy"])
def test_the_start_is_the_method_of_moments(kind: str) -> None:
    """ "Z_i := 1/m sum_j (y_i^j)^2 x_i^j (x_i^j)'", and "UDU' <- rank-k SVD(1/n sum_i Z_i)"."""
    y = targets(kind)
    z = np.einsum("ij,ijp,ijq->pq", y**2, X, X) / (len(X) * X.shape[1])
    assert np.allclose(z, FIXTURE[f"{kind}_moment_matrix"], rtol=0, atol=1e-12)
    assert distance(leading(z[np.triu_indices(5)], 5, 2), B_STAR) == pytest.approx(FIXTURE[f"{kind}_dist_noqr"][0], abs=1e-10)


@pytest.mark.parametrize("kind", ["clean", "noisy"])
def test_the_first_round_by_hand(kind: str) -> None:
    y = targets(kind)
    b = leading(np.array(FIXTURE[f"{kind}_moment_matrix"])[np.triu_indices(5)], 5, 2)
    heads = np.array([exact_head(X[i] @ b, y[i]) for i in range(10)])
    known = np.array(FIXTURE[f"{kind}_heads_round1"])
    for place in range(2):  # eigenvectors have no sign of their own
        sign = np.sign(heads[0, place] * known[0, place])
        assert np.allclose(sign * heads[:, place], known[:, place], rtol=0, atol=1e-10)
    slopes = np.array([gradient(X[i], X[i] @ b, y[i], heads[i]) for i in range(10)])
    assert np.linalg.norm(slopes.mean(axis=0)) == pytest.approx(FIXTURE[f"{kind}_grad_round1_frobenius"], abs=1e-10)
    assert np.abs(np.einsum("pk,ipl->ikl", b, slopes)).max() < 1e-12  # an exact head's gradient is orthogonal to B: no QR is needed


def test_the_gradient_is_that_of_the_loss() -> None:
    y, b, w = targets("noisy")[0], np.linspace(-1, 1, 10).reshape(5, 2), np.array([0.3, -0.7])

    def loss(at: Array) -> float:
        return float(((y - X[0] @ at @ w) ** 2).mean() / 2)

    slope = gradient(X[0], X[0] @ b, y, w)
    for place in np.ndindex(5, 2):
        step = np.zeros((5, 2))
        step[place] = 1e-6
        assert slope[place] == pytest.approx((loss(b + step) - loss(b - step)) / 2e-6, abs=1e-7)


WAYS = [
    {"batch_rows": 5},
    {"heads": "gradient", "head_steps": 3, "head_eta": 0.1, "batch": "fixed"},
    {"heads": "shared"},
    {"orthonormalize": True, "start": "random"},
]


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("payload", ["float64", "float32"])
def test_the_bits_do_not_depend_on_hosts_nor_on_deaths(method: dict[str, Any], payload: str, tmp_path: Path) -> None:
    data = {"users": 12, "d": 6, "test_per_user": 4}
    experiment = synthetic(rounds=10, data=data, participation=0.5, eta=0.2, **method).model_copy(update={"payload": payload})
    once = World(experiment, tmp_path / "one", 1).run()
    faults = Faults(hosts_before={5: "h1"}, hosts_after={8: "h0"}, coordinator=(4, 9))
    for n_hosts, plan in ((2, None), (5, faults)):
        again = World(experiment, tmp_path / str(n_hosts), n_hosts, plan).run()
        assert representation(again).tobytes() == representation(once).tobytes()
        assert again.outcomes["fedrep_linear"].figures == once.outcomes["fedrep_linear"].figures


def test_the_ledger_has_d_k_scalars_each_way_for_each_selected_user(tmp_path: Path) -> None:
    World(synthetic(rounds=7, data={"users": 20, "d": 6}, k=3, participation=0.25), tmp_path, 3).run()
    booked = query(tmp_path, "SELECT step, direction, SUM(scalars) FROM ledger WHERE useful = 1 GROUP BY step, direction")
    scalars = {(step, way): n for step, way, n in booked}
    assert scalars["representation", "down"] == scalars["representation", "up"] == 7 * 5 * 6 * 3
    assert scalars["moments", "up"] == 20 * 6 * 7 / 2
    vectors = query(
        tmp_path,
        "SELECT step, direction, SUM(vectors) AS n FROM ledger WHERE useful = 1 GROUP BY step, direction HAVING n > 0 ORDER BY 1, 2",
    )
    assert vectors == query(tmp_path, "SELECT step, direction, vectors FROM expected WHERE vectors ORDER BY 1, 2")


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 3), d=st.integers(4, 8))
def test_theorem_1_bounds_the_distance(seed: int, k: int, d: int) -> None:
    """(10): dist(B^T, B*) <= (1 - eta E_0 sigma_min^2/2)^{T/2} dist(B^0, B*) for eta <= 1/(4 sigma_max^2), with many rows and no noise."""
    data = {"users": 10, "d": d, "k": k, "rows_per_user": 400, "noise": 0.0}
    experiment = synthetic(seed, 1, data)
    assert isinstance(experiment.data, RepresentationData)
    heads = np.array([true_head(experiment.data, seed, f"u{i}") for i in range(10)])
    sigma = np.linalg.svd(heads / np.sqrt(10), compute_uv=False)
    eta = 1 / (4 * sigma[0] ** 2)
    rounds = 12
    history = coterie.run(synthetic(seed, rounds, data, k=k, eta=eta, participation=1.0, batch="fresh", batch_rows=400)).history()
    start = coterie.run(synthetic(seed, 1, data, k=k, eta=1e-12, participation=1.0, batch_rows=400)).history()[0]["distance"]
    rate = 1 - eta * (1 - start**2) * sigma[-1] ** 2 / 2
    for number, row in enumerate(history, 1):
        assert row["distance"] <= rate ** (number / 2) * start + 1e-9


def rounds_to(history: Array, level: float) -> float:
    below = np.flatnonzero(history <= level)
    return float(below[0]) if below.size else np.inf


def histories(n: int, seeds: int, rounds: int = 50, **method: Any) -> list[Array]:
    """Distances at the start and after each round."""
    found = []
    for seed in range(seeds):
        runs = coterie.run(synthetic(seed, rounds, {"users": n}, batch_rows=5, **method)).history()
        start = coterie.run(synthetic(seed, 1, {"users": n}, batch_rows=5, eta=1e-12)).history()[0]["distance"]
        found.append(np.array([start, *(row["distance"] for row in runs)]))
    return found


# The design's medians of 20 other seeds: n, eta, distance at the start, rounds to .1, .01 and .001, floor.
FIGURE_3 = [
    (100, 1.0, 0.44, (4, 10, 15), 4.2e-4),
    (100, 0.25, 0.44, (11, 27, 44), 1.7e-4),
    (500, 1.0, 0.21, (1, 4, 7), 1.8e-4),
    (1000, 1.0, 0.14, (1, 4, 6), 1.3e-4),
]


def check_figure_3(n: int, eta: float, start: float, wanted: tuple[float, ...], floor: float, seeds: int) -> None:
    rounds = 50 if eta == 1.0 else 120
    found = histories(n, seeds, rounds, eta=eta)
    assert np.median([history[0] for history in found]) == pytest.approx(start, rel=0.25)
    for level, target in zip((0.1, 0.01, 0.001), wanted, strict=True):
        median = np.median([rounds_to(history, level) for history in found])
        assert abs(median - target) <= max(2, 0.15 * target), (n, eta, level, median)
    assert np.median([history[-15:].mean() for history in found]) == pytest.approx(floor, rel=0.3)


def test_figure_3_for_a_hundred_users() -> None:
    check_figure_3(*FIGURE_3[0], seeds=7)


@pytest.mark.slow
@pytest.mark.parametrize("case", FIGURE_3, ids=[f"n={case[0]} eta={case[1]}" for case in FIGURE_3])
def test_figure_3(case: tuple[int, float, float, tuple[float, ...], float]) -> None:
    check_figure_3(*case, seeds=20 if case[0] < 1000 else 9)


@pytest.mark.slow
def test_figure_3_heads_by_gradient_steps_need_more_rounds() -> None:
    """GD-GD and 10GD-GD, tuned: to .01 in 79 and 29 rounds for n = 100; FedRep in 10."""
    medians = {}
    # (eta, head_eta) at the edge of what converges
    for steps, tuned, sizes in ((1, 79, ((0.25, 0.5), (1.0, 0.1))), (10, 29, ((0.5, 0.25), (1.0, 0.1)))):
        tried = []
        for eta, head_eta in sizes:
            found = histories(100, 7, 150, heads="gradient", head_steps=steps, head_eta=head_eta, eta=eta)
            tried.append(float(np.median([rounds_to(history, 0.01) for history in found])))
        medians[steps] = min(tried)
        assert 0.5 * tuned <= medians[steps] <= 1.5 * tuned, medians
    assert medians[1] > 1.5 * medians[10] > 15


@pytest.mark.slow
def test_figure_4_new_users_need_k_rows() -> None:
    """Medians over new users of their population error after solving for a head on m_new rows: FedRep's, local's and FedAvg's."""
    wanted = {1: (0.94, 1.95), 2: (3.3e-6, 1.86), 3: (1.2e-6, 1.74), 5: (5.4e-7, 1.52), 10: (3.0e-7, 1.0)}
    data = {"users": 100, "d": 20}
    errors: dict[str, dict[int, list[float]]] = {name: {m: [] for m in wanted} for name in ("fedrep", "local", "fedavg")}
    for seed in range(5):
        learnt = {
            "fedrep": coterie.run(synthetic(seed, 200, data, eta=0.5, batch_rows=10)).outcomes["fedrep_linear"].shared["B"],
            "fedavg": coterie.run(synthetic(seed, 200, data, eta=0.1, head_eta=0.1, heads="shared", start="random", batch_rows=10))
            .outcomes["fedrep_linear"]
            .shared["B"],
        }
        truth = true_representation(synthetic(seed, data=data).data, seed)
        assert truth is not None
        rng = np.random.default_rng(seed)
        for _ in range(40):
            w = rng.standard_normal(2)
            theta = truth @ (w * np.sqrt(2) / np.linalg.norm(w))
            rows = rng.standard_normal((10, 20))
            y = rows @ theta + 1e-3 * rng.standard_normal(10)
            for m in wanted:
                for name, b in learnt.items():
                    errors[name][m].append(float(np.square(b @ exact_head(rows[:m] @ b, y[:m]) - theta).sum()))
                errors["local"][m].append(float(np.square(exact_head(rows[:m], y[:m]) - theta).sum()))
    for m, (fedrep, local) in wanted.items():
        found = {name: float(np.median(values[m])) for name, values in errors.items()}
        assert fedrep / 2 <= found["fedrep"] <= 2 * fedrep, (m, found)
        assert local / 2 <= found["local"] <= 2 * local, (m, found)
        assert found["fedavg"] > 0.8, (m, found)


def test_new_users_solve_for_their_heads_on_what_a_run_has_left(tmp_path: Path) -> None:
    learnt = coterie.run(synthetic(0, 60, {"users": 30}, participation=0.5, batch_rows=5))
    outcome = learnt.outcomes["fedrep_linear"]
    section = {"source": "representation", "users": 40, "rows_per_user": 3, "test_per_user": 10}
    new = adapted_from(synthetic(0, 60, {"users": 30}), section, [], 1)
    finished = asyncio.run(launch(new, Launch(transport="loopback", start=Outcome(None, shared=outcome.shared))))
    errors = finished.outcomes["fedrep_linear"].by_user["heldout_metric"]
    assert np.median(errors) < 1e-4
    assert representation(finished).tobytes() == outcome.shared["B"].tobytes()
    booked = dict(finished.database.connection.execute("SELECT step, SUM(scalars) FROM ledger GROUP BY step").fetchall())
    assert booked["delivery"] == 40 * 10 * 2
    assert "representation" not in booked


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    for changes, sentence in (
        ({"k": 11}, r"method.k is 11, want at most the 10 features"),
        ({"start": "finished_run"}, "no run is given"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            World(synthetic(rounds=2, **changes), tmp_path / str(len(sentence)), 1).run()
    content = {"name": "x", "data": {"source": "representation"}, "method": {"name": "fedrep_linear"}, "problem": {"loss": "least_squares"}}
    with pytest.raises(ConfigError, match="intercept true and l2 0, want least_squares, intercept false and l2 0"):
        World(experiment_from(content), tmp_path / "x", 1).run()


def test_rows_of_a_user_do_not_depend_on_the_others() -> None:
    config = synthetic(3, data={"users": 8, "test_per_user": 2}).data
    everyone = {user.name: user for user in load_users(config, 3, None)}
    (alone,) = load_users(config, 3, ["u5"])
    assert alone.features.tobytes() == everyone["u5"].features.tobytes()
    assert alone.target.tobytes() == everyone["u5"].target.tobytes()
    truth = true_representation(config, 3)
    assert truth is not None
    assert np.allclose(truth.T @ truth, np.eye(2), atol=1e-12)


def test_one_head_for_all_is_federated_averaging_and_is_judged_as_it_is() -> None:
    """Two rounds by hand: B and w are means of the users' gradient steps on both from the same point."""
    y, w, eta, head_eta = targets("noisy"), np.zeros(2), 0.3, 0.2
    run = coterie.run(fixture_experiment("noisy", 2, heads="shared", eta=eta, head_eta=head_eta)).outcomes["fedrep_linear"]
    b = leading(np.array(FIXTURE["noisy_moment_matrix"])[np.triu_indices(5)], 5, 2)
    for _ in range(2):
        residuals = [y[i] - X[i] @ b @ w for i in range(10)]
        slopes_b = [-np.outer(X[i].T @ residuals[i], w) / 6 for i in range(10)]
        slopes_w = [-(X[i] @ b).T @ residuals[i] / 6 for i in range(10)]
        b, w = b - eta * np.mean(slopes_b, axis=0), w - head_eta * np.mean(slopes_w, axis=0)
    assert np.allclose(run.shared["B"] @ run.shared["w"], b @ w, rtol=0, atol=1e-12)  # eigenvectors have no sign of their own
    losses = [np.square(y[i] - X[i] @ b @ w).mean() / 2 for i in range(10)]
    assert run.figures["sum_of_losses"] == pytest.approx(sum(losses), rel=1e-10)


def test_a_run_tells_how_far_its_start_was_from_the_truth() -> None:
    stayed, moved = (coterie.run(synthetic(2, 3, {"users": 30}, eta=eta)).metrics["fedrep_linear"] for eta in (1e-12, 0.5))
    assert moved["distance_at_start"] == pytest.approx(stayed["distance"], rel=1e-6)
    assert abs(moved["distance"] - moved["distance_at_start"]) > 0.01


def test_heads_by_gradient_steps_go_on_from_where_they_were_left() -> None:
    """GD-GD with two steps: w_i <- w_i - head_eta grad_w f_i(w_i, B), from w_i = 0 in the first round only."""
    y, heads, eta, head_eta = targets("noisy"), np.zeros((10, 2)), 0.3, 0.2
    method = {"heads": "gradient", "head_steps": 2, "head_eta": head_eta, "eta": eta}
    found = coterie.run(fixture_experiment("noisy", 2, **method)).outcomes["fedrep_linear"].shared["B"]
    b = leading(np.array(FIXTURE["noisy_moment_matrix"])[np.triu_indices(5)], 5, 2)
    for _ in range(2):
        for i in range(10):
            for _ in range(2):
                heads[i] += head_eta * (X[i] @ b).T @ (y[i] - X[i] @ b @ heads[i]) / 6
        b = b + eta * np.mean([np.outer(X[i].T @ (y[i] - X[i] @ b @ heads[i]), heads[i]) / 6 for i in range(10)], axis=0)
    assert np.allclose(found @ found.T, b @ b.T, rtol=0, atol=1e-12)  # eigenvectors have no sign of their own


def test_each_round_has_rows_of_its_own() -> None:
    """ "Client i draws a fresh batch of m samples": the start and two rounds by hand, on what the data gives for rounds 0, 1 and 2."""
    experiment = synthetic(4, 2, {"users": 8, "d": 5, "rows_per_user": 3}, participation=1.0, batch_rows=6, eta=0.5)
    assert isinstance(experiment.data, RepresentationData)
    draw = fresh(experiment.data, 4, [f"u{i}" for i in range(8)])
    rows = [[draw(i, number, 6) for i in range(8)] for number in range(3)]
    z = np.mean([np.einsum("j,jp,jq->pq", y**2, x, x) / 6 for x, y in rows[0]], axis=0)
    b = leading(z[np.triu_indices(5)], 5, 2)
    for drawn in rows[1:]:
        heads = [exact_head(x @ b, y) for x, y in drawn]
        b = b - 0.5 * np.mean([gradient(x, x @ b, y, w) for (x, y), w in zip(drawn, heads, strict=True)], axis=0)
    found = coterie.run(experiment).outcomes["fedrep_linear"].shared["B"]
    assert np.allclose(found @ found.T, b @ b.T, rtol=0, atol=1e-12)


def test_what_diverges_is_named_with_its_user_and_round() -> None:
    with pytest.raises(RunError, match=r"user 'u\d+' in fedrep_linear.UpdatedRepresentation.b in round \d+, wanted finite numbers"):
        coterie.run(synthetic(1, 400, {"users": 20}, participation=0.5, eta=30.0, heads="shared", head_eta=30.0))
