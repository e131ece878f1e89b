"""Pictures of convex clustering: where users lie, which ties are drawn, and the path as a tree."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import vl_convert

from coterie.arrays import Array, Indices
from coterie.families.ties import ALL_PAIRS
from coterie_deploy.view import graph_layout
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.charts_graph import Ties, graph_chart, splits, tree_chart
from coterie_deploy.view.charts_structure import colours_of
from coterie_deploy.view.theme import theme


def numbered(*labels: int) -> Indices:
    return np.array(labels, dtype=np.int64)


def names(n: int) -> list[str]:
    return [f"u{number}" for number in range(n)]


def picture(models: Array, labels: Indices, ties: Ties | None = None) -> Chart:
    colours = colours_of([labels.tolist()])[-1]
    chart = graph_chart(names(len(models)), models, labels, colours, ties, stage="pdmm", said=ALL_PAIRS if ties is None else "tied so")
    drawn(chart)
    return chart


def drawn(chart: Chart) -> str:
    """The picture, which no library may refuse."""
    json.dumps(chart.spec, allow_nan=False)
    svg = str(vl_convert.vegalite_to_svg({**chart.spec, "width": 340}, config=theme(dark=False), allowed_base_urls=[]))
    assert "NaN" not in svg
    return svg


def layer(chart: Chart, mark: str) -> list[Mapping[str, Any]]:
    return [row for one in chart.spec["layer"] if one["mark"]["type"] == mark for row in one["data"]["values"]]


def overlaps(chart: Chart) -> int:
    """Pairs of points that hide a part of each other."""
    points = layer(chart, "circle")
    places, radii = np.array([[one["x"], one["y"]] for one in points]), np.array([one["r"] for one in points])
    first, second = np.triu_indices(len(points), 1)
    apart = np.linalg.norm(places[first] - places[second], axis=1)
    return int((apart < (radii[first] + radii[second]) * 0.999).sum())


# ---- the graph


def test_two_components_hold_the_variance_that_the_caption_says() -> None:
    random = np.random.default_rng(0)
    models = random.normal(size=(40, 3)) * [3.0, 1.0, 0.1]
    plane = graph_layout.plane_of(models)
    values = np.linalg.eigvalsh(np.cov(models.T))[::-1]
    assert plane.shares == pytest.approx((values[0] / values.sum(), values[1] / values.sum()))
    assert np.var(plane.values, axis=0, ddof=1) == pytest.approx(values[:2])
    chart = picture(models, np.arange(40))
    assert f"{plane.shares[0]:.0%} of their variance; up: the second, {plane.shares[1]:.0%}" in chart.note
    assert "all pairs" in chart.note.lower()
    assert not layer(chart, "rule")


def test_users_of_one_model_lie_around_it_without_an_overlap() -> None:
    labels = np.repeat([0, 1, 2], [30, 12, 1])
    models = np.array([[0.0, 0.0], [1.0, 0.2], [0.5, 5.0]])[labels]
    chart = picture(models, labels)
    assert overlaps(chart) == 0
    points = layer(chart, "circle")
    centres = np.array([np.mean([[one["x"], one["y"]] for one in points if one["cluster"] == label], axis=0) for label in range(3)])
    there = graph_layout.plane_of(models).values[[0, 30, 42]]
    assert np.argsort(centres, axis=0).tolist() == np.argsort(there, axis=0).tolist()
    assert [one["colour"] for one in points if one["cluster"] == 2] == [None]
    assert len({one["colour"] for one in points}) == 3
    assert "42 users with the model of others lie around it" in chart.note
    assert "grey: 1 user alone" in chart.note


def test_ties_are_lines_between_their_users_and_wider_with_more_weight() -> None:
    models = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    ties = Ties(np.array([0, 1]), np.array([1, 2]), np.array([4.0, 1.0]))
    chart = picture(models, np.arange(3), ties)
    weak, strong = layer(chart, "rule")
    assert (strong["from"], strong["to"], strong["weight"]) == ("u0", "u1", 4.0)
    assert strong["width"] > weak["width"]
    assert strong["opacity"] > weak["opacity"]
    places = {one["user"]: (one["x"], one["y"]) for one in layer(chart, "circle")}
    assert ((strong["x"], strong["y"]), (strong["x2"], strong["y2"])) == (places["u0"], places["u1"])
    assert [row[:3] for row in chart.rows] == [("u0", 0, 1), ("u1", 1, 2), ("u2", 2, 1)]
    assert "2 ties" in chart.note


def test_of_very_many_ties_the_strongest_are_drawn_and_counted() -> None:
    random = np.random.default_rng(1)
    first, second = np.triu_indices(100, 1)
    ties = Ties(first, second, random.uniform(size=len(first)))
    chart = picture(random.normal(size=(100, 2)), np.arange(100), ties)
    lines = layer(chart, "rule")
    assert len(lines) == 1500
    assert min(one["weight"] for one in lines) >= np.sort(ties.weight)[-1500] * 0.999
    assert "the 1,500 strongest of 4,950 ties" in chart.note


def test_many_users_are_drawn_as_clusters_with_the_ties_between_them() -> None:
    labels = np.repeat([0, 1, 2], [400, 200, 1])
    models = np.array([[0.0, 0.0], [1.0, 0.2], [0.5, 5.0]])[labels]
    ties = Ties(np.array([0, 1, 2, 450]), np.array([1, 401, 402, 600]), np.array([1.0, 2.0, 3.0, 1.0]))
    chart = picture(models, labels, ties)
    points = layer(chart, "circle")
    assert [one["users"] for one in points] == [400, 200, 1]
    assert points[0]["r"] / points[1]["r"] == pytest.approx(2**0.5, rel=1e-4)
    assert overlaps(chart) == 0
    assert sorted((one["from"], one["to"], one["weight"]) for one in layer(chart, "rule")) == [
        ("cluster 0", "cluster 1", 5.0),
        ("cluster 1", "cluster 2", 1.0),
    ]
    assert "601 users are drawn as 3 clusters" in chart.note
    assert "Of 4 ties 1 are within clusters; the others are between 2 pairs of clusters, all drawn" in chart.note


def test_of_very_many_clusters_the_largest_are_drawn_and_the_others_counted() -> None:
    labels = np.concatenate([np.arange(600), np.arange(300)])
    models = np.random.default_rng(2).normal(size=(600, 2))[labels]
    chart = picture(models, labels, Ties(np.array([0, 0]), np.array([1, 599]), np.array([1.0, 1.0])))
    assert len(layer(chart, "circle")) == 300
    assert overlaps(chart) == 0
    assert "900 users are in 600 clusters. The 300 largest" in chart.note
    assert "300 users in 300 clusters are not" in chart.note
    assert "between 2 pairs of clusters, 1 of them drawn" in chart.note


def test_a_model_of_one_number_is_drawn_at_its_value_and_its_number() -> None:
    chart = picture(np.array([[3.0], [1.0], [3.0]]), numbered(0, 1, 0))
    points = layer(chart, "circle")
    assert points[0]["x"] == points[2]["x"] > points[1]["x"]
    assert points[0]["y"] > points[1]["y"] > points[2]["y"]
    assert chart.rows == [("u0", 0, 3.0), ("u1", 1, 1.0), ("u2", 0, 3.0)]


@pytest.mark.parametrize("n", [1, 2, 50, 600])
def test_equal_models_are_one_heap_of_users_or_one_point(n: int) -> None:
    chart = picture(np.full((n, 3), 0.1), np.zeros(n, np.int64))
    assert len(layer(chart, "circle")) == (n if n <= 500 else 1)
    assert overlaps(chart) == 0
    assert ("All models are equal" in chart.note) == (n > 1)


def test_users_far_from_the_others_lie_at_the_edge_and_are_counted() -> None:
    models = np.random.default_rng(3).normal(size=(100, 2))
    models[7] = 1000.0, 0.0
    chart = picture(models, np.arange(100))
    points = np.array([[one["x"], one["y"]] for one in layer(chart, "circle")])
    assert np.ptp(np.delete(points, 7, axis=0)[:, 0]) > 1.0
    assert points[:, 0].argmax() == 7
    assert "farther away lie at the edge" in chart.note


def test_rounding_is_no_second_component() -> None:
    random = np.random.default_rng(4)
    models = np.outer(random.normal(size=20), [1.0, 2.0]) + 1e-14 * random.normal(size=(20, 2))
    assert graph_layout.plane_of(models).values[:, 1].tolist() == [0.0] * 20


# ---- the path


def tree(*labels: Indices, **more: Any) -> Chart:
    chart = tree_chart([float(place + 1) for place in range(len(labels))], labels, names(len(labels[0])), **more)
    assert chart is not None
    drawn(chart)
    return chart


def test_groups_join_at_the_penalty_from_which_on_they_are_together() -> None:
    chart = tree(numbered(0, 0, 1, 2), numbered(0, 0, 1, 1), numbered(0, 0, 0, 0))
    assert chart.rows == [(1.0, 2, 2, "u0"), (2.0, 2, 2, "u2"), (3.0, 2, 4, "u0")]
    assert "At the largest one all are together" in chart.note
    assert "No cluster parts" in chart.note
    leaves = chart.spec["params"][0]["value"]
    assert leaves == ["u0", "u1", "u2", "u3"]
    lines = layer(chart, "rule")
    ends = {(one["x"], one["x2"]) for one in lines if one["y"] == one["y2"]}
    assert {(1.0, 3.0), (2.0, 3.0)} <= ends
    joins = {(one["x"], one["y"], one["y2"]) for one in lines if one["x"] == one["x2"]}
    assert joins == {(1.0, 0.0, 1.0), (2.0, 2.0, 3.0), (3.0, 0.5, 2.5)}


def test_a_path_that_is_not_nested_says_how_often_clusters_part() -> None:
    labels = [numbered(0, 0, 1, 2), numbered(0, 1, 1, 2), numbered(0, 0, 0, 1)]
    assert splits(labels) == 1
    chart = tree(*labels)
    assert "1 time a cluster parts" in chart.note
    assert chart.rows == [(2.0, 2, 2, "u1"), (3.0, 2, 3, "u0")]
    assert "2 clusters are left" in chart.note


def test_the_chosen_penalty_is_marked_and_its_clusters_have_their_colours() -> None:
    middle = numbered(0, 0, 1, 1, 2)
    chart = tree(numbered(0, 1, 2, 3, 4), middle, numbered(0, 0, 0, 0, 1), chosen=2.0, colours={0: 5, 1: 6, 2: 0})
    coloured = {(one["y"], one["colour"]) for one in layer(chart, "rule") if one and one["y"] == one["y2"] and one["x"] < 2.0}
    assert coloured == {(0.0, 5), (1.0, 5), (2.0, 6), (3.0, 6), (4.0, None)}
    assert [one["encoding"]["x"]["datum"] for one in chart.spec["layer"] if one["mark"].get("style") == "mark-of-goal"] == [2.0]
    assert "the penalty of the result, 2" in chart.note


def test_many_users_are_leaves_together_where_they_join_together() -> None:
    n = 1000
    first = np.arange(n) // 2
    second = np.where(np.arange(n) < 900, 0, 1 + np.arange(n))
    last = np.zeros(n, np.int64)
    labels = [np.unique(one, return_inverse=True)[1] for one in (first, second, last)]
    assert splits(labels) == 50
    chart = tree(*labels)
    leaves = chart.spec["params"][0]["value"]
    assert len(leaves) <= 40
    assert sum(int(leaf.split()[0].replace(",", "")) for leaf in leaves if "user" in leaf) == n
    assert "a dashed line stands for several" in chart.note
    assert any(one["groups"] > 1 for one in layer(chart, "rule"))


def test_names_of_leaves_are_text_and_no_code() -> None:
    strange = ["it's", 'a "b" \\ [c]', "${x}", "<b>"]
    chart = tree_chart([1.0, 2.0], [numbered(0, 1, 2, 3), numbered(0, 0, 1, 1)], strange)
    assert chart is not None
    svg = drawn(chart)
    assert all(name in html.unescape(svg) for name in strange)


def test_a_path_of_one_penalty_or_one_user_is_no_tree() -> None:
    assert tree_chart([1.0], [numbered(0, 1)], names(2)) is None
    assert tree_chart([1.0, 2.0], [numbered(0), numbered(0)], names(1)) is None


def test_two_users_who_never_join_are_two_lines() -> None:
    chart = tree(numbered(0, 1), numbered(0, 1))
    assert chart.rows == []
    assert len(layer(chart, "rule")) == 2
    assert "2 clusters are left" in chart.note
