"""Hosts send the sum of their users' answers, and nobody sees the terms: `federation.total` and `exact_sums`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import consent_hash
from coterie.experiment.model import convex_tensors
from coterie.experiment.reveals import steps_of
from coterie.families.consensus import Curvatures, GroupModel, Slopes
from coterie.families.partial import Scores, TrainingLoss
from coterie.wire.messages import Annotated, Array, Rows, Scalars, declare
from coterie.wire.precision import Precision
from coterie_client.hosting.totals import with_totals
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.adapt import adapted_from
from coterie_deploy.studies.certify import certification
from coterie_deploy.studies.check.federations import CASES, clustered, network, pairwise
from coterie_deploy.studies.check.world import World
from coterie_server.interface.half import Facts, Members, Setting, Sum, Totals, server_half
from coterie_server.interface.sum_links import SumLinks
from coterie_server.interface.wanted import Wanted, check_wanted
from coterie_server.run.coordinator import Finished
from coterie_server.session.hub import Hub
from tests.simulation import query

UP = """SELECT kind, COUNT(*), SUM(vectors), SUM(payload_bytes) FROM ledger
    WHERE direction = 'up' AND step = 'shared' AND useful GROUP BY kind"""


def ran(experiment: Experiment, folder: Path, n_hosts: int) -> Finished:
    folder.mkdir()
    finished = World(experiment, folder, n_hosts).run()
    finished.database.close()
    return finished


def left(finished: Finished) -> dict[str, Any]:
    outcome = finished.outcomes[finished.final_stage]
    models = {} if outcome.models is None else {"models": outcome.models.tobytes()}
    return {**models, **{name: array.tobytes() for name, array in outcome.shared.items()}, **outcome.figures}


def test_one_three_and_seven_hosts_leave_the_same_bits_and_send_one_sum_each(tmp_path: Path) -> None:
    experiment = network({"name": "fedavg", "participation": 1.0, "evaluate_last": 0, "fine_tune": []}, exact_sums=True).experiment(
        tmp_path
    )
    found = {n: left(ran(experiment, tmp_path / f"{n}", n)) for n in (1, 3, 7)}
    assert found[1] == found[3] == found[7]
    for n in found:
        rounds = experiment.stop.rounds
        size = 5 * 6 + 6 + 6 * 4 + 4 + 4 * 3 + 3  # numbers of the network
        assert query(tmp_path / f"{n}", UP.replace("?", "'shared'")) == [
            ("partial.UpdatedTotal", n * rounds, n * rounds, 8 * size * n * rounds)
        ]
        assert verdict_on(tmp_path / f"{n}").agrees


@pytest.mark.parametrize("case", ["oracle", "squared", "fedavg convex", "fedrep"])
def test_exact_sums_and_sums_in_member_order_differ_in_the_last_digits_alone(case: str, tmp_path: Path) -> None:
    experiment = CASES[case].experiment(tmp_path)
    outcomes = []
    for exact in (False, True):
        finished = ran(experiment.model_copy(update={"exact_sums": exact}), tmp_path / str(exact), 2)
        outcomes.append(finished.outcomes[finished.final_stage])
    plain, exact_one = outcomes
    if plain.models is not None:
        np.testing.assert_allclose(exact_one.models, plain.models, rtol=0, atol=1e-12)
    for name, array in plain.shared.items():
        np.testing.assert_allclose(exact_one.shared[name], array, rtol=1e-5, atol=1e-6)


def test_the_rounding_error_is_a_figure_of_each_round(tmp_path: Path) -> None:
    finished = asyncio.run(launch(CASES["fedavg convex sums"].experiment(tmp_path), Launch("loopback", folder=tmp_path)))
    finished.database.close()
    found = {value for (value,) in query(tmp_path, "SELECT value FROM figures WHERE name = 'rounding' AND round > 0")}
    assert found
    assert all(0 < value < 1e-10 for value in found)


def test_a_number_out_of_range_ends_the_run_and_crosses_without_its_value(tmp_path: Path) -> None:
    experiment = CASES["oracle sums"].experiment(tmp_path)
    with np.load(tmp_path / "users.npz") as archive:
        arrays = dict(archive)
    np.savez(tmp_path / "users.npz", **{**arrays, "target": arrays["target"] * 1e9})  # type: ignore[arg-type]
    said = r"a number of a loss exceeds 2\^40, the range of its exact sum \(exact_sums\) \(rule M4\); its own log names it"
    with pytest.raises(RunError, match=said) as caught:
        ran(experiment, tmp_path / "run", 2)
    assert "e+" not in str(caught.value)


def test_the_hosts_own_log_names_user_field_and_value() -> None:
    assert Slopes.ask_total is not None
    none = np.zeros((2, 0), np.int64)
    ask = Slopes.ask_total(none, none, np.array([[40, 50, 32], [3, 50, 32]]))
    local: Any = SimpleNamespace(n_own=2, names=("ann", "bob"))
    slopes = Slopes(np.ones(2), np.array([[1.0, 2.0], [0.0, -9.5]]))
    said = r"user 'bob' has 9.5 in consensus.Slopes.gradient, wanted at most 2\^3 in an exact sum: want exact_sums: false"
    with pytest.raises(RunError, match=said) as caught:
        with_totals([slopes], [ask], local, ())
    assert caught.value.finding.sentence == "a number of a loss exceeds 2^3, the range of its exact sum (exact_sums) (rule M4)"
    (sums,) = with_totals([Slopes(slopes.value, slopes.gradient[::-1] / 2)], [ask], local, ())
    assert isinstance(sums, Slopes.total or ())


@pytest.mark.parametrize("form", [[[40, 50, 32]], [[40, 60, 32], [3, 50, 32]], [[2000, 1, 0], [3, 50, 32]], [[40, 50, 70], [3, 50, 32]]])
def test_a_form_that_sums_do_not_fit_into_is_refused(form: list[list[int]]) -> None:
    assert Slopes.ask_total is not None
    none = np.zeros((2, 0), np.int64)
    local: Any = SimpleNamespace(n_own=2, names=("ann", "bob"))
    with pytest.raises(ProtocolError, match=r"asks for sums of consensus.Slopes in a form that they do not"):
        with_totals([Slopes(np.ones(2), np.ones((2, 2)))], [Slopes.ask_total(none, none, np.array(form))], local, ())


@pytest.mark.parametrize("weights", [[2**62 + 5, 2**62], [2**62, 2**62]])
def test_weights_whose_sum_would_wrap_are_refused(weights: list[int]) -> None:
    assert Slopes.ask_total is not None
    ask = Slopes.ask_total(np.array(weights)[:, None], np.zeros((2, 0), np.int64), np.array([[40, 50, 32], [3, 50, 32]]))
    local: Any = SimpleNamespace(n_own=2, names=("ann", "bob"))
    with pytest.raises(ProtocolError, match="in a form that they do not fit into"):
        with_totals([Slopes(np.ones(2), np.ones((2, 2)))], [ask], local, ())


def test_sums_over_nobody_are_refused() -> None:
    assert Slopes.ask_total is not None
    none = np.zeros((0, 0), np.int64)
    ask = Slopes.ask_total(none, none, np.array([[40, 50, 32], [3, 50, 32]]), users=np.zeros(0, np.int64))
    local: Any = SimpleNamespace(n_own=2, names=("ann", "bob"))
    with pytest.raises(ProtocolError, match="over other users than those who answer"):
        with_totals([], [ask], local, ())


def test_a_host_whose_experiment_sends_sums_does_not_send_the_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = CASES["oracle sums"].experiment(tmp_path)

    async def exchanged(self: Hub, *messages: Any, **_: Any) -> Totals:
        await self.exchange(*messages)
        raise AssertionError("the hosts have answered")

    monkeypatch.setattr(Hub, "total", exchanged)
    with pytest.raises(RunError, match=r"the parent asks for a step that this experiment does not have \(rule C9\)"):
        ran(experiment, tmp_path / "run", 2)


def test_sums_over_other_users_than_those_who_answer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = CASES["oracle sums"].experiment(tmp_path)
    total = Hub.total

    async def of_two(self: Hub, *messages: Any, of: Any, **_: Any) -> Totals:
        return await total(self, *messages, of=of, to=np.array([0, 1]))  # the message goes to all users of their hosts

    monkeypatch.setattr(Hub, "total", of_two)
    with pytest.raises(RunError, match=r"its parent broke the protocol \(rule J6\)"):
        ran(experiment, tmp_path / "run", 2)


def test_a_method_that_uses_each_users_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exact_sums is true, but method 'local' uses the answer of each user: want false, or one of"):
        pairwise({"name": "local"}, exact_sums=True).experiment(tmp_path)
    with pytest.raises(ConfigError, match="exact_sums is true, but method 'scaffold' uses the answer of each user"):
        network({"name": "scaffold"}, exact_sums=True).experiment(tmp_path)


def test_owners_read_that_sums_travel_and_accept_them_apart(tmp_path: Path) -> None:
    exact, plain = (clustered({"name": "oracle"}, exact_sums=on).experiment(tmp_path) for on in (True, False))
    assert consent_hash(exact) != consent_hash(plain)
    said = {step.reveal.up for step in steps_of(exact)} - {step.reveal.up for step in steps_of(plain)}
    assert said == {"sums of value, gradient and Hessian at given models over the users of a group on one host"}


def test_studies_that_ask_each_user_do_not_inherit_the_key(tmp_path: Path) -> None:
    experiment = CASES["certify"].experiment(tmp_path).model_copy(update={"exact_sums": True})
    assert not certification(experiment).exact_sums
    trained = network({"name": "fedrep"}, exact_sums=True).experiment(tmp_path)
    assert not adapted_from(trained, trained.data.model_dump(mode="json"), (), 1).exact_sums


def test_the_sums_of_a_host_are_those_of_its_groups() -> None:
    own, groups = np.array([1, 2, 4]), np.array([0, 3, 1, 9, 3])
    assert Slopes.total is not None
    wanted = [Wanted(Slopes.total, None, {"d": 2, "words of value": 2}, groups=groups)]

    def sums(of: list[int], d: int = 2, words: int = 2) -> Any:
        k = len(of)
        assert Slopes.total is not None
        columns: dict[str, Any] = {"value": np.zeros((k, words), np.int64), "gradient": np.zeros((k, 2, d), np.int64)}
        return Slopes.total(groups=np.array(of), **columns)

    check_wanted([sums([1, 3])], own, wanted)
    for wrong in ([sums([1, 3, 9])], [sums([1])], [], [sums([1]), sums([3])]):
        with pytest.raises(ProtocolError, match=r"consensus.SlopesTotal came for groups"):
            check_wanted(wrong, own, wanted)
    with pytest.raises(ProtocolError, match="axis 'd' is 5, wanted 2"):
        check_wanted([sums([1, 3], d=5)], own, wanted)
    with pytest.raises(ProtocolError, match="axis 'words of value' is 1, wanted 2"):
        check_wanted([sums([1, 3], words=1)], own, wanted)


def test_what_has_no_sum_cannot_be_declared_or_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no sum over users"):

        @declare(method="unsummable", step="x", total=True)
        class Unsummable(Rows):
            value: Annotated[Array, Scalars("rows", allows="nan")]

    experiment = CASES["oracle sums"].experiment(tmp_path)
    hub = Hub(experiment, "run", None, lambda: 0.0)  # type: ignore[arg-type]
    hub.roster.members = object.__new__(type("Members", (), {"__len__": lambda _: 1}))
    with pytest.raises(TypeError, match=r"partial.Scores has no sum: declare it with total=True"):
        asyncio.run(hub.total(of=[Sum(Scores)]))


def test_the_kinds_of_a_total_are_declared_beside_their_terms() -> None:
    for cls in (Slopes, Curvatures, TrainingLoss):
        assert cls.total is not None
        assert cls.ask_total is not None
        assert (cls.total.kind, cls.ask_total.kind) == (f"{cls.kind}Total", f"{cls.method}.Ask{cls.__name__}Total")
        assert cls.total.step == cls.ask_total.step == cls.step
    assert GroupModel.total is None


def test_a_half_that_uses_each_users_tensors_is_refused_though_its_method_says_sums(tmp_path: Path) -> None:
    experiment = CASES["scaffold convex"].experiment(tmp_path)
    nobody = np.zeros(2, np.int64)
    facts = Facts(np.ones(2, np.int64), 3, n_test=nobody)
    members, precision = Members(("u0", "u1"), ("", "")), Precision.of("float64", is_convex=True)
    setting = Setting(0, "scaffold", members, precision, facts, tensors=convex_tensors(3), sums=SumLinks(nobody, nobody - 1))
    with pytest.raises(ConfigError, match="exact_sums is true, but the server half of 'scaffold' uses each user's tensors: want false"):
        server_half("scaffold").build(experiment.method, setting)


def test_closed_forms_count_a_sum_for_each_pair_of_a_member_and_a_group() -> None:
    host_of, cluster_of = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1])
    one, own, mixed = np.zeros(5, np.int64), cluster_of, np.array([0, 1, 0, 1, 1])
    flat, tiers = SumLinks(host_of, cluster_of), SumLinks(host_of, cluster_of, np.array([2, 3]))
    assert flat.sums_up("gradient", 10.0, mixed) == {("gradient", "up"): 40.0}
    assert flat.n_sums(np.array([0, 1, 2]), own) == 2
    assert flat.n_sums(np.array([3, 4])) == 1
    for groups in (one, own):
        expected = {("gradient", "up", "between-cluster"): 20.0, ("gradient", "up", "within-cluster"): 50.0}
        assert tiers.sums_up("gradient", 10.0, groups) == expected
    assert tiers.sums_up("gradient", 10.0, mixed) == {("gradient", "up", "between-cluster"): 40.0}


def test_without_exact_sums_the_same_call_adds_in_member_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Totals] = []
    total = Hub.total

    async def watched(self: Hub, *messages: Any, **options: Any) -> Totals:
        weights = np.arange(12)
        (first, *others) = options["of"]
        options["of"] = [Sum(first.kind, weights, first.groups), *others]
        found.append(await total(self, *messages, **options))
        raise RunError("that is enough")

    monkeypatch.setattr(Hub, "total", watched)
    for exact in (False, True):
        experiment = CASES["oracle"].experiment(tmp_path).model_copy(update={"exact_sums": exact})
        with pytest.raises(RunError, match="that is enough"):
            ran(experiment, tmp_path / str(exact), 3)
    plain, exactly = found
    assert plain.rounding == 0 < exactly.rounding < 1e-12
    np.testing.assert_allclose(plain[Slopes].gradient, exactly[Slopes].gradient, rtol=0, atol=1e-9)
    np.testing.assert_allclose(plain.mean(Slopes).value * [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9 + 10 + 11], exactly[Slopes].value, atol=1e-9)
    with pytest.raises(RunError, match=r"no member answered with partial.Scores"):
        exactly[Scores]
