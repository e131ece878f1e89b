"""The caterpillar plot has the coefficients in their order, in natural units, with intervals if they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie_deploy.read.coefficients import Coefficient
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.charts_coefficients import MOST_MODELS, caterpillar_chart
from coterie_deploy.view.run_view import view_of


def models(n: int, *, has_intervals: bool = True) -> list[Coefficient]:
    """In an order that is not that of their estimates."""
    values = [(7 * i) % n + 0.5 for i in range(n)]
    ends = [(value - 1, value + 2) if has_intervals else (None, None) for value in values]
    return [
        Coefficient("user", f"u{i}", "", "ses", value, 1.0 if has_intervals else None, low, high, 9)
        for i, (value, (low, high)) in enumerate(zip(values, ends, strict=True))
    ]


def layers(chart: Chart) -> list[dict[str, Any]]:
    return list(chart.spec["layer"])


def test_models_are_in_the_order_of_their_estimates_with_names_and_intervals() -> None:
    chart = caterpillar_chart("ses", models(10), "user", 0.9, 3, common=2.5)
    assert [row[2] for row in chart.rows] == sorted(row[2] for row in chart.rows)
    rule, points, common = layers(chart)
    assert rule["encoding"]["x2"] == {"field": "high"}
    assert points["encoding"]["y"]["axis"]["labels"] is True
    assert points["encoding"]["y"]["scale"]["domain"] == [row[0] for row in chart.rows]
    assert common["data"]["values"] == [{"estimate": 2.5}]
    assert (chart.key, chart.title) == ("coefficients-3", "ses by user")
    assert chart.note == "Points: users in the order of their estimates; lines: 90 % intervals; dashed: the common model."


def test_without_standard_errors_there_are_points_alone() -> None:
    chart = caterpillar_chart("ses", models(10, has_intervals=False), "user", 0.95, 1, common=None)
    (points,) = layers(chart)
    assert points["mark"]["type"] == "point"
    assert [one["field"] for one in points["encoding"]["tooltip"]] == ["name", "cluster", "estimate", "rows"]


def test_of_very_many_models_the_ends_are_drawn_and_it_is_said() -> None:
    chart = caterpillar_chart("ses", models(1003), "user", 0.95, 1, common=None)
    assert len(chart.rows) == MOST_MODELS
    assert (chart.rows[0][2], chart.rows[-1][2]) == (0.5, 1002.5)
    assert layers(chart)[1]["encoding"]["y"]["axis"]["labels"] is False
    assert chart.note.endswith("200 of 1,003 are drawn.")


@pytest.mark.parametrize("has_inference", [True, False])
def test_the_report_has_a_plot_for_each_coefficient_in_natural_units(tmp_path: Path, has_inference: bool) -> None:
    overrides = [f"inference={str(has_inference).lower()}", "method={name: local}", "references=[]", "data.feature_columns=[ses]"]
    coterie.run("hsb", overrides=overrides, output=tmp_path / "run")
    section = next(one for one in view_of(tmp_path / "run").sections if one.key == "coefficients")
    assert list(section.tabs) == ["ses", "(intercept)"]
    table = coterie.load_run(tmp_path / "run").coefficients()
    for name, (chart,) in section.tabs.items():
        own = table[table.coefficient == name]
        assert len(chart.rows) == len(own) == 160
        assert [row[2] for row in chart.rows] == sorted(own.estimate)
        assert ("intervals" in chart.note) == has_inference
    assert ("Standard errors were not measured: run the experiment with --set inference=true." in section.sentences) == (not has_inference)


def test_a_single_model_is_no_plot(tmp_path: Path) -> None:
    coterie.run("hsb", overrides=["method={name: global}", "references=[]"], output=tmp_path / "run")
    assert all(one.key != "coefficients" for one in view_of(tmp_path / "run").sections)
