"""Benchmarks keep one line of JSON for each run, and compare a run with the last one by more than the noise of both."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as all_of_them
from tests.benchmarks import record
from tests.benchmarks.record import Figure


def compared(now: list[float], last: list[float], better: Any = "less", exact: bool = False) -> str:
    one, other = (Figure("case", "s", values, better, exact=exact).kept() for values in (now, last))
    return record.verdict(one, other)


def test_a_change_beyond_the_range_of_the_repetitions_is_worse_or_better_and_one_within_it_is_the_same() -> None:
    steady = [1.0, 1.02, 1.04]
    assert compared([1.2, 1.22, 1.24], steady) == "worse"
    assert compared([0.8, 0.82, 0.84], steady) == "better"
    assert compared([1.2, 1.22, 1.24], steady, "more") == "better"
    assert compared([1.0, 1.22, 1.5], steady) == "same"  # this run is noisy
    assert compared([1.2, 1.22, 1.24], [0.9, 1.02, 1.3]) == "same"  # the last one was


def test_of_many_repetitions_the_middle_half_is_the_noise() -> None:
    assert compared([1.2] * 11, [0.1, *[1.0] * 9, 9.0]) == "worse"


def test_a_twentieth_is_noise_except_of_an_exact_count() -> None:
    assert compared([1.04], [1.0]) == "same"
    assert compared([1.06], [1.0]) == "worse"
    assert compared([1.04], [1.0], exact=True) == "worse"


def test_a_figure_that_only_explains_others_is_not_compared_and_one_without_a_last_time_is_new() -> None:
    assert compared([9.0], [1.0], None) == ""
    assert record.verdict(Figure("case", "s", [1.0]).kept(), None) == "new"


@pytest.mark.parametrize("name", all_of_them.NAMES)
def test_make_bench_has_every_benchmark_and_each_yields_figures_with_options_that_have_defaults(name: str) -> None:
    if name == "bench_cvxpy":
        pytest.importorskip("cvxpy", reason="the extra `bench` is not installed")
    module = importlib.import_module(f"tests.benchmarks.{name}")
    options = inspect.signature(module.figures).parameters.values()
    assert inspect.isgeneratorfunction(module.figures)
    assert all(type(one.default) in {int, float, str} or (type(one.default) is tuple and one.default) for one in options)
    assert Path(inspect.getfile(module)).read_text().endswith('\n\nif __name__ == "__main__":\n    record.main(figures)\n')


def figures(repeats: int = 2, sizes: tuple[str, ...] = ("small",)) -> Iterator[Figure]:
    for size in sizes:
        yield Figure(f"{size} problem", "s", [figures.seconds * (1 + k / 100) for k in range(repeats)], wanted=2)  # type: ignore[attr-defined]


def test_a_kept_line_is_compared_with_the_next_run_of_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)

    def run(seconds: float, *arguments: str) -> str:
        figures.seconds = seconds  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        record.main(figures)
        return capsys.readouterr().out

    assert "  new\n" in run(1.0, "--keep")
    assert "  same, was 1.005\n" in run(1.01)
    assert "  wanted: at most 2, MISSED  WORSE, was 1.005\n" in run(3.0)
    assert "  new\n" in run(3.0, "--repeats", "3")
    assert record.moved("test_benchmarks") == []
    run(0.5, "--keep")
    assert [one.split("  ")[-1] for one in record.moved("test_benchmarks")] == ["better, was 1.005"]
    (path,) = tmp_path.iterdir()
    line = json.loads(path.read_text().splitlines()[0])
    assert set(line) == {"bench", "date", "commit", "options", "machine", "figures", "load"}
    assert line["options"] == {"repeats": 2, "sizes": ["small"]}
    assert line["machine"]["cores"] >= 1
    assert line["machine"]["cpu"]
    wanted = {"name": "small problem", "value": 1.005, "low": 1.0, "high": 1.01, "n": 2, "unit": "s", "better": "less"}
    assert line["figures"] == [{**wanted, "wanted": 2, "exact": False}]
