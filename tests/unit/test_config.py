"""The experiment file: how mistakes in it are said, and what `--set` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.config import apply_overrides, experiment_from, load_experiment
from coterie.errors import ConfigError
from coterie.names import parse_users

CONTENT: dict[str, Any] = {
    "name": "small",
    "data": {"source": "hsb"},
    "problem": {"loss": "least_squares"},
    "method": {"name": "pdmm", "path": [0.2, 0.1]},
}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("method.path=[-1, -2]", "method.path.0: is -1, want more than 0; method.path.1: is -2, want more than 0"),
        ("method.path=[]", "method.path: is [], want at least 1 items"),
        ("method.path=0.1", "method.path: is 0.1, want a list"),
        ("method.sampling=odd", "method.sampling: is 'odd', want 'full', 'paired', 'uniform' or 'recorded'"),
        ("seed=-1", "seed: is -1, want at least 0"),
        ("stop.rounds=many", "stop.rounds: is 'many', want a whole number"),
        ("stop.residual=.inf", "stop.residual: is inf, want a finite number"),
        ("stop=3", "stop: is 3, want a mapping"),
        ("evaluate=perhaps", "evaluate: is 'perhaps', want true or false"),
        ("data.source=excel", "data.source: is 'excel', want one of csv, parquet, npz, python, ellipses, hsb"),
        ("data.source=null", "data.source: is missing, want one of csv, parquet, npz, python, ellipses, hsb"),
        ("data={source: csv, path: 3}", "data.path: is 3, want text"),
        ("data={source: csv}", "data.path: is missing"),
        ("data.colour=red", "data.colour: unknown key"),
        ("data.test_fraction=1", "data.test_fraction: is 1, want less than 1"),
        ("name=a b", "name: is 'a b', want at most 100 letters, digits, dots, hyphens and underscores"),
    ],
)
def test_a_mistake_is_said_once_with_its_place_the_value_found_and_the_one_wanted(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment_from(apply_overrides(CONTENT, [override]), "here")
    assert str(error.value).startswith(f"here: {sentence}")
    assert str(error.value).count(": is ") <= sentence.count(": is ")


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"x\.yaml is empty, want an experiment with name, data, problem and method$"):
        load_experiment(tmp_path / "x.yaml")


@pytest.mark.parametrize("key", ["penalty", "lambda_eq3", "lambda_eq14"])
def test_a_penalty_that_is_set_takes_the_place_of_the_others(key: str) -> None:
    method = experiment_from(apply_overrides(CONTENT, [f"method.{key}=0.05"])).method
    assert method.model_dump(exclude_defaults=True) == {key: 0.05}


def test_a_path_that_is_set_takes_the_place_of_a_penalty_and_other_keys_stay() -> None:
    content = {**CONTENT, "method": {"name": "pdmm", "penalty": 0.3, "refit": True}}
    method = experiment_from(apply_overrides(content, ["method.path=[0.2]"])).method
    assert method.model_dump(exclude_defaults=True) == {"path": (0.2,), "refit": True}
    assert content["method"] == {"name": "pdmm", "penalty": 0.3, "refit": True}


def test_a_method_with_another_convention_is_set_in_the_same_way() -> None:
    content = {**CONTENT, "method": {"name": "squared", "penalty": 0.3}}
    assert experiment_from(apply_overrides(content, ["method.gamma_eq4=0.1"])).method.penalty is None


def test_a_position_that_is_not_there_says_what_positions_count() -> None:
    with pytest.raises(ConfigError, match=r"positions count the users in this machine's data; leave --users out to serve all of them$"):
        parse_users("80-159", [f"u{place}" for place in range(80)])
