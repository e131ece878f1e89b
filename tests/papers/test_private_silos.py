"""Liu, Hu, Wu and Smith (2022) with noise, and DP-SGD's claim against an attack: is a row in the data?

The attack trains many times with a row of the largest gradient, and many times with a row without a gradient in its place. The rates at
which a threshold tells them apart bound epsilon from below, with 95 % confidence: Jagielski, Ullman and Oprea (2020), "Auditing
differentially private machine learning".
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from scipy import stats

from coterie.draws.accountant import Steps, epsilon
from coterie.draws.secret import KEY_BYTES, Secret
from coterie.experiment.model import X
from coterie.experiment.problem import ProblemConfig
from coterie.wire.precision import Precision
from coterie_client.families.perturbed import noised
from coterie_client.interface.half import Inbox, Local
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.learning.private import RowNoise, RowPrivacy, train_privately
from coterie_client.nets.losses import LEAST_SQUARES
from coterie_client.nets.private import RowwiseSlope
from coterie_client.problems import build_problem
from coterie_client.problems.descent import ConvexLearner
from coterie_deploy.studies.reproduce import private_silos, reproduce

DELTA = 1e-3
CLIP, N_STEPS, N_ROWS = 0.5, 4, 8
Attack = Callable[..., NDArray[np.float64]]


def trained(multiplier: float, rate: float, *, is_there: bool, n_trials: int) -> NDArray[np.float64]:
    """(n_trials,) models of one number after training with or without the row."""
    rng = np.random.default_rng(1)
    features, target = 0.1 * rng.standard_normal((N_ROWS, 1)), rng.standard_normal(N_ROWS)
    features[0], target[0] = (1.0, 100.0) if is_there else (0.0, 0.0)
    problem = build_problem(ProblemConfig(loss="least_squares", intercept=False), ["u"], [features], [target])
    learner, phase = ConvexLearner(problem, 0), Phase("all", None, N_STEPS, round(rate * N_ROWS), 0.1)
    key, found = Secret(bytes(KEY_BYTES)).child(int(is_there)), np.empty(n_trials)
    for trial in range(n_trials):
        noise = RowNoise(CLIP, multiplier, key.child(trial).numbers())
        fitted = learner.fit({X: np.zeros(1)}, Rows(features, target, "u"), [phase], Draw(0, "u", 1, "audit"), noise)
        found[trial] = fitted.tensors[X][0]
    return found


def trained_network(multiplier: float, rate: float, *, is_there: bool, n_trials: int) -> NDArray[np.float64]:
    """As `trained`, by torch: the one weight of a network."""
    features, target = torch.full((N_ROWS, 1), 0.1), torch.zeros(N_ROWS)
    features[0], target[0] = (1.0, 100.0) if is_there else (0.0, 0.0)
    module, phase = torch.nn.Linear(1, 1, bias=False), Phase("all", None, N_STEPS, round(rate * N_ROWS), 0.1)
    slope = RowwiseSlope(module, ["weight"], features, target, LEAST_SQUARES.mean)
    key, found = Secret(bytes(KEY_BYTES)).child("network", int(is_there)), np.empty(n_trials)
    with torch.no_grad():
        for trial in range(n_trials):
            module.weight.zero_()
            train_privately(slope, N_ROWS, phase, RowNoise(CLIP, multiplier, key.child(trial).numbers()))
            found[trial] = float(module.weight)
    return found


def summed(multiplier: float, rate: float, *, is_there: bool, n_trials: int) -> NDArray[np.float64]:
    """What the attack makes of the sums of gradients and Hessians of `global`, in one round: both, in units of their clips."""
    features, target = np.full((N_ROWS, 1), 0.1), np.zeros(N_ROWS)
    features[0], target[0] = (10.0, -100.0) if is_there else (0.0, 0.0)
    problem = build_problem(ProblemConfig(loss="least_squares", intercept=False, reduction="sum"), ["u"], [features], [target])
    privacy = RowPrivacy(CLIP, lambda _: multiplier, 1, 3 * CLIP)
    local = Local(0, ("u",), np.arange(1), 1, Precision.of("float64", is_convex=True), (), problem, row_privacy=privacy)
    key, found = Secret(bytes(KEY_BYTES)).child("sums", int(is_there)), np.empty(n_trials)
    for trial in range(n_trials):
        gradient, hessian = noised(np.zeros((1, 1)), Inbox("stage", 1, {}, key.child(trial)), local)
        found[trial] = gradient[0, 0] / CLIP + hessian[0, 0, 0] / (3 * CLIP)
    return found


def audited(multiplier: float, rate: float, n_trials: int, attack: Attack = trained) -> float:
    """A lower bound on epsilon. Half of the trials choose the threshold, the other half judge it."""
    there, gone = (attack(multiplier, rate, is_there=is_there, n_trials=2 * n_trials) for is_there in (True, False))

    def bound(threshold: float, part: slice) -> float:
        hits, alarms = int((there[part] > threshold).sum()), int((gone[part] > threshold).sum())
        low = float(stats.beta.ppf(0.025, hits, n_trials - hits + 1)) if hits else 0.0
        high = float(stats.beta.ppf(0.975, alarms + 1, n_trials - alarms)) if alarms < n_trials else 1.0
        return float(np.log(max(low - DELTA, 1e-12) / high))

    first, second = slice(None, n_trials), slice(n_trials, None)
    threshold = max(
        np.quantile(np.concatenate([there[first], gone[first]]), np.linspace(0.01, 0.99, 99)), key=lambda t: bound(float(t), first)
    )
    return bound(float(threshold), second)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("attack", "rate", "n_steps", "n_trials"),
    [(trained, 1.0, N_STEPS, 1500), (trained, 0.5, N_STEPS, 1500), (trained_network, 1.0, N_STEPS, 500), (summed, 1.0, 1, 3000)],
)
def test_what_an_attack_finds_stays_below_the_claimed_epsilon_with_noise_and_exceeds_it_without(
    attack: Attack, rate: float, n_steps: int, n_trials: int
) -> None:
    multiplier = 2.0 / np.sqrt(N_STEPS / n_steps)
    claimed = epsilon(Steps(multiplier, n_steps, rate), DELTA)
    with_noise, without, with_little = (audited(one, rate, n_trials, attack) for one in (multiplier, 1e-9, multiplier / 8))
    assert 0.2 * claimed < with_noise < claimed  # the attack is no weak one
    assert without > claimed
    assert with_little > claimed


def test_the_study_compares_three_methods_and_draws_their_error_against_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = private_silos.load

    def short(name: str, changes: list[str]) -> Any:
        return shipped(name, [*changes, "stop.rounds=2", "data.test_fraction=0.5", "method.evaluate_every=1", "method.batch_size=null"])

    monkeypatch.setattr(private_silos, "load", short)
    said = io.StringIO()
    points = reproduce("private-silos", seeds=1, output=tmp_path, console=Console(file=said, width=100))
    listed = [(method, number) for method in (*private_silos.METHODS, "alone") for number in (1, 2)]
    assert [(point.method, point.round) for point in points] == listed
    assert {round(point.epsilon, 1) for point in points if point.round == 2} == {6.0, 0.0}
    assert (tmp_path / "private-silos.png").stat().st_size > 10_000
    assert "MR-MTL, lambda 1" in said.getvalue()
    assert "0.02394" in said.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_schools_with_noise_have_the_printed_order_and_errors(tmp_path: Path) -> None:
    points = reproduce("private-silos", seeds=5, output=tmp_path, console=Console(file=io.StringIO()))
    found = {
        method: np.mean([point.of_pupils for point in points if point.method == method and point.of_pupils is not None])
        for method in private_silos.METHODS
    }
    assert found["mr-mtl"] < found["fedavg"] < found["local"]
    for method, (_, _, printed) in private_silos.METHODS.items():
        assert found[method] == pytest.approx(printed, abs=6e-4)
