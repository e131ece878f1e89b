"""The model of `coterie project`, by hand."""

from __future__ import annotations

import pytest

from coterie.experiment.links import LinkRule
from coterie_deploy.view.project import Projection, _scope

RULE = LinkRule(bits_per_s=8000.0, delay_s=10.0)  # 1000 bytes a second

# link, exchange, stage, round, bytes down, bytes up
ROWS = [
    ("x/a", 0, 0, 0, 400, 600),
    ("x/b", 0, 0, 0, 100, 100),
    ("x/a", 1, 0, 1, 500, 500),  # round 1: x has two turns, on the slower of its links 1000 and 3000 bytes
    ("x/b", 1, 0, 1, 200, 200),
    ("x/a", 2, 0, 1, 1000, 0),
    ("x/b", 2, 0, 1, 1000, 2000),
    ("y/a", 1, 0, 1, 30_000, 0),  # and y one turn of 30 s, which is the longer
    ("x/a", 3, 0, 2, 1000, 0),  # round 2: of both one
    ("y/a", 2, 0, 2, 2000, 0),
    ("y/a", 3, 1, 2, 0, 4000),  # a round of another stage, that of y alone
]


def test_clusters_run_side_by_side_and_the_slowest_link_of_each_turn_counts() -> None:
    scope = _scope(ROWS, 2000, None, is_within=True)
    assert scope.seconds(RULE) == pytest.approx((5 * 10 + 1 + 2) + (20 + 30) + (20 + 2) + (20 + 4))
    assert scope.n_turns(RULE) == 3
    assert scope.n_turns(None) == 4, "where links take no time, the most turns count"
    assert scope.seconds(None) == 0
    assert (scope.down_bytes, scope.up_bytes) == (36_200, 7400)


def test_turns_of_one_parent_follow_each_other() -> None:
    rows = [(link.replace("/", "-"), seq, *rest) for link, seq, *rest in ROWS if link.startswith("x")]
    scope = _scope(rows, 2000, None, is_within=False)  # type: ignore[arg-type]
    assert scope.seconds(RULE) == pytest.approx((5 * 10 + 1 + 2) + (20 + 1) + (20 + 3) + (20 + 1))


def test_what_a_scope_took_on_the_links_of_the_run_is_no_computing() -> None:
    shaped, fast = _scope(ROWS, 2000, RULE, is_within=True), _scope(ROWS, 2000, None, is_within=True)
    found = Projection("title", 200.0, {"within": shaped, "between": fast}, ())
    assert found.computing_s == pytest.approx(200.0 - 149.0)
    assert found.seconds({}) == pytest.approx(200.0)
    assert found.seconds({"between": RULE}) == pytest.approx(349.0)
    twice = LinkRule(4000.0, 20.0)
    assert found.seconds({"within": twice}) == pytest.approx(349.0)
    assert Projection("title", 100.0, {"within": shaped}, ()).computing_s == 0
