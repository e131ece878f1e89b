"""What a problem refuses, and how it says so."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.errors import ConfigError, RunError
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems import build_problem
from coterie_client.problems.losses import LeastSquares, Logistic, resolve_row_loss

OVERLAP = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([1.0, -1.0, 1.0, -1.0])
SEPARATE = OVERLAP[0], np.array([-1.0, -1.0, 1.0, 1.0])
TOUCHING = np.array([[0.0], [1.0], [1.0], [3.0]]), np.array([-1.0, -1.0, 1.0, 1.0])
ONE_CLASS = OVERLAP[0], np.ones(4)


def _build(loss, *users, **config):
    names = [f"u{i}" for i in range(len(users))]
    return build_problem(ProblemConfig(loss=loss, **config), names, [a for a, _ in users], [y for _, y in users])


@pytest.mark.parametrize(
    "mistake",
    [
        {"loss": "hinge"},
        {"loss": "package.module"},
        {"loss": "package/module:name"},
        {"loss": "logistic", "l2": -1.0},
        {"loss": "logistic", "l2": float("nan")},
        {"loss": "huber", "huber_delta": 0.0},
        {"loss": "poisson", "log_mean_limit": -1.0},
        {"loss": "poisson", "log_mean_limit": 51.0},
        {"loss": "logistic", "reduction": "median"},
        {"loss": "logistic", "weight": 1},
    ],
)
def test_a_wrong_configuration_is_refused(mistake):
    with pytest.raises(ValidationError):
        ProblemConfig(**mistake)


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_labels_other_than_plus_and_minus_one_are_refused_by_user_and_value(loss):
    with pytest.raises(ConfigError, match=r"user 'u1' has the label 2, labels must be -1 or \+1"):
        _build(loss, OVERLAP, (OVERLAP[0], np.array([1.0, -1.0, 2.0, 0.0])))


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ((np.empty((0, 1)), np.empty(0)), "user 'u1' has no rows"),
        ((np.array([[np.nan]]), np.ones(1)), "user 'u1' has nan in row 0, feature 0"),
        ((np.ones((2, 1)), np.array([1.0, np.inf])), "user 'u1' has the target inf in row 1"),
        ((np.ones((2, 3)), np.ones(2)), "user 'u1' has rows of 3 features, the problem has 1"),
        ((np.ones((2, 1)), np.ones(3)), r"user 'u1' has targets of shape \(3,\), wanted \(2,\)"),
        ((np.ones(2), np.ones(2)), r"user 'u1' has features of shape \(2,\)"),
    ],
)
def test_unusable_rows_are_refused_by_user(user, message):
    with pytest.raises(ConfigError, match=message):
        _build("least_squares", OVERLAP, user)


def test_a_host_needs_users_with_names_and_arrays_of_their_own():
    config = ProblemConfig(loss="logistic")
    with pytest.raises(ConfigError, match="0 users"):
        build_problem(config, [], [], [])
    with pytest.raises(ConfigError, match="user 'a' is listed twice"):
        build_problem(config, ["a", "a"], [OVERLAP[0]] * 2, [OVERLAP[1]] * 2)
    with pytest.raises(ConfigError, match="targets are given for 1 users, wanted 2"):
        build_problem(config, ["a", "b"], [OVERLAP[0]] * 2, [OVERLAP[1]])


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_a_single_class_is_refused_while_the_intercept_is_free(loss):
    for l2 in (0.0, 0.1):
        problem = _build(loss, OVERLAP, ONE_CLASS, l2=l2)
        assert problem.coercive()[0] is None
        with pytest.raises(ConfigError, match=r"1 of 2 users .* user 'u1': all its rows have the label \+1"):
            problem.check()
    _build(loss, OVERLAP, ONE_CLASS, l2=0.1, intercept=False).check()


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
def test_separable_classes_are_refused_without_l2_only(loss):
    problem = _build(loss, OVERLAP, SEPARATE, TOUCHING)
    reasons = problem.coercive()
    assert reasons[0] is None
    assert all(reason is not None and "separable" in reason for reason in reasons[1:])
    _build(loss, OVERLAP, SEPARATE, TOUCHING, l2=1e-6).check()


def test_separability_is_decided_as_a_linear_program_decides_it():
    from scipy import optimize

    rng = np.random.default_rng(0)
    users = [(rng.normal(size=(m, 2)), np.where(rng.random(m) < 0.5, 1.0, -1.0)) for m in rng.integers(3, 12, 120)]
    users = [(a, y) for a, y in users if abs(y.sum()) < len(y)]
    found = [reason is None for reason in _build("logistic", *users).coercive()]
    for overlap, (a, y) in zip(found, users, strict=True):
        signed = y[:, None] * np.hstack([a, -np.ones((len(a), 1))])
        # max sum_r y_r a_r.v with y_r a_r.v >= 0 and v in a box: zero exactly when no direction separates.
        program = optimize.linprog(-signed.sum(axis=0), A_ub=-signed, b_ub=np.zeros(len(a)), bounds=(-1, 1))
        assert overlap == (program.fun > -1e-9)
    assert 20 < sum(found) < len(found) - 20


def test_least_squares_needs_rows_that_span_the_space_or_l2():
    flat = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), np.ones(3)
    with pytest.raises(ConfigError, match="its rows span 2 of 3 dimensions and l2 is 0"):
        _build("least_squares", flat).check()
    _build("least_squares", flat, l2=0.1).check()
    _build("huber_distance", flat).check()


def test_many_offenders_are_counted_and_some_named():
    with pytest.raises(ConfigError, match=r"5 of 5 users .*'u0'.*'u1'.*'u2'.*; and 2 more"):
        _build("logistic", *[ONE_CLASS] * 5).check()


def test_an_unbounded_local_problem_names_its_user_or_is_nan():
    problem = _build("squared_hinge", OVERLAP, ONE_CLASS, OVERLAP)
    zero = np.zeros((3, 2))
    with pytest.raises(RunError, match=r"the local problem of user 'u1' has no minimiser"):
        problem.argmin(zero, 0.0)
    found = problem.argmin(zero, np.array([0.0, 0.0, 1.0]), allow_unbounded=True)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()
    assert np.isfinite(problem.argmin(zero, 1e-3)).all()  # a ridge is enough


@pytest.mark.parametrize("loss", ["huber", "logistic", "huber_distance"])
def test_a_tilt_steeper_than_the_loss_is_unbounded(loss):
    problem = _build(loss, OVERLAP, OVERLAP)
    tilt = np.zeros((2, problem.d))
    tilt[1, 0] = 100.0
    found = problem.argmin(tilt, 0.0, allow_unbounded=True)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()
    with pytest.raises(RunError, match="'u1'"):
        problem.argmin(tilt[1:], 0.0, users=np.array([1]))


def test_separable_logistic_rows_have_no_minimiser_though_the_slope_vanishes_at_infinity():
    problem = _build("logistic", SEPARATE)
    assert np.isnan(problem.argmin(np.zeros((1, 2)), 0.0, allow_unbounded=True)).all()


def test_models_of_another_shape_are_a_bug_of_the_caller():
    problem = _build("logistic", OVERLAP)
    with pytest.raises(ValueError, match=r"shape \(1, 3\), wanted \(1, 2\)"):
        problem.value(np.zeros((1, 3)))
    with pytest.raises(ValueError, match="ridge is -1"):
        problem.argmin(np.zeros((1, 2)), -1.0)


class _PseudoHuber:
    """sqrt(1 + (s - y)^2), a user's own loss."""

    is_classifier = False
    curvature_bound = 1.0
    curvature_floor = 0.0

    def value(self, s, y):
        return np.sqrt(1.0 + (s - y) ** 2)

    def slope(self, s, y):
        return (s - y) / self.value(s, y)

    def curvature(self, s, y):
        return self.value(s, y) ** -3.0

    def check_targets(self, y, user):
        if (y < 0).any():
            raise ConfigError(f"user {user!r} has the target {y.min():g}, wanted none below 0")

    def predict(self, s):
        return s


class _NeedsArguments(_PseudoHuber):
    def __init__(self, scale):
        self.scale = scale


@pytest.fixture
def own_losses(monkeypatch):
    module = ModuleType("own_losses")
    module.PseudoHuber = _PseudoHuber
    module.ready = _PseudoHuber()
    module.NeedsArguments = _NeedsArguments
    module.nothing = object()
    for name, change in {
        "unbounded": {"curvature_bound": float("inf")},
        "undecided": {"is_classifier": "no"},
        "upside_down": {"curvature_floor": 2.0},
    }.items():
        setattr(module, name, type(name, (_PseudoHuber,), change))
    monkeypatch.setitem(sys.modules, "own_losses", module)


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize("name", ["PseudoHuber", "ready"])
def test_a_loss_of_ones_own_works_like_a_built_in_one(name):
    rng = np.random.default_rng(1)
    users = [(rng.normal(size=(m, 2)), rng.random(m)) for m in (5, 9, 9)]
    problem = _build(f"own_losses:{name}", *users, l2=0.01)
    problem.check()
    x = problem.argmin(np.zeros((3, 3)), 0.0)
    np.testing.assert_allclose(problem.gradient(x), 0.0, atol=1e-11)
    with pytest.raises(ConfigError, match="user 'u0' has the target -1"):
        _build(f"own_losses:{name}", (np.ones((1, 2)), -np.ones(1)))


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:Loss", "cannot be imported: ModuleNotFoundError"),
        ("own_losses:Missing", "module 'own_losses' has no 'Missing'"),
        ("own_losses:NeedsArguments", "its class must take no arguments: TypeError"),
        ("own_losses:nothing", r"is a object without value\(\), slope\(\)"),
        ("own_losses:unbounded", "has curvature_bound inf, it must be a finite number"),
        ("own_losses:undecided", "has is_classifier 'no', it must be True or False"),
        ("own_losses:upside_down", "has curvature from 2.0 to 1.0, wanted floor <= bound"),
    ],
)
def test_a_path_that_leads_to_no_row_loss_says_why(path, message):
    with pytest.raises(ConfigError, match=message):
        resolve_row_loss(ProblemConfig(loss=path))


def test_a_built_in_name_resolves_without_an_import():
    assert resolve_row_loss(ProblemConfig(loss="logistic")) == Logistic()
    assert resolve_row_loss(ProblemConfig(loss="least_squares")) == LeastSquares()


@pytest.mark.parametrize("statement", ["raise SystemExit(7)", "raise BaseException('no')", "1 / 0", "import no_such_module_either", "def"])
def test_a_module_that_fails_on_import_is_named_as_a_loss(statement, tmp_path, monkeypatch):
    (tmp_path / "failing_loss.py").write_text(statement + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^loss 'failing_loss:Loss' cannot be imported: "):
        resolve_row_loss(ProblemConfig(loss="failing_loss:Loss"))
