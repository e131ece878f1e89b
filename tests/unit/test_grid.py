"""A grid of settings: the points of `method.grid`, their stages, and the form that the command line gives it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie_deploy.engines.api import run
from coterie_deploy.studies.tune.plan import entries_of
from coterie_server.run.engine import best
from coterie_server.run.plan import stages_of
from tests.simulation import Faults, World, bits, small_experiment

GRID = [{"penalty": 1.0}, {"penalty": 0.1}, {"penalty": None, "gamma_eq4": 1e-3}, {"penalty": 0.1, "tolerance": 1e-8}]
NAMES = ["penalty=1", "penalty=0.1", "penalty=null gamma_eq4=0.001", "penalty=0.1 tolerance=1e-08"]


def squared(grid: Sequence[Any], **more: Any) -> Experiment:
    return small_experiment({"name": "squared", "penalty": 0.5, "grid": grid, **more})


def test_each_point_is_a_stage_that_starts_from_the_one_before() -> None:
    listed = stages_of(squared(GRID))
    assert [stage.name for stage in listed] == NAMES
    assert [stage.start for stage in listed] == [(), *((name,) for name in NAMES[:-1])]
    assert all(stage.is_result for stage in listed)
    assert [(stage.config.penalty, stage.config.gamma_eq4, stage.config.tolerance) for stage in listed] == [
        (1.0, None, 1e-10),
        (0.1, None, 1e-10),
        (None, 1e-3, 1e-10),
        (0.1, None, 1e-8),
    ]
    assert all(stage.config.grid is None for stage in listed)


def test_without_a_grid_there_is_the_methods_own_stage() -> None:
    (stage,) = stages_of(small_experiment({"name": "squared", "penalty": 0.5}))
    assert (stage.name, stage.start) == ("squared", ())


def test_references_come_first_and_are_no_results() -> None:
    experiment = small_experiment({"name": "squared", "penalty": 0.5, "grid": GRID[:2]}, references=["local"])
    assert [(stage.name, stage.is_result) for stage in stages_of(experiment)] == [("local", False), (NAMES[0], True), (NAMES[1], True)]


def test_names_do_not_depend_on_the_order_of_keys_in_the_file() -> None:
    """The frozen experiment has its keys in another order, and a resumed run looks for the stages of the first attempt."""
    experiment = squared(GRID)
    frozen = experiment_from(json.loads(experiment_to_json(experiment)))
    assert stages_of(frozen) == stages_of(experiment)


def test_a_value_that_is_no_name_for_a_file_gives_the_point_a_number() -> None:
    weights = {"name": "hlm_exact", "gamma": 1.0, "lam": 1.0}
    grid = [{"lam": {"c/0": 1.0}}, {"lam": 2.0}]
    content = {"name": "x", "data": {"source": "hsb"}, "problem": {"loss": "least_squares"}, "method": {**weights, "grid": grid}}
    assert [stage.name for stage in stages_of(experiment_from(content))] == ["point-1", "lam=2"]


def test_a_point_of_a_grid_has_the_models_of_its_own_run_and_held_out_rows_choose() -> None:
    result = run(squared(GRID[:2]))
    for name, penalty in (("penalty=1", 1.0), ("penalty=0.1", 0.1)):
        alone = run(small_experiment({"name": "squared", "penalty": penalty}))
        for user, model in alone.models.items():
            np.testing.assert_allclose(result.models_of(name)[user], model, rtol=0, atol=1e-9)
    assert result.final_stage == best(tuple(NAMES[:2]), result.outcomes)


def test_a_point_starts_where_its_neighbour_ended() -> None:
    """From next to the optimum Newton's method needs a look there and a step; from zero, far away, it needs more."""
    data = {"source": "hlm", "clusters": 2, "users_per_cluster": 3, "d": 2, "rows_per_user": 9, "sigma_global": 3.0}
    method = {"name": "squared", "penalty": 1.0, "grid": [{"penalty": 0.1}, {"penalty": 0.1000001}]}
    result = run(small_experiment(method, data=data, problem={"loss": "huber", "intercept": False}))
    first, second = (len(result.history(stage)) for stage in result.stages)
    assert first > 6
    assert second <= 3


def test_models_that_stay_at_their_users_go_on_from_point_to_point() -> None:
    method = {"name": "async_l2gd", "gamma": 1.0, "lam": 1.0}
    one = run(small_experiment({**method, "iterations": 1})).metrics["async_l2gd"]["objective"]
    result = run(small_experiment({**method, "grid": [{"iterations": 400}, {"iterations": 1}]}))
    long, after = (result.metrics[f"iterations={count}"]["objective"] for count in (400, 1))
    assert abs(after - long) < 0.02 * (one - long)


def test_a_run_over_a_grid_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = World(squared(GRID), tmp_path / "a", 2).run()
    world = World(squared(GRID), tmp_path / "b", 2, Faults(hosts_before={9: "h0"}, coordinator=(6, 17)))
    assert bits(world.run()) == bits(undisturbed)
    assert len(world.done) == 3


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        ([{"penalty": 1}, {"penalty": -1}], r"method\.grid\.entry 2\.penalty: is -1, want more than 0$"),
        ([{"pena": 1}], r"method\.grid\.entry 1\.pena: unknown key$"),
        ([{"gamma_eq4": 1}], r"method\.grid\.entry 1: want exactly one of penalty \(GAM\) and gamma_eq4"),
        ([{}], r"method: entry 1 of the grid is \{\}, want at least one setting that it changes$"),
        ([{"penalty": 1}, {"name": "pdmm"}], r"method: entry 2 of the grid sets 'name', want only the method's other settings$"),
        ([{"grid": [{"penalty": 1}]}], r"method: entry 1 of the grid sets 'grid', want only the method's other settings$"),
        ([{"penalty": 1}, {"penalty": 2}, {"penalty": 1.0}], r"method: entries 1 and 3 of the grid are the same settings, want each once$"),
        ([], r"method\.grid: is \[\], want at least 1 items$"),
        ([3], r"method\.grid\.0: is 3, want a mapping$"),
        ([{"penalty": place + 1} for place in range(1001)], r"method\.grid: is .*, want at most 1000 items$"),
    ],
)
def test_a_mistake_in_a_grid_names_its_entry(grid: Sequence[Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        squared(grid)


def test_a_method_without_a_grid_knows_no_such_key() -> None:
    with pytest.raises(ConfigError, match=r"method\.grid: unknown key"):
        small_experiment({"name": "pdmm", "penalty": 0.1, "grid": [{"penalty": 0.2}]})


# ---- on the command line


def test_values_are_crossed_in_a_snake_from_the_largest_on() -> None:
    points = entries_of(["method.gamma=1,100,10", "method.lam=0,2", "method.variant=b,a"])
    assert len(points) == 12
    assert points[0] == {"gamma": 100, "lam": 2, "variant": "b"}
    assert len({json.dumps(point) for point in points}) == 12
    values: Mapping[str, list[Any]] = {"gamma": [100, 10, 1], "lam": [2, 0], "variant": ["b", "a"]}
    for before, after in itertools.pairwise(points):
        moves = [abs(values[key].index(before[key]) - values[key].index(after[key])) for key in values]
        assert sum(moves) == 1


def test_a_range_is_evenly_spaced_on_a_logarithmic_scale_with_both_ends_exact() -> None:
    (values,) = ([point["lam"] for point in entries_of([f"method.lam={text}"])] for text in ("0.1..100:7",))
    assert values == [100.0, 31.62, 10.0, 3.162, 1.0, 0.3162, 0.1]


def test_a_range_may_stand_among_values_and_numbers_may_have_exponents() -> None:
    assert [point["lam"] for point in entries_of(["method.lam=0, 1e-3..1e-1:3, 5"])] == [5, 0.1, 0.01, 0.001, 0]


def test_values_may_be_text_mappings_and_null() -> None:
    assert entries_of(["method.lam={a: 1, b: 2}, auto, null"]) == [{"lam": {"a": 1, "b": 2}}, {"lam": "auto"}, {"lam": None}]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["method.lam="], r"--grid 'method\.lam=' has no values, want at least one, for example method\.gamma=0\.1,1,10"),
        (["lam=1,2"], r"--grid 'lam=1,2' wants the form method\.setting=values"),
        (["method.lam"], r"wants the form method\.setting=values"),
        (["problem.l2=1,2"], r"wants the form method\.setting=values"),
        (["method.a.b=1,2"], r"wants the form method\.setting=values"),
        (["method.lam=1,2", "method.lam=3,4"], r"--grid has method\.lam twice, want each setting once"),
        (["method.lam=1,2,1.0"], r"has the value 1\.0 twice, want each once"),
        (["method.lam=1"], r"the grid has 1 point, want 2 to 1000 to choose from"),
        (["method.lam=1..2:400", "method.gamma=1,2,3"], r"the grid has 1,200 points, want 2 to 1000"),
        (["method.lam=0..10:3"], r"'method\.lam=0\.\.10:3': a range is LOW\.\.HIGH:N with 0 < LOW < HIGH and N from 2 to 1000"),
        (["method.lam=10..1:3"], r"a range is LOW\.\.HIGH:N"),
        (["method.lam=1..10:1"], r"a range is LOW\.\.HIGH:N"),
        (["method.lam=1..10:many"], r"a range is LOW\.\.HIGH:N"),
        (["method.lam=1..x:3"], r"a range is LOW\.\.HIGH:N"),
        (["method.lam=[1"], r"the list of values is not YAML"),
    ],
)
def test_a_wrong_grid_is_one_sentence(options: Sequence[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        entries_of(options)
