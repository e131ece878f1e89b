"""PDMM on a graph: sum_i f_i(x_i) + LAM sum_{(i,j) in E} w_ij |x_i - x_j|.

Armacki, Bajovic, Jakovetic and Kar (2022) have all pairs. With LAM w_ij instead of LAM and rho w_ij in that of rho, their (16) to (19)
hold for z_ij and m_ij = mu_ij / w_ij on the edges, and the sum of a user's weights takes the place of N-1. Graphs of neighbours are those
of Touw, Groenen and Terada (2022), section 3.
"""

import dataclasses

import numpy as np
import pytest
from pydantic import ValidationError

from coterie.errors import ConfigError, RunError
from coterie.experiment.problem import ProblemConfig
from coterie.families.pdmm_messages import Degrees, UpdatedModels
from coterie.families.pdmm_steps import least_nu
from coterie.families.ties import Extent
from coterie.methods.pdmm import Config
from coterie_server.interface.half import Replies
from coterie_server.maths import graphs
from coterie_server.maths.clusters import same_partition
from coterie_server.maths.ssnal import Graph
from coterie_server.maths.sum_of_norms import sum_of_norms
from coterie_server.methods.pdmm import pairs
from tests.papers.pdmm_federation import Data, Points, Run
from tests.slow import slow_after

SIX, SIXTY = Data(6), Data(60)
NEAR = {"neighbours": 5, "phi": 2.0}
RING = {"pairs": [(f"u{i}", f"u{(i + step) % 60}", 1.0 + (i % 3) / 2) for step in (1, 7, 20) for i in range(60)]}
PATH_OF_SIX = {"pairs": [(f"u{i}", f"u{i + 1}", 0.5 + i) for i in range(5)]}
WAYS = {
    "lean": {},
    "anderson": {"acceleration": "anderson"},
    "jacobi": {"order": "jacobi"},
    "linearized": {"x_update": "linearized"},
    "paired": {"sampling": "paired", "primal_fraction": 0.5},
    "independent": {"sampling": "paired", "primal_fraction": 0.5, "dual": "independent"},
    "wang": {"steps": "wang"},
}


class Sixty(Data):
    """The fixture of 60 users with another loss of the same rows and labels."""

    def __init__(self, loss):
        super().__init__(60)
        self.config = ProblemConfig(loss=loss, l2=0.0 if loss == "squared_distance" else 1e-3)
        self._set(self.features, self.labels)


def kkt(run):
    """How far the iterate is from the conditions of a minimum, relative to the users' largest gradient at zero.

    sum_j mu_ij = -grad f_i, |mu_ij| <= LAM w_ij, and mu_ij along x_i - x_j where these differ.
    """
    layout, x, m = run.method.layout, run.state.x, run.state.mu
    gradients = run.data.problem.gradient(x)
    scale = np.linalg.norm(run.data.problem.gradient(np.zeros_like(x)), axis=1).max()
    apart = pairs.differences(np.ascontiguousarray(x.T), layout)
    slack = run.method.lam * pairs.lengths(apart) - (m * apart).sum(axis=0)
    return max(
        np.linalg.norm(gradients + pairs.sums(layout, m), axis=1).max() / scale,
        (pairs.lengths(m) / run.method.lam).max() - 1,
        np.abs(slack).max() / run.method.lam / np.abs(x).max(),
    )


def settled(run, residual, limit):
    while not run.figures or max(run.figures[-1]["primal_residual"], run.figures[-1]["dual_residual"]) > residual:
        assert len(run.figures) < limit, run.figures[-1]
        run.round()
    return run


LOSSES = ["squared_hinge", "logistic", "least_squares", "huber", "squared_distance"]


@pytest.mark.parametrize("graph", ["complete", NEAR, RING], ids=["complete", "neighbours", "pairs"])
@pytest.mark.parametrize("loss", slow_after(1, LOSSES))
def test_the_conditions_of_a_minimum_hold_to_1e_8_for_each_loss(loss, graph):
    run = Run(Sixty(loss), start="zero", penalty=0.09, acceleration="anderson", evaluate_every=0, cluster_tolerance=0, graph=graph)
    settled(run, 1e-10, 6000)
    assert kkt(run) < 1e-8
    labels = run.finish().labels
    layout = run.method.layout
    together = labels[layout.first] == labels[layout.second]
    exactly = Graph.of(60, layout.first, layout.second, np.ones(layout.size)).components(pairs.zero_pairs(layout, run.state.z))
    assert same_partition(labels, exactly)
    assert together.any()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("graph", [PATH_OF_SIX, {"neighbours": 2}], ids=["pairs", "neighbours"])
def test_every_way_reaches_the_optimum_of_son_newtons_solver(way, graph):
    points = Points(np.random.default_rng(5).normal(size=(6, 2)))
    run = Run(points, penalty=0.3, graph=graph, **WAYS[way])
    graph = run.method.layout.graph
    best = sum_of_norms(points.features[:, 0], (np.stack([graph.first, graph.second], axis=1), graph.weights), 0.3, tolerance=1e-12)
    while not run.figures or run.figures[-1]["objective"] > best.objective * (1 + 1e-7):
        assert len(run.figures) < 5000, run.figures[-1]
        run.round()
    assert run.figures[-1]["objective"] >= best.objective * (1 - 1e-12)
    np.testing.assert_allclose(run.finish().models, best.x, atol=1e-2)


def test_all_pairs_with_weight_one_have_the_optimum_of_the_complete_graph():
    entry = SIX.son(0.7)
    graph = {"pairs": [(f"u{i}", f"u{j}", 1.0) for i in range(6) for j in range(i + 1, 6)]}
    run = Run(SIX, penalty=0.7, graph=graph)
    assert run.until(1e-9, 1000) > 5
    assert same_partition(run.finish().labels, np.array(entry["partition"]))


def test_one_round_by_hand_on_two_points_with_a_weight():
    """f_i = |x - a_i|^2/2, a = 0 and 4, w = 1/2, LAM = 2, start at 2, rho = eta = 1: q = 1, v_i = 1/2 (2 + 0) + 1/2 2 = 2."""
    run = Run(Points([[0.0], [4.0]]), penalty=2.0, rho=1.0, eta=1.0, tau=1.6, graph={"pairs": [("u0", "u1", 0.5)]})
    run.round()
    np.testing.assert_allclose(run.state.x[:, 0], [1.0, 3.0])  # (a_i + 2)/(1 + 1)
    assert run.state.z[0, 0] == 0.0  # |-2| is not above LAM/rho = 2
    np.testing.assert_allclose(run.state.mu[0, 0], -3.2)  # 1.6 (1 - 3 - 0)
    run.round()
    # v_0 = 1/2 (3 + 0) + 1/2 3.2 + 1/2 1 = 3.6
    np.testing.assert_allclose(run.state.x[:, 0], [1.8, 2.2])
    figures = run.figures[0]
    assert figures["objective"] == pytest.approx(0.5 + 0.5 + 2 * 0.5 * 2)
    assert figures["primal_residual"] == pytest.approx(np.sqrt(0.5 * 4) / np.sqrt(0.5 * (1 + 9)))
    assert figures["dual_residual"] == pytest.approx(np.sqrt(0.5 * (1 + 1)) / (2 * np.sqrt(0.5)))


@pytest.mark.parametrize("way", ["lean", "anderson", "paired"])
def test_units_of_the_features_change_no_figure_and_no_cluster(way):
    """With features in units 2^30 times as small, models are as many times as large, and LAM has the inverse unit of a loss by a model."""
    points = np.random.default_rng(2).normal(size=(40, 3)) + 3 * (np.arange(40) % 4 == 1)[:, None]
    one, other = (Run(Points(points * unit), penalty=0.3 * unit, graph=NEAR, **WAYS[way]) for unit in (1.0, 2.0**30))
    for run in (one, other):
        run.rounds(60)
    np.testing.assert_array_equal(one.method.layout.graph.weights, other.method.layout.graph.weights)
    np.testing.assert_array_equal(one.state.x * 2.0**30, other.state.x)
    for name in ("clusters", "primal_residual", "dual_residual", "rho"):
        assert [row[name] for row in one.figures] == [row[name] for row in other.figures], name
    assert 1 < one.figures[-1]["clusters"] < 40
    np.testing.assert_array_equal(one.finish().labels, other.finish().labels)


@pytest.mark.parametrize("way", ["lean", "anderson", "paired"])
@pytest.mark.parametrize("n_hosts", [1, 4])
def test_the_closed_form_counts_what_was_really_encoded(way, n_hosts):
    run = Run(SIXTY, n_hosts=n_hosts, penalty=0.09, graph=NEAR, **WAYS[way])
    run.rounds(12)
    run.finish()
    wanted = {key: value for key, value in run.method.expected_vectors(run.figures).items() if value}
    assert dict(run.memory.vectors) == wanted
    scalars = run.method.expected_scalars(run.figures)
    assert scalars["ties", "down"] == run.memory.scalars["ties", "down"] == 60
    assert scalars["evaluate", "up"] == run.memory.scalars["evaluate", "up"]
    n_edges = run.method.layout.size
    assert run.method.printed_vectors(12)["up"] >= 12 * (0.4 if way == "paired" else 1.0) * (60 + 2 * n_edges)


@pytest.mark.parametrize("way", ["lean", "anderson", "jacobi", "paired"])
def test_the_same_bits_however_users_are_spread_over_hosts(way):
    one, several = (Run(SIXTY, n_hosts=n, penalty=0.09, graph=NEAR, **WAYS[way]) for n in (1, 7))
    for run in (one, several):
        run.rounds(15)
    np.testing.assert_array_equal(one.state.x, several.state.x)
    np.testing.assert_array_equal(one.state.mu, several.state.mu)


def test_a_path_goes_on_on_the_same_graph():
    first = Run(SIXTY, penalty=0.1, graph=NEAR, stage="a")
    first.rounds(60)
    warm = Run(SIXTY, penalty=0.09, graph=NEAR, stage="b", memory=first.memory, start=first.finish())
    np.testing.assert_array_equal(warm.method.layout.graph.weights, first.method.layout.graph.weights)
    cold = Run(SIXTY, penalty=0.09, graph=NEAR)
    rounds = [len(settled(run, 1e-6, 2000).figures) for run in (warm, cold)]
    assert rounds[0] < rounds[1]
    assert warm.figures[-1]["objective"] == pytest.approx(cold.figures[-1]["objective"], rel=1e-6)


def test_a_user_is_told_its_degree_until_it_has_answered():
    run = Run(SIX, penalty=0.7, graph=PATH_OF_SIX)
    told = []

    class Late:
        """Users 4 and 5 miss the first two rounds."""

        async def exchange(self, *messages, to=None, wanted=()):
            (degrees,) = [message for message in messages if isinstance(message, Degrees)] or [None]
            told.append(None if degrees is None else dict(zip(degrees.users.tolist(), degrees.degree.tolist(), strict=True)))
            there = np.arange(6) if len(told) > 2 else np.arange(4)
            replies = {UpdatedModels: UpdatedModels(np.zeros((len(there), run.data.d)), users=None if len(there) == 6 else there)}
            values = [message for message in messages if type(message).__name__ == "ValuesWanted"]
            assert not values
            return Replies(
                replies, None if len(there) == 6 else there, unasked=np.setdiff1d(np.arange(6), there) if len(told) == 2 else None
            )

    run.method = dataclasses.replace(run.method, config=run.config.model_copy(update={"evaluate_every": 0}))
    run.memory = Late()
    run.rounds(4)
    degrees = {0: 0.5, 1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0, 5: 4.5}
    late = {user: degrees[user] for user in (4, 5)}
    assert told == [degrees, late, late, None]
    assert [row.get("ties_told", 0.0) - row.get("unasked_ties", 0.0) for row in run.figures] == [6, 0, 2, 0]
    assert run.method.expected_scalars(run.figures)["ties", "down"] == 8


def test_a_stage_that_goes_on_with_another_graph_says_so():
    run = Run(SIX, penalty=0.7, graph=PATH_OF_SIX)
    run.round()
    pairs = PATH_OF_SIX["pairs"]
    for others in (pairs[:-1], [*pairs[:-1], [*pairs[-1][:2], 2 * pairs[-1][2]]]):
        run.method = Run(SIX, penalty=0.7, graph={"pairs": others}).method
        with pytest.raises(RunError, match=r"the pairs or weights of method.graph are others than those that the run began with"):
            run.round()


def spectral_radius(s, nu, tau, curvature, all_zero, e):
    """Of the jacobi iteration in a direction where the scaled weights have the eigenvalue s, rho degree = 1, f_i = curvature |x|^2/2.

    In x, z, m^ and m summed with their weights over the degree.
    """
    a = 1 - s
    x = np.array([s + e, 1, -1, 0.0]) / (curvature + 1 + e)
    w = np.zeros(4) if all_zero else np.array([a, 0, 1, 0.0])
    residual = a * x - w
    dual = np.array([0, 0, 0, 1.0]) + tau * residual
    step = np.array([x, w, dual - nu * residual, dual])
    return np.abs(np.linalg.eigvals(step[np.ix_([0, 2, 3], [0, 2, 3])] if all_zero else step)).max()


@pytest.mark.parametrize("e", [0.0, 0.5, 1.0])
def test_jacobi_on_any_graph_is_stable_with_the_damping_of_two_users(e):
    enough = least_nu(Extent(60, 99, 3.0, is_complete=False), 0.8, e)
    assert enough == least_nu(Extent.complete(2), 0.8, e) == pytest.approx(0.4 + (1 - e) / (3 + e))
    for s in np.linspace(-1, 0.99, 41):
        for curvature in (0.0, 0.1, 1.0, 10.0):
            for all_zero in (False, True):
                assert spectral_radius(s, enough + 1e-3, 0.8, curvature, all_zero, e) <= 1 + 1e-9
    assert spectral_radius(-1.0, enough - 1e-3, 0.8, 0.0, False, e) > 1 + 1e-6


def test_too_little_damping_on_a_path_of_users_is_refused_and_would_diverge():
    with pytest.raises(ConfigError, match=r"nu is 0.5, want at least tau/2 \+ 1/\(3\) = 0.7333 for 6 users"):
        Run(SIX, penalty=0.7, order="jacobi", nu=0.5, graph=PATH_OF_SIX)
    run = Run(SIX, penalty=0.05, order="jacobi", nu=0.75, graph=PATH_OF_SIX)
    run.method = dataclasses.replace(run.method, steps=dataclasses.replace(run.method.steps, nu=0.0))
    run.rounds(200)
    assert run.figures[-1]["primal_residual"] > 1


@pytest.mark.parametrize(
    "way", [{"placement": "paper"}, {"sampling": "uniform", "s_p": 3}, {"sampling": "recorded", "schedule": [[[], [], []]]}]
)
def test_a_graph_wants_the_lean_placement_and_draws_in_pairs(way):
    with pytest.raises(
        ValidationError, match="the graph is not complete, which wants placement lean and sampling full, paired or arrival, and has"
    ):
        Config(penalty=1.0, graph=PATH_OF_SIX, **way)


def test_counts_of_blocks_are_those_of_the_graph():
    with pytest.raises(ConfigError, match=r"s_p is 17, want at most N \+ 2\|E\| = 16 for 6 users"):
        Run(SIX, penalty=0.7, sampling="paired", s_p=17, graph=PATH_OF_SIX)
    with pytest.raises(ConfigError, match=r"s_d is 11, want at most 2\|E\| = 10 for 6 users"):
        Run(SIX, penalty=0.7, sampling="paired", s_p=16, dual="independent", s_d=11, graph=PATH_OF_SIX)


def test_zeros_join_along_edges_alone_and_equal_models_without_a_tie_stay_apart():
    run = Run(
        Points([[0.0], [5.0], [0.0], [0.0]]), penalty=1e-3, graph={"pairs": [("u0", "u1", 1.0), ("u1", "u2", 1.0), ("u2", "u3", 1.0)]}
    )
    run.rounds(200)
    assert run.finish().labels.tolist() == [0, 1, 2, 2]


def test_neighbours_come_from_the_local_models_also_where_the_start_is_another():
    run = Run(SIXTY, penalty=0.09, graph=NEAR)
    wanted = graphs.nearest(SIXTY.local_models, 5, 2.0)
    np.testing.assert_array_equal(run.method.layout.graph.weights, wanted.weights)
    np.testing.assert_array_equal(run.method.start_models(), SIXTY.global_models)
