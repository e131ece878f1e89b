"""The policy of a host's owner: each breach is refused before data is opened, small users stay away, and users go by other names."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from
from coterie.text.names import natural_key
from coterie_client.data import load_users
from coterie_client.hosting.policy import Policy, breaches, check_policy, read_policy
from coterie_client.hosting.pseudonyms import admitted, key_in, pseudonym, write_list
from coterie_deploy.cli import app as cli
from coterie_deploy.roles.host_policy import host_policy
from tests.commands import Command, commands_in

TABLE: dict[str, Any] = {"source": "csv", "path": "rows.csv", "user_column": "school", "target_column": "score", "feature_columns": ["ses"]}
SMALL: dict[str, Any] = {
    "name": "small",
    "data": TABLE,
    "problem": {"loss": "least_squares", "l2": 0.1},
    "method": {"name": "local"},
    "federation": {"join_timeout_s": 60},
}
NARROW = {
    "columns": {"users": ["school", "ward"], "clusters": ["region"], "targets": ["score"], "features": ["ses", "hours"]},
    "methods": ["local", "pdmm"],
    "references": ["local"],
    "standardize": False,
    "code": False,
}
ARRAYS = {"source": "npz", "path": "a.npz", "user": "school", "target": "score"}
KEY = bytes(range(32))


def experiment(**changes: Any) -> Experiment:
    return experiment_from({**SMALL, **changes})


def table(**changes: Any) -> dict[str, Any]:
    return {"data": {**TABLE, **changes}}


def test_what_a_policy_allows_has_no_breach() -> None:
    policy = Policy.model_validate(NARROW)
    assert breaches(policy, experiment()) == []
    assert breaches(policy, experiment(**table(cluster_column="region", feature_columns=["hours", "ses"]), references=["local"])) == []
    assert breaches(Policy(), experiment(**table(standardize=True, feature_columns=None), references=["global"])) == []


BREACHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "user": (table(user_column="name"), "C2", "data.user_column"),
    "cluster": (table(cluster_column="ward"), "C2", "data.cluster_column"),
    "target": (table(target_column="income"), "C2", "data.target_column"),
    "feature": (table(feature_columns=["ses", "name"]), "C2", "data.feature_columns[1]"),
    "all features": (table(feature_columns=None), "C3", "data.feature_columns"),
    "all features of Stata": (
        {"data": {**TABLE, "source": "stata", "path": "a.dta", "feature_columns": None}},
        "C3",
        "data.feature_columns",
    ),
    "formula": (table(target_column=None, feature_columns=None, formula="score ~ ses + name"), "C2", "data.formula"),
    "formula with a part of the target's name": (
        table(target_column=None, feature_columns=None, formula="score ~ core"),
        "C2",
        "data.formula",
    ),
    "indicator": (table(missing="indicator", indicator_columns=["name"]), "C2", "data.indicator_columns[0]"),
    "dots in a formula": (table(target_column=None, feature_columns=None, formula="score ~ ses.hours"), "C2", "data.formula"),
    "cluster in a formula": (
        table(target_column=None, feature_columns=None, cluster_column="region", formula="score ~ ses + region"),
        "C2",
        "data.formula",
    ),
    "names by place": (table(csv={"names": ["school", "ses", "score"]}), "C7", "data.csv.names"),
    "images": ({"data": {**ARRAYS, "encoded": {"bytes": "ses", "offsets": "secret"}, "features": "ses"}}, "C2", "data.encoded.offsets"),
    "cluster of users": (table(user_column=["school", "ward"]), "C2", "data.user_column[0]"),
    "method": ({"method": {"name": "global"}}, "C4", "method.name"),
    "reference": ({"references": ["local", "global"]}, "C4", "references[1]"),
    "standardize": (table(standardize=True), "C4", "data.standardize"),
    "missing": (table(missing="mean"), "C4", "data.missing"),
    "code": ({"problem": {"loss": "own:huber"}}, "C5", ""),
    "array": ({"data": {**ARRAYS, "features": "secret"}}, "C2", "data.features"),
}


@pytest.mark.parametrize("kind", BREACHES)
def test_each_breach_is_named_in_full_here_and_by_its_place_elsewhere(kind: str) -> None:
    changes, rule, place = BREACHES[kind]
    (breach,) = breaches(Policy.model_validate(NARROW | ({"standardize": True} if kind == "indicator" else {})), experiment(**changes))
    assert (breach.finding.rule, breach.finding.place) == (rule, place)


def test_functions_of_a_formula_are_no_columns_and_a_part_of_the_target_is_a_feature() -> None:
    only = Policy.model_validate({"columns": {"features": ["ses", "region"]}})
    written = table(target_column=None, feature_columns=None, formula="score ~ log(ses) + C(region)")
    assert breaches(only, experiment(**written)) == []
    (breach,) = breaches(only, experiment(**table(target_column=None, feature_columns=None, formula="score ~ ses + core")))
    assert breach.finding.role == "feature"


def test_all_breaches_are_in_one_sentence() -> None:
    found = experiment(**table(user_column="name", target_column="income", standardize=True), references=["global"])
    with pytest.raises(ConfigError) as caught:
        check_policy(Policy.model_validate(NARROW), found, "policy.yaml")
    assert [part in str(caught.value) for part in ("'name' as user", "'income' as target", "'global'", "standardize")] == [True] * 4
    assert caught.value.finding.sentence == "its policy does not let this column be a user (data.user_column) (rule C2)"


@pytest.mark.parametrize("source", ["ellipses", "hsb"])
def test_data_of_the_package_has_no_owner(source: str) -> None:
    assert breaches(Policy.model_validate({"columns": NARROW["columns"]}), experiment(data={"source": source})) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("colums: {}", "colums"),
        ("min_rows: 0", "min_rows"),
        ("columns: {users: school}", "columns.users"),
        ("columns: {rows: [a]}", "columns.rows"),
        ("[1", "not YAML"),
        ("- a", "policy"),
    ],
)
def test_a_wrong_policy_is_a_sentence_and_not_no_policy(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError, match=part) as caught:
        host_policy(None, tmp_path, tmp_path)
    assert caught.value.finding.rule == "C8"


def test_a_policy_is_found_in_the_data_folder_and_one_that_is_named_must_be_there(tmp_path: Path) -> None:
    assert host_policy(None, tmp_path, tmp_path) is None
    with pytest.raises(ConfigError, match="cannot read the policy"):
        host_policy(tmp_path / "other.yaml", tmp_path, tmp_path)
    (tmp_path / "policy.yaml").write_text("min_rows: 3\n")
    found = host_policy(None, tmp_path, tmp_path)
    assert found is not None
    assert found.policy.min_rows == 3


# ---- who takes part, and under which name


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    names = [f"Smith{i}" for i in range(4) for _ in range(8)] + ["Tiny"]
    lines = [f"{name},{i * 7 % 11},{i * 5 % 13},{i * 3 % 17}" for i, name in enumerate(names)]
    (tmp_path / "rows.csv").write_text("\n".join(["school,ses,hours,score", *lines]) + "\n")
    return tmp_path


def test_users_with_few_rows_are_left_out_and_none_is_an_error(rows: Path) -> None:
    users = load_users(experiment().data, 0, None, rows)
    found = admitted(users, 3, None)
    assert [user.name for user in found.users] == ["Smith0", "Smith1", "Smith2", "Smith3"]
    assert found.n_left_out == 1
    with pytest.raises(ConfigError, match="none of 5 users has the 100 training rows") as caught:
        admitted(users, 100, None)
    assert caught.value.finding.rule == "C6"


def test_pseudonyms_are_of_a_key_and_rows_stay_those_of_the_true_name(rows: Path) -> None:
    users = load_users(experiment().data, 0, None, rows)
    found = admitted(users, 1, KEY)
    assert found.true_names == {pseudonym(KEY, user.name): user.name for user in users}
    assert [user.name for user in found.users] == sorted((user.name for user in found.users), key=natural_key)
    mine = {user.name: user for user in users}
    for user in found.users:
        true = mine[found.true_names[user.name]]
        assert np.array_equal(user.test_features, true.test_features)
        assert np.array_equal(user.features, true.features)
    assert pseudonym(bytes(32), "Smith0") != pseudonym(KEY, "Smith0")


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    place = tmp_path / "state" / "pseudonyms.key"
    key = key_in(tmp_path / "policy.key", place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert key_in(tmp_path / "policy.key", place) == key
    (tmp_path / "policy.key").write_text(KEY.hex())
    (tmp_path / "policy.key").chmod(0o440)
    assert key_in(tmp_path / "policy.key", place) == KEY
    write_list(tmp_path / "list.json", {"u-1": "Zoë"})
    assert stat.S_IMODE((tmp_path / "list.json").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "list.json").read_text()) == {"u-1": "Zoë"}


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_a_key_that_others_may_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    (tmp_path / "policy.key").write_text(KEY.hex())
    (tmp_path / "policy.key").chmod(mode)
    with pytest.raises(ConfigError, match=f"policy.key has mode {mode:04o}: others may read or change .*, want chmod 600"):
        key_in(tmp_path / "policy.key", tmp_path / "pseudonyms.key")


@pytest.mark.parametrize("text", ["", "12", "no key"])
def test_a_broken_key_is_a_sentence_and_not_another_key(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.key").write_text(text)
    (tmp_path / "policy.key").chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        key_in(tmp_path / "policy.key", tmp_path / "pseudonyms.key")


# ---- coterie policy init


def test_a_first_policy_sorts_columns_and_leaves_out_what_names_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{1000 + i},Person {i},s{i % 3},{i % 2},{i / 7:.3f},{i * 1.5}" for i in range(30)]
    (tmp_path / "pupils.csv").write_text("\n".join(["pid,name,school,region,ses,score", *lines]))
    assert cli._run(["policy", "init", str(tmp_path / "pupils.csv")]) == 0
    assert str(tmp_path / "policy.yaml") in capsys.readouterr().out
    policy = read_policy(tmp_path / "policy.yaml")
    assert policy.columns.users == policy.columns.clusters == ("school", "region")
    assert policy.columns.targets == ("region", "ses", "score")
    assert policy.columns.features == ("school", "region", "ses", "score")
    assert not policy.code
    assert "[pid, name]" in (tmp_path / "policy.yaml").read_text()


def test_a_first_policy_reads_a_table_as_an_experiment_would(tmp_path: Path) -> None:
    rows = [f"W{i % 3};{'fm'[i % 2]};{'yes' if i % 5 else 'no'};2.{100 + i},5;2024-01-{i % 28 + 1:02};{i % 7}" for i in range(30)]
    text = "\n".join(["Abteilung;Geschlecht;Raucher;Kosten (€);Tag;Näße", *rows])
    (tmp_path / "stays.csv").write_text(text, encoding="cp1252")
    columns = read_policy(_written(tmp_path, "stays.csv")).columns
    assert columns.targets == ("Raucher", "Kosten (€)", "Näße")
    assert columns.features == ("Abteilung", "Geschlecht", "Raucher", "Kosten (€)", "Tag", "Näße")
    assert columns.users == ("Abteilung", "Geschlecht", "Raucher", "Näße")


def _written(folder: Path, table: str) -> Path:
    assert cli._run(["policy", "init", str(folder / table)]) == 0
    return folder / "policy.yaml"


def test_a_policy_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pupils.csv").write_text("school;score\na;1,5\nb;2,5\n")
    (tmp_path / "policy.yaml").write_text("min_rows: 9\n")
    assert cli._run(["policy", "init", str(tmp_path / "pupils.csv")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert read_policy(tmp_path / "policy.yaml").min_rows == 9
    assert cli._run(["policy", "init", str(tmp_path / "pupils.csv"), "--overwrite"]) == 0
    assert read_policy(tmp_path / "policy.yaml").columns.users == ("school", "score")


@pytest.mark.parametrize("content", [b"", b"school,score\n", b"\xff\xfe\x00"])
def test_no_table_is_a_sentence(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pupils.csv").write_bytes(content)
    assert cli._run(["policy", "init", str(tmp_path / "pupils.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_users_of_a_command_line_are_in_the_name_of_a_host_by_the_key_alone(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("pseudonyms: true")
    names = []
    for state in ("one", "one", "two"):  # each state folder has its own key
        found = host_policy(None, tmp_path, tmp_path / state)
        assert found is not None
        names.append(found.called("Smith0"))
    assert names[0] == names[1] == pseudonym(key_in(tmp_path / "one" / "pseudonyms.key"), "Smith0")
    assert names[2] not in (None, "Smith0", names[0])
    assert found.called(None) is None


# ---- real processes


@pytest.fixture
def start(rows: Path) -> Iterator[Callable[..., Command]]:
    (rows / "small.yaml").write_text(yaml.safe_dump(SMALL))
    (rows / "data").mkdir()
    (rows / "rows.csv").rename(rows / "data" / "rows.csv")
    with commands_in(rows) as run:
        yield run


def test_true_names_stay_with_the_host_and_results_are_those_of_the_true_names(start: Callable[..., Command], tmp_path: Path) -> None:
    models = []
    for name, text in (("plain", "min_rows: 3"), ("renamed", "min_rows: 3\npseudonyms: true")):
        (tmp_path / "data" / "policy.yaml").write_text(text)
        server = start("server", "small.yaml", "--listen", "127.0.0.1:0", "--output", name)
        code, out, err = start("client", "--server", server.address(), "--name", "a", "--data", "data").end()
        assert (code, server.end()[0]) == (0, 0), err
        assert "keeps to the policy data/policy.yaml" in out
        assert "1 user with fewer than 3 training rows" in out
        with np.load(tmp_path / name / "models" / "local.npz") as arrays:
            models.append(dict(zip(arrays["users"].tolist(), arrays["x"], strict=True)))
    listed = next((tmp_path / "coterie-state").glob("*pseudonyms*.json"))
    true_names = json.loads(listed.read_text())
    assert str(listed.name) in out
    assert sorted(true_names.values()) == ["Smith0", "Smith1", "Smith2", "Smith3"]
    assert set(models[1]) == set(true_names)
    for other, name in true_names.items():
        assert np.array_equal(models[1][other], models[0][name])
    for path in (tmp_path / "renamed").rglob("*"):
        assert not path.is_file() or b"Smith" not in path.read_bytes(), path
    assert any(b"Smith" in path.read_bytes() for path in (tmp_path / "plain").rglob("*") if path.is_file())


def test_a_policy_refuses_before_data_is_opened(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "data" / "rows.csv").unlink()
    (tmp_path / "own.yaml").write_text("columns: {users: [ward]}\nmethods: [pdmm]\n")
    server = start("server", "small.yaml", "--listen", "127.0.0.1:0")
    sentence = start("client", "--server", server.address(), "--name", "a", "--data", "data", "--policy", "own.yaml").fails(2)
    assert "own.yaml does not allow" in sentence
    assert "column 'school' as user" in sentence
    assert "method 'local'" in sentence
