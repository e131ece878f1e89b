"""The reference optima of the fixtures (CVXPY), in few rounds, and what a round engine relies on."""

import asyncio
import dataclasses

import numpy as np
import pytest

from coterie.errors import RunError
from coterie_server.maths.consensus import begin, step
from tests.fixture_losses import SquaredHinge


def grouped(losses, labels, second_order=True):
    """The oracle of the sums over groups, and the list of its answers' values, one per ask."""
    asked = []

    async def ask(points):
        values, gradients, hessians = losses(points[labels])
        members = np.arange(len(points))[:, None] == labels
        sums = (members @ values, members @ gradients, np.einsum("kn,nde->kde", members, hessians))
        asked.append(sums[0])
        return sums if second_order else (*sums[:2], None)

    return ask, asked


async def minimize(ask, start, tolerance=1e-9, limit=500):
    """Makes steps until all groups converge or `limit` rounds have passed."""
    state = begin(start)
    while state.n_rounds < limit and not state.converged.all():
        state = step(state, *await ask(state.query), tolerance)
    return state


def solve(ask, start, **options):
    return asyncio.run(minimize(ask, start, **options))


@pytest.mark.parametrize("n_users", [6, 60])
@pytest.mark.parametrize(("second_order", "most_rounds"), [(True, 25), (False, 60)])
def test_one_group_of_all_users_reaches_the_global_optimum_in_few_rounds(n_users, second_order, most_rounds):
    losses = SquaredHinge(n_users)
    ask, asked = grouped(losses, np.zeros(n_users, int), second_order)
    state = solve(ask, np.zeros((1, 3)))
    assert state.converged.all()
    assert state.values.sum() == pytest.approx(losses.fixture["global"]["sum_f"], rel=1e-9)
    np.testing.assert_allclose(state.points[0], losses.fixture["global"]["x"], atol=1e-6)
    assert state.n_rounds == len(asked) < most_rounds


@pytest.mark.parametrize("n_users", [6, 60])
@pytest.mark.parametrize(("second_order", "most_rounds"), [(True, 25), (False, 150)])
def test_one_group_per_known_cluster_reaches_the_oracle_optimum_in_few_rounds(n_users, second_order, most_rounds):
    losses = SquaredHinge(n_users)
    ask, asked = grouped(losses, losses.labels, second_order)
    state = solve(ask, np.zeros((3, 3)))
    assert state.converged.all()
    assert state.values.sum() == pytest.approx(losses.fixture["oracle"]["sum_f"], rel=1e-9)
    assert state.n_rounds == len(asked) < most_rounds


async def envelope(losses, y, quadratic):
    """Value, gradient and Hessian at y (d,) of each env_i(y) = min_x f_i(x) + q/2 |x - y|^2, and the minimizers (n, d)."""
    n, d = len(losses.rows), len(y)
    eye = quadratic * np.eye(d)

    async def ask(x):
        values, gradients, hessians = losses(x)
        return values + quadratic / 2 * ((x - y) ** 2).sum(axis=1), gradients + quadratic * (x - y), hessians + eye

    inner = await minimize(ask, np.tile(y, (n, 1)), 1e-13)
    assert inner.converged.all()
    hessians = losses(inner.points)[2]
    curved = quadratic * (np.eye(d) - quadratic * np.linalg.inv(hessians + eye))
    return inner.values, quadratic * (y - inner.points), curved, inner.points


@pytest.mark.parametrize("n_users", [6, 60])
@pytest.mark.parametrize("entry", [0, 1])
def test_one_group_on_the_moreau_envelopes_reaches_the_squared_penalty_optimum(n_users, entry):
    losses = SquaredHinge(n_users)
    known = losses.fixture["sq"][entry]
    quadratic = 2 * known["GAM"] * n_users

    async def ask(y):
        values, gradients, hessians, _ = await envelope(losses, y[0], quadratic)
        return np.array([values.sum()]), gradients.sum(axis=0)[None], hessians.sum(axis=0)[None]

    state = solve(ask, np.zeros((1, 3)))
    assert state.converged.all()
    assert state.n_rounds < 25
    assert state.values[0] / n_users == pytest.approx(known["cvxpy4"], rel=1e-8)  # CVXPY's own accuracy
    x = asyncio.run(envelope(losses, state.points[0], quadratic))[3]
    np.testing.assert_allclose(x, known["x"], atol=1e-5)
    penalty = sum(((x[i] - x[j]) ** 2).sum() for i in range(n_users) for j in range(i))
    # The mean-model form and the pairwise form of (4) are one objective.
    assert losses(x)[0].sum() + known["GAM"] * penalty == pytest.approx(state.values[0], rel=1e-9)


def test_the_first_newton_step_on_a_quadratic_lands_on_its_minimum():
    curvature = np.array([[3.0, 1.0], [1.0, 2.0]])
    target = np.array([1.0, -2.0])
    state = step(begin(np.zeros((1, 2))), np.array([0.0]), -(curvature @ target)[None], curvature[None])
    np.testing.assert_allclose(state.query[0], target, rtol=1e-14)


def test_the_first_quasi_newton_steps_are_those_computed_by_hand():
    # f = x^2 from x = 3: gradient 6, first direction -1; then s = -1, y = -2, so the secant step is -4/2 and lands on 0.
    state = step(begin(np.array([[3.0]])), np.array([9.0]), np.array([[6.0]]))
    assert state.query[0, 0] == 2.0
    state = step(state, np.array([4.0]), np.array([[4.0]]))
    assert state.query[0, 0] == 0.0


def quartic(points):
    values = (points**4).sum(axis=1) + np.cosh(points).sum(axis=1)
    hessians = np.stack([np.diag(12 * x**2 + np.cosh(x)) for x in points])
    return values, 4 * points**3 + np.sinh(points), hessians


def test_a_step_that_climbs_is_shortened_and_the_point_does_not_move():
    start = np.array([[1.0, 1.0]])
    state = step(begin(start), *quartic(start))
    refused = step(state, np.array([1e9]), np.ones((1, 2)), np.eye(2)[None])
    np.testing.assert_array_equal(refused.points, start)
    np.testing.assert_allclose(refused.query - start, 0.1 * (state.query - start))
    infinite = step(state, np.array([np.inf]), np.full((1, 2), np.nan), np.full((1, 2, 2), np.nan))
    np.testing.assert_array_equal(infinite.query, refused.query)


def test_a_far_start_needs_backtracking_and_still_converges():
    async def ask(points):  # log-cosh: full Newton steps diverge from |x| > 1.09
        values = np.logaddexp(points, -points).sum(axis=1)
        return values, np.tanh(points), np.stack([np.diag(1 - np.tanh(x) ** 2) for x in points])

    state = solve(ask, np.array([[3.0, -2.0]]))
    assert state.converged.all()
    np.testing.assert_allclose(state.points, 0, atol=1e-8)


def test_a_converged_group_is_not_asked_to_move_and_its_answers_are_ignored():
    targets, curvatures = np.array([[0.0, 0.0], [2.0, 1.0]]), np.stack([np.eye(2), np.diag([1.0, 50.0])])
    state = begin(np.zeros((2, 2)))
    state = step(state, np.array([0.0, 102.0]), np.array([[0.0, 0.0], [-2.0, -50.0]]), curvatures)
    assert state.converged.tolist() == [True, False]
    after = step(state, np.array([-9.0, 100.0]), np.array([[7.0, 7.0], [-1.0, 1.0]]), curvatures)
    np.testing.assert_array_equal(after.query[0], targets[0])
    assert after.values[0] == 0.0


@pytest.mark.parametrize("second_order", [True, False])
def test_a_group_has_the_same_bits_whatever_the_other_groups_do(second_order):
    async def ask(points):
        values, gradients, hessians = quartic(points)
        return values, gradients, hessians if second_order else None

    start = np.array([[1.0, 2.0], [0.1, -0.2], [5.0, 0.0]])
    together = solve(ask, start)
    for k in range(3):
        np.testing.assert_array_equal(solve(ask, start[k : k + 1]).points[0], together.points[k])


@pytest.mark.parametrize("second_order", [True, False])
def test_a_run_resumed_from_stored_arrays_has_the_same_bits(second_order):
    losses = SquaredHinge(6)
    ask, _ = grouped(losses, losses.labels, second_order)

    async def rounds(state, n):
        for _ in range(n):
            state = step(state, *await ask(state.query))
        return state

    whole = asyncio.run(rounds(begin(np.zeros((3, 3))), 8))
    half = asyncio.run(rounds(begin(np.zeros((3, 3))), 4))
    stored = {f.name: value.copy() if isinstance(value := getattr(half, f.name), np.ndarray) else value for f in dataclasses.fields(half)}
    resumed = asyncio.run(rounds(dataclasses.replace(half, **stored), 4))
    for field in dataclasses.fields(whole):
        np.testing.assert_array_equal(getattr(whole, field.name), getattr(resumed, field.name))


@pytest.mark.parametrize("second_order", [True, False])
def test_a_tolerance_below_rounding_ends_by_stalling_and_not_at_the_limit(second_order):
    losses = SquaredHinge(60)
    ask, _ = grouped(losses, losses.labels, second_order)
    state = solve(ask, np.zeros((3, 3)), tolerance=0.0, limit=400)
    assert state.converged.all()
    assert np.linalg.norm(state.gradients, axis=1).max() < 1e-5


def test_a_tiny_optimal_value_is_still_reached():
    async def ask(points):
        square = ((points - 1) ** 2).sum(axis=1)
        return square**2, 4 * square[:, None] * (points - 1), None

    state = solve(ask, np.array([[3.0, 4.0]]))
    assert state.converged.all()
    assert np.linalg.norm(state.gradients) <= 1e-9 * (1 + state.first_norms[0])


def test_hessians_without_curvature_do_not_break_the_step():
    async def ask(points):  # flat in the second coordinate
        return points[:, 0] ** 2, points * [2.0, 0.0], np.array([[[2.0, 0.0], [0.0, 0.0]]])

    state = solve(ask, np.array([[3.0, 5.0]]))
    np.testing.assert_allclose(state.points, [[0.0, 5.0]])


def test_values_that_contradict_their_gradients_are_refused_by_group():
    async def ask(points):
        values, gradients, hessians = quartic(points)
        return values, gradients * [[1.0], [-1.0]], hessians

    with pytest.raises(RunError, match="group 1"):
        solve(ask, np.ones((2, 2)))
    with pytest.raises(RunError, match="group 0 is not finite"):
        step(begin(np.zeros((1, 1))), np.array([np.nan]), np.zeros((1, 1)))


# ---- functions without a minimiser


def margins(loss, rows, targets, l2=0.0, *, newton=True):
    """An oracle of one group: sum of phi(a.x, y) + l2/2 |x|^2; phi is logistic, a squared hinge, or Poisson's."""
    rows, y = np.asarray(rows, float), np.asarray(targets, float)

    async def ask(points):
        s = rows @ points[0]
        if loss == "logistic":
            p = 1 / (1 + np.exp(y * s))
            value, slope, curvature = np.logaddexp(0, -y * s), -y * p, p * (1 - p)
        elif loss == "hinge":
            short = np.maximum(1 - y * s, 0)
            value, slope, curvature = short**2, -2 * y * short, 2.0 * (short > 0)
        else:
            value, slope, curvature = np.exp(s) - y * s, np.exp(s) - y, np.exp(s)
        gradient = rows.T @ slope + l2 * points[0]
        hessian = rows.T @ (curvature[:, None] * rows) + l2 * np.eye(rows.shape[1])
        return np.array([value.sum() + l2 / 2 * points[0] @ points[0]]), gradient[None], hessian[None] if newton else None

    return ask


RANDOM = np.random.default_rng(5)
CLOUD = np.column_stack([RANDOM.normal(size=(40, 2)), np.ones(40)])
SIDES = np.sign(CLOUD @ [1.0, -2.0, 0.3])
NOISY = np.where(RANDOM.random(40) < 0.2, -SIDES, SIDES)
RARE = np.column_stack([CLOUD, (np.arange(40) < 5) * 1.0])  # a feature that only five rows have, all of one label
WAYS = [(True, 1.0), (True, 1e-6), (True, 1e7), (False, 1.0)]  # without Hessians the search itself depends on units
RARE_LABELS = np.where(np.arange(40) < 5, 1.0, NOISY)


@pytest.mark.parametrize(("newton", "units"), WAYS, ids=str)
@pytest.mark.parametrize(
    ("loss", "rows", "targets"),
    [("logistic", CLOUD, SIDES), ("logistic", RARE, RARE_LABELS), ("logistic", CLOUD, np.ones(40)), ("poisson", CLOUD, np.zeros(40))],
    ids=["separable", "quasi-separable", "one-label", "no-counts"],
)
def test_a_loss_without_a_minimiser_is_told_from_one_that_has_converged(loss, rows, targets, newton, units):
    scaled = rows * np.array([units, *np.ones(rows.shape[1] - 1)])
    with np.errstate(over="ignore"):
        state = asyncio.run(minimize(margins(loss, scaled, targets, newton=newton), np.zeros((1, rows.shape[1]))))
    assert state.converged.all()
    assert state.unbounded.tolist() == [True]


@pytest.mark.parametrize(("newton", "units"), WAYS, ids=str)
@pytest.mark.parametrize(
    ("loss", "rows", "targets", "l2"),
    [
        ("logistic", CLOUD, NOISY, 0.0),
        ("logistic", CLOUD, SIDES, 1e-5),
        ("poisson", CLOUD, np.arange(40) % 3, 0.0),
        ("logistic", np.vstack([CLOUD, -CLOUD]), np.ones(80), 0.0),  # the minimiser is 0, where the search starts
    ],
    ids=["noisy", "little-l2", "counts", "zero"],
)
def test_a_minimiser_is_one_in_any_units(loss, rows, targets, l2, newton, units):
    scaled = rows * np.array([units, *np.ones(rows.shape[1] - 1)])
    with np.errstate(over="ignore"):
        state = asyncio.run(minimize(margins(loss, scaled, targets, l2 * min(1.0, units), newton=newton), np.zeros((1, rows.shape[1]))))
    assert state.converged.all()
    assert not state.unbounded.any()
    assert not state.flat.any()


@pytest.mark.parametrize(("l2", "is_flat"), [(0.0, True), (1e-3, False)])
def test_a_squared_hinge_without_active_rows_has_several_minimisers(l2, is_flat):
    state = asyncio.run(minimize(margins("hinge", CLOUD, SIDES, l2), np.zeros((1, 3))))
    assert state.converged.all()
    assert not state.unbounded.any()
    assert state.flat.tolist() == [is_flat]
