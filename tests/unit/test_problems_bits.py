"""User i's results are the same to the last bit whoever shares its host, and whoever is asked about beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.experiment.problem import DISTANCE_LOSSES, MARGIN_LOSSES, ProblemConfig
from coterie_client.problems import build_problem, newton
from coterie_client.problems.margins import MarginBlock

LOSSES = (*MARGIN_LOSSES, *DISTANCE_LOSSES)


class _World:
    """Users with rows, models and a local problem each; any of them can be put on one host."""

    def __init__(self, loss, n, p, most_rows, seed, **config):
        rng = np.random.default_rng(seed)
        self.config = ProblemConfig(loss=loss, **config)
        counts = rng.integers(1, most_rows + 1, n)
        self.features = [2.0 * rng.normal(size=(m, p)) for m in counts]
        low = 0.0 if loss == "poisson" else -1.0
        self.targets = [np.where(rng.random(m) < 0.5, 1.0, low) for m in counts]
        self.test_features = [rng.normal(size=(m, p)) for m in rng.integers(1, 2 * most_rows, n)]
        self.test_targets = [np.where(rng.random(len(a)) < 0.5, 1.0, low) for a in self.test_features]
        d = p + self.config.has_intercept
        self.x, self.tilt, self.start = rng.normal(size=(3, n, d))
        self.start *= rng.choice([0.0, 1.0, 50.0], size=(n, 1))
        self.row = rng.integers(0, counts)
        self.ridge = 10.0 ** rng.uniform(-3, 2, n)

    def host(self, users):
        return build_problem(
            self.config,
            [f"u{i}" for i in users],
            [self.features[i] for i in users],
            [self.targets[i] for i in users],
        )

    def results(self, problem, users, among=None, lay_out=np.ascontiguousarray):
        """All results about `users`, whose positions on the host are `among`."""
        x, tilt, start = (lay_out(a[users]) for a in (self.x, self.tilt, self.start))
        tests = [self.test_features[i] for i in users], [self.test_targets[i] for i in users]
        found = {
            "value": problem.value(x, among),
            "gradient": problem.gradient(x, among),
            "row gradient": problem.row_gradient(x, self.row[users], among),
            "hessian": problem.hessian(x, among),
            "argmin": problem.argmin(tilt, self.ridge[users], start, among),
            "evaluate": np.stack(problem.evaluate(x, *tests, among), axis=1),
        }
        if among is None:
            found |= {"smoothness": problem.smoothness(), "strong convexity": problem.strong_convexity()}
            found |= {"row smoothness": problem.row_smoothness(), "row strong convexity": problem.row_strong_convexity()}
        return found


def _assert_same(part, whole, users):
    for name, rows in part.items():
        assert np.array_equal(rows, whole[name][users]), f"{name} differs for {len(users)} users"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("p", [1, 2, 3, 19, 20, 100])
def test_a_user_alone_gets_the_bits_it_gets_among_many(loss, p):
    n, most_rows = (60, 40) if p < 50 else (10, 80)
    world = _World(loss, n, p, most_rows, seed=p, l2=0.01)
    if p >= 50:
        world.ridge += 10.0  # weak ridges are tried on small models, where they are quick
    everyone = np.arange(n)
    problem = world.host(everyone)
    whole = world.results(problem, everyone)
    for i in (0, 1, n // 2, n - 1):
        one = np.array([i])
        _assert_same(world.results(world.host(one), one), whole, one)
        _assert_same(world.results(problem, one, one), whole, one)


@settings(max_examples=25)
@given(
    loss=st.sampled_from(LOSSES),
    p=st.sampled_from([1, 2, 3, 7, 20]),
    reduction=st.sampled_from(["mean", "sum"]),
    intercept=st.booleans(),
    l2=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_any_partition_over_hosts_gives_the_same_bits(loss, p, reduction, intercept, l2, seed, data):
    n = 30
    world = _World(loss, n, p, 40, seed, reduction=reduction, intercept=intercept, l2=l2)
    whole = world.results(world.host(np.arange(n)), np.arange(n))
    host_of = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    for host in np.unique(host_of):
        users = np.flatnonzero(host_of == host)
        _assert_same(world.results(world.host(users), users), whole, users)


@settings(max_examples=15)
@given(loss=st.sampled_from(LOSSES), p=st.sampled_from([1, 3, 20]), seed=st.integers(0, 10_000), data=st.data())
def test_any_subset_of_a_host_gives_the_same_bits(loss, p, seed, data):
    n = 30
    world = _World(loss, n, p, 40, seed, l2=0.02)
    problem = world.host(np.arange(n))
    whole = world.results(problem, np.arange(n))
    users = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    _assert_same(world.results(problem, users, users), whole, users)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("p", [1, 3, 20])
def test_the_layout_of_the_callers_arrays_does_not_show(loss, p):
    world = _World(loss, 20, p, 40, seed=p)
    users = np.arange(20)
    problem = world.host(users)
    whole = world.results(problem, users)
    world.features = [np.asfortranarray(a) for a in world.features]
    problem = world.host(users)
    for lay_out in (np.asfortranarray, lambda a: np.repeat(a, 2, axis=1)[:, ::2], lambda a: a[::-1].copy()[::-1]):
        _assert_same(world.results(problem, users, lay_out=lay_out), whole, users)
    one = np.array([7])
    _assert_same(world.results(problem, one, one, lay_out=np.asfortranarray), whole, one)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_thousand_users_give_the_bits_of_one(loss):
    world = _World(loss, 1000, 2, 12, seed=11, l2=1e-3)
    everyone = np.arange(1000)
    whole = world.results(world.host(everyone), everyone)
    for i in (0, 333, 999):
        one = np.array([i])
        _assert_same(world.results(world.host(one), one), whole, one)


def test_a_user_that_diverges_or_is_singular_changes_no_bit_of_the_others():
    world = _World("squared_hinge", 12, 2, 20, seed=12)
    users = np.arange(12)
    whole = world.results(world.host(users), users)["argmin"]
    world.features[3], world.targets[3] = np.ones((4, 2)), np.ones(4)
    world.ridge[3] = 0.0
    found = world.host(users).argmin(world.tilt, world.ridge, world.start, allow_unbounded=True)
    others = np.delete(users, 3)
    assert np.isnan(found[3]).all()
    assert np.array_equal(found[others], whole[others])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("ridge", [0.0, 0.7, 40.0])
def test_what_was_computed_ahead_changes_no_bit(loss, ridge):
    n, users = 30, np.array([2, 3, 11])
    world = _World(loss, n, 3, 40, seed=4, l2=0.02, intercept=False)
    fresh, problem = world.host(np.arange(n)), world.host(np.arange(n))
    start = world.x  # of moderate size: without a ridge, some starts are far from everything
    wanted = fresh.argmin(world.tilt, ridge, start, allow_unbounded=True)
    problem.look_ahead(start, ridge)
    for _ in range(2):  # the second time what is known has been used before
        np.testing.assert_array_equal(problem.argmin(world.tilt, ridge, start, allow_unbounded=True), wanted)
        np.testing.assert_array_equal(problem.argmin(world.tilt, ridge, start.copy(), allow_unbounded=True), wanted)
    np.testing.assert_array_equal(problem.argmin(world.tilt[users], ridge, start[users], users, allow_unbounded=True), wanted[users])
    for other in ({"ridge": ridge + 1.0, "start": start}, {"ridge": ridge, "start": start + 1.0}, {"ridge": ridge}):
        np.testing.assert_array_equal(
            problem.argmin(world.tilt, allow_unbounded=True, **other), fresh.argmin(world.tilt, allow_unbounded=True, **other)
        )
    problem.look_ahead(start)
    np.testing.assert_array_equal(problem.gradient(start), fresh.gradient(start))
    np.testing.assert_array_equal(problem.gradient(start + 1.0), fresh.gradient(start + 1.0))
    np.testing.assert_array_equal(problem.gradient(start[users], users), fresh.gradient(start[users], users))
    np.testing.assert_array_equal(problem.argmin(world.tilt, ridge, start, allow_unbounded=True), wanted)


def test_what_was_computed_ahead_is_used(monkeypatch):
    world = _World("squared_hinge", 20, 3, 40, seed=1, l2=0.02)
    problem, looks = world.host(np.arange(20)), []
    look = MarginBlock.look
    monkeypatch.setattr(MarginBlock, "look", lambda block, x: (looks.append(1), look(block, x))[1])

    def times(work):
        looks.clear()
        work()
        return len(looks)

    n_stacks, argmin = len(problem.stacks), lambda: problem.argmin(world.tilt, 2.0, world.x)
    before = times(argmin)
    assert times(lambda: problem.look_ahead(world.x, 2.0)) == n_stacks
    assert times(argmin) == before - n_stacks
    assert times(lambda: problem.look_ahead(world.x)) == times(lambda: problem.look_ahead(world.x)) == n_stacks
    assert times(lambda: problem.gradient(world.x)) == 0
    assert times(argmin) == before


def test_who_needs_damping_does_not_change_how_others_step(monkeypatch):
    """Users with a ridge arrive with one step, whatever the comparison of heights says; the others, without curvature, are damped."""
    monkeypatch.setattr(newton, "_accepted", lambda old, *_: np.zeros(len(old.value), dtype=np.bool_))
    world = _World("least_squares", 12, 3, 8, seed=5, l2=0.0, intercept=False)
    for i in (3, 7):
        world.features[i], world.targets[i] = world.features[i][:1], world.targets[i][:1]  # one row: flat in two directions
    world.ridge[:] = 1.0
    world.ridge[[3, 7]] = 0.0
    strong, everyone = np.delete(np.arange(12), [3, 7]), np.arange(12)
    alone = world.host(strong).argmin(world.tilt[strong], 1.0, world.x[strong])
    among = world.host(everyone).argmin(world.tilt, world.ridge, world.x, allow_unbounded=True)
    assert np.isnan(among[[3, 7]]).all()
    np.testing.assert_array_equal(among[strong], alone)
