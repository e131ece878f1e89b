"""Means that bear users who lie, against the formulas of their papers written out, and where they are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.errors import ConfigError, RunError
from coterie.experiment import plugins
from coterie.experiment.config import experiment_from, named_code
from coterie.experiment.robust import RULES, Robust
from coterie_server.families.robust import centre_of, check
from tests.packaged import installed

Matrix = NDArray[np.float64]


def answers(k: int, d: int, n_liars: int = 0, seed: int = 0) -> Matrix:
    found = np.random.default_rng(seed).standard_normal((k, d))
    found[k - n_liars :] *= 1e6
    return found


def centre(rule: Any, rows: Matrix, before: Matrix | None = None, fraction: float | None = None) -> Matrix:
    return centre_of(Robust(rule=rule, fraction=fraction), [rows], before).values


def krum_scores(rows: Matrix, f: int) -> list[float]:
    """Blanchard and others (2017): the sum of squared distances to the n - f - 2 closest vectors."""
    k = len(rows)
    return [float(sum(sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(k) if j != i)[: k - f - 2])) for i in range(k)]


def test_the_median_and_the_trimmed_mean_are_those_of_each_number() -> None:
    rows = answers(9, 5, n_liars=2)
    assert np.array_equal(centre("median", rows), [sorted(column)[4] for column in rows.T])
    wanted = [sum(sorted(column)[2:7]) / 5 for column in rows.T]
    np.testing.assert_allclose(centre("trimmed_mean", rows, fraction=0.2), wanted, rtol=1e-14)


def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median() -> None:
    rows = answers(7, 3, n_liars=3)
    found = centre("geometric_median", rows)

    def total(point: Matrix) -> float:
        return float(np.linalg.norm(rows - point, axis=1).sum())

    directions = np.random.default_rng(1).standard_normal((50, 3))
    assert all(total(found) <= total(found + 1e-2 * step) for step in directions)
    weights = 1 / np.linalg.norm(rows - found, axis=1)[:, None]
    np.testing.assert_allclose(found, (weights * rows).sum(axis=0) / weights.sum(), atol=1e-5)  # a fixed point of Weiszfeld's step


@pytest.mark.parametrize(("k", "fraction"), [(9, 0.2), (11, 0.3), (5, 0.2)])
def test_krum_is_the_answer_nearest_to_its_neighbours_and_multi_krum_the_mean_of_such(k: int, fraction: float) -> None:
    rows = answers(k, 4, n_liars=1)
    f = Robust(rule="krum", fraction=fraction).bears(k)
    scores = krum_scores(rows, f)
    assert np.array_equal(centre("krum", rows, fraction=fraction), rows[int(np.argmin(scores))])
    kept = sorted(range(k), key=lambda i: scores[i])[: k - f]
    np.testing.assert_allclose(centre("multi_krum", rows, fraction=fraction), rows[kept].mean(axis=0), rtol=1e-12)


def test_norm_clip_shortens_the_longest_changes_to_the_longest_of_the_others() -> None:
    before, rows = np.ones(3), answers(10, 3, n_liars=2) + 1
    lengths = np.linalg.norm(rows - before, axis=1)
    n_clipped = int(2 * 2 / 10 * (10 - 2))  # floor(2 f / n (n - f))
    limit = sorted(lengths)[10 - n_clipped - 1]
    wanted = before + np.mean([(row - before) * min(1, limit / length) for row, length in zip(rows, lengths, strict=True)], axis=0)
    found = centre_of(Robust(rule="norm_clip", fraction=0.2), [rows], before)
    np.testing.assert_allclose(found.values, wanted, rtol=1e-9)
    assert found.left.sum() == n_clipped


# Nine answers, of which the last two lie, and what byzfl 0.0.11 makes of them with f = 2 (Median, TrMean, GeometricMedian(nu=1e-9, T=5000),
# MultiKrum, and the mean after ARC). Its Krum counts k - f - 1 neighbours where the paper has k - f - 2, and takes another answer here.
NINE = np.array(
    [
        [0.0, 0.3, -0.27],
        [-0.89, -0.45, -0.99],
        [0.06, 1.34, -0.49],
        [-0.62, 0.49, 0.36],
        [0.11, -0.93, -0.03],
        [0.7, -1.34, -0.46],
        [-1.9, -1.29, -1.84],
        [40.0, -3.0, 5.0],
        [38.0, 9.0, -70.0],
    ]
)
BYZFL = {
    "median": [0.06, -0.45, -0.46],
    "trimmed_mean": [0.049999999999999975, -0.3760000000000001, -0.44799999999999995],
    "geometric_median": [0.010400426190793084, -0.1460579279220922, -0.5022763962169139],
    "multi_krum": [-0.3628571428571429, -0.26857142857142857, -0.5314285714285715],
    "norm_clip": [0.07250912493401947, -0.13584207719620373, -0.4502939103391679],
}


@pytest.mark.parametrize("rule", BYZFL)
def test_rules_are_those_of_byzfl(rule: Any) -> None:
    np.testing.assert_allclose(centre(rule, NINE), BYZFL[rule], rtol=1e-12, atol=2e-7 if rule == "geometric_median" else 0)


@pytest.mark.parametrize("rule", RULES)
def test_two_of_ten_who_send_anything_at_all_move_a_rule_no_further_than_the_others_are(rule: Any) -> None:
    honest = answers(8, 6)
    for lie in (1e3, 1e30, 1e200):
        liars = np.full((2, 6), lie)
        found = centre_of(Robust(rule=rule), [np.concatenate([honest, liars])], np.zeros(6))
        assert np.linalg.norm(found.values - honest.mean(axis=0)) <= 2 * np.linalg.norm(honest, axis=1).max()
        if rule not in ("median", "krum"):
            assert found.left[8:].all()


@pytest.mark.parametrize("rule", RULES)
def test_answers_that_are_no_numbers_count_among_those_who_lie(rule: Any) -> None:
    honest = answers(8, 6)
    for lie in (np.nan, np.inf, 1e300):
        liar = np.where(np.arange(6) == 4, lie, 0.0)
        found = centre_of(Robust(rule=rule), [honest[:3], np.tile(liar, (2, 1)), honest[3:]], np.zeros(6))
        assert found.left[3:5].all()
        # Both of the two of ten who may lie are known, so the rule is that of eight who do not.
        alone = {"multi_krum": honest.mean(axis=0), "trimmed_mean": honest.mean(axis=0), "norm_clip": honest.mean(axis=0)}
        np.testing.assert_allclose(found.values, alone.get(rule, centre_of(Robust(rule=rule, fraction=_hardly(rule)), [honest]).values))
    with pytest.raises(RunError, match="of 2 answers none has finite numbers"):
        centre_of(Robust(rule=rule), [np.full((2, 3), np.nan)])


def _hardly(rule: str) -> float | None:
    return None if "median" in rule else 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_bits_depend_on_the_answers_alone_and_not_on_the_messages_that_they_came_in(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie_server.families.robust._BLOCK", 50)  # several blocks
    rows = answers(8, 37).astype(np.float32)
    whole = centre_of(Robust(rule=rule), [rows], rows[0])
    for at in (1, 5):
        parts = centre_of(Robust(rule=rule), np.split(rows, [at]), rows[0])
        assert parts.values.tobytes() == whole.values.tobytes()
        assert np.array_equal(parts.left, whole.left)


@pytest.mark.parametrize("rule", RULES)
def test_equal_answers_are_their_own_centre_and_a_single_answer_too(rule: Any) -> None:
    row = answers(1, 5)
    for k in (1, 2, 3, 8):
        np.testing.assert_allclose(centre(rule, np.tile(row, (k, 1)), np.zeros(5)), row[0], rtol=1e-15)


@pytest.mark.parametrize("rule", RULES)
def test_of_two_answers_all_rules_take_the_middle_or_shorten_the_longer(rule: Any) -> None:
    rows = np.array([[1.0, 0.0], [0.0, 2.0]])
    wanted = [0.5, 1.0]  # f is 0: nobody can say who lies
    np.testing.assert_allclose(centre(rule, rows, np.zeros(2)), wanted)


def test_of_equal_scores_krum_takes_the_earlier_member() -> None:
    rows = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])
    assert centre("krum", rows, fraction=0.2).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("rule", "k", "bears"), [("median", 9, 4), ("krum", 4, 0), ("krum", 5, 1), ("trimmed_mean", 3, 1), ("norm_clip", 10, 2)]
)
def test_a_rule_bears_no_more_than_its_number_of_answers_allows(rule: Any, k: int, bears: int) -> None:
    assert Robust(rule=rule).bears(k) == bears


def test_a_fraction_of_users_is_rounded_up_and_not_by_its_last_bit() -> None:
    assert [Robust(rule="norm_clip", fraction=fraction).most(k) for fraction, k in [(0.3, 10), (0.29, 100), (0.1, 5)]] == [3, 29, 1]


# ---- rules of others

TRIMMED = """
    import numpy as np
    from coterie.plugin import RobustRule

    def centre(rows, f, before):
        order = np.argsort(np.linalg.norm(rows - np.median(rows, axis=0), axis=1), kind="stable")
        left = np.zeros(len(rows), dtype=bool)
        left[order[len(rows) - f :]] = True
        return rows[~left].mean(axis=0), left

    def nobody(rows):
        return np.zeros(len(rows), dtype=bool)

    NEAREST = RobustRule(centre=centre)
    SHORT = RobustRule(centre=lambda rows, f, before: (rows[0, 1:], nobody(rows)))
    COUNTED = RobustRule(centre=lambda rows, f, before: (rows.mean(axis=0), f))
    EMPTY = RobustRule(centre=lambda rows, f, before: (rows.mean(axis=0) * np.inf, nobody(rows)))
    FIRST = RobustRule(centre=lambda rows, f, before: (rows[0], nobody(rows)))
    BROKEN = RobustRule(centre=lambda rows, f, before: rows["no"])
    NONE = centre
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = installed(tmp_path, "pack-nearest", "1.5", {"coterie.rules": {"nearest": "pack_nearest:NEAREST"}}, {"pack_nearest": TRIMMED})
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["nearest", "pack_nearest:NEAREST"])
def test_a_rule_of_a_package_or_a_file_stands_in_for_the_mean(name: str) -> None:
    rows, robust = answers(10, 6, n_liars=2).astype(np.float32), Robust(rule=name, fraction=0.2)
    check(robust)
    found = centre_of(robust, [rows[:4], rows[4:]])
    np.testing.assert_allclose(found.values, rows[:8].mean(axis=0, dtype=np.float64))
    assert found.left.tolist() == [False] * 8 + [True] * 2
    rows[9] = np.nan  # which the rule does not see
    assert centre_of(robust, [rows]).values.tobytes() == found.values.tobytes()
    made = experiment_from({"name": "r", **NETWORK, "method": FEDAVG, "federation": {"robust": {"rule": name}}})
    assert made.packages == ({"pack-nearest": "1.5"} if name == "nearest" else {})
    assert named_code(made) == []  # hosts do not import it


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SHORT", r"returns as a centre float64 of shape \(4,\), want float64 of \(5,\)"),
        ("COUNTED", r"returns as who is left out int64 of shape \(\), want bool of \(1,\)"),
        ("EMPTY", "returns -?inf in a centre of finite answers"),
        ("FIRST", "another centre of the same answers in another order"),
        ("BROKEN", "has raised IndexError"),
        ("NONE", "is a function, want a coterie.plugin.RobustRule"),
        ("LOST", "does not exist"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said_before_the_run_needs_it(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"rule 'pack_nearest:{name}'.* {said}"):
        check(Robust(rule=f"pack_nearest:{name}"))


def test_a_rule_is_known_and_allowed() -> None:
    with pytest.raises(ConfigError, match=r"rule 'meddian' is unknown.*, krum.*did you mean"):
        experiment_from({"name": "r", **NETWORK, "method": FEDAVG, "federation": {"robust": {"rule": "meddian"}}})
    with plugins.code_allowed(False), pytest.raises(ConfigError, match="--allow-code"):  # as at an aggregator
        check(Robust(rule="nearest:NEAREST"))


FEDAVG = {"name": "fedavg"}
DIGITS = {"source": "digits", "partition": {"by": "classes", "users": 20, "classes_per_user": 2}}
NETWORK = {"model": {"name": "mlp", "hidden": [4], "classes": 10}, "data": DIGITS}
CONVEX = {"data": {"source": "ellipses"}, "problem": {"loss": "squared_hinge", "l2": 1e-3}}


def refusal(content: dict[str, Any], robust: dict[str, Any] | None = None, **federation: Any) -> str:
    with pytest.raises(ConfigError) as found:
        experiment_from({"name": "r", **content, "federation": {"robust": robust or {"rule": "median"}, **federation}})
    return str(found.value)


@pytest.mark.parametrize(
    ("content", "federation", "why"),
    [
        ({**NETWORK, "method": FEDAVG, "exact_sums": True}, {"sums": "masked", "hosts": 3}, "may lie about that too"),
        ({**NETWORK, "method": FEDAVG, "exact_sums": True}, {}, "with exact_sums hosts add them up"),
        ({**CONVEX, "method": {"name": "pdmm", "penalty": 0.1}}, {}, "its penalties bound how far one user pulls another"),
        ({**CONVEX, "method": {"name": "global"}}, {}, "uses more than a mean"),
        ({**NETWORK, "method": {"name": "local_network"}}, {}, "users share nothing"),
        ({**CONVEX, "method": {"name": "fed_mtl"}}, {}, "its own mean of the others"),
        (
            {**NETWORK, "method": {**FEDAVG, "average": "plain"}, "privacy": {"unit": "user", "clip": 1, "epsilon": 8, "delta": 0.01}},
            {},
            "noise",
        ),
    ],
)
def test_what_no_rule_can_do_is_refused_with_the_reason(content: dict[str, Any], federation: dict[str, Any], why: str) -> None:
    found = refusal(content, **federation)
    assert "federation.robust" in found
    assert why in found


def test_a_median_with_a_fraction_and_a_clip_for_known_clusters_are_refused() -> None:
    fraction = {"rule": "median", "fraction": 0.1}
    assert "want no fraction" in refusal({**NETWORK, "method": FEDAVG}, fraction)
    known = {**CONVEX, "method": {"name": "async_l2gd", "iterations": 9, "gamma": 1.0, "alpha": 0.5}}
    assert "do not begin at a common point" in refusal(known, {"rule": "norm_clip"})


def test_every_rule_has_an_experiment_that_is_the_same_after_it_was_written() -> None:
    import json

    from coterie.experiment.config import experiment_to_json

    for rule, more in itertools.product(RULES, ({}, {"fraction": 0.3})):
        if more and "median" in rule and rule != "trimmed_mean":
            continue
        one = experiment_from({"name": "r", **NETWORK, "method": FEDAVG, "federation": {"robust": {"rule": rule, **more}}})
        assert experiment_from(json.loads(experiment_to_json(one))) == one
