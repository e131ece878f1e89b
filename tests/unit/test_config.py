"""The experiment file: how mistakes in it are said, and what `--set` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError, SettingsDropped
from coterie.experiment.config import experiment_from, load_experiment
from coterie.experiment.overrides import apply_overrides
from coterie.text.names import parse_users
from coterie.text.quoting import MAX_SENTENCE

CONTENT: dict[str, Any] = {
    "name": "small",
    "data": {"source": "hsb"},
    "problem": {"loss": "least_squares"},
    "method": {"name": "pdmm", "path": [0.2, 0.1]},
}

SOURCES = (
    "csv, parquet, stata, spss, npz, leaf, python, images, torchvision, huggingface, roles, tweets, "
    "ellipses, hlm, representation, hsb, exams, growth, ilea, digits"
)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("method.path=[-1, -2]", "method.path.0: is -1, want more than 0; method.path.1: is -2, want more than 0"),
        ("method.path=[]", "method.path: is [], want at least 1 items"),
        ("method.path=0.1", "method.path: is 0.1, want a list"),
        ("method.sampling=odd", "method.sampling: is 'odd', want 'full', 'paired', 'uniform', 'recorded' or 'arrival'"),
        ("seed=-1", "seed: is -1, want at least 0"),
        ("stop.rounds=many", "stop.rounds: is 'many', want a whole number"),
        ("stop.residual=.inf", "stop.residual: is inf, want a finite number"),
        ("stop=3", "stop: is 3, want a mapping"),
        ("evaluate=perhaps", "evaluate: is 'perhaps', want true or false"),
        ("data.source=excel", f"data.source: is 'excel', want one of {SOURCES}"),
        ("data.source=null", f"data.source: is missing, want one of {SOURCES}"),
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


NETWORK: dict[str, Any] = {
    "name": "small",
    "data": {"source": "digits", "partition": {"by": "classes", "users": 20, "classes_per_user": 2}},
    "model": {"name": "mlp", "classes": 10},
    "method": {"name": "fedrep", "head_epochs": 3, "participation": 0.5, "optimizer": {"lr": 0.02}},
}


def test_another_method_keeps_what_means_the_same_and_the_rest_is_named_once() -> None:
    said = r"^method 'fedavg' does not take over head_epochs from 'fedrep': they have another meaning there, or none; its defaults hold$"
    with pytest.warns(SettingsDropped, match=said):
        changed = apply_overrides(NETWORK, ["method.name=fedavg"])
    assert changed["method"] == {"name": "fedavg", "participation": 0.5, "optimizer": {"lr": 0.02}}
    experiment_from(changed)
    with pytest.warns(SettingsDropped, match="'local_network' does not take over head_epochs, participation from"):
        assert "participation" not in apply_overrides(NETWORK, ["method.name=local_network"])["method"], "users do not depend on each other"


def test_what_an_earlier_override_sets_is_not_dropped_for_another_method() -> None:
    changed = apply_overrides(NETWORK, ["method={name: fedrep, head_epochs: 3}", "method.name=fedavg"])
    with pytest.raises(ConfigError, match=r"method\.head_epochs: unknown key"):
        experiment_from(changed)


def test_the_name_of_the_same_method_changes_nothing() -> None:
    assert apply_overrides(NETWORK, ["method.name=fedrep"]) == NETWORK


def test_a_position_that_is_not_there_says_what_positions_count() -> None:
    with pytest.raises(ConfigError, match=r"positions count the users in this machine's data; leave --users out to serve all of them$"):
        parse_users("#80..#159", [f"u{place}" for place in range(80)])


BASE = "name: x\ndata: {source: hsb}\nproblem: {loss: least_squares}\nmethod: {name: pdmm, penalty: 0.1}\n"
BOMB = "a: &a [x, x]\n" + "".join(
    f"{after}: &{after} [*{one}, *{one}]\n" for one, after in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (BOMB + BASE, "is not YAML: line 2 has an alias, '*a', want the value itself"),
        ("name: &x [*x]\n", "is not YAML: line 1 has an alias"),
        (BASE + "description: " + "[" * 20_000 + "]" * 20_000, "is not YAML: line 5 is nested more than 50 levels deep, want fewer"),
        (BASE + "seed: 1" + "0" * 5000, "has a value that YAML cannot read: "),
        (BASE + "seed: 1" + "0" * 400, "is not YAML: line 5 has a whole number of 1329 bits, want at most 1024"),
        (BASE + "seed: 1" + "0" * 100, "seed: is a whole number of 333 bits, want at most 9.22337e+18"),
        (BASE + "seed: 2001-99-99", "has a value that YAML cannot read: month must be in 1..12"),
        (BASE + "seed: !!bool x", "has a value that YAML cannot read: 'x'"),
        (BASE + "description: " + "d" * 2_000_000, "is too long, want at most 1048576 bytes"),
        (BASE + "description: [" + "d" * 1_000_000 + "]", "description: is ['ddd"),
        (BASE + "k" * 1000 + ": 1", "kkk ...: unknown key"),
        (BASE.replace("penalty: 0.1", "path: [" + "x," * 5000 + "]"), "and 4980 more mistakes"),
        (BASE + "stop: {rounds: 1000000000000}", "stop.rounds: is 1000000000000, want at most 1e+09"),
    ],
)
def test_a_hostile_file_is_refused_soon_and_in_one_short_sentence(text: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_experiment(tmp_path / "x.yaml")
    assert wanted in str(error.value)
    assert len(str(error.value)) <= MAX_SENTENCE


@pytest.mark.parametrize("override", ["name=" + "a" * 100_000, "a." * 5000 + "b=1", "seed=1" + "0" * 5000, "name." + "x" * 100_000 + "=1"])
def test_a_hostile_override_is_refused_in_one_short_sentence(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment_from(apply_overrides(CONTENT, [override]))
    assert len(str(error.value)) <= MAX_SENTENCE


def test_keys_that_look_alike_are_one_key(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(BASE + "x: {\u00e9: 3, e\u0301: 4}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="the key '\u00e9' occurs twice, in line 5 and in line 5, want it once"):
        load_experiment(tmp_path / "x.yaml")


def test_a_key_that_is_there_twice_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(BASE + "stop: {rounds: 3, rounds: 4}\n")
    with pytest.raises(ConfigError, match="the key 'rounds' occurs twice, in line 5 and in line 5, want it once"):
        load_experiment(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("clusters: 1000, users_per_cluster: 100000", "clusters times users_per_cluster is 100000000 users, want at most 1000000"),
        (
            "clusters: 1000, points_per_class: 1000000",
            "pools, test sets and rows of the users are 2004200000 points together, want at most",
        ),
        ("rows_per_user: 2000000, points_per_class: 1000000", "pools, test sets and rows of the users are 126012000 points together"),
    ],
)
def test_generated_data_that_no_machine_holds_is_refused(more: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"data: {sentence}"):
        experiment_from(apply_overrides(CONTENT, [f"data={{source: ellipses, {more}}}"]))


MEANT = [
    ("metod=3", "metod: unknown key; did you mean 'method'?"),
    ("stop.round=3", "stop.round: unknown key; did you mean 'rounds'?"),
    ("method.penatly=3", "method.penatly: unknown key; did you mean 'penalty'?"),
    ("method.name=pdmn", "squared; did you mean 'pdmm'?"),
    ("problem.loss=leest_squares", "'package.module:name'; did you mean 'least_squares'?"),
    ("data.source=cvs", f"data.source: is 'cvs', want one of {SOURCES}; did you mean 'csv'?"),
    ("data={source: csv, path: a, target_colum: y}", "data.target_colum: unknown key; did you mean 'target_column'?"),
    (
        "data={source: digits, partition: {by: classes, users: 2, clases_per_user: 2}}",
        "data.partition.clases_per_user: unknown key; did you mean 'classes_per_user'?",
    ),
    ("data={source: csv, path: a, csv: {delimter: ;}}", "data.csv.delimter: unknown key; did you mean 'delimiter'?"),
    ("data={source: csv, path: a, columns: {ses: numbr}}", "data.columns.ses: is 'numbr', want 'number', 'boolean', 'date', 'category' or"),
    ("federation.links={dirct: 1Mbit/s}", "federation.links.dirct: unknown key; did you mean 'direct'?"),
    ("payload=float46", "'float16' or 'bfloat16'; did you mean 'float64'?"),
    ("model={name: mpl, classes: 10}", "model.name: is 'mpl', want one of linear, mlp, cnn, lstm, custom; did you mean 'mlp'?"),
    ("model={name: mlp, classes: 10, hiden: [3]}", "model.hiden: unknown key; did you mean 'hidden'?"),
]


@pytest.mark.parametrize(("override", "sentence"), MEANT)
def test_a_misspelt_word_is_said_with_the_one_that_may_be_meant(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment_from(apply_overrides(CONTENT, [override]))
    assert sentence in str(error.value)


@pytest.mark.parametrize("override", ["xyzzy=3", "method.xyzzy=3", "data.source=xyzzy", "data.colour=red"])
def test_a_word_like_no_other_has_no_suggestion(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment_from(apply_overrides(CONTENT, [override]))
    assert "did you mean" not in str(error.value)


def test_a_misspelt_part_of_a_phase_is_a_mistake_before_anything_starts() -> None:
    from coterie.experiment.model import check_part
    from coterie.methods.fedrep import Config

    sentence = "a phase trains 'hed', which is no part of a model: want one of all, representation, head; did you mean 'head'?"
    with pytest.raises(ConfigError) as error:
        Config(name="fedrep").phase("hed")
    assert str(error.value) == sentence
    for part in ("all", "representation", "head"):
        check_part(part)


def test_a_method_of_ones_own_with_a_misspelt_part_is_refused_with_its_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.methods.fedrep import Config

    monkeypatch.setattr(Config, "phases", lambda self: [self.phase("hed", epochs=1)])
    content = {**CONTENT, "data": {"source": "digits", "partition": {"by": "classes", "users": 2, "classes_per_user": 2}}}
    del content["problem"]
    with pytest.raises(ConfigError, match="a phase trains 'hed'"):
        experiment_from({**content, "model": {"name": "mlp", "classes": 10}, "method": {"name": "fedrep"}})


def test_a_client_refuses_a_phase_of_no_part() -> None:
    from coterie_client.learning import Phase

    with pytest.raises(ConfigError, match="a phase trains 'hed'"):
        Phase("hed", 1, None, None, 0.1)  # type: ignore[arg-type]
