"""`coterie attack`, and hosts that return what they were sent. A test changes the host objects of its own process, which then lie."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import as_written
from coterie.experiment.robust import RULES, Robust
from coterie.families.partial import Updated
from coterie.methods.async_l2gd import MESSAGES
from coterie.methods.scaffold import VariateMove
from coterie_client.hosting.host import Host
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.attack import Asked, Attacking, How, attack_here, choose
from coterie_deploy.studies.attack.lies import KINDS, Lies
from coterie_deploy.studies.attack.plan import Cell
from coterie_deploy.studies.attack.result import Attacked, chart_of
from coterie_deploy.studies.check.federations import CASES, clustered, network
from coterie_server.record.rundb import open_run
from tests.integration.test_conformance import two_tiers


def updates(folder: Path, disguise: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What each host of the first round returns, of seven users in as many hosts."""
    case = network({"name": "fedavg", "participation": 1.0}, federation={"hosts": 7}, stop={"rounds": 1})
    folder.mkdir()
    found: dict[str, np.ndarray[Any, Any]] = {}

    def watched(host: Host) -> None:
        close = host.close

        def noted(asked: Any, answers: Any) -> Any:
            listed = list(answers)
            for message in listed:
                if isinstance(message, Updated):
                    found[host.name] = message.weights[0]
            return close(asked, listed)

        host.close = noted  # type: ignore[method-assign]
        disguise(host)  # which calls it with what is told

    asyncio.run(launch(case.experiment(folder), Launch("loopback", folder=folder / "run", disguise=watched)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lies_are_those_of_their_papers(tmp_path: Path) -> None:
    liars = frozenset({"host-6", "host-7"})
    told = {kind: updates(tmp_path / kind, Lies(kind, liars, 3.0, 0)) for kind in KINDS}
    true = updates(tmp_path / "true", Lies("sign_flip", frozenset(), 3.0, 0))
    for kind in KINDS:
        assert all(np.array_equal(told[kind][name], true[name]) for name in true if name not in liars)
        assert not any(np.array_equal(told[kind][name], true[name]) for name in liars)
    honest = np.array([true[f"host-{number}"] for number in range(1, 6)], dtype=np.float64)
    np.testing.assert_allclose(told["little_is_enough"]["host-7"], honest.mean(axis=0) - 3 * honest.std(axis=0), rtol=1e-4, atol=1e-6)
    # b - s (x - b) and b - s (m - b) have the same b.
    b = (told["sign_flip"]["host-6"] + 3 * true["host-6"].astype(np.float64)) / 4
    np.testing.assert_allclose(told["inner_product"]["host-6"], b - 3 * (honest.mean(axis=0) - b), rtol=1e-3, atol=1e-5)
    length = np.linalg.norm(told["gauss"]["host-6"] - b) / np.linalg.norm(true["host-6"] - b)
    assert 1.5 < length < 6  # s, more or less


def warnings_of(folder: Path, kind: str = "warning") -> list[str]:
    with contextlib.closing(open_run(folder)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM events WHERE kind = ? ORDER BY rowid", (kind,))]


def notes_of(folder: Path) -> list[str]:
    return warnings_of(folder, "note")


@pytest.mark.parametrize(
    ("does", "said"), [("echo", "exactly the tensors that it was sent"), ("stuck", "the same tensors as for another task")]
)
def test_a_host_that_returns_what_it_was_sent_or_the_same_again_is_said(does: str, said: str, tmp_path: Path) -> None:
    case = network({"name": "fedavg", "participation": 1.0}, federation={"hosts": 7}, stop={"rounds": 5})
    kept: list[Any] = []

    def lazy(host: Host) -> None:
        if host.name != "host-3":
            return
        close = host.close

        def other(asked: Any, answers: Any) -> Any:
            listed = list(answers)
            for place, message in enumerate(listed):
                if isinstance(message, Updated):
                    sent = next(one.weights for one in asked.messages if hasattr(one, "weights"))
                    kept.append(sent[None] if does == "echo" else message.weights)
                    listed[place] = replace(message, weights=kept[0] if does == "stuck" else kept[-1])
            return close(asked, listed)

        host.close = other  # type: ignore[method-assign]

    asyncio.run(launch(case.experiment(tmp_path), Launch("loopback", folder=tmp_path / "run", disguise=lazy)))
    found = [text for text in warnings_of(tmp_path / "run") if "host-" in text]
    assert found
    assert all("'host-3'" in text and said in text for text in found)
    assert len(found) < 5  # in rounds 1, 2 and 4 of them


def spoilt(case: Any, folder: Path, value: float) -> None:
    """A run of seven hosts or so, the third of which returns models with one such number."""

    def lies(host: Host) -> None:
        close = host.close

        def other(asked: Any, answers: Any) -> Any:
            listed = list(answers)
            for place, message in enumerate(listed):
                if isinstance(message, Updated | VariateMove | MESSAGES.models):
                    name = "theta" if isinstance(message, MESSAGES.models) else "weights"
                    vectors = getattr(message, name).copy()
                    vectors[:, -1] = value
                    listed[place] = replace(message, **{name: vectors})
            return close(asked, listed)

        if host.name == "host-3":
            host.close = other  # type: ignore[method-assign]

    asyncio.run(launch(case.experiment(folder), Launch("loopback", folder=folder / "run", disguise=lies)))


@pytest.mark.parametrize(
    ("method", "value", "rule"),
    [
        ("fedavg", np.nan, "geometric_median"),
        ("fedavg", np.inf, "norm_clip"),
        ("scaffold", np.nan, "median"),
        ("async_l2gd", 1e300, "median"),
        ("async_l2gd", np.nan, "multi_krum"),
    ],
)
def test_a_host_whose_models_are_no_numbers_does_not_end_a_run_with_a_rule(method: str, value: float, rule: str, tmp_path: Path) -> None:
    federation = {"hosts": 12 if method == "async_l2gd" else 7, "robust": {"rule": rule}}
    if method == "async_l2gd":
        case = clustered({"name": method, "gamma": 1.0, "alpha": 0.5, "iterations": 60}, federation=federation)
    else:
        case = network({"name": method, "participation": 1.0}, federation=federation, stop={"rounds": 3})
    spoilt(case, tmp_path, value)
    found = [text for text in warnings_of(tmp_path / "run") if "'host-3' returned" in text]
    assert bool(found) == (not np.isfinite(value))  # a large number is one, and the rule leaves it out
    assert all("federation.robust leaves such answers out" in text for text in found)
    notes = notes_of(tmp_path / "run")
    averaged = "4 users of a cluster" if method == "async_l2gd" else "7 users of a round"
    assert any(text.startswith(f"robust: of the {averaged} {rule} bears") for text in notes), notes
    if rule == "multi_krum":
        assert any("multi_krum has left out answers of" in text and "'u2' in" in text for text in notes)
    if method == "fedavg":
        with contextlib.closing(open_run(tmp_path / "run")) as connection:
            figures = [value for (value,) in connection.execute("SELECT value FROM figures WHERE name IN ('left_out', 'shortened')")]
        assert len(figures) == 3
        assert all(value >= 1 for value in figures)


def test_aggregators_say_whom_a_rule_left_out_as_a_flat_run_does(tmp_path: Path) -> None:
    case = CASES["async_l2gd robust"]
    asyncio.run(launch(case.experiment(tmp_path), Launch("loopback", folder=tmp_path / "run")))
    (tmp_path / "two").mkdir()
    two_tiers("async_l2gd robust", tmp_path / "two").run()
    flat, two = (notes_of(folder / "run") for folder in (tmp_path, tmp_path / "two"))
    assert len([text for text in two if "trimmed_mean has left out" in text]) == 3, "one of each cluster"
    (whole,) = [text for text in flat if "trimmed_mean has left out" in text]
    for user in re.findall(r"'u\d+' in \d+", whole):
        assert any(user in text for text in two)


def test_without_a_rule_the_sentence_names_host_and_user(tmp_path: Path) -> None:
    case = network({"name": "fedavg", "participation": 1.0}, federation={"hosts": 7}, stop={"rounds": 3})
    with pytest.raises(RunError, match=r"host 'host-3' returned nan for user '.+' in partial.Updated.weights in round 1"):
        spoilt(case, tmp_path, np.nan)


def test_hosts_that_train_are_not_suspected(tmp_path: Path) -> None:
    case = network({"name": "fedavg", "participation": 1.0}, stop={"rounds": 5})
    asyncio.run(launch(case.experiment(tmp_path), Launch("loopback", folder=tmp_path / "run")))
    assert not [text for text in warnings_of(tmp_path / "run") if "host" in text]


def asked(folder: Path, **options: Any) -> Asked:
    usual = {"hosts": 2, "of": None, "kinds": "all", "rules": "all", "methods": None, "seeds": "0:1", "strength": None}
    settings = ("stop.rounds=4", "data.partition.users=10", "method.evaluate_last=1", "method.participation=1.0")
    return Asked("digits", **{**usual, "overrides": settings, "output": folder, "resume": False, "data": None, **options})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_drill_judges_honest_users_and_a_median_bears_what_a_mean_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "drill", io.StringIO()
    before: list[weakref.ref[Any]] = []  # lies and hosts of runs until now

    def noted(lies: Lies, host: Host) -> None:
        if host.name == "host-1":  # the first of a run
            assert not [one() for one in before if one() is not None], "a run that has ended keeps its hosts in memory"
            before.append(weakref.ref(lies))
        before.append(weakref.ref(host))
        disguised(lies, host)

    disguised = Lies.__call__
    monkeypatch.setattr(Lies, "__call__", noted)
    attacking, place = choose(asked(folder, kinds="sign_flip", rules="mean,median", methods="fedavg,local_network", strength=200.0))
    attack_here(attacking, place, How("loopback", None, 1), Console(file=out, width=80), Console(file=io.StringIO()), quiet=True)
    with (folder / "attack.csv").open() as file:
        found = {(row["method"], row["rule"], row["kind"]): row["accuracy"] for row in csv.DictReader(file)}
    cells = [("fedavg", "mean"), ("fedavg", "median"), ("local_network", "mean")]
    assert list(found) == [(*cell, kind) for cell in cells for kind in ("nobody", "sign_flip")]
    under = found["fedavg", "mean", "sign_flip"]
    assert not under or float(under) < float(found["fedavg", "mean", "nobody"]) - 0.1
    assert float(found["fedavg", "median", "sign_flip"]) > float(found["fedavg", "median", "nobody"]) - 0.15
    assert found["local_network", "mean", "sign_flip"] == found["local_network", "mean", "nobody"]  # users share nothing
    printed = " ".join(out.getvalue().split())
    assert "2 of 10 hosts lie" in printed
    assert "median: refused for local_network: the row is what it does by itself" in printed


def test_rules_that_do_not_fit_a_method_are_left_out() -> None:
    section = "{name: async_l2gd, gamma: 1.0, alpha: 0.5, iterations: 20}"
    content = as_written(load("hlm", [f"method={section}", "references=[]"]))
    attacking = Attacking(content, ["async_l2gd", "hlm_exact"], ["mean", *RULES], ["gauss"], [0], 10, 2)
    assert attacking.rules_of("async_l2gd") == ["mean", *(rule for rule in RULES if rule != "norm_clip")]
    assert attacking.rules_of("hlm_exact") == ["mean"]
    assert attacking.experiment(Cell("async_l2gd", "krum", "gauss"), 0).federation.robust == Robust(rule="krum", fraction=0.2)


def test_a_drill_tries_rules_of_others_beside_ours(tmp_path: Path) -> None:
    attacking, _ = choose(asked(tmp_path / "drill", rules="own_median:RULE, median", kinds="gauss"))
    assert attacking.rules == ("median", "own_median:RULE")
    own = attacking.experiment(Cell("fedrep", "own_median:RULE", "gauss"), 0).federation.robust
    assert own == Robust(rule="own_median:RULE", fraction=0.2)
    assert [run.folder.name for run in attacking.wanted(tmp_path)][-1] == "fedrep-own_median.RULE-gauss-0"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hosts": 5}, "less than half of the 10 hosts"),
        ({"kinds": "lie"}, "--kind has 'lie'"),
        ({"rules": "mode"}, "--rule has 'mode'"),
        ({"of": 11}, "want at most the 10 users"),
        ({"overrides": ("exact_sums=true",)}, "these hosts send sums"),
    ],
)
def test_what_cannot_be_a_drill_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        choose(asked(tmp_path / "drill", **options))
    assert why in str(found.value)


def test_the_picture_tells_rules_apart_by_colour_and_shape_in_one_legend() -> None:
    """Names beside points covered each other, where rules came to the same."""
    content = as_written(load("digits"))
    attacking = Attacking(content, ["fedavg"], ["mean", "median"], ["gauss"], [0], 10, 2)
    values = {cell: [0.5] for cell in attacking.cells()}
    chart = chart_of(Attacked("accuracy", True, values, {}, {}), attacking)
    encoding = chart.spec["encoding"]
    assert encoding["color"] == encoding["shape"], "two legends"
    assert encoding["color"]["scale"]["domain"] == ["mean", "median"], "one method needs no name"
    both = replace(attacking, methods=["fedavg", "ditto"])
    named = chart_of(Attacked("accuracy", True, {cell: [0.5] for cell in both.cells()}, {}, {}), both).spec["encoding"]["color"]
    assert named["scale"]["domain"] == ["fedavg, mean", "fedavg, median", "ditto, mean", "ditto, median"]
