"""Charts say what the numbers say: thinned lines, axes, bars beside the closed form, clusters, trees of links, colours."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coterie.arrays import Array
from coterie_deploy.read.costs import AXES, axes_of, common_goal, cost, figures_shown, goal_said
from coterie_deploy.view import charts, charts_structure, charts_users
from coterie_deploy.view import theme as themes
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.charts_structure import KNOWN, Link
from coterie_server.record.curves import GAP, Curves, Goal
from coterie_server.record.query import Group
from coterie_server.record.rundb import BETWEEN, DIRECT, WITHIN
from coterie_server.record.summary import StageSummary, Traffic

NAN = float("nan")


def curves_of(n: int = 4, *, scopes: tuple[str, ...] = (DIRECT,), has_reference: bool = False, **figures: Any) -> Curves:
    """A stage of n rounds that take a second, 10 bytes down and 100 up each."""
    stage = StageSummary(0, "pdmm", "pdmm", n, "converged", float(n))
    rounds = np.arange(n + 1)
    sent = {(way, scope): rounds * each for scope in scopes for way, each in (("down", 10.0), ("up", 100.0))}
    found = {name: np.array([NAN, *values]) for name, values in figures.items()}
    return Curves(stage, rounds, rounds.astype(np.float64), found, sent, has_reference)


def layers_of(chart: Chart) -> list[dict[str, Any]]:
    return list(chart.spec.get("layer", [chart.spec]))


def values_of(chart: Chart) -> list[dict[str, Any]]:
    return list(chart.spec["data"]["values"])


# ---- lines


def test_a_long_line_is_thinned_and_keeps_its_ends_and_its_extremes() -> None:
    y = np.sin(np.arange(50_000) / 700.0)
    y[23_456], y[34_567] = 9.0, -9.0
    thin_x, thin_y = charts.thinned(np.arange(50_000.0), y)
    assert thin_x.size <= charts.MAX_POINTS
    assert (thin_x[0], thin_x[-1], thin_y.max(), thin_y.min()) == (0.0, 49_999.0, 9.0, -9.0)
    assert (np.diff(thin_x) > 0).all()
    assert np.array_equal(thin_y, y[thin_x.astype(int)])


def test_what_is_no_number_is_no_point() -> None:
    x, y = charts.thinned(np.array([0.0, 1, NAN, 3]), np.array([1.0, NAN, 1, math.inf]))
    assert (x.tolist(), y.tolist()) == ([0.0], [1.0])


@pytest.mark.parametrize(
    ("against", "paid"),
    [
        ("round", [1, 2, 3]),
        ("seconds", [1.0, 2.0, 3.0]),
        ("bytes", [220, 440, 660]),
        ("up", [200, 400, 600]),
        ("down", [20, 40, 60]),
        ("within", [110, 220, 330]),
        ("between", [110, 220, 330]),
    ],
)
def test_a_figure_is_drawn_against_what_it_has_cost(against: Any, paid: list[float]) -> None:
    found = curves_of(3, scopes=(WITHIN, BETWEEN), accuracy=[0.5, 0.6, 0.7])
    chart = charts.progress_chart({"one": found}, "accuracy", against)
    assert chart.rows == [("one", x, y) for x, y in zip(paid, [0.5, 0.6, 0.7], strict=True)]
    assert chart.columns[1] == AXES[against]


def test_bytes_up_can_count_more() -> None:
    chart = charts.progress_chart({"one": curves_of(2, loss=[2.0, 1.0])}, "loss", "bytes", up_weight=5)
    assert [row[1] for row in chart.rows] == [510, 1020]
    assert "up 5 times" in chart.columns[1]


def test_counts_begin_at_0_and_an_axis_that_does_not_says_so() -> None:
    def drawn(values: list[float]) -> tuple[Any, bool]:
        chart = charts.progress_chart({"one": curves_of(2, users=values)}, "users", "round")
        return layers_of(chart)[0]["encoding"]["y"].get("scale", {}).get("zero", True), "does not begin at 0" in chart.note

    assert drawn([40.0, 60.0]) == (True, False)
    assert drawn([0.4, 0.6]) == (False, True)
    assert drawn([-0.4, 0.6]) == (False, False)


def test_a_gap_is_on_a_logarithmic_axis_without_its_zero() -> None:
    chart = charts.progress_chart({"one": curves_of(4, gap=[1.0, 1e-3, 1e-6, 0.0])}, GAP, "round", goal=Goal(GAP, 1e-3))
    line, goal = layers_of(chart)
    y = line["encoding"]["y"]
    assert y["scale"] == {"type": "log"}
    assert [row[2] for row in chart.rows] == [1.0, 1e-3, 1e-6]
    assert y["axis"]["values"] == [10.0**power for power in range(-6, 1)]
    assert goal["encoding"]["y"]["datum"] == 1e-3
    assert "gap ≤ 0.001" in chart.note


def test_several_runs_are_several_lines_in_their_order() -> None:
    named = {"b": curves_of(2, loss=[2.0, 1.0]), "a": curves_of(2, loss=[3.0, 1.0]), "without": curves_of(2)}
    chart = charts.progress_chart(named, "loss", "round")
    assert chart.spec["encoding"]["color"]["sort"] == ["b", "a", "without"]
    assert [row[0] for row in chart.rows] == ["b", "b", "a", "a"]


def test_one_round_is_a_point() -> None:
    chart = charts.progress_chart({"one": curves_of(1, loss=[2.0])}, "loss", "round")
    assert chart.spec["mark"]["type"] == "point"


def test_axes_that_say_nothing_are_left_out() -> None:
    flat = curves_of(3, loss=[1.0, 1.0, 1.0])
    assert axes_of([flat]) == ["round", "bytes", "up", "down", "seconds"]
    assert axes_of([flat, curves_of(3, scopes=(WITHIN, BETWEEN))]) == list(AXES)
    untimed = Curves(flat.stage, flat.rounds, np.full(4, NAN), flat.figures, flat.wire_bytes)
    assert "seconds" not in axes_of([untimed])


def test_the_goal_of_a_comparison_is_what_all_have_reached() -> None:
    slow, fast = curves_of(2, accuracy=[0.5, 0.7]), curves_of(2, accuracy=[0.9, 0.8])
    assert common_goal([slow, fast]) == Goal("accuracy", 0.7)
    own = curves_of(2, gap=[0.5, 0.0], objective=[3.0, 2.0]), curves_of(2, gap=[0.1, 0.0], objective=[2.5, 2.2])
    assert common_goal(own) == Goal("objective", 2.2)  # a gap to one's own smallest objective is always reached
    assert common_goal([slow, curves_of(2, loss=[1.0, 2.0])]) is None
    assert common_goal([]) is None
    assert goal_said(Goal("accuracy", 0.7)) == "accuracy ≥ 0.7"
    assert goal_said(Goal("gap", 1e-5)) == "gap ≤ 1e-5"


def test_the_metric_of_ones_own_loss_is_no_goal_by_itself() -> None:
    """It may be an accuracy or an error."""
    one, other = curves_of(2, metric=[0.5, 0.7], loss=[3.0, 2.0]), curves_of(2, metric=[0.9, 0.8], loss=[2.0, 1.0])
    assert common_goal([one, other]) == Goal("loss", 2.0)


def test_figures_that_say_how_far_a_run_is_come_first() -> None:
    assert figures_shown(curves_of(1, converged=[1], objective=[1], gap=[1])) == [GAP, "objective"]
    assert figures_shown(curves_of(1, converged=[1], users=[3])) == ["users"]


def test_bytes_so_far_have_a_line_for_each_way_and_scope() -> None:
    chart = charts.cumulative_chart(curves_of(2, scopes=(WITHIN, BETWEEN)))
    assert {row[:2] for row in chart.rows} == {(way, scope) for way in ("up", "down") for scope in (WITHIN, BETWEEN)}
    assert ("up", WITHIN, 2, 200) in chart.rows
    assert float(cost(curves_of(2), "bytes")[-1]) == 220


# ---- bars


def traffic(step: str, direction: str, vectors: int, n_bytes: int, *, expected: float | None = None, scope: str = DIRECT) -> Traffic:
    return Traffic(0, step, direction, scope, vectors=vectors, message_bytes=n_bytes, expected=expected)


def test_bars_that_nobody_could_see_are_only_in_the_table() -> None:
    rows = [traffic("S0", "down", 1, 3), traffic("S5", "up", 50, 10_000), traffic("S7+S10", "down", 50, 9_000)]
    chart = charts.traffic_chart(rows)
    assert [value["step"] for value in values_of(chart)] == ["S5", "S7+S10"]
    assert [row[0] for row in chart.rows] == ["S0", "S5", "S7+S10"]
    assert "S0" in chart.note


def test_groups_of_a_query_are_drawn_as_traffic_is() -> None:
    rows = [traffic("S5", "up", 5, 100), traffic("S7+S10", "down", 5, 90)]
    groups = [Group((row.step, row.direction, row.scope), vectors=row.vectors, message_bytes=row.message_bytes) for row in rows]
    assert charts.traffic_chart(groups).rows == charts.traffic_chart(rows).rows
    scopes = [Group((row.scope, row.direction), vectors=row.vectors, message_bytes=row.message_bytes) for row in rows]
    assert charts.scope_chart(scopes).rows == charts.scope_chart(rows).rows == [(DIRECT, "up", 5, 100), (DIRECT, "down", 5, 90)]


def test_the_closed_form_stands_across_the_bars_and_the_note_says_whether_it_is_met() -> None:
    met = charts.vectors_chart([traffic("S5", "up", 50, 1, expected=50.0), traffic("evaluate", "down", 50, 1)])
    assert met is not None
    assert "which all of them meet" in met.note
    assert met.spec["layer"][1]["encoding"]["x"]["field"] == "closed form"
    off = charts.vectors_chart([traffic("S5", "up", 49, 1, expected=50.0)])
    assert off is not None
    assert "meet" not in off.note
    coins = Traffic(0, "S5", "up", DIRECT, vectors=49, expected=47.5, spread=2.0, drawn=49.0)
    of_coins, other = (charts.vectors_chart([replace(coins, vectors=vectors)]) for vectors in (49, 48))
    assert of_coins is not None
    assert other is not None
    assert "of random coins their mean; for the coins drawn, all bars are what it says." in of_coins.note
    assert other.note.endswith("of random coins their mean.")
    assert charts.vectors_chart([traffic("control", "up", 0, 100)]) is None


def test_a_step_in_two_scopes_has_bars_for_both() -> None:
    chart = charts.traffic_chart([traffic("trace", "up", 1, 10, scope=WITHIN), traffic("trace", "up", 1, 10, scope=BETWEEN)])
    assert [value["bar"] for value in values_of(chart)] == ["trace (within)", "trace (between)"]


# ---- who is together


def test_a_cluster_keeps_the_colour_of_most_of_its_users() -> None:
    users = [f"u{i}" for i in range(6)]
    chart = charts_structure.clusters_chart(users, ["1", "2"], [[0, 0, 0, 3, 3, 5], [7, 7, 9, 9, 9, 9]], axis="round", users=users)
    colour = {(value["step"], value["user"]): value["colour"] for value in values_of(chart)}
    assert colour["1", "u0"] == colour["2", "u0"] != colour["1", "u3"]
    assert colour["1", "u3"] == colour["2", "u5"]
    assert [value["users"] for value in values_of(chart)][5] == 1  # u5 is alone at first
    assert "From 3 to 2 clusters" in chart.note


def test_known_clusters_have_a_column_of_their_own() -> None:
    users = ["a", "b", "c"]
    chart = charts_structure.clusters_chart(["c", "a"], ["0.1"], [[0, 0, 1]], axis="penalty", users=users, known=[1, 1, 0])
    assert chart.rows == [(KNOWN, "c", 0), (KNOWN, "a", 1), ("0.1", "c", 1), ("0.1", "a", 0)]
    assert chart.spec["encoding"]["x"]["scale"]["domain"] == [KNOWN, " ", "0.1"]
    assert "2 of 3 users" in chart.note


def test_a_path_has_no_point_where_a_stage_has_no_figure() -> None:
    measured = {"clusters": [5, 2, 1], "held-out accuracy": [None, 0.9, 0.8], "adjusted Rand index": [None, None, 1.0]}
    clusters, metric = charts_structure.path_charts([0.1, 0.2, 0.4], measured)  # a single point is no chart
    assert clusters.rows == [(0.1, 5), (0.2, 2), (0.4, 1)]
    assert metric.rows == [(0.2, 0.9), (0.4, 0.8)]


# ---- who speaks to whom


def drawn_names(chart: Chart) -> list[str]:
    found = {json.dumps(value, sort_keys=True): value for layer in layers_of(chart)[1:] for value in layer["data"]["values"]}
    return [value["name"] for value in found.values()]


@pytest.mark.parametrize(("n_hosts", "n_drawn"), [(1, 1), (4, 4), (12, 12), (13, 12), (160, 12)])
def test_many_hosts_are_drawn_as_the_busiest_and_the_others_together(n_hosts: int, n_drawn: int) -> None:
    links = [Link("", f"host-{i}", 2, 1000.0 + i, 10.0, DIRECT) for i in range(n_hosts)]
    chart = charts_structure.topology_chart(links)
    names = drawn_names(chart)
    assert len(names) == n_drawn + 1
    assert len(chart.rows) == n_hosts
    assert f"host-{n_hosts - 1} · 2 users" in names
    if n_hosts == 160:
        assert "149 more hosts · 298 users" in names


def test_aggregators_that_have_no_room_take_their_hosts_with_them() -> None:
    links = [Link("", f"a{i}", 5, 100.0 + i, 1.0, BETWEEN) for i in range(60)]
    links += [Link(f"a{i}", f"h{j}", None, 50.0, 1.0, WITHIN) for i in range(60) for j in range(5)]
    chart = charts_structure.topology_chart(links)
    names = drawn_names(chart)
    assert "53 more aggregators · 265 users" in names
    assert "a59 · 5 users" in names
    assert "a3 · 5 users" not in names
    assert sum(name == "4 more hosts" for name in names) == 7
    assert chart.spec["height"] < 1200


def test_members_with_odd_names_are_drawn_once_each() -> None:
    links = [Link("", "coordinator", 1, 5.0, 5.0, BETWEEN), Link("coordinator", "coordinator", None, 5.0, 5.0, WITHIN)]
    links.append(Link("", "x" * 99, 1, 5.0, 5.0, BETWEEN))
    names = drawn_names(charts_structure.topology_chart(links))
    assert sorted(names) == sorted(["coordinator", "coordinator · 1 user", "coordinator", f"{'x' * 23}… · 1 user"])


# ---- users, events, runs


def test_quartiles_are_those_of_the_users() -> None:
    values = {f"u{i}": value for i, value in enumerate([3.0, 1.0, 2.0, NAN, 5.0, 4.0])}
    chart = charts_users.users_chart({"accuracy": values})
    (box,) = chart.spec["layer"][1]["data"]["values"]
    assert box == {"metric": "accuracy", "min": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0, "max": 5.0}
    assert len(chart.rows) == 5


def test_users_with_the_same_value_are_counted() -> None:
    chart = charts_users.users_chart({"accuracy": {"a": 1.0, "b": 1.0, "c": 0.5, "d": 1.0}})
    assert chart.spec["layer"][-1]["data"]["values"] == [{"metric": "accuracy", "value": 1.0, "n": 3}]
    assert chart.note.startswith("Ticks: 4 users; numbers: users with the same value; below them")
    alone = charts_users.users_chart({"accuracy": {"a": 1.0, "b": 0.5}})
    assert "numbers" not in alone.note
    assert len(alone.spec["layer"]) == 4


def test_events_stand_below_the_stages() -> None:
    chart = charts.events_chart([(0.5, "join", "a"), (1.5, "skip", "b")], [("pdmm", 1.0, 2.0)])
    assert chart.spec["layer"][0]["encoding"]["y"]["sort"] == ["stages", "join", "skip"]
    assert chart.rows == [(1.0, "stage", "pdmm, until 2.0"), (0.5, "join", "a"), (1.5, "skip", "b")]


# ---- all


def some_of_each() -> list[Chart]:
    found = curves_of(3, scopes=(WITHIN, BETWEEN), gap=[1.0, 0.1, NAN], accuracy=[0.5, math.inf, 0.7])
    rows = [traffic("S5", "up", 5, 100, expected=5.0), traffic("trace", "down", 2, 90, scope=WITHIN)]
    vectors = charts.vectors_chart(rows)
    assert vectors is not None
    return [
        charts.progress_chart({"one": found, "two": found}, GAP, "between", goal=Goal(GAP, 0.01)),
        charts.progress_chart({f"run {i}": found for i in range(10)}, "accuracy", "seconds"),
        charts.cumulative_chart(found),
        charts.traffic_chart(rows),
        vectors,
        charts.scope_chart(rows),
        charts_users.users_chart({"accuracy": {"a": 0.5, "b": NAN}}),
        charts.events_chart([(0.5, "join", "<b>")], [("pdmm", 0.0, 1.0)]),
        charts.outcomes_chart([("one", 10, 0.5), ("two", 20, 0.6)], "accuracy", "bytes"),
        charts_structure.clusters_chart(["a", "b"], ["1"], [[0, 0]], axis="round", users=["a", "b"], known=[0, 1]),
        *charts_structure.path_charts([0.1, 1.0, 2.0], {"clusters": [2, NAN, 1]}),
        charts_structure.agreement_chart([1, 2], [0.0, 1.0]),
        charts_structure.topology_chart([Link("", "a", 2, 5.0, 5.0, BETWEEN), Link("a", "h", None, 5.0, 5.0, WITHIN)]),
    ]


def test_every_chart_is_drawn_from_what_it_carries() -> None:
    import vl_convert

    for chart in some_of_each():
        spec = json.loads(json.dumps(chart.spec, allow_nan=False))
        drawn = vl_convert.vegalite_to_svg({**spec, "width": 300}, config=themes.theme(dark=True), allowed_base_urls=[])
        assert drawn.startswith("<svg"), chart.key
        assert "NaN" not in drawn, chart.key
        assert len(chart.rows[0]) == len(chart.columns), chart.key


# The matrices of Machado, Oliveira and Fernandes (2009), table 1, at severity 1: what who sees no red, green or blue sees of linear RGB.
SIGHTS = {
    "all colours": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> Array:
    """Linear RGB of "#rrggbb"."""
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.asarray(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4))


def lab(rgb: Array) -> Array:
    """CIE L*a*b* of linear RGB."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x = matrix @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_can_be_told_apart_and_stand_out_whatever_one_sees(name: str) -> None:
    palette = themes.PALETTES[name]
    assert len(palette) == themes.N_COLOURS
    for sight, matrix in SIGHTS.items():
        seen = [lab(np.asarray(matrix) @ linear(colour)) for colour in palette]
        nearest = min(float(np.linalg.norm(one - other)) for one, other in itertools.combinations(seen, 2))
        assert nearest > 15, sight  # 2.3 is just noticeable side by side
    page = float(linear(themes.PAGES[name]) @ [0.2126, 0.7152, 0.0722])
    for colour in palette:
        light, dark = sorted((page, float(linear(colour) @ [0.2126, 0.7152, 0.0722])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour  # WCAG 2.1, 1.4.11
