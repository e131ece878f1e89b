"""What runs leave is the same, bit for bit, as when it was written down: a move of code changes nothing."""

from __future__ import annotations

import json

import pytest

from tests.bits import FIXTURE, everything, in_a_process, libraries

FAST = ("ellipses", "growth", "hlm", "pdmm paper", "hlm_exact inference", "async_al2sgd", "fedrep", "scaffold convex")


def compared(names: list[str]) -> None:
    expected = json.loads(FIXTURE.read_text(encoding="utf-8"))
    found = in_a_process("--names", ",".join(names), timeout=1500)["hashes"]
    differing = sorted(name for name in names if found[name] != expected["hashes"][name])
    if differing and (here := libraries()) != expected["libraries"]:
        pytest.skip(f"{differing} differ, but so do the libraries: {here} instead of {expected['libraries']}")
    assert not differing


def test_every_shipped_experiment_and_every_case_of_a_method_has_a_hash() -> None:
    assert set(json.loads(FIXTURE.read_text(encoding="utf-8"))["hashes"]) == set(everything())


def test_some_runs_leave_the_bits_that_are_written_down() -> None:
    compared(list(FAST))


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_all_shipped_experiments_and_all_methods_leave_the_bits_that_are_written_down() -> None:
    names = list(json.loads(FIXTURE.read_text(encoding="utf-8"))["hashes"])
    compared(names)
