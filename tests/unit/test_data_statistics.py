"""Stata and SPSS files give what the same table gives as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie.experiment.features import Feature
from coterie_client.data import list_users, load_users, read_users

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
N = 24


def frame() -> Any:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "school": np.repeat([3.0, 7.0, 12.0], N // 3),  # Stata keeps numbers of schools as floats
            "region": np.repeat(["north", "south", "south"], N // 3),
            "sex": pd.Categorical(rng.choice(["f", "m"], N)),
            "seen": pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 99, N), unit="D"),
            "ses": rng.standard_normal(N),
            "score": rng.standard_normal(N),
        }
    )


def config(source: str, path: str, **more: Any) -> Any:
    columns = {"sex": {"category": ["f", "m"]}}
    roles = {"user_column": "school", "cluster_column": "region", "target_column": "score", "columns": columns}
    return ADAPTER.validate_python({"source": source, "path": path, **roles, **more})


def bits(users: Any) -> list[Any]:
    return [(user.name, user.cluster, user.features.tobytes(), user.target.tobytes(), user.test_features.tobytes()) for user in users]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    table = frame()
    table.to_stata(tmp_path / "t.dta", write_index=False, convert_dates={"seen": "td"})
    table.assign(school=table["school"].astype(int)).to_csv(tmp_path / "t.csv", index=False, float_format="%.17g")
    return tmp_path


def test_a_stata_file_has_the_bits_of_its_text(folder: Path) -> None:
    stata, text = load_users(config("stata", "t.dta"), 0, None, folder), load_users(config("csv", "t.csv"), 0, None, folder)
    assert [(user.name, user.cluster) for user in stata] == [("3", "north"), ("7", "south"), ("12", "south")]
    assert bits(stata) == bits(text)
    assert {feature.kind for feature in stata[0].schema} == {"category", "date", "number"}
    assert stata[0].schema == text[0].schema
    assert list_users(config("stata", "t.dta"), 0, folder) == list_users(config("csv", "t.csv"), 0, folder)
    assert bits(load_users(config("stata", "t.dta"), 0, ["7"], folder)) == [bits(text)[1]]


def test_a_column_with_labels_is_not_used_in_silence(folder: Path) -> None:
    reading = read_users(config("stata", "t.dta", columns={}), 0, None, folder)
    assert [feature.name for feature in reading.users[0].schema] == ["seen", "ses"]
    assert any("'sex'" in note.sentence and note.finding.rule == "T18" for note in reading.notes)


def test_missing_numbers_are_counted_or_dropped(tmp_path: Path) -> None:
    table = frame()
    table.loc[4, "ses"] = np.nan
    table.to_stata(tmp_path / "t.dta", write_index=False)
    with pytest.raises(ConfigError) as error:
        load_users(config("stata", "t.dta"), 0, None, tmp_path)
    assert error.value.finding.rule == "T4"
    reading = read_users(config("stata", "t.dta", missing="drop_rows"), 0, None, tmp_path)
    assert sum(len(user.target) + len(user.test_target) for user in reading.users) == N - 1


def test_two_values_with_one_label_are_read_as_numbers(tmp_path: Path) -> None:
    table = frame()[["school", "score", "ses"]].assign(code=np.arange(N) % 2)
    table.to_stata(tmp_path / "t.dta", write_index=False, value_labels={"code": {0: "same", 1: "same"}})
    (user, *_) = load_users(config("stata", "t.dta", cluster_column=None, columns={}), 0, None, tmp_path)
    assert user.schema == (Feature("ses"), Feature("code"))


def test_an_spss_file_is_read_through_pandas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "t.sav").write_bytes(b"")
    monkeypatch.setattr(pd, "read_spss", lambda _: frame())
    spss, stata = (load_users(config(*what), 0, None, folder) for what in (("spss", "t.sav"), ("stata", "t.dta")))
    assert bits(spss) == bits(stata)
    assert spss[0].schema == stata[0].schema


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "t.dta").write_bytes(b"nothing of Stata")
    with pytest.raises(ConfigError, match=r"t\.dta cannot be read .*, want a Stata file") as error:
        load_users(config("stata", "t.dta"), 0, None, tmp_path)
    assert error.value.finding.rule == "T1"


def test_a_missing_library_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Any:
        raise ImportError("no pyreadstat")

    (folder / "t.sav").write_bytes(b"")
    monkeypatch.setattr(pd, "read_spss", refused)
    with pytest.raises(
        ConfigError, match=r"t\.sav, an SPSS file, needs pyreadstat, which is not installed: pip install 'pyreadstat'"
    ) as error:
        load_users(config("spss", "t.sav"), 0, None, folder)
    assert error.value.finding.rule == "T21"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"t\.dta, a Stata file, needs pandas, which is not installed: pip install 'pandas'"):
        load_users(config("stata", "t.dta"), 0, None, folder)


def test_a_schema_of_a_stata_file_reads_it(tmp_path: Path) -> None:
    from coterie_deploy.cli.data_schema import is_table, schema_of

    frame().to_stata(tmp_path / "t.dta", write_index=False)
    assert is_table(tmp_path / "t.dta")
    data = yaml.safe_load(schema_of(tmp_path / "t.dta"))["data"]
    assert data["source"] == "stata"
    assert data["columns"] == {
        "school": "number", "region": {"category": ["north", "south"]}, "sex": {"category": ["f", "m"]},
        "seen": "date", "ses": "number", "score": "number",
    }  # fmt: skip
