"""Texts as users: the speaking roles of plays, tweets of many authors, and words as symbols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie_client.data import UserData, UserHead, list_users, load_users
from coterie_client.data.words import symbols_of

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
PLAY = """First Witch:
When shall we three meet again
In thunder, lightning, or in rain?

Second Witch:
When the hurlyburly's done,
When the battle's lost and won.

First Witch:
Where the place?

Third Witch:
There to meet with Macbeth.
"""
FIRST = "When shall we three meet again\nIn thunder, lightning, or in rain?\nWhere the place?"


def roles(**more: Any) -> Any:
    return ADAPTER.validate_python({"source": "roles", "path": "play.txt", "min_characters": 20, "sequence_length": 5, "stride": 1, **more})


def load(folder: Path, text: str = PLAY, **more: Any) -> list[UserData]:
    (folder / "play.txt").write_text(text)
    return load_users(roles(**more), 0, None, folder)


def read(rows: np.ndarray[Any, Any], text: str = PLAY) -> list[str]:
    symbols = sorted(set(text))
    return ["".join(symbols[code] for code in np.atleast_1d(row)) for row in rows]


def test_a_role_is_all_its_speeches_and_a_row_the_symbols_before_the_next(tmp_path: Path) -> None:
    users = load(tmp_path, test_fraction=0)
    assert [user.name for user in users] == ["First Witch", "Second Witch", "Third Witch"]
    first = users[0]
    assert (first.features.dtype, first.features.shape) == (np.int64, (len(FIRST) - 5, 5))
    assert read(first.features) == [FIRST[start : start + 5] for start in range(len(FIRST) - 5)]
    assert read(first.target.astype(np.int64)) == list(FIRST[5:])
    assert first.target.dtype == np.float64
    assert first.test_features.shape == (0, 5)


def test_the_held_out_rows_of_a_role_are_those_of_the_last_part_of_its_text(tmp_path: Path) -> None:
    first = load(tmp_path, test_fraction=0.25)[0]
    split = len(FIRST) - int(len(FIRST) * 0.25 + 0.5)
    assert read(first.features) == [FIRST[start : start + 5] for start in range(split - 5)]
    assert read(first.test_features) == [FIRST[start : start + 5] for start in range(split, len(FIRST) - 5)]
    assert "".join(read(first.test_target.astype(np.int64))) == FIRST[split + 5 :]


def test_rows_are_a_stride_apart_and_rare_roles_left_out(tmp_path: Path) -> None:
    (first,) = load(tmp_path, min_characters=70, stride=7, test_fraction=0)
    assert read(first.features) == [FIRST[start : start + 5] for start in range(0, len(FIRST) - 5, 7)]
    assert list_users(roles(min_characters=70, stride=7, test_fraction=0), 0, tmp_path) == [
        UserHead("First Witch", None, len(first.target))
    ]


def test_a_role_has_the_same_bits_whoever_else_is_loaded(tmp_path: Path) -> None:
    everyone = load(tmp_path)
    for user in everyone:
        (alone,) = load_users(roles(), 0, [user.name], tmp_path)
        assert np.array_equal(alone.features, user.features)
        assert np.array_equal(alone.test_features, user.test_features)
        assert np.array_equal(alone.target, user.target)


def test_roles_can_be_thinned_and_drawn(tmp_path: Path) -> None:
    users = load(tmp_path, partition={"by": "user", "max_users": 2, "rows_per_user": 9, "test_rows_per_user": 2})
    assert len(users) == 2
    assert {(len(user.target), len(user.test_target)) for user in users} <= {(9, 2), (9, 1), (9, 0)}


def test_wrong_plays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data file 'play.txt' is missing"):
        list_users(roles(), 0, tmp_path)
    with pytest.raises(ConfigError, match=r"^play.txt has no role with 500 characters, want at least one: see min_characters$"):
        load(tmp_path, min_characters=500)
    with pytest.raises(ConfigError, match=r"^play.txt has no role with 20 characters"):
        load(tmp_path, "no play at all")
    with pytest.raises(
        ConfigError,
        match=r"^play.txt: role 'Second Witch' has \d+ training characters, want more than the sequence_length of 60: see min_characters$",
    ):
        load(tmp_path, sequence_length=60, test_fraction=0)
    (tmp_path / "play.txt").write_bytes(b"A:\n\xff\xfe")
    with pytest.raises(ConfigError, match=r"^play.txt has the byte 0xff at the wrong place, want UTF-8$"):
        list_users(roles(), 0, tmp_path)
    with pytest.raises(ValidationError, match="the users of plays are their roles: want user"):
        roles(partition={"by": "dirichlet", "users": 2, "alpha": 1})


TWEETS = """"0","1","Mon Apr 06","NO_QUERY","ann","so sad, SO sad"
"4","2","Mon Apr 06","NO_QUERY","bob","great day"
"2","3","Mon Apr 06","NO_QUERY","ann","a neutral one"
"4","4","Mon Apr 06","NO_QUERY","ann","a great one, at last, for all of us here"
"""  # the columns of Sent140: polarity, id, date, query, user, text


def tweets(**more: Any) -> Any:
    return ADAPTER.validate_python({"source": "tweets", "path": "t.csv", "test_fraction": 0, "length": 5, **more})


def test_tweets_are_read_by_their_authors_with_sent140s_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(TWEETS.encode("latin-1"))
    ann, bob = load_users(tweets(), 0, None, tmp_path)
    assert (ann.name, ann.target.tolist(), bob.target.tolist()) == ("ann", [0, 1], [1])
    assert np.array_equal(ann.features, symbols_of(["so sad, SO sad", "a great one, at last, for all of us here"], 10_000, 5))
    assert np.array_equal(load_users(tweets(), 0, ["bob"], tmp_path)[0].features, bob.features)
    assert list_users(tweets(), 0, tmp_path) == [UserHead("ann", None, 2), UserHead("bob", None, 1)]


def test_columns_of_tweets_have_names_under_a_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("who,mood,said\nann,1,hello\nann,0,good bye\n")
    named = {"header": True, "user_column": "who", "label_column": "mood", "text_column": "said", "partition": {"by": "user"}}
    (ann,) = load_users(tweets(**named), 0, None, tmp_path)
    assert ann.target.tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"^t.csv: column 'text' is missing, found 'who', 'mood', 'said'$"):
        list_users(tweets(**(named | {"text_column": "text"})), 0, tmp_path)
    with pytest.raises(ValidationError, match="column 'who' is a name and header is false, want header: true"):
        tweets(user_column="who")
    with pytest.raises(ValidationError, match=r"are \(4, 4, 0\), want three columns"):
        tweets(text_column=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"t.csv has 0 rows, want at least one"),
        (b'"0","1","d","q","ann"\n', r"t.csv line 1 has 5 fields, want more than 5"),
        (b'"x","1","d","q","ann","hi"\n', r"t.csv line 1 has the label 'x', want a whole number"),
        (b'"0","1","d","q","","hi"\n', r"t.csv line 1, the user: the name is empty"),
        (b'"0","1","d","q","ann","hi"\n', r"class 4 of partition.classes has 0 rows in t.csv, want at least one"),
        (b'"0","1","d","q","ann","hi"x\n', r"t.csv cannot be read \(.*\), want comma-separated text"),
    ],
)
def test_wrong_tweets_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{message}"):
        list_users(tweets(), 0, tmp_path)


@settings(max_examples=25)
@given(st.text(max_size=60), st.integers(2, 50), st.integers(1, 9))
def test_any_text_becomes_symbols_in_range(text: str, n_symbols: int, length: int) -> None:
    symbols = symbols_of([text], n_symbols, length)
    assert symbols.shape == (1, length)
    assert ((symbols >= 0) & (symbols < n_symbols)).all()


def test_short_texts_are_filled_at_the_front_and_case_does_not_matter() -> None:
    symbols = symbols_of(["Good day!", "", "good DAY it's a very long one"], 10_000, 4)
    assert symbols[0, :2].tolist() == [0, 0]
    assert symbols[0, 2:].tolist() == symbols[2, :2].tolist()
    assert symbols[1].tolist() == [0, 0, 0, 0]
    # A fixed symbol: the same word on every machine, 1 + crc32("good") mod 9999.
    assert symbols[0, 2] == 2274
