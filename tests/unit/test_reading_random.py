"""Tables in random dialects with random bad and missing cells: the plain table's bits, or the exact counts."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from coterie.errors import ConfigError
from coterie.experiment.data import DataConfig
from coterie_client.data import UserData, load_users

ADAPTER: TypeAdapter[Any] = TypeAdapter(DataConfig)
COLUMNS = ("user", "group", "x", "z", "seen", "y")
ROLES = {"source": "csv", "path": "t.csv", "user_column": "user", "cluster_column": "group", "target_column": "y"}
USERS = ("Café", "b;c", 'quo"te', "d,e", "12")


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    """Rows of text as a program writes them: users and groups, three numbers, a boolean."""
    n = draw(st.integers(25, 60))
    numbers = st.floats(-1e9, 1e9, allow_nan=False).map(repr) | st.integers(-5, 2_000_000).map(str)
    rows = []
    for number in range(n):
        user = USERS[number % len(USERS)]
        rows.append([user, f"g{len(user)}", draw(numbers), draw(numbers), draw(st.sampled_from(["TRUE", "false"])), draw(numbers)])
    return rows


@st.composite
def dialects(draw: st.DrawFn) -> dict[str, Any]:
    decimal = draw(st.sampled_from([".", ","]))
    thousands = draw(st.sampled_from([None, "'", "." if decimal == "," else ","]))
    return {
        "delimiter": draw(st.sampled_from([",", ";", "\t", "|"])),
        "decimal": decimal,
        "thousands": thousands,
        "encoding": draw(st.sampled_from(["utf-8", "latin-1", "utf-16"])),
        "comment": draw(st.sampled_from([None, "#"])),
    }


def spelled(cell: str, dialect: dict[str, Any]) -> str:
    """A number in a dialect."""
    whole, point, rest = cell.partition(".")
    if dialect["thousands"] and whole.lstrip("-").isdigit() and len(whole.lstrip("-")) > 3:
        whole = f"{int(whole):,}".replace(",", dialect["thousands"])
    return whole + (dialect["decimal"] if point else "") + rest


def written(rows: list[list[str]], dialect: dict[str, Any], order: list[int], quoting: int, end: str, bom: bool) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=dialect["delimiter"], quoting=quoting, lineterminator=end)  # type: ignore[arg-type]
    writer.writerow([[*COLUMNS, "note"][place] for place in order])
    for number, row in enumerate(rows):
        if dialect["comment"] and number % 5 == 0:
            text.write(f"# {number} is no row, whatever; it says{end}")
        cells = [*row[:2], *(spelled(cell, dialect) for cell in row[2:4]), row[4], spelled(row[5], dialect), f"word {number % 3}"]
        writer.writerow([cells[place] for place in order])
    content = text.getvalue()
    return ("\ufeff" + content if bom and dialect["encoding"] == "utf-8" else content).encode(dialect["encoding"])


def read(folder: str, content: bytes, **more: Any) -> list[UserData]:
    Path(folder, "t.csv").write_bytes(content)
    return load_users(ADAPTER.validate_python({**ROLES, "feature_columns": ["x", "z", "seen"], **more}), 0, None, Path(folder))


def plain(rows: list[list[str]]) -> bytes:
    return written(
        rows, {"delimiter": ",", "decimal": ".", "thousands": None, "encoding": "utf-8", "comment": None}, list(range(6)), 0, "\n", False
    )


def bits(users: list[UserData]) -> list[Any]:
    return [
        (u.name, u.cluster, u.schema, *(getattr(u, p).tobytes() for p in ("features", "target", "test_features", "test_target")))
        for u in users
    ]


WORDS = ("oops", "1_0", "inf", "NA", "", "null")
SPOILED = st.lists(st.tuples(st.integers(0, 24), st.sampled_from([2, 3, 5]), st.sampled_from(WORDS)), max_size=4)
QUOTING = st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])


@settings(max_examples=15, deadline=None)
@given(tables(), dialects(), st.permutations(range(7)), QUOTING, st.sampled_from(["\n", "\r\n"]), st.booleans(), SPOILED)
def test_a_table_in_any_dialect_is_the_plain_one_or_its_wrong_cells_are_counted(
    rows: list[list[str]], dialect: dict[str, Any], order: list[int], quoting: int, end: str, bom: bool, spoiled: list[tuple[int, int, str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cells = {(row, column): word for row, column, word in spoiled}
        changed = [[cells.get((number, place), cell) for place, cell in enumerate(row)] for number, row in enumerate(rows)]
        content = written(changed, dialect, order, quoting, end, bom)
        bad = [word for word in cells.values() if word in ("oops", "1_0", "inf")]
        missing = {row for (row, _), word in cells.items() if word not in ("oops", "1_0", "inf")}
        if not cells:
            assert bits(read(folder, content, csv=dialect)) == bits(read(folder, plain(rows)))
            return
        with pytest.raises(ConfigError) as caught:
            read(folder, content, csv=dialect)
        assert ("missing" in str(caught.value)) == bool(missing)
        assert str(caught.value).count(" line ") == min(5, len(cells))
        if bad:
            with pytest.raises(ConfigError) as caught:
                read(folder, content, csv=dialect, missing="drop_rows")
            counted = str(len(bad)) + (" cell is" if len(bad) == 1 else " cells are")
            assert str(caught.value).startswith(counted) or len(bad) == 1
            assert caught.value.finding.rule == "T3"
            of_target = sum(column == 5 for (_, column), word in cells.items() if word in ("oops", "1_0", "inf"))
            assert caught.value.finding.count == (of_target if caught.value.finding.role == "target" else len(bad) - of_target)
        else:
            kept = [row for number, row in enumerate(rows) if number not in missing]
            assert bits(read(folder, content, csv=dialect, missing="drop_rows")) == bits(read(folder, plain(kept)))


@settings(max_examples=30, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["{!r}", "{:e}", "{:.30g}", "{:.17f}", " {!r}", "{!r} "]))
def test_cells_have_the_bits_of_pythons_floats(value: float, form: str) -> None:
    from coterie_client.data.tables.cells import PLAIN

    text = form.format(value)
    found = PLAIN.numbers([text, "1"])
    assert found is not None
    assert found[0].tobytes() == np.float64(float(text)).tobytes()
    assert PLAIN.number(text) == float(text)
