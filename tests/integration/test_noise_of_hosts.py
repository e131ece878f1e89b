"""Noise that hosts add inside masked sums (`privacy.where: hosts`): what the coordinator sees, what hosts refuse, and kills."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.draws import secret
from coterie.draws.accountant import Steps, epsilon
from coterie.draws.secret import KEY_BYTES, Secret
from coterie.draws.shares import Shares
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import consent_hash
from coterie.experiment.reveals import steps_of
from coterie.families.evaluation import FinalModels, Scores
from coterie.families.partial import AskScores, Delivery, Shared, TrainingLoss, Updated
from coterie.families.shares import form_of, n_noised, shares_of
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded
from coterie.wire.messages import AskTotal
from coterie_client.families import evaluation
from coterie_client.families.partial import CLIENT
from coterie_client.hosting.build import build_host
from coterie_client.hosting.noised_sums import noised
from coterie_client.hosting.totals import with_totals
from coterie_client.interface.half import Inbox
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.roles.consent_page import asked_lines
from coterie_deploy.studies.check.world import Faults, Leaving, WorldLink
from coterie_deploy.view.run_view import view_of
from coterie_server.run import coordinator
from coterie_server.run.coordinator import Finished
from tests.convex import convex_experiment, write_rows
from tests.networks import network_experiment, write_users
from tests.simulation import World, query, random_faults

HOSTS: Mapping[str, Any] = {"unit": "user", "where": "hosts", "clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-3}
MASKED: Mapping[str, Any] = {"sums": "masked", "hosts": 3}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("noise") / "users.npz")


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and names of runs are the same in all runs of a test."""
    monkeypatch.setattr(secret, "new_key", lambda: b"k" * KEY_BYTES)
    monkeypatch.setattr(coordinator.secrets, "token_hex", lambda n: "ab" * n)


def experiment_of(archive: Path, method: str | Mapping[str, Any] = "fedavg", **changes: Any) -> Experiment:
    """Three hosts that noise and mask their sums; `privacy` and `federation` are changes of those sections."""
    listed = {"participation": 1.0, **({"name": method} if isinstance(method, str) else method)}
    rules = {"exact_sums": True, "stop": {"rounds": 4}, **changes}
    rules["privacy"] = {**HOSTS, **changes.get("privacy", {})}
    rules["federation"] = {**MASKED, **changes.get("federation", {})}
    return convex_experiment(archive, listed, **rules)


def ran(world: World) -> Finished:
    finished = world.run()
    finished.database.close()
    return finished


def final(finished: Finished) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in finished.outcomes[finished.final_stage].shared.items()}


# ---- whole runs


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_run_sends_no_loss_of_a_user_and_its_books_and_closed_forms_agree(method: str, archive: Path, tmp_path: Path) -> None:
    finished = ran(World(experiment_of(archive, method), tmp_path / "run", 3))
    assert verdict_on(tmp_path / "run").agrees
    steps = {step for (step,) in query(tmp_path / "run", "SELECT DISTINCT step FROM ledger")}
    assert "loss" not in steps
    assert ("evaluation" in steps) == (method == "fedavg")  # a user of ditto would judge a model without noise
    spent = [value for (value,) in query(tmp_path / "run", "SELECT value FROM figures WHERE name = 'epsilon' ORDER BY round")]
    assert spent == [epsilon(Steps(2.0, n), 1e-3) for n in range(1, 5)]
    assert finished.outcomes[method].figures["noise_multiplier"] == 2.0
    (note,) = [text for (text,) in query(tmp_path / "run", "SELECT text FROM events WHERE text LIKE 'privacy: changes%'")]
    said = "it is that of 2 hosts, and a total is of as many or more: of A hosts, t of whom help the coordinator, sqrt((A - t) / 2) times"
    assert said in note
    results = " ".join(view_of(tmp_path / "run").results)
    assert "noise is added by hosts" in results.lower()
    assert ("scores on held-out rows have no noise" in results) == (method == "fedavg")
    assert ("there are no scores" in results) == (method == "ditto")


def test_with_hardly_any_noise_and_a_large_clip_a_run_is_the_plain_mean(archive: Path, tmp_path: Path) -> None:
    quiet = experiment_of(archive, privacy={"clip": 1e3, "noise_multiplier": 1e-8})
    plain = convex_experiment(archive, {"name": "fedavg", "participation": 1.0, "average": "plain"}, stop={"rounds": 4})
    found, wanted = ran(World(quiet, tmp_path / "quiet", 3)), ran(World(plain, tmp_path / "plain", 3))
    np.testing.assert_allclose(found.outcomes["fedavg"].shared["x"], wanted.outcomes["fedavg"].shared["x"], atol=1e-4)
    loud = ran(World(experiment_of(archive), tmp_path / "loud", 3))
    assert np.abs(loud.outcomes["fedavg"].shared["x"] - wanted.outcomes["fedavg"].shared["x"]).max() > 0.01


def test_two_runs_of_one_seed_differ_by_their_noise(archive: Path, tmp_path: Path) -> None:
    first, second = (final(ran(World(experiment_of(archive), tmp_path / name, 3))) for name in "ab")
    assert first != second


def test_a_network_shares_its_representation_with_noise_and_keeps_its_heads(tmp_path: Path) -> None:
    path = write_users(tmp_path / "users.npz")
    rules = {"exact_sums": True, "federation": dict(MASKED), "stop": {"rounds": 2}}
    experiment = network_experiment(path, {"name": "fedrep", "head_epochs": 1}, privacy=dict(HOSTS), **rules)
    finished = ran(World(experiment, tmp_path / "run", 3))
    assert verdict_on(tmp_path / "run").agrees
    assert all(np.isfinite(array).all() for array in finished.outcomes["fedrep"].shared.values())
    assert not finished.outcomes["fedrep"].by_user


# ---- noise is drawn once for what is sent


class Heard(World):
    """A world that notes what each host has ever sent in answer to each exchange."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sent: dict[tuple[str, int], set[bytes]] = defaultdict(set)

    def reply(self, link: WorldLink, encoded: Encoded) -> None:
        found = session_pb2.JoinRequest.FromString(encoded.head).reply
        found.attempt = found.resent = found.durable_seq = 0
        content = found.SerializeToString(deterministic=True) + b"".join(bytes(tail) for tail in encoded.tails)
        self.sent[link.name, found.seq].add(content)


def same_bits_after_kills(experiment: Experiment, folder: Path, seeds: range) -> None:
    calm = World(experiment, folder / "calm", 3)
    wanted = final(ran(calm))
    ((n_exchanges,),) = query(folder / "calm", "SELECT MAX(seq) FROM ledger")
    for seed in seeds:
        world = Heard(experiment, folder / f"{seed}", 3, random_faults(seed, n_exchanges, list(calm.users)), keeps_hosts=seed % 2 == 0)
        assert final(ran(world)) == wanted
        assert {len(contents) for contents in world.sent.values()} == {1}


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("on_loss", ["stop", "skip"])
def test_a_run_survives_kills_with_the_same_bits_and_no_host_sends_two_answers(on_loss: str, archive: Path, tmp_path: Path) -> None:
    same_bits_after_kills(experiment_of(archive, stop={"rounds": 5}, federation={"on_loss": on_loss}), tmp_path, range(3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("repeatable")
def test_no_noise_is_used_twice_after_kills_at_five_hundred_random_points(archive: Path, tmp_path: Path) -> None:
    """Each of the runs has three kills."""
    same_bits_after_kills(experiment_of(archive, stop={"rounds": 5}), tmp_path, range(167))


@pytest.mark.usefixtures("repeatable")
def test_a_host_that_draws_anew_after_a_restart_would_send_two_answers_and_is_refused_by_its_own_log(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has power: without the history the terms are others, and masks over two terms would give away their difference."""
    made = iter(range(1000))
    key = property(lambda _: Secret(bytes(KEY_BYTES)).child(next(made)))
    monkeypatch.setattr("coterie_client.hosting.noise_keys.NoiseKeys.secret", key)
    world = World(experiment_of(archive, stop={"rounds": 5}), tmp_path / "run", 3, Faults({}, {5: "h1", 6: "h2", 7: "h0"}, ()))
    with pytest.raises(RunError, match=r"the parent asks for more than the total of masked sums \(rule C11\)"):
        world.run()


def test_a_round_with_a_lost_host_has_the_noise_of_the_fewest_and_goes_on(archive: Path, tmp_path: Path) -> None:
    experiment = experiment_of(archive, stop={"rounds": 6}, federation={"on_loss": "skip", "absence_timeout_s": 0.02})
    ran(World(experiment, tmp_path / "calm", 3))
    sums = [seq for (seq,) in query(tmp_path / "calm", "SELECT DISTINCT seq FROM ledger WHERE kind = 'partial.UpdatedTotal' ORDER BY seq")]
    finished = ran(Leaving("h1", sums[1], sums[3], experiment, tmp_path / "left", 3))
    users = [n for (n,) in query(tmp_path / "left", "SELECT value FROM figures WHERE name = 'users' AND round > 0 ORDER BY round")]
    assert min(users) < max(users)
    assert np.isfinite(finished.outcomes["fedavg"].shared["x"]).all()


# ---- how much noise there is


@pytest.mark.parametrize(
    ("federation", "n"),
    [({}, 2), ({"threshold": 1.0}, 3), ({"min_summed": 3}, 3), ({"hosts": 100}, 66), ({"hosts": 100, "min_hosts": 10}, 7)],
)
def test_a_share_is_made_for_the_fewest_hosts_that_others_accept(federation: Mapping[str, Any], n: int, archive: Path) -> None:
    """A host asks nobody how many there are: what it computes from is part of what its owner has accepted."""
    experiment = experiment_of(archive, federation=federation)
    assert n_noised(experiment) == n
    shares = shares_of(experiment)
    assert shares == Shares(0.5, 2.0, n)


def test_an_epsilon_gives_noise_that_counts_every_user_in_each_round(archive: Path, tmp_path: Path) -> None:
    """The coordinator draws the users, so what it does not know of the draw protects nobody."""
    wanted = {"noise_multiplier": None, "epsilon": 3.0}
    drawn = experiment_of(archive, {"name": "fedavg", "participation": 0.8}, privacy=wanted, stop={"rounds": 6})
    found = shares_of(drawn)
    assert found is not None
    assert 2.97 < epsilon(Steps(found.wanted, 6), 1e-3) <= 3.0
    finished = ran(World(drawn, tmp_path / "run", 3))
    assert finished.outcomes["fedavg"].figures["epsilon"] == epsilon(Steps(found.wanted, 6), 1e-3)


def host_sums(experiment: Experiment, rows: np.ndarray[Any, Any], key: bytes) -> Any:
    shares = shares_of(experiment)
    assert shares is not None
    found = Updated(rows, np.zeros((len(rows), 0), np.int64), users=np.arange(len(rows)))
    return noised(asked(len(rows), shares), [found], shares, Secret(key)), shares


def asked(n: int, shares: Shares, **changes: Any) -> AskTotal:
    assert Updated.ask_total is not None
    none = np.zeros((n, 0), dtype=np.int64)
    fields = {"weight": none, "group": none, "form": np.array([form_of(shares)] * 2), **changes}
    return Updated.ask_total(**fields, users=np.arange(n))


def test_what_leaves_a_host_is_the_sum_of_shortened_changes_with_its_share(archive: Path) -> None:
    rows = np.array([[3.0, 4.0, 0.0, 0.0], [0.1, 0.0, -0.1, 0.0]])
    total, shares = host_sums(experiment_of(archive), rows, b"a" * KEY_BYTES)
    noise = shares.noise(Secret(b"a" * KEY_BYTES).child("share").numbers(), 4)
    np.testing.assert_allclose(shares.read(total.weights[0, 0] - noise), [0.4, 0.4, -0.1, 0.0], atol=1e-5)
    assert shares.read(noise).std() > 0.1
    assert total.counts.shape == (1, 1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": np.ones((2, 1), dtype=np.int64)},
        {"group": np.zeros((2, 1), dtype=np.int64)},
        {"form": np.array([[0, 20, 0], [0, 20, 0]])},
    ],
    ids=["weights", "groups", "form"],
)
def test_sums_of_another_form_than_that_of_the_noise_are_refused(changes: Mapping[str, Any], archive: Path) -> None:
    """Weights would let one user count more often than the noise is for; a coarser grid would hide less of it."""
    shares = shares_of(experiment_of(archive))
    assert shares is not None
    found = Updated(np.zeros((2, 4)), np.zeros((2, 0), np.int64), users=np.arange(2))
    with pytest.raises(ProtocolError, match="in another form than that of their noise"):
        noised(asked(2, shares, **changes), [found], shares, Secret(bytes(KEY_BYTES)))


def test_a_second_sum_in_an_exchange_is_refused(archive: Path) -> None:
    host = build_host("h", experiment_of(archive), "run", ["u0"])
    host.indices, host.n_members = np.arange(1), 1
    shares = shares_of(host.experiment)
    assert shares is not None
    assert TrainingLoss.ask_total is not None
    none = np.zeros((1, 0), dtype=np.int64)
    asks = [asked(1, shares), TrainingLoss.ask_total(none, none, np.array([form_of(shares)]), users=np.arange(1))]
    answers = [Updated(np.zeros((1, 4)), np.zeros((1, 0), np.int64), users=np.arange(1)), TrainingLoss(np.ones(1), users=np.arange(1))]
    with pytest.raises(ProtocolError, match="asks for 2 sums in one exchange, but the noise is enough for one"):
        with_totals(answers, asks, host.local, frozenset(), lambda *_: pytest.fail("no sum leaves"))


def test_sums_in_which_a_user_counts_twice_are_refused(archive: Path) -> None:
    """One that counts a thousand times would stand out from noise that is made for one clip."""
    host = build_host("h", experiment_of(archive), "run", ["u0"])
    host.indices, host.n_members = np.arange(1), 1
    shares = shares_of(host.experiment)
    assert shares is not None
    twice = np.zeros(2, dtype=np.int64)
    answers = [Updated(np.zeros((2, 4)), np.zeros((2, 0), np.int64), users=twice)]
    with pytest.raises(ProtocolError, match=r"^the parent asks for sums of partial.Updated in which a user counts more than once"):
        with_totals(answers, [replace(asked(2, shares), users=twice)], host.local, frozenset(), lambda *_: pytest.fail("no sum leaves"))


def test_training_rows_are_not_judged_on_a_host_that_noises_its_sums(archive: Path) -> None:
    """Nothing of an honest run asks for it, and the host accepts the step: exact losses at any model would say more than epsilon."""
    host = build_host("h", experiment_of(archive), "run", ["u0"])
    host.indices, host.n_members = np.arange(1), 1
    _, (scores,) = evaluation.step(None, Inbox("stage", 1, {FinalModels: FinalModels(np.ones((1, 4)))}), host.local)
    assert isinstance(scores, Scores)
    assert np.isinf(scores.objective).all()


def test_a_host_refuses_scores_of_models_without_noise_and_rounds_beyond_those_accepted(archive: Path) -> None:
    for method, modes in (("fedavg", [1]), ("ditto", [0])):
        experiment = experiment_of(archive, method, stop={"rounds": 2})
        host = build_host("h", experiment, "run", ["u0"])
        host.indices, host.n_members = np.arange(1), 1
        state = CLIENT.init(experiment.method.client_options(), host.local, None)
        sent = Shared(np.zeros(4), np.zeros(0, np.int64), users=np.arange(1))
        for _ in range(2):
            state, replies = CLIENT.step(state, Inbox("stage", 1, {Shared: sent}, Secret(bytes(KEY_BYTES))), host.local)
            (update,) = replies
            assert isinstance(update, Updated)
            assert np.linalg.norm(update.weights) <= 0.5 * (1 + 1e-12)
        with pytest.raises(ProtocolError, match=r"^the parent asks for round 3 with noise, which is enough for 2 rounds"):
            CLIENT.step(state, Inbox("stage", 1, {Shared: sent}), host.local)
        judging = {Delivery: Delivery(np.zeros(4), np.zeros(0, np.int64), users=np.arange(1)), AskScores: AskScores(np.array(modes))}
        with pytest.raises(ProtocolError, match="asks for scores of models that users train without noise"):
            CLIENT.step(state, Inbox("stage", 1, judging), host.local)


# ---- what is said and refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"federation": {"sums": "open"}}, "federation.sums is 'open', but with privacy.where 'hosts' each host adds a share of the noise"),
        ({"exact_sums": False}, "exact_sums is false, and numbers with a floating point cannot be masked"),
        ({"privacy": {"unit": "row"}}, "where is 'hosts', but the noise of unit row is in the steps of its hosts: want no such key"),
        ({"privacy": {"adapt": {}}}, "adapt is for noise of the server: hosts do not tell how many changes are shorter"),
        ({"privacy": {"where": "server"}}, "exact_sums is true, but privacy.unit 'user' .* or privacy.where: hosts with"),
        (
            {"privacy": {"noise_multiplier": None}},
            "noise_multiplier or epsilon says how much noise there is, but neither is given: give one",
        ),
        ({"privacy": {"epsilon": 1.0}}, "noise_multiplier or epsilon says how much noise there is, but both are given: give one"),
        (
            {"changes": ["data.fold={number: 1, of: 2}"]},
            "data.fold judges models on part of the training rows, .* beside privacy.where 'hosts'",
        ),
    ],
)
def test_what_would_hide_too_little_is_refused(changes: Mapping[str, Any], said: str, archive: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        experiment_of(archive, **changes)


def test_fine_tuned_models_are_not_judged(archive: Path) -> None:
    with pytest.raises(ConfigError, match=r"method.fine_tune trains on rows without noise, which privacy.where 'hosts' does not allow"):
        experiment_of(archive, {"name": "fedavg", "fine_tune": ["head"]})


def test_noise_that_64_bits_cannot_hold_is_refused_before_the_first_round(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"noise of 1e-20 clips, too little for sums of \d users in 64 bits: want at least"):
        World(experiment_of(archive, privacy={"noise_multiplier": 1e-20}), tmp_path / "run", 3).run()


def test_owners_read_and_accept_who_adds_the_noise(archive: Path) -> None:
    experiment = experiment_of(archive)
    text = "\n".join(asked_lines(experiment))
    assert "under masks, of each host, the sum of its drawn users' changes of the shared tensors, each shortened" in text
    assert "this host adds a share of the noise to its sum" in text
    other = experiment_of(archive, federation={"min_summed": 3})
    assert consent_hash(other) != consent_hash(experiment)
    (step,) = [step for step in steps_of(experiment) if "partial/shared" in step.reveal.steps]
    assert "the total with the noise of all hosts that are asked" in step.reveal.concluded


# ---- images: what a host needs


def test_a_host_without_scipy_and_the_accountant_adds_its_share_where_the_multiplier_is_given(archive: Path) -> None:
    """As in the image `client`."""
    content = {**experiment_of(archive).model_dump(mode="json", exclude_unset=True), "method": {"name": "fedavg"}}
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["scipy", "scipy.special", "dp_accounting", "torch"]))
import numpy as np
from coterie.draws.secret import Secret
from coterie.experiment.config import experiment_from
from coterie.families.shares import shares_of
from coterie_client.hosting.build import build_host
host = build_host("h", experiment_from({content!r}), "run", ["u0"])
shares = shares_of(host.experiment)
assert shares.noise(Secret(bytes(32)).numbers(), 5).any() and host._share is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("privacy", "missing"),
    [({"unit": "row", "where": None}, "scipy"), ({"noise_multiplier": None, "epsilon": 1.0}, "dp_accounting")],
)
def test_a_host_that_lacks_a_library_of_its_noise_says_so_before_it_joins(
    privacy: Mapping[str, Any], missing: str, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiment_of(archive, privacy=privacy)
    build_host("h", experiment, "run", ["u0"])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ConfigError, match=rf"^the noise of this host needs {missing}, which is not installed: pip install 'coterie\[privacy\]'"
    ):
        build_host("h", experiment, "run", ["u0"])
