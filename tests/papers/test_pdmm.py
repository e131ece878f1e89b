"""Algorithm 1 of Armacki, Bajovic, Jakovetic and Kar (2022), both halves: what each test checks is quoted from the paper.

"Fixture" is tests/fixtures/convex_clustering_{6,60}.json: optima from CVXPY and 40-round traces on recorded schedules. Where the method
departs from the print, the test says so.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.config import experiment_from
from coterie.families.pdmm_steps import least_nu
from coterie.families.ties import Extent
from coterie.methods.pdmm import Config, Constants
from coterie.record import snapshot
from coterie_client.methods.pdmm import CLIENT
from coterie_server.interface.half import Outcome
from coterie_server.maths.clusters import same_partition
from coterie_server.methods.pdmm.half import stages
from tests.slow import slow_after

_spec = importlib.util.spec_from_file_location("pdmm_federation", Path(__file__).with_name("pdmm_federation.py"))
federation = sys.modules["pdmm_federation"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(federation)
Data, Memory, Points, Run = federation.Data, federation.Memory, federation.Points, federation.Run

SIX, SIXTY = Data(6), Data(60)
HALF = {"sampling": "paired", "primal_fraction": 0.5}
UNIFORM = {"sampling": "uniform", "primal_fraction": 0.5, "dual": "independent", "dual_fraction": 0.5}
ALL_WAYS = [
    {"placement": placement, **way}
    for placement in ("lean", "paper")
    for way in ({}, {"order": "jacobi"}, HALF, {**HALF, "dual": "independent", "dual_fraction": 0.25}, UNIFORM, {"x_update": "linearized"})
] + [{"acceleration": "anderson", "anderson_memory": 3}]
TRACES = SIX.fixture["traces"]


def way_name(way):
    return "-".join(str(value) for value in way.values()) if isinstance(way, dict) else str(way)


# ---- one step, and 40


@pytest.mark.parametrize("placement", ["lean", "paper"])
def test_two_steps_by_hand_on_two_points_of_the_line(placement):
    """(16)-(19) with f_1 = x^2/2, f_2 = (x-2)^2/2, rho = 1, eta = 0, LAM = 1/2, tau = .4, nu = .6, from zero."""
    run = Run(Points([[0.0], [2.0]]), start="zero", placement=placement, order="jacobi", penalty=0.5, rho=1, tau=0.4, nu=0.6)
    # (16): x_i (1 + rho) = a_i + rho (x_j + z_ij) - mu^_ij. (17): z_12 = 0. (18): mu_12 = .4 (0 - 1 - 0). (19): mu^_12 = -.4 + .6.
    np.testing.assert_allclose(run.round().state.x, [[0.0], [1.0]], atol=1e-12)
    np.testing.assert_allclose(run.state.mu, [[-0.4]], atol=1e-12)
    # (16): 2 x_1 = 0 + 1 - .2 and 2 x_2 = 2 + 0 + .2. (17) sees x^t: -1 + .2 shrunk by .5. (18): -.4 + .4 (.4 - 1.1 + .3).
    np.testing.assert_allclose(run.round().state.x, [[0.4], [1.1]], atol=1e-12)
    np.testing.assert_allclose(run.state.z, [[-0.3]], atol=1e-12)
    np.testing.assert_allclose(run.state.mu, [[-0.56]], atol=1e-12)
    assert run.figures[-1]["objective"] == pytest.approx(0.08 + 0.405 + 0.5 * 0.7)


def test_the_residuals_of_the_two_steps_by_hand():
    """x^1 = (0, 1), z = 0; x^2 = (.4, 1.1), z = -.3. |x_1 - x_2 - z| over sqrt(2) |x|; rho (2 |dx|^2 + |dz|^2)^(1/2) over LAM."""
    run = Run(Points([[0.0], [2.0]]), start="zero", order="jacobi", penalty=0.5, rho=1, tau=0.4, nu=0.6)
    assert run.round().figures[-1]["primal_residual"] == pytest.approx(1 / 2**0.5)
    assert run.figures[-1]["dual_residual"] == pytest.approx(2**0.5 / 0.5)
    assert run.round().figures[-1]["primal_residual"] == pytest.approx(0.4 / (2 * (0.16 + 1.21)) ** 0.5)
    assert run.figures[-1]["dual_residual"] == pytest.approx((2 * (0.16 + 0.01) + 0.09) ** 0.5 / 0.5)


@pytest.mark.parametrize("n_hosts", [1, 4])
@pytest.mark.parametrize("trace", TRACES, ids=[trace["name"] for trace in TRACES])
def test_a_recorded_schedule_gives_the_recorded_iterates(trace, n_hosts):
    """S1 to S11 in 40 rounds. xmode `literal` is (16) as printed; `full` minimizes (15) in full: placement lean on ordered pairs."""
    is_printed = trace["xmode"] == "literal"
    copies = 1 if is_printed else 2  # (15) in full has lambda = LAM/2 and half of rho on each of (i,j), (j,i)
    config = {"penalty": copies * trace["lam"], "rho": copies * trace["rho"], "eta": 0.0, "tau": trace["tau"], "nu": trace["nu"]}
    if "schedule" in trace["name"]:
        config |= {"sampling": "recorded", "schedule": SIX.fixture["schedule"]}
    linearized = {"x_update": "linearized"} if trace.get("xsolve") == "lin" else {}
    run = Run(
        SIX, n_hosts, start="zero", placement="paper" if is_printed else "lean", order="jacobi", evaluate_every=0, **config, **linearized
    )
    if linearized:  # the recorder took c in the curvature of the intercept too, which L_i of the squared hinge leaves out
        c = SIX.fixture["c"]
        bare = [np.linalg.eigvalsh(0.2 * rows.T @ rows)[-1] for rows in np.concatenate([SIX.features, -np.ones((6, 10, 1))], axis=2)]
        for host, state in run.memory.states.items():
            curvatures = np.array(bare)[run.memory.layout.own[host]] + c
            run.memory.states[host] = dataclasses.replace(state, smoothness=curvatures)
    iterates = run.rounds(40)
    for number, wanted in trace["x"].items():
        np.testing.assert_allclose(iterates[int(number) - 1], wanted, atol=1e-9)
    ordered = run.method.layout.copies == 2
    for found, wanted in ((run.state.z, trace["z_40"]), (run.state.mu, trace["mu_40"])):
        i, j = np.triu_indices(6, 1)
        pairs = np.array(wanted)[i, j]
        np.testing.assert_allclose(found.T[i * 6 + j] if ordered else found.T, pairs, atol=1e-9)


def test_a_schedule_that_is_over_is_an_error_that_says_so():
    run = Run(SIX, start="zero", penalty=0.7, sampling="recorded", schedule=SIX.fixture["schedule"][:2])
    run.rounds(2)
    with pytest.raises(RunError, match=r"round 3 is not in the schedule, which has 2 rounds"):
        run.round()


# ---- the optimum of (3)


def reaches_the_optimum(data, entry, limit, **config):
    # At N = 60, LAM = .05 two clusters are 7.6e-4 of a coefficient apart: users of one cluster must be nearer than that, which takes long.
    is_close = (data.n, entry["LAM"]) == (60, 0.05)
    run = Run(data, penalty=entry["LAM"], evaluate_every=10, cluster_tolerance=7e-4 if is_close else 1e-4, **config)
    run.until(1e-6, limit)
    while not same_partition((outcome := run.finish()).labels, np.array(entry["partition"])):
        assert len(run.figures) < 3 * limit, f"{outcome.figures['clusters']} clusters, wanted {entry['K']}"
        run.rounds(10)
    assert abs(run.figures[-1]["objective"] - data.phi(outcome.models, entry["LAM"])) < 1e-9 * entry["Phi"]
    assert outcome.figures["clusters"] == entry["K"]


EASY = [(data, entry) for data in (SIX, SIXTY) for entry in data.fixture["son"] if entry["LAM"] not in (0.05, 0.1)]
HARD = [(data, entry) for data in (SIX, SIXTY) for entry in data.fixture["son"] if entry["LAM"] in (0.05, 0.1)]
JACOBI = {"placement": "paper", "order": "jacobi"}
FULL_WAYS = [{}, {"placement": "paper"}, JACOBI, {"x_update": "linearized"}, {"acceleration": "anderson"}]


def son_name(value):
    return f"N{value.n}" if isinstance(value, Data) else f"LAM{value['LAM']}" if "LAM" in value else way_name(value) or "lean"


@pytest.mark.parametrize(("data", "entry"), EASY, ids=son_name)
@pytest.mark.parametrize("way", slow_after(1, FULL_WAYS[::2]), ids=son_name)
def test_full_participation_reaches_the_optimum_and_its_clusters(data, entry, way):
    """ "E[F(x^t) - F*] = O(1/t)" (section IV): Phi within 1e-6 of CVXPY's, the same partition."""
    reaches_the_optimum(data, entry, 500, **way)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "entry"), EASY + HARD, ids=son_name)
@pytest.mark.parametrize("way", [*FULL_WAYS, HALF, {**HALF, "placement": "paper"}], ids=son_name)
@pytest.mark.timeout(300)
def test_every_way_reaches_every_optimum_and_its_clusters(data, entry, way):
    """The same for all penalties of the fixtures, and with half of the blocks drawn in pairs."""
    reaches_the_optimum(data, entry, 3000, **way)


def test_a_large_penalty_gives_the_global_model():
    """ "we recover global model learning as in (1) for lambda > lambda^" """
    run = Run(SIXTY, start="zero", penalty=0.15, placement="paper")
    run.until(1e-9, 500)
    outcome = run.finish()
    assert outcome.figures["clusters"] == 1
    np.testing.assert_allclose(outcome.models, SIXTY.global_models, atol=1e-5)


@pytest.mark.parametrize("way", slow_after(1, [{"order": "jacobi"}, {}, HALF]), ids=son_name)
def test_the_gap_stays_under_an_envelope_of_one_over_t(way):
    """ "E[F(x^t) - F*] = O(1/t)": t times the gap is never again what it was in the first rounds."""
    run = Run(SIXTY, penalty=0.09, **way)
    run.rounds(150)
    envelope = np.arange(1, 151) * run.gaps()
    assert envelope[20:].max() < envelope[:20].max()


def test_at_the_solution_the_duals_are_subgradients_and_balance_the_losses():
    """KKT of (14): grad f_i + sum_j mu_ij = 0, mu_ij = LAM z_ij/|z_ij|, |mu_ij| <= LAM where z_ij = 0."""
    run = Run(SIX, penalty=0.7, evaluate_every=0)
    run.rounds(400)
    z, mu = run.state.z, run.state.mu
    i, j = np.triu_indices(6, 1)
    sums = np.zeros((6, 3))
    np.add.at(sums, i, mu.T)
    np.add.at(sums, j, -mu.T)
    np.testing.assert_allclose(SIX.problem.gradient(run.state.x), -sums, atol=1e-8)
    norms = np.linalg.norm(z, axis=0)
    apart = norms > 0
    np.testing.assert_allclose(mu[:, apart], 0.7 * z[:, apart] / norms[apart], atol=1e-7)
    assert np.linalg.norm(mu, axis=0).max() <= 0.7 + 1e-8
    assert max(run.figures[-1][name] for name in ("primal_residual", "dual_residual")) < 1e-8


@pytest.mark.slow
def test_the_printed_uniform_draw_keeps_a_bias_and_the_full_lagrangian_does_not():
    """S1 as printed draws ordered pairs, but (16) sees only those with i first: the state loses antisymmetry and with it the optimum.

    (15) in full, which placement lean minimizes on the same kind of draws, converges.
    """
    printed = Run(SIXTY, penalty=0.09, placement="paper", evaluate_every=100, **UNIFORM)
    printed.rounds(400)
    assert 5e-6 < printed.gaps()[-1] < 1e-4
    assert Run(SIXTY, penalty=0.09, evaluate_every=10, **UNIFORM).until(1e-6, 700) > 100


# ---- how many rounds, how many vectors


@pytest.mark.parametrize(
    ("way", "rounds"),
    [
        ({"placement": "paper", "steps": "wang"}, (22, 284)),
        ({"placement": "paper", "order": "jacobi"}, (14, 113)),
        ({"placement": "paper"}, (9, 61)),
        ({}, (9, 61)),
    ],
    ids=["wang", "jacobi", "z-after-x", "lean"],
)
def test_full_participation_takes_the_known_number_of_rounds(way, rounds):
    """Rounds to a gap of 1e-3 and 1e-6 for N = 60, LAM = .09, from the global model; the wang rule is Theorem 3's of [18]."""
    run = Run(SIXTY, penalty=0.09, **way)
    assert run.until(1e-3, 100) <= 1.1 * rounds[0]
    assert run.until(1e-6, 400) <= 1.1 * rounds[1]


# ---- extrapolation, which the paper does not have


def test_the_first_two_rounds_with_acceleration_are_plain_and_the_third_starts_from_their_extrapolation():
    """(v, mu) of the plain rounds through `anderson.step`; x, z and mu of the third are those of (16) to (18) from there."""
    plain, run = Run(SIX, penalty=0.7), Run(SIX, penalty=0.7, acceleration="anderson")
    for _ in range(2):
        sent, mu = run.state.v, run.state.mu
        plain.round()
        run.round()
        np.testing.assert_allclose(run.state.x, plain.state.x, atol=1e-12)
        np.testing.assert_allclose(run.state.mu, plain.state.mu, atol=1e-12)
    f = np.concatenate([((plain.state.v - sent) / np.sqrt(6)).reshape(-1), (plain.state.mu - mu).reshape(-1)])
    np.testing.assert_allclose(run.state.extrapolation.memory.residual, f, atol=1e-12)
    first = Run(SIX, penalty=0.7)
    start_v = first.state.v
    first.round()
    before = np.concatenate([((first.state.v - start_v) / np.sqrt(6)).reshape(-1), first.state.mu.reshape(-1)])
    w = f @ (f - before) / ((f - before) @ (f - before))
    v = plain.state.v - w * (plain.state.v - first.state.v)
    mu = plain.state.mu - w * (plain.state.mu - first.state.mu)
    np.testing.assert_allclose(run.state.v, v, atol=1e-8)
    run.round()
    q = run.method.steps.rho * 5 + run.method.steps.eta
    np.testing.assert_allclose(SIX.problem.gradient(run.state.x) + q * run.state.x, v, atol=1e-7)
    i, j = np.triu_indices(6, 1)
    split = run.state.x[i] - run.state.x[j] + mu.T / run.method.steps.rho
    length = np.linalg.norm(split, axis=1, keepdims=True)
    np.testing.assert_allclose(run.state.z.T, split * np.maximum(0, 1 - 0.7 / run.method.steps.rho / length), atol=1e-8)


@pytest.mark.parametrize(("lam", "at_most"), slow_after(1, [(0.09, 0.65), (0.05, 0.6), (0.01, 0.3)]))
def test_acceleration_saves_rounds_and_more_of_them_the_slower_convergence_is(lam, at_most):
    """Rounds to a relative gap of 1e-6, as a share of what the method needs without."""
    plain, run = (Run(SIXTY, penalty=lam, acceleration=how, balance_rounds=0) for how in ("none", "anderson"))
    assert run.until(1e-6, 400) <= at_most * plain.until(1e-6, 400)


@pytest.mark.parametrize("lam", [0.05, 0.7])
def test_small_residuals_mean_a_small_gap_with_acceleration_too(lam):
    run = Run(SIX, penalty=lam, acceleration="anderson")
    while max(run.figures[-1][name] for name in ("primal_residual", "dual_residual")) > 1e-5 if run.figures else True:
        assert len(run.figures) < 500
        run.round()
    assert run.gaps()[-1] < 1e-6


def test_a_path_is_accelerated_stage_by_stage():
    larger = Run(SIXTY, penalty=0.1, acceleration="anderson", balance_rounds=0, stage="first")
    larger.until(1e-6, 100)
    warm = Run(SIXTY, penalty=0.05, acceleration="anderson", balance_rounds=0, start=larger.finish(), memory=larger.memory, stage="second")
    assert warm.until(1e-6, 200) < Run(SIXTY, penalty=0.05, acceleration="anderson", balance_rounds=0).until(1e-6, 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("fraction", "rounds"), [(0.5, (35, 256)), (0.1, (203, 1510)), (1 / 60, (1266, 9133))])
def test_paired_draws_take_the_known_number_of_rounds(fraction, rounds):
    """S_P = N^2/2, N^2/10, N: medians of five seeds."""
    found = []
    for seed in range(5):
        run = Run(SIXTY, penalty=0.09, sampling="paired", primal_fraction=fraction, seed=seed, evaluate_every=1 if fraction == 0.5 else 10)
        found.append([run.until(1e-3, 3 * rounds[0]), run.until(1e-6, 3 * rounds[1])])
    ratio = np.median(found, axis=0) / rounds
    assert (ratio < 1.2).all(), f"{np.median(found, axis=0)} rounds, wanted about {rounds}"


@pytest.mark.parametrize("n_hosts", [1, 3])
@pytest.mark.parametrize("way", ALL_WAYS, ids=way_name)
def test_the_closed_form_counts_what_was_really_encoded(way, n_hosts):
    """ "the server receives exactly S_P d x 1-sized messages"; S7 = X counted once, and S10 = S_D: exactly, for any number of rounds.

    Drawn in pairs S6 carries one vector per unordered pair. The paper's own count bounds placement paper from above.
    """
    run = Run(SIX, n_hosts, penalty=0.7, **way)
    for _ in range(2):
        run.rounds(7)
        before = dict(run.memory.vectors)
        run.finish()
        expected = {key: count for key, count in run.method.expected_vectors(run.figures).items() if count}
        assert dict(run.memory.vectors) == expected
        run.memory.vectors = type(run.memory.vectors)(before)  # the second half goes on as if not finished


SCHEDULE = [[[0, 1], [1], [1, 2]], [[2], [6, 8, 9], []], [[], [], [3]]]


@pytest.mark.parametrize(
    ("way", "up", "down"),
    [
        ({}, 36, 66),
        ({"sampling": "paired", "s_p": 9}, 9, 18),
        ({"sampling": "paired", "s_p": 36}, 36, 66),
        ({"sampling": "paired", "s_p": 9, "dual": "independent", "s_d": 7}, 9, 17),  # of 7 dual blocks four pairs are drawn
        ({"sampling": "paired", "s_p": 9, "dual": "independent", "s_d": 1}, 9, 11),
        ({"sampling": "uniform", "s_p": 9, "dual": "independent", "s_d": 7}, 9, 16),
        ({"sampling": "uniform", "s_p": 9}, 9, 18),
    ],
    ids=way_name,
)
def test_the_papers_own_count_is_s_p_up_and_s_p_plus_s_d_down(way, up, down):
    run = Run(SIX, penalty=0.7, placement="paper", **way)
    assert run.method.printed_vectors(3) == {"up": 3 * up, "down": 3 * down}


def test_the_papers_own_count_of_a_schedule_is_that_of_its_rounds():
    run = Run(SIX, penalty=0.7, placement="paper", sampling="recorded", schedule=SCHEDULE)
    assert run.method.printed_vectors(1) == {"up": 3, "down": 5}
    assert run.method.printed_vectors(2) == {"up": 7, "down": 9}
    assert run.method.printed_vectors(3) == {"up": 7, "down": 10}


@pytest.mark.parametrize("placement", ["lean", "paper"])
@pytest.mark.parametrize("sampling", ["full", "recorded", "paired", "uniform"])
def test_the_papers_own_count_bounds_what_is_sent(sampling, placement):
    """ "the server receives exactly S_P", "[sends] S_P + S_D": S0 is not in that count."""
    ways = [{"schedule": SCHEDULE} if sampling == "recorded" else {}]
    if sampling in ("paired", "uniform"):
        ways = [
            {"s_p": s_p, **dual} for s_p in (1, 2, 3, 20, 36) for dual in ({}, *({"dual": "independent", "s_d": s} for s in (1, 3, 30)))
        ]
    for way in ways:
        run = Run(SIX, penalty=0.7, placement=placement, sampling=sampling, evaluate_every=0, nu=0.7 if sampling != "full" else None, **way)
        run.rounds(3 if sampling == "recorded" else 8)
        run.finish()
        bound = run.method.printed_vectors(len(run.figures))
        for direction in ("up", "down"):
            sent = sum(count for (step, way_), count in run.memory.vectors.items() if way_ == direction and step != "S0")
            assert sent <= bound[direction], (way, direction)


def test_the_vectors_of_the_table_are_reproduced():
    """113 rounds as printed: N^2 vectors up and N^2 down per round; lean: N each way."""
    assert SIXTY.n**2 * 113 == pytest.approx(407e3, rel=0.01)
    lean, paper = Run(SIXTY, penalty=0.09), Run(SIXTY, penalty=0.09, placement="paper", order="jacobi")
    for run in (lean, paper):
        run.rounds(2)
        run.finish()
    assert lean.memory.vectors == {("S0", "down"): 1, ("S7+S10", "down"): 120, ("S5", "up"): 120}
    counts = {("S5", "up"): 120, ("S6", "up"): 7080, ("S7", "down"): 120, ("S10", "down"): 7080}
    assert paper.memory.vectors == {("S0", "down"): 1, **counts}


def test_one_round_trip_per_iteration_and_two_with_z_after_x():
    for way, per_round in (({"order": "jacobi"}, 1), ({}, 2), (HALF, 1)):
        run = Run(SIX, penalty=0.7, placement="paper", **way)
        run.rounds(5)
        run.finish()
        assert run.memory.exchanges == 5 * per_round + 1


def test_lean_users_who_are_not_drawn_are_not_contacted():
    run = Run(SIX, 6, start="zero", penalty=0.7, evaluate_every=0, sampling="paired", s_p=6)
    run.rounds(30)
    assert run.memory.contacts == sum(figures["x_blocks"] for figures in run.figures) > 0


def test_messages_of_a_full_round_are_hardly_larger_than_their_vectors():
    for placement, floats in (("lean", 2 * 60 * 3), ("paper", 2 * 3600 * 3)):
        run = Run(SIXTY, start="zero", penalty=0.09, placement=placement, evaluate_every=0, order="jacobi")
        run.rounds(3)
        before = run.memory.message_bytes
        run.round()
        assert run.memory.message_bytes - before < 8 * floats + 300


# ---- placements, hosts, precision


@pytest.mark.parametrize("order", ["jacobi", "z_after_x"])
def test_lean_and_paper_make_the_same_iterates(order):
    """v_i is all that (16) takes from z, mu^ and the other models."""
    lean, paper = (Run(SIXTY, penalty=0.09, placement=placement, order=order, evaluate_every=0) for placement in ("lean", "paper"))
    for a, b in zip(lean.rounds(60), paper.rounds(60), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
    np.testing.assert_allclose(lean.state.mu, paper.state.mu, atol=1e-10)


def test_lean_and_paper_make_the_same_iterates_on_the_same_draws():
    lean, paper = (Run(SIX, penalty=0.7, placement=placement, **HALF) for placement in ("lean", "paper"))
    for a, b in zip(lean.rounds(60), paper.rounds(60), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("payload", slow_after(1, ["float64", "float32"]))
@pytest.mark.parametrize("way", ALL_WAYS, ids=way_name)
def test_the_same_bits_however_users_are_spread_over_hosts(way, payload):
    one, three, seven = (Run(SIXTY, hosts, payload, penalty=0.09, seed=5, **way) for hosts in (1, 3, 7))
    for run in (one, three, seven):
        run.rounds(4)
    for run in (three, seven):
        assert snapshot.dumps(run.state) == snapshot.dumps(one.state)
        assert run.figures == one.figures


@pytest.mark.parametrize("payload", ["float64", "float32"])
def test_a_pair_drawn_as_such_stays_antisymmetric_to_the_bit(payload):
    """ "by imposing the constraint x_i - x_j = z_ij only for i < j": the user with j > i knows z_ji without being told."""
    run = Run(SIX, 2, payload, penalty=0.7, placement="paper", **HALF)
    run.rounds(25)
    run.finish()
    for name in ("z", "muhat"):
        everyone = np.zeros((6, 6, 3))
        for host, state in run.memory.states.items():
            for place, user in enumerate(run.memory.layout.own[host]):
                everyone[user, np.arange(6) != user] = getattr(state, name)[place]
        assert (everyone == -everyone.transpose(1, 0, 2)).all()
        if name == "z":
            assert (run.state.z == everyone[np.triu_indices(6, 1)].T).all()
    for kept in (run.state.x, run.state.z, run.state.mu):  # what the server goes on with is what the users got
        assert (run.memory.precision.rounded(kept) == kept).all()
    for state in run.memory.states.values():  # S7: everyone knows everyone's model
        assert (state.x == run.state.x).all()


@pytest.mark.parametrize(
    "way", slow_after(1, [{}, {"placement": "paper"}, {"placement": "paper", **HALF}, {"acceleration": "anderson"}]), ids=way_name
)
def test_float32_payloads_converge_to_single_precision(way):
    run = Run(SIX, payload="float32", penalty=0.7, evaluate_every=50, **way)
    run.rounds(250)
    assert abs(run.gaps()[-1]) < 1e-5
    assert run.finish().figures["clusters"] == 3


# ---- state


@pytest.mark.parametrize("way", ALL_WAYS, ids=way_name)
def test_a_run_goes_on_from_snapshots_with_the_same_bits(way):
    run, other = (Run(SIX, 2, penalty=0.7, **way) for _ in range(2))
    run.rounds(6)
    other.rounds(3)
    other.state = snapshot.loads(snapshot.dumps(other.state))
    other.memory.states = snapshot.loads(snapshot.dumps(other.memory.states))
    other.rounds(3)
    assert snapshot.dumps(run.state) == snapshot.dumps(other.state)


def test_a_round_never_writes_into_the_state_it_was_given():
    for way in ALL_WAYS:
        run = Run(SIX, penalty=0.7, **way)
        run.round()
        before, bytes_before = run.state, snapshot.dumps(run.state)
        run.rounds(2)
        assert snapshot.dumps(before) == bytes_before


@pytest.mark.parametrize("placement", slow_after(1, ["lean", "paper"]))
def test_a_path_goes_on_from_the_iterate_of_the_larger_penalty(placement):
    """z, mu and mu^ are kept on both sides, S0 is not repeated, and fewer rounds are needed than from the global model."""
    larger = Run(SIXTY, 3, penalty=0.1, placement=placement, stage="first")
    larger.until(1e-6, 300)
    warm = Run(SIXTY, memory=larger.memory, start=larger.finish(), penalty=0.09, placement=placement, stage="second")
    assert ("S0", "down") not in warm.method.expected_vectors([{}])
    assert warm.until(1e-6, 300) < Run(SIXTY, penalty=0.09, placement=placement).until(1e-6, 300)


def test_a_host_without_the_state_of_the_stage_before_says_so():
    first = Run(SIX, penalty=1.2, stage="first")
    carry = first.round().finish()
    with pytest.raises(RunError, match=r"stage 'second' starts from stage 'first', but the host has no state"):
        Run(SIX, start=carry, penalty=0.7, stage="second")
    with pytest.raises(ConfigError, match="cannot go on from them with placement paper"):
        Run(SIX, start=carry, memory=first.memory, penalty=0.7, stage="second", placement="paper")


@pytest.mark.parametrize("placement", slow_after(1, ["lean", "paper"]))
def test_models_that_differ_are_told_to_those_who_need_them(placement):
    """ "we need that x_j^0, j != i, is available at each user i": one row when all are equal, all N otherwise."""
    start = Outcome(np.array(SIX.fixture["local"]["x"]))
    run = Run(SIX, 2, start=start, penalty=0.7, placement=placement)
    run.rounds(300)
    assert run.memory.vectors["S0", "down"] == run.method.expected_vectors(run.figures)["S0", "down"] == 6
    assert abs(run.gaps()[-1]) < 1e-7


# ---- constants


def test_the_penalty_has_the_same_meaning_in_all_conventions():
    """(3) has 1/N and ordered pairs, (14) ordered pairs, (16)-(17) neither."""
    assert Config(penalty=0.7).lam(6) == Config(lambda_eq3=0.7 / 12).lam(6) == Config(lambda_eq14=0.35).lam(6) == 0.7
    entry = SIX.son(0.7)
    assert Config(lambda_eq3=entry["lam3"]).lam(6) == pytest.approx(0.7)
    assert Config(lambda_eq14=entry["lam14"]).lam(6) == pytest.approx(0.7)


def spectral_radius(n, nu, tau, curvature, all_zero, eta_over_rho=0.0):
    """Of the jacobi iteration at full participation for f_i = rho curvature |x|^2/2, off consensus: all z zero, or none shrunk.

    In x, D'z, D'mu^/rho, D'mu/rho, where D x are the differences and D'D = N on such x.
    """
    x = np.array([eta_over_rho - 1, 1, -1, 0.0]) / (curvature + n - 1 + eta_over_rho)
    w = np.zeros(4) if all_zero else np.array([n, 0, 1, 0.0])
    residual = n * x - w
    dual = np.array([0, 0, 0, 1.0]) + tau * residual
    step = np.array([x, w, dual - nu * residual, dual])
    return np.abs(np.linalg.eigvals(step[np.ix_([0, 2, 3], [0, 2, 3])] if all_zero else step)).max()


@pytest.mark.parametrize("n", [2, 3, 6, 60])
@pytest.mark.parametrize("tau", [0.1, 0.45, 0.8])
def test_jacobi_is_stable_from_tau_half_plus_one_over_2n_minus_1_on(n, tau):
    """ "damping factors ... to stabilize": the least nu is sharp, and not N/(2N-1), which is too little for two users with tau = .8."""
    cases = [(curvature, all_zero) for curvature in (0, 0.01 * n, n / 3, n) for all_zero in (False, True)]
    enough = max(spectral_radius(n, least_nu(Extent.complete(n), tau) + 1e-3, tau, *case) for case in cases)
    too_little = max(spectral_radius(n, least_nu(Extent.complete(n), tau) - 1e-3, tau, *case) for case in cases)
    assert enough <= 1 + 1e-9
    assert too_little > 1 + 1e-6
    assert least_nu(Extent.complete(2), 0.8) > 2 / 3 > 6 / 11 > 0.51 > least_nu(Extent.complete(6), 0.8)


@pytest.mark.parametrize("n", [2, 3, 6, 60])
@pytest.mark.parametrize("e", [0.3, 1.0, 3.0])
def test_eta_lessens_the_damping_that_is_needed(n, e):
    """tau/2 + (1 - e)/(2N - 1 + e), e = eta/rho: sharp again, and enough for the larger eta_i that a linearized x-update amounts to."""
    least = least_nu(Extent.complete(n), 0.8, e)
    cases = [(curvature, all_zero) for curvature in (0, 0.01 * n, n / 3, n) for all_zero in (False, True)]
    assert max(spectral_radius(n, least + 1e-3, 0.8, *case, larger) for case in cases for larger in (e, 2 * e, 10 * e + 5)) <= 1 + 1e-9
    assert max(spectral_radius(n, least - 1e-3, 0.8, *case, e) for case in cases) > 1 + 1e-6
    assert least <= least_nu(Extent.complete(n), 0.8)


def test_a_setting_that_eta_makes_stable_is_taken_and_converges():
    rho = 3 * SIX.facts.smoothness.mean() / 5
    with pytest.raises(ConfigError, match=r"nu is 0.3, want at least tau/2 \+ 1/\(2N-1\) = 0.4909"):
        Run(SIX, penalty=0.7, order="jacobi", nu=0.3)
    run = Run(SIX, penalty=0.7, order="jacobi", nu=0.3, eta=3 * rho)
    assert run.until(1e-6, 500) > 10
    with pytest.raises(ConfigError, match=r"nu is 0.2, want at least tau/2 \+ \(1-e\)/\(2N-1\+e\), e = eta/rho, = 0.2571"):
        Run(SIX, penalty=0.7, order="jacobi", nu=0.2, eta=3 * rho)


def forced(run, **steps):
    """The same run with constants that its config would refuse."""
    run.method = dataclasses.replace(run.method, steps=dataclasses.replace(run.method.steps, **steps))
    return run


NEARLY_ALL = {"sampling": "paired", "primal_fraction": 0.9}
ALL_RECORDED = {
    "sampling": "recorded",
    "schedule": [[list(range(6)), *[[p for p in range(36) if p // 6 != p % 6]] * 2]] * 60,
    "evaluate_every": 1,
}


@pytest.mark.parametrize(("way", "part"), [(NEARLY_ALL, "89%"), (ALL_RECORDED, "100%")], ids=["paired", "recorded"])
def test_rounds_that_draw_nearly_everything_need_the_damping_of_full_participation(way, part):
    with pytest.raises(ConfigError, match=f"nu is 0.0, want at least .* in jacobi order, with {part} of the blocks in a round"):
        Run(SIX, penalty=0.05, nu=0.0, **way)
    undamped, default = forced(Run(SIX, penalty=0.05, **way), nu=0.0), Run(SIX, penalty=0.05, **way)
    for run in (undamped, default):
        run.rounds(60)
    first, last = (undamped.figures[place]["primal_residual"] for place in (0, -1))
    assert last > 1e3 * first or undamped.figures[-1]["objective"] > 1e3 * undamped.figures[0]["objective"]
    assert default.figures[-1]["objective"] < default.figures[0]["objective"]


def test_half_of_the_blocks_need_no_damping():
    run = Run(SIX, penalty=0.7, nu=0.0, **HALF)
    assert run.until(1e-6, 1000) > 10
    assert run.method.as_half().warnings == ()


def test_with_z_after_x_tau_stays_below_the_golden_ratio():
    for tau in (1.62, 2.1):
        with pytest.raises(ConfigError, match=rf"tau is {tau}, want less than \(1 \+ sqrt 5\)/2 = 1.618 with z after x"):
            Run(SIX, penalty=0.7, tau=tau)
    too_far, default = forced(Run(SIX, penalty=0.7), tau=2.1), Run(SIX, penalty=0.7)
    for run in (too_far, default):
        run.rounds(150)
    assert not too_far.gaps()[-1] < 1
    assert default.gaps()[-1] < 1e-6


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        (UNIFORM | {"placement": "paper"}, "sampling uniform in placement paper is biased"),
        ({"eta": 0.0}, "eta is 0 with z after x: convergence is proven for eta of at least rho"),
        ({"sampling": "paired", "primal_fraction": 0.6, "nu": 0.1}, "nu is 0.1 and a round updates 61% of the blocks"),
    ],
)
def test_what_is_let_through_but_not_proven_is_said(way, sentence):
    (said,) = Run(SIX, penalty=0.7, **way).method.as_half().warnings
    assert said.startswith(sentence)


@pytest.mark.parametrize("way", [*ALL_WAYS[:5], UNIFORM, {"steps": "wang"}, NEARLY_ALL], ids=way_name)
def test_defaults_need_no_warning(way):
    assert Run(SIX, penalty=0.7, **way).method.as_half().warnings == ()


@pytest.mark.parametrize(
    ("n", "config", "wanted"),
    [
        (4, {"sampling": "paired", "s_p": 4, "dual": "independent", "s_d": 6}, Constants(2.0, 0.0, 0.51, 0.45 * (4 / 16) / (6 / 12))),
        (4, {"sampling": "paired", "s_p": 4, "dual": "independent", "s_d": 2}, Constants(2.0, 0.0, 0.51, 0.45)),
        (4, {"sampling": "uniform", "s_p": 8}, Constants(2.0, 0.0, 0.51, 0.45)),
        (4, {"steps": "wang"}, Constants(2.0, 0.0, 2 / 3, 1 / 3)),
        (3, {"steps": "wang", "sampling": "paired", "s_p": 6}, Constants(3.0, 0.0, 2 / 3, 1 / 6)),
        (3, {"steps": "wang", "sampling": "paired", "s_p": 2}, Constants(3.0, 0.0, 1 / 2, 2 / (2 * (18 - 2)))),
        (10, {"sampling": "paired", "s_p": 10}, Constants(2 / 3 * 5 / 3, 0.0, 0.51, 0.8)),
        (10, {"sampling": "paired", "s_p": 11}, Constants(2 / 3, 0.0, 0.51, 0.8)),
        (10, {"sampling": "uniform", "s_p": 10}, Constants(2 / 3, 0.0, 0.51, 0.45)),
        (4, {}, Constants(2.0, 2.0, 0.0, 1.6)),
        (2, {"order": "jacobi"}, Constants(6.0, 0.0, 0.8 / 2 + 1 / 3 + 0.01, 0.8)),
    ],
)
def test_the_constants_are_exactly_these(n, config, wanted):
    """For a mean smoothness of 2."""
    found = Config(penalty=1, **config).steps_for(Extent.complete(n), 2.0)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(wanted), rel=1e-12)


@pytest.mark.parametrize("n", slow_after(1, [2, 4]))
@pytest.mark.parametrize("way", [{"order": "jacobi"}, HALF, {"steps": "wang"}], ids=way_name)
def test_the_default_constants_work_for_few_users(n, way):
    points = Points(np.random.default_rng(n).normal(size=(n, 2)))
    run, check = Run(points, penalty=0.4 / n, **way), Run(points, penalty=0.4 / n, rho=1 / n)
    run.rounds(300)
    check.rounds(100)
    assert run.figures[-1]["objective"] == pytest.approx(check.figures[-1]["objective"], rel=1e-6)


@pytest.mark.parametrize("sampling", slow_after(1, ["paired", "uniform"]))
def test_small_residuals_mean_a_small_gap_even_when_a_round_draws_little(sampling):
    """A round that draws one block at rest says nothing about the others."""
    run = Run(SIX, penalty=0.7, sampling=sampling, s_p=3)
    while max(run.figures[-1][name] for name in ("primal_residual", "dual_residual")) > 3e-3 if run.figures else True:
        run.round()
    assert len(run.figures) > 100
    assert run.gaps()[-1] < 1e-3


def test_too_little_damping_is_refused_and_would_diverge():
    with pytest.raises(ConfigError, match=r"nu is 0.0, want at least tau/2 \+ 1/\(2N-1\) = 0.4909 for 6 users"):
        Run(SIX, penalty=0.7, order="jacobi", nu=0.0)
    run = Run(SIX, penalty=0.7, order="jacobi", nu=0.5)
    run.method = dataclasses.replace(run.method, steps=dataclasses.replace(run.method.steps, nu=0.0))
    run.rounds(100)
    assert not run.gaps()[-1] < 1


def test_a_dual_step_of_the_wrong_sign_is_seen():
    """Teeth for (18): with the sign flipped nothing above would hold."""
    run = Run(SIX, penalty=0.7, order="jacobi")
    run.method = dataclasses.replace(run.method, steps=dataclasses.replace(run.method.steps, tau=-0.8))
    run.rounds(100)
    assert not run.gaps()[-1] < 1e-3


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "given by nothing, want exactly one of"),
        ({"penalty": 1, "path": (2, 1)}, "given by penalty and path"),
        ({"path": (1, 2)}, "strictly decreasing"),
        ({"penalty": 1, "sampling": "paired"}, "exactly one of primal_fraction and s_p"),
        ({"penalty": 1, "primal_fraction": 0.5}, "draws nothing"),
        ({"penalty": 1, "order": "z_after_x", **HALF}, "sampling: full, or order: jacobi"),
        ({"penalty": 1, "dual_fraction": 0.5, **HALF}, "need dual: independent"),
        ({"penalty": 1, "sampling": "recorded"}, "needs one"),
        (
            {"penalty": 1, "sampling": "recorded", "schedule": [[[0], [], []], [[1], [7, 8, 7], []]]},
            "round 2 of the schedule names z block 7 twice",
        ),
        ({"penalty": 1, "steps": "wang", "tau": 0.1}, "leave out"),
        ({"penalty": 1, "acceleration": "anderson", "placement": "paper"}, "placement is paper, want lean"),
        ({"penalty": 1, "acceleration": "anderson", "order": "jacobi", "nu": 0.6}, "order is jacobi, want z_after_x; nu is 0.6, want 0"),
        ({"penalty": 1, "acceleration": "anderson", **HALF}, "sampling is paired, want full"),
        ({"penalty": 1, "acceleration": "anderson", "x_update": "linearized"}, "x_update is linearized, want exact"),
        ({"penalty": 1, "acceleration": "anderson", "anderson_memory": 0}, "greater than or equal to 1"),
        ({"penalty": float("nan")}, "finite number"),
        ({"penalty": 1, "lambda": 1}, "Extra inputs"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_in_a_sentence(config, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config(**config)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"sampling": "paired", "s_p": 37}, "s_p is 37, want at most N.2 = 36 for 6 users"),
        ({**HALF, "dual": "independent", "s_d": 31}, "s_d is 31"),
        ({"sampling": "recorded", "schedule": [[[0], [7], []]]}, "round 1 of the schedule names block 7"),
        ({"sampling": "recorded", "schedule": [[[6], [], []]]}, "names block 6"),
        ({"start": None}, "name one, or write start: zero"),
    ],
)
def test_a_config_that_does_not_fit_the_members_is_refused_before_anything_starts(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Run(SIX, penalty=0.7, **{"start": "global", **config})


def test_an_answer_that_was_not_asked_for_is_the_peers_fault(monkeypatch):
    run = Run(SIX, penalty=0.7, placement="paper", **HALF)
    step = CLIENT.step

    def shifted(state, inbox, local):
        state, replies = step(state, inbox, local)
        return state, [dataclasses.replace(m, partner=m.partner[::-1]) if hasattr(m, "partner") else m for m in replies]

    monkeypatch.setattr(federation, "CLIENT", dataclasses.replace(CLIENT, step=shifted))
    with pytest.raises(ProtocolError, match="S6 brought"):
        run.rounds(3)


def test_a_path_is_a_stage_for_each_penalty_each_from_the_one_before():
    method = {"name": "pdmm", "path": [0.1, 0.09]}
    problem = {"loss": "squared_hinge", "l2": 1e-3}
    experiment = experiment_from({"name": "x", "data": {"source": "ellipses"}, "problem": problem, "method": method})
    listed = stages(experiment.method, experiment)
    assert [stage.start for stage in listed] == [(), ("global",), (listed[1].name,)]
    assert [stage.config.lam(60) for stage in listed[1:]] == [0.1, 0.09]
    with pytest.raises(ConfigError, match="path has 2 penalties, want one per stage"):
        experiment.method.lam(60)
