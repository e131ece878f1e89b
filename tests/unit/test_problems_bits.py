"""User i's results are the same to the last bit whoever shares its host, and whoever is asked about beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.problem import DISTANCE_LOSSES, MARGIN_LOSSES, ProblemConfig
from coterie_client.problems import build_problem

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


@settings(max_examples=25, deadline=None)
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


@settings(max_examples=15, deadline=None)
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
