"""`fed_mtl` on convex problems: the problem of Smith, Chiang, Sanjabi and Talwalkar (2017), (1), with relations given and learnt.

"Fixture" is tests/fixtures/fed_mtl_6.json: optima from CVXPY, whose recipe it tells, on the rows of convex_clustering_6.json.
"""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.experiment.problem import ProblemConfig
from coterie.methods.fed_mtl import Config, Pull, Pulled
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.data import UserData
from coterie_client.data.sources import user_source
from coterie_client.interface.half import Inbox, Local
from coterie_client.methods.fed_mtl import CLIENT
from coterie_client.problems import build_problem
from coterie_deploy.engines.api import Result, run
from coterie_server.interface.half import Facts, Members, Replies, Setting
from coterie_server.methods.fed_mtl import relations
from coterie_server.methods.fed_mtl.half import Related
from tests.papers.fixture_data import FOLDER, experiment
from tests.simulation import Faults, World, bits, small_experiment

FIXTURE: list[dict[str, Any]] = json.loads((FOLDER / "fed_mtl_6.json").read_text(encoding="utf-8"))["cases"]
CASES = range(len(FIXTURE))
PATH = [[1, -1, 0, 0], [-1, 2, -1, 0], [0, -1, 2, -1], [0, 0, -1, 1]]


@functools.cache
def solved(place: int, hosts: int = 1, rounds: int = 500, **more: Any) -> Result:
    """A case of the fixture, to residuals of 1e-10 or what `more` says."""
    case = FIXTURE[place]
    method = {"name": "fed_mtl", "mu": case["mu"], "relations": case["relations"], **more}
    problem = {"loss": case["loss"], "l2": case["l2"]}
    return run(experiment(6, method, problem=problem, stop={"rounds": rounds, "residual": 1e-10}), hosts=hosts)


def models(result: Result, stage: str = "fed_mtl") -> np.ndarray:
    found = result.outcomes[stage].models
    assert found is not None
    return found


def matrix(place: int) -> np.ndarray:
    found = FIXTURE[place]["relations"]
    return np.eye(6) - 1 / 6 if found == "mean" else np.array(found)


def trained(method: dict[str, Any], **more: Any) -> Result:
    """Nine users in three clusters."""
    return run(small_experiment({"name": "fed_mtl", **method}, **{"stop": {"rounds": 500, "residual": 1e-10}, **more}))


# ---- the optimum


@pytest.mark.parametrize("place", CASES)
def test_the_optimum_is_that_of_cvxpy(place: int) -> None:
    wanted, result = FIXTURE[place], solved(place)
    assert result.history()[-1]["objective"] == pytest.approx(wanted["objective"], rel=1e-8)
    np.testing.assert_allclose(models(result), wanted["w"], atol=1e-5)
    assert result.history()[-1]["round"] < 150


@pytest.mark.parametrize("place", CASES)
def test_at_the_fixed_point_the_gradients_and_the_relations_balance(place: int) -> None:
    """grad f_i(w_i) + mu sum_j A_ij w_j = 0, with gradients computed here."""
    case, w = FIXTURE[place], models(solved(place))
    content = json.loads((FOLDER / "convex_clustering_6.json").read_text(encoding="utf-8"))
    pulls = case["mu"] * matrix(place) @ w
    for i, pull in enumerate(pulls):
        rows, targets = np.hstack([content["A"][i], -np.ones((len(content["A"][i]), 1))]), np.array(content["Y"][i])
        margins = targets * (rows @ w[i])
        slopes = -2 * np.maximum(0, 1 - margins) if case["loss"] == "squared_hinge" else -1 / (1 + np.exp(margins))
        gradient = (slopes * targets) @ rows / len(rows) + case["l2"] * np.array([w[i][0], w[i][1], 0])
        np.testing.assert_allclose(gradient, -pull, atol=1e-8)


def test_relations_to_the_mean_are_the_squared_distances_of_all_pairs() -> None:
    """mu/2 sum_i |w_i - wbar|^2 = GAM sum_{i<j} |w_i - w_j|^2 with GAM = mu / (2n), which method `squared` solves in another way."""
    squared = run(small_experiment({"name": "squared", "penalty": 0.7 / 18}))
    np.testing.assert_allclose(models(trained({"mu": 0.7})), models(squared, "squared"), atol=1e-8)


@pytest.mark.parametrize("free", [{"mu": 0.0}, {"mu": 3.0, "relations": np.zeros((9, 9)).tolist()}])
def test_without_relations_every_user_minimises_its_own_loss(free: dict[str, Any]) -> None:
    result = trained(free, references=["local"])
    np.testing.assert_allclose(models(result), models(result, "local"), atol=1e-7)


def test_a_strong_pull_to_the_mean_leaves_one_model_for_all() -> None:
    result = trained({"mu": 1e4}, references=["global"], stop={"rounds": 200})
    np.testing.assert_allclose(models(result), models(result, "global"), atol=1e-2)


def test_users_drawn_by_turns_end_at_the_same_optimum() -> None:
    some, everyone = trained({"mu": 0.1, "users_per_round": 4}), trained({"mu": 0.1})
    np.testing.assert_allclose(models(some), models(everyone), atol=1e-7)
    assert {row["users"] for row in some.history()} == {4.0}
    assert "objective" not in some.history()[0]  # not all have said what their loss is


# ---- the way there

WAYS: list[dict[str, Any]] = [
    {"mu": 0.1},
    {"mu": 100.0},
    {"mu": 1.0, "users_per_round": 4},
    {"mu": 1.0, "relations": "learned", "relations_every": 7},
    {"mu": 0.1, "relations": "learned", "relations_floor": 0.05},
]


@pytest.mark.parametrize("way", WAYS)
def test_the_objective_never_increases(way: dict[str, Any]) -> None:
    """Nor where relations are learnt anew: Omega is the minimiser of the same objective."""
    history = trained(way, stop={"rounds": 60}).history()
    # In the first rounds of learned relations they are those of the mean, which is another objective.
    first = way.get("relations_every", 1) if way.get("relations") == "learned" else 0
    values = np.array([row["objective"] for row in history[first:] if "objective" in row])
    assert (np.diff(values) <= 1e-12 * values[:-1]).all()
    assert values[-1] < values[0]


def test_two_rounds_by_hand() -> None:
    """f_1 = x^2/2 and f_2 = (x-2)^2/2 with A = [[2, -1], [-1, 1]] and mu = 1: sigma = 1 + 1/sqrt 2."""
    method, sigma = related(2, 1, relations=((2.0, -1.0), (-1.0, 1.0)), mu=1.0), 1 + 1 / np.sqrt(2)
    b, a, targets = sigma * np.array([2.0, 1.0]), np.array([[2.0, -1.0], [-1.0, 1.0]]), np.array([0.0, 2.0])
    asked: list[Pull] = []

    def answer(pull: Pull) -> Pulled:
        asked.append(pull)
        w = (targets[:, None] + pull.weight[:, None] * pull.y) / (1 + pull.weight[:, None])
        return Pulled(w, np.square(w[:, 0] - targets) / 2)

    # The second round starts ahead: t_1 = (1 + sqrt 5)/2, t_2 = (1 + sqrt(1 + 4 t_1^2))/2, V = W + (t_1 - 1)/t_2 (W^1 - W^0).
    first = (1 + np.sqrt(5)) / 2
    ahead = (first - 1) / ((1 + np.sqrt(1 + 4 * first**2)) / 2)
    w, pulls = [np.zeros(2)], []
    for part in (0.0, ahead):
        v = w[-1] + part * (w[-1] - w[0])
        pulls.append(v - a @ v / b)
        w.append((targets + b * pulls[-1]) / (1 + b))
    state, figures = played(method, answer, rounds=2)
    np.testing.assert_allclose([pull.weight for pull in asked], [b, b])
    np.testing.assert_allclose([pull.y[:, 0] for pull in asked], pulls)
    np.testing.assert_allclose(state.w[:, 0], w[2], rtol=1e-12)
    assert figures["objective"] == pytest.approx(np.square(w[2] - targets).sum() / 2 + w[2] @ a @ w[2] / 2)
    assert figures["dual_residual"] == pytest.approx(
        np.linalg.norm(w[2] - targets + a @ w[2]) / (np.linalg.norm(w[2] - targets) + np.linalg.norm(a @ w[2]))
    )


def test_a_move_that_goes_too_far_is_taken_back() -> None:
    """Users whose losses come out worse where the step starts ahead: the models stay, and the next step starts from them."""
    method, n_asked = related(2, 1, mu=1.0), [0]
    seen: list[np.ndarray] = []

    def answer(pull: Pull) -> Pulled:
        n_asked[0] += 1
        seen.append(pull.y)
        return Pulled(pull.y + np.array([[1.0], [2.0]]), np.full(2, 100.0 if n_asked[0] == 3 else 10.0 / n_asked[0]))

    state, figures = played(method, answer, rounds=3)
    before, _ = played(method, answer_from(seen[:2]), rounds=2)
    np.testing.assert_array_equal(state.w, before.w)
    assert figures["objective"] == method.objective(before)
    assert state.t == 1.0


def test_where_users_are_drawn_steps_start_from_where_the_models_are() -> None:
    method, asked = related(3, 1, mu=1.0, users_per_round=2), [Pull(np.zeros((0, 1)), np.zeros(0))]

    def answer(pull: Pull) -> Pulled:
        asked.append(pull)
        return Pulled(pull.y + 1.0, np.full(2, 9.0 - len(asked)), users=pull.users)

    before, _ = played(method, answer, rounds=3)
    played(method, answer, rounds=4)
    assert asked[-1].users is not None
    np.testing.assert_allclose(asked[-1].y, np.full((2, 1), before.w.mean()))


def test_users_start_from_their_latest_models() -> None:
    random = np.random.default_rng(4)
    rows, targets = random.normal(size=(3, 12, 2)), random.normal(size=(3, 12))
    names = ("u0", "u1", "u2")
    problem = build_problem(ProblemConfig(loss="least_squares", l2=0.1, intercept=False), list(names), list(rows), list(targets))
    local = Local(0, names, np.arange(3), 3, Precision.of("float64", is_convex=True), (), problem)
    pull = Pull(np.ones((2, 2)), np.array([0.5, 2.0]), users=np.array([0, 2]))
    state, (reply,) = CLIENT.step(CLIENT.init({}, local, None), Inbox("", 1, {Pull: pull}), local)
    assert isinstance(reply, Pulled)
    np.testing.assert_array_equal(state.w, [reply.w[0], [0.0, 0.0], reply.w[1]])
    for row, place in enumerate((0, 2)):
        weight = pull.weight[row]
        hessian = rows[place].T @ rows[place] / 12 + (0.1 + weight) * np.eye(2)
        np.testing.assert_allclose(reply.w[row], np.linalg.solve(hessian, rows[place].T @ targets[place] / 12 + weight), rtol=1e-10)
        residuals = targets[place] - rows[place] @ reply.w[row]
        assert reply.value[row] == pytest.approx(np.square(residuals).mean() / 2 + 0.05 * np.square(reply.w[row]).sum())


def answer_from(ys: list[np.ndarray]) -> Any:
    """Answers as in the test above, which asked for these y."""
    calls = iter(range(1, len(ys) + 1))
    return lambda pull: Pulled(pull.y + np.array([[1.0], [2.0]]), np.full(2, 10.0 / next(calls)))


def related(n: int, d: int, **method: Any) -> Related:
    facts = Facts(np.ones(n, dtype=np.int64), d)
    names = tuple(f"u{i}" for i in range(n))
    setting = Setting(0, "fed_mtl", Members(names, ("",) * n), Precision.of("float64", is_convex=True), facts)
    return Related(Config(**{"participation": 1.0, **method}), setting, n, facts.d)


def played(method: Related, answer: Any, rounds: int) -> tuple[Any, dict[str, float]]:
    """The state after some rounds in which users answer so, and the figures of the last."""

    class Federation:
        async def exchange(self, *messages: Message, to: Any = None, wanted: Any = ()) -> Replies:
            (pull,) = messages
            assert isinstance(pull, Pull)
            return Replies({Pulled: answer(pull)}, None)

    async def go() -> tuple[Any, dict[str, float]]:
        state, figures = await method.init(Federation()), {}
        for number in range(1, rounds + 1):
            state, found = await method.round(state, Federation(), number)
            figures = dict(found)
        return state, figures

    return asyncio.run(go())


def test_answers_of_others_than_those_asked_end_the_run() -> None:
    with pytest.raises(ProtocolError, match=r"fed_mtl.Pulled came for members \[0\], wanted it once for each of \[0, 1\]"):
        played(related(2, 1), lambda pull: Pulled(pull.y[:1], np.zeros(1), users=np.array([0])), rounds=1)


# ---- the bound and what is learnt


def test_the_diagonal_bounds_the_relations_and_touches_them() -> None:
    random = np.random.default_rng(3)
    root = random.normal(size=(7, 3)) * np.array([1, 5, 0.1, 0, 2, 1, 3])[:, None]
    a = root @ root.T
    b = relations.bounds(a, 7)
    eigenvalues = np.linalg.eigvalsh(np.diag(b) - a)
    assert eigenvalues[0] > -1e-12
    assert np.linalg.eigvalsh((np.diag(b) - a)[np.ix_(b > 0, b > 0)])[0] < 1e-12
    assert b[3] == 0


def test_what_is_learnt_without_a_floor_is_the_closed_form_of_zhang_and_yeung() -> None:
    """(W'W)^{1/2} / tr (W'W)^{1/2}, times n."""
    w = np.random.default_rng(1).normal(size=(4, 6))
    values, vectors = np.linalg.eigh(w @ w.T)
    root = (vectors * np.sqrt(values)) @ vectors.T
    np.testing.assert_allclose(np.linalg.inv(relations.learnt(w, 1e-12)), 4 * root / np.trace(root), rtol=1e-8)


@pytest.mark.parametrize("floor", [0.05, 1.0])
def test_no_other_omega_of_that_trace_has_a_lower_penalty(floor: float) -> None:
    random = np.random.default_rng(2)
    w = random.normal(size=(6, 3)) * np.array([4, 1, 0.1])
    a = relations.learnt(w, floor)
    omega = np.linalg.inv(a) - floor * np.eye(6)
    assert np.trace(omega) == pytest.approx(6)
    assert np.linalg.eigvalsh(omega)[0] > -1e-12
    least = np.trace(w.T @ a @ w)
    for _ in range(50):
        other = random.normal(size=(6, 6))
        other = 6 * other @ other.T / np.trace(other @ other.T)
        mixed = 0.99 * omega + 0.01 * other
        assert np.trace(w.T @ np.linalg.solve(mixed + floor * np.eye(6), w)) >= least


def test_models_of_zero_tell_no_relations() -> None:
    np.testing.assert_array_equal(relations.learnt(np.zeros((3, 2)), 1.0), np.eye(3) / 2)


@user_source
def groups(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """Two groups of eight users with opposite models and few noisy rows each."""
    random, made = np.random.default_rng(11), []
    for place in range(16):
        w = np.array([1.0, 0.5, -0.5, 1.0]) * (1 if place < 8 else -1)
        rows, test = random.normal(size=(6, 4)), random.normal(size=(100, 4))
        made.append(UserData(f"u{place}", f"g{place // 8}", rows, rows @ w + random.normal(size=6), test, test @ w))
    return made


def test_planted_groups_are_learnt_and_help_their_users() -> None:
    data = {"source": "python", "path": "tests.papers.test_fed_mtl_convex:groups"}
    problem = {"loss": "least_squares", "intercept": False, "l2": 0.01}
    method = {"name": "fed_mtl", "mu": 3.0, "relations": "learned"}
    content = {"name": "groups", "data": data, "problem": problem, "method": method, "references": ["local", "global"]}
    result = run(experiment_from({**content, "stop": {"rounds": 60}}))
    omega = np.linalg.inv(relations.learnt(models(result), 1.0)) - np.eye(16)
    inside, between = np.concatenate([omega[:8, :8], omega[8:, 8:]]), omega[:8, 8:]
    assert between.mean() < -0.5 < 0 < inside.min()
    error = {stage: result.metrics[stage]["heldout_metric"] for stage in ("local", "global", "fed_mtl")}
    assert error["fed_mtl"] < 0.3 * error["local"] < 0.3 * error["global"]
    assert {"primal_residual", "dual_residual"} <= set(result.history()[-1])


# ---- bits and counts


@pytest.mark.parametrize("more", [{}, {"relations": "learned"}, {"users_per_round": 2}])
def test_one_host_and_three_give_the_same_bits(more: dict[str, Any]) -> None:
    one, three = solved(0, 1, rounds=30, **more), solved(0, 3, rounds=30, **more)
    assert models(one).tobytes() == models(three).tobytes()
    assert one.history() == three.history()


@pytest.mark.parametrize("way", WAYS[3:4])
def test_a_killed_host_and_a_killed_coordinator_change_no_bit(way: dict[str, Any], tmp_path: Path) -> None:
    content = small_experiment({"name": "fed_mtl", **way}, stop={"rounds": 12})
    calm = bits(World(content, tmp_path / "calm", 3).run())
    faults = Faults(hosts_before={5: "h1"}, hosts_after={9: "h0"}, coordinator=(7, 11))
    assert bits(World(content, tmp_path / "killed", 3, faults, keeps_hosts=False).run()) == calm


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 3])
def test_processes_that_talk_give_the_bits_of_one_process(hosts: int) -> None:
    content = small_experiment({"name": "fed_mtl", "mu": 0.5, "relations": "learned"}, stop={"rounds": 12})
    near, far = run(content), run(content, transport="grpc", hosts=hosts)
    assert models(far).tobytes() == models(near).tobytes()
    assert far.history() == near.history()


def test_a_round_is_one_vector_and_one_number_each_way_for_each_user() -> None:
    result = solved(2, 3)
    n_rounds = len(result.history())
    pulled = {line["direction"]: (line["vectors"], line["scalars"]) for line in result.ledger() if line["step"] == "pull"}
    assert pulled == dict.fromkeys(("down", "up"), (6 * n_rounds, 6 * n_rounds * 4))


def test_what_travels_in_single_precision_is_what_the_server_reckons_with() -> None:
    result = run(experiment(6, {"name": "fed_mtl", "mu": 0.1}, payload="float32", stop={"rounds": 30}))
    np.testing.assert_allclose(models(result), FIXTURE[0]["w"], atol=1e-4)
    np.testing.assert_array_equal(models(result), models(result).astype(np.float32))
    penalty = 0.05 * np.square(models(result) - models(result).mean(axis=0)).sum()
    assert result.history()[-1]["objective"] == pytest.approx(result.metrics["fed_mtl"]["sum_of_losses"] + penalty, rel=1e-13)


def test_users_who_do_not_answer_keep_their_models() -> None:
    """And count as asked unless they were sent nothing; what they keep is part of the others' pulls."""
    method, n_rounds = related(3, 1, mu=1.0), [0]

    class Federation:
        async def exchange(self, *messages: Message, to: Any = None, wanted: Any = ()) -> Replies:
            n_rounds[0] += 1
            (pull,) = messages
            assert isinstance(pull, Pull)
            here = np.arange(3) if n_rounds[0] == 1 else np.array([0, 2])
            return Replies(
                {Pulled: Pulled(pull.y[here] + 1.0, np.full(here.size, 9.0 / n_rounds[0] ** 2), users=here)}, here, unasked=np.array([1])
            )

    async def go() -> tuple[Any, Any, dict[str, float]]:
        first, _ = await method.round(await method.init(Federation()), Federation(), 1)
        second, figures = await method.round(first, Federation(), 2)
        return first, second, dict(figures)

    first, second, figures = asyncio.run(go())
    assert first.w[1] == second.w[1]
    assert (first.w[[0, 2]] != second.w[[0, 2]]).all()
    assert (figures["users"], figures["unasked"]) == (2.0, 1.0)
    assert method.expected_vectors([{"users": 3.0}, figures]) == {("pull", "down"): 5.0, ("pull", "up"): 5.0}
    assert method.expected_scalars([{"users": 3.0}, figures]) == {("pull", "down"): 10.0, ("pull", "up"): 10.0}


def test_while_a_loss_is_not_known_no_step_starts_ahead() -> None:
    """It could only be taken back: nobody can say whether it has decreased the objective."""
    method, here = related(3, 1, mu=1.0), np.array([0, 2])

    class Federation:
        async def exchange(self, *messages: Message, to: Any = None, wanted: Any = ()) -> Replies:
            (pull,) = messages
            assert isinstance(pull, Pull)
            return Replies({Pulled: Pulled(pull.y[here] + 1.0, np.ones(2), users=here)}, here)

    async def go() -> list[float]:
        state, found = await method.init(Federation()), []
        for number in range(1, 5):
            state, figures = await method.round(state, Federation(), number)
            assert "objective" not in figures
            found.append(float(state.w[0, 0]))
        return found

    first = asyncio.run(go())
    np.testing.assert_allclose(np.diff(first), (2 / 3) ** np.arange(1, 4))  # w <- 2/3 w + 1, one step a round


# ---- relations in a file


@pytest.mark.parametrize("name", ["relations.csv", "relations.npy"])
def test_relations_may_be_in_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_text("\n".join(",".join(map(str, row)) for row in PATH) + "\n", encoding="utf-8")
    else:
        np.save(path, np.array(PATH))
    np.testing.assert_array_equal(relations.given(str(path), 4), PATH)


WRONG: dict[str, tuple[list[list[float]], str]] = {
    "size": ([[1, 0], [0, 1]], r"method.relations has the shape \[2, 2\], want \[4, 4\]: a row and a column for each user"),
    "ragged": ([[1, 0], [0]], "method.relations holds no matrix of numbers: row 2 has 1 numbers, and row 1 has 2"),
    "symmetry": ([[1, 0.5, 0, 0], *PATH[1:]], "has 0.5 in row 1, column 2, and -1 in row 2, column 1, want a symmetric matrix"),
    "sign": ((-np.array(PATH)).tolist(), r"method.relations has the eigenvalue -3.414, want none below 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_matrix_that_is_none_of_relations_is_refused_in_a_sentence(case: str) -> None:
    rows, sentence = WRONG[case]
    with pytest.raises(ConfigError, match=sentence):
        relations.given(tuple(map(tuple, rows)), 4)


WRONG_FILES: dict[str, tuple[bytes, str]] = {
    "nan.csv": (b"nan,0\n0,1\n", r"nan.csv \(method.relations\) has nan in row 1, column 1, want finite numbers"),
    "words.csv": (b"a,b\n1,2\n", "holds no matrix of numbers: could not convert string to float: 'a'"),
    "bytes.csv": (b"\xff\xfe", "holds no matrix of numbers: 'utf-8' codec"),
    "empty.csv": (b"", r"has the shape \[0\], want \[2, 2\]"),
    "empty.npy": (b"", "holds no matrix of numbers: "),
    "long.csv": (b"1," * 40_000, "holds no matrix of numbers: it has 80000 bytes, want at most 65792 for 2 users"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_file_without_relations_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, sentence = WRONG_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        relations.given(str(tmp_path / name), 2)


def test_a_file_is_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([[None, 1], [1, None]]), allow_pickle=True)
    with pytest.raises(ConfigError, match="holds no matrix of numbers: Object arrays cannot be loaded when allow_pickle=False"):
        relations.given(str(tmp_path / "objects.npy"), 2)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read none.csv \(method.relations\): No such file"):
        relations.given("none.csv", 2)


def test_a_run_with_wrong_relations_ends_with_that_sentence() -> None:
    with pytest.raises(ConfigError, match=r"has the shape \[1, 1\], want \[6, 6\]"):
        run(experiment(6, {"name": "fed_mtl", "relations": [[1.0]]}))


# ---- settings


def of_a_network(**method: Any) -> Experiment:
    data = {"source": "npz", "path": "users.npz"}
    return experiment_from({"name": "net", "data": data, "model": {"name": "mlp", "classes": 10}, "method": {"name": "fed_mtl", **method}})


def of_a_problem(**method: Any) -> Experiment:
    return experiment(6, {"name": "fed_mtl", **method})


@pytest.mark.parametrize(
    ("make", "method", "sentence"),
    [
        (of_a_network, {"relations": "learned"}, "method.relations is 'learned', but networks know the mean of all users alone"),
        (of_a_network, {"relations_every": 5}, "method.relations_every is 5, but networks know the mean"),
        (of_a_problem, {"epochs": 3}, "method.epochs is 3, but users of a convex problem minimise their losses exactly: want no such key"),
        (of_a_problem, {"optimizer": {"lr": 0.1}}, r"method.optimizer is {.*'lr': 0.1.*}, but users of a convex problem"),
        (
            of_a_problem,
            {"relations": "media"},
            "method.relations: is 'media', want mean, learned, a file whose name ends in .csv or .npy, or",
        ),
        (of_a_problem, {"relations": [[float("nan")]]}, r"method.relations: is \[\[nan\]\], want mean"),
        (of_a_problem, {"relations": 3}, "method.relations: is 3, want mean"),
    ],
)
def test_a_setting_without_meaning_is_refused_in_a_sentence(make: Any, method: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(**method)


def test_all_users_take_part_unless_they_are_drawn_and_the_frozen_experiment_says_so() -> None:
    assert of_a_problem().method.participation == 1.0
    assert of_a_problem(participation=0.5).method.participation == 0.5
    assert of_a_network().method.participation == 0.1
    for made in (of_a_problem(), of_a_problem(relations=PATH), of_a_network()):
        assert experiment_from(json.loads(experiment_to_json(made))) == made
