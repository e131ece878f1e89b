"""Whole runs with masked sums: the bits of open ones, whoever is lost, and nothing but the total for the coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import changed_parts, consent_parts
from coterie.experiment.reveals import answered_by, steps_of
from coterie.families import masking
from coterie.families.masking import AskKey, AskMasks, Covered, HostKey, HostKeys, Opened
from coterie.masked.frames import Advert
from coterie.record.snapshot import SnapshotFile
from coterie.session.masks import Masks
from coterie.session.tls import load_tls
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received
from coterie.wire.messages import Total
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.studies.check.federations import CASES, clustered, descent, network, pairwise
from coterie_deploy.studies.check.world import Faults, Leaving, World, WorldLink
from coterie_server.run.coordinator import Finished
from tests.simulation import query

MASKED = {"sums": "masked", "hosts": 3}
FEDAVG = {"name": "fedavg", "participation": 1.0, "evaluate_last": 1, "fine_tune": []}


def ran(world: World) -> Finished:
    finished = world.run()
    finished.database.close()
    return finished


def left(finished: Finished) -> dict[str, Any]:
    outcome = finished.outcomes[finished.final_stage]
    models = {} if outcome.models is None else {"models": outcome.models.tobytes()}
    return {**models, **{name: array.tobytes() for name, array in outcome.shared.items()}, **outcome.figures}


def with_rules(experiment: Experiment, **rules: Any) -> Experiment:
    return experiment.model_copy(update={"federation": experiment.federation.model_copy(update=rules)})


# ---- bits and traffic


@pytest.mark.parametrize(("case", "on_loss"), [("fedavg", "stop"), ("fedavg", "skip"), ("oracle", "stop")])
def test_masked_sums_leave_the_bits_of_open_ones(case: str, on_loss: str, tmp_path: Path) -> None:
    made = clustered({"name": "oracle"}, exact_sums=True) if case == "oracle" else descent(FEDAVG, exact_sums=True)
    experiment = made.experiment(tmp_path)
    experiment = with_rules(experiment, on_loss=on_loss, hosts=3)
    opened = ran(World(experiment, tmp_path / "open", 3))
    masked = ran(World(with_rules(experiment, sums="masked", min_summed=2), tmp_path / "masked", 3))
    assert left(masked) == left(opened)
    steps = {step for (step,) in query(tmp_path / "masked", "SELECT DISTINCT step FROM ledger WHERE kind LIKE 'masking.%'")}
    assert steps == {"advertise", "share", "masked"} | ({"unmask"} if on_loss == "skip" else set())


def exchanges(folder: Path, kind: str) -> list[int]:
    return [seq for (seq,) in query(folder, f"SELECT DISTINCT seq FROM ledger WHERE kind = '{kind}' ORDER BY seq")]


@pytest.mark.parametrize("lost_in", ["masking.Covered", "masking.AskUnmask"])
def test_a_host_that_is_lost_before_or_while_masks_are_taken_off_changes_no_term_of_the_others(lost_in: str, tmp_path: Path) -> None:
    experiment = with_rules(descent(FEDAVG, exact_sums=True).experiment(tmp_path), on_loss="skip", absence_timeout_s=0.02, hosts=3)
    masked = with_rules(experiment, sums="masked")
    ran(World(masked, tmp_path / "calm", 3))
    at = exchanges(tmp_path / "calm", lost_in)[2]
    finished = ran(Leaving("h1", at, at + 3, masked, tmp_path / "left", 3))
    assert query(tmp_path / "left", "SELECT COUNT(*) FROM events WHERE kind = 'skip'") == [(1,)]
    # The same hosts in the same rounds, with open sums: the numbers of exchanges differ, the users who answered do not.
    answered = [n for (n,) in query(tmp_path / "left", "SELECT value FROM figures WHERE name = 'users' AND round > 0 ORDER BY round")]
    assert min(answered) < max(answered)
    assert all(np.isfinite(array).all() for array in finished.outcomes[finished.final_stage].shared.values())


def test_the_total_of_a_round_with_a_lost_host_is_that_of_open_sums(tmp_path: Path) -> None:
    base = with_rules(descent(FEDAVG, exact_sums=True).experiment(tmp_path), on_loss="skip", absence_timeout_s=0.02, hosts=3)
    found = []
    for rules in ({}, {"sums": "masked"}):
        experiment, folder = with_rules(base, **rules), tmp_path / str(len(found))
        ran(World(experiment, folder / "calm", 3))
        at = exchanges(folder / "calm", "partial.UpdatedTotal")[1]
        (last,) = exchanges(folder / "calm", "partial.Delivery")
        finished = ran(Leaving("h1", at, last, experiment, folder / "left", 3))
        found.append({name: array.tobytes() for name, array in finished.outcomes[finished.final_stage].shared.items()})
    assert found[0] == found[1]


def test_a_run_is_killed_anywhere_and_has_the_same_bits(tmp_path: Path) -> None:
    experiment = CASES["global masked"].experiment(tmp_path)
    calm = ran(World(experiment, tmp_path / "calm", 3))
    (n,) = query(tmp_path / "calm", "SELECT MAX(seq) FROM ledger")[0]
    for seq in range(1, n + 1):
        faults = Faults({seq: "h0"}, {seq: "h1"}, (seq,))
        assert left(ran(World(experiment, tmp_path / f"{seq}", 3, faults))) == left(calm)


def test_a_host_remembers_what_it_has_masked_since_the_older_of_its_snapshots(global_masked: Experiment, tmp_path: Path) -> None:
    world = World(global_masked, tmp_path, 3)
    host = world.host("h0", "run")
    found = []
    for last_seq in (3, 7, 9):
        host.last_seq = last_seq
        host.save()
        found.append(host.settled_until(session_pb2.Task(durable_seq=5)))
    assert found == [0, 3, 5]  # the coordinator itself may come back to what is behind 5
    storeless = build_host("h0", global_masked, "run", world.users["h0"])
    assert storeless.settled_until(session_pb2.Task(durable_seq=5)) == 5


def test_a_host_forgets_no_exchange_that_it_may_be_asked_again(global_masked: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.session.masks._KEPT", 1)
    hosts, adverts = keys_of(global_masked, "abc")
    told: list[int] = []
    monkeypatch.setattr("coterie.masked.party.Party.over", lambda _, until: told.append(until))
    hosts["a"].answers(SimpleNamespace(stage=1, seq=9, durable_seq=5), [masking.keys_message(adverts)], [], 3)
    assert told == [3]


def test_a_run_that_may_lose_hosts_is_killed_while_masks_are_taken_off_and_is_repeated_with_its_decisions(tmp_path: Path) -> None:
    experiment = with_rules(descent(FEDAVG, exact_sums=True).experiment(tmp_path), on_loss="skip", absence_timeout_s=0.02, **MASKED)
    calm = ran(World(experiment, tmp_path / "calm", 3))
    for seq in exchanges(tmp_path / "calm", "masking.AskUnmask")[1:2]:
        faults = Faults({seq: "h0"}, {seq: "h1"}, (seq + 1,))
        assert left(ran(World(experiment, tmp_path / f"{seq}", 3, faults))) == left(calm)
    lossy = ran(Leaving("h1", 7, 11, experiment, tmp_path / "lossy", 3))
    repeated = ran(World(experiment, tmp_path / "again", 3, decisions_of=tmp_path / "lossy"))
    assert left(repeated) == left(lossy) != left(calm)


class Malformed(World):
    """Host h1 sends masks, or shares of them, of another shape from one exchange on, until it comes back."""

    kind: type[Any]

    def host(self, name: str, run_id: str) -> Host:
        host = super().host(name, run_id)
        if name == "h1" and "h1" not in self.hosts:
            masks, real = host._masks, host._masks.answers  # type: ignore[union-attr]

            def answers(task: Any, *args: Any) -> list[Any]:
                found = real(task, *args)
                if task.round < 2:
                    return found
                changed = {Covered: ("commitments", 1), Opened: ("own", 1)}[self.kind]
                return [
                    dataclasses.replace(one, **{changed[0]: getattr(one, changed[0])[changed[1] :]}) if type(one) is self.kind else one
                    for one in found
                ]

            masks.answers = answers  # type: ignore[method-assign, union-attr]
        return host


@pytest.mark.parametrize("kind", [Covered, Opened])
def test_malformed_masks_are_a_breach_of_their_host_and_the_others_go_on(kind: type[Any], tmp_path: Path) -> None:
    experiment = with_rules(descent(FEDAVG, exact_sums=True).experiment(tmp_path), on_loss="skip", **MASKED)
    world = Malformed(experiment, tmp_path / "run", 3)
    world.kind = kind
    finished = ran(world)
    (said,) = {text for (text,) in query(tmp_path / "run", "SELECT text FROM events WHERE kind = 'skip'")}
    assert "going on without h1" in said
    assert all(np.isfinite(array).all() for array in finished.outcomes[finished.final_stage].shared.values())


def test_malformed_masks_end_a_run_in_which_nobody_may_be_lost(tmp_path: Path) -> None:
    world = Malformed(with_rules(descent(FEDAVG, exact_sums=True).experiment(tmp_path), **MASKED), tmp_path / "run", 3)
    world.kind = Covered
    with pytest.raises(RunError, match=r"host 'h1' broke the protocol: the commitments of host 'h1' have shape \(1, 16\)"):
        world.run()


# ---- what the coordinator sees


class Listening(World):
    """Keeps the words of the sums that host h0 sends."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.words: list[np.ndarray[Any, Any]] = []

    def reply(self, link: WorldLink, encoded: Encoded) -> None:
        if link.name != "h0":
            return
        for message in decoded(encoded, len(link.host.users)):
            if isinstance(message, Total):
                self.words += [getattr(message, name).reshape(-1) for name, _ in message.specs if name != "groups"]


def decoded(encoded: Encoded, n_own: int) -> list[Any]:
    reply = session_pb2.JoinRequest.FromString(encoded.head).reply
    messages, _ = Received(reply, tuple(memoryview(bytes(tail)) for tail in encoded.tails), len(encoded.head)).decode(n_own)
    return messages


@pytest.mark.parametrize("sums", ["masked", "open"])
def test_the_sums_of_a_host_are_uniform_bits_under_masks_and_are_not_without(sums: str, tmp_path: Path) -> None:
    experiment = with_rules(network(FEDAVG, exact_sums=True).experiment(tmp_path), sums=sums, hosts=3)
    world = Listening(experiment, tmp_path / "run", 3)
    ran(world)
    octets = np.concatenate(world.words).astype("<i8").view(np.uint8)
    expected = octets.size / 256
    assert expected >= 10
    statistic = ((np.bincount(octets, minlength=256) - expected) ** 2).sum() / expected
    assert (statistic < chi2.isf(1e-9, 255)) == (sums == "masked")


def test_a_group_of_too_few_hosts_is_not_summed(tmp_path: Path) -> None:
    experiment = with_rules(clustered({"name": "oracle"}, exact_sums=True).experiment(tmp_path), **MASKED)
    world = World(experiment, tmp_path / "run", 3)
    world.users = {f"h{place}": [f"u{4 * place + own}" for own in range(4)] for place in range(3)}  # a cluster on each host
    with pytest.raises(RunError, match=r"has users of 1 of the hosts that are asked, but the total of a group must be of at least 2 hosts"):
        world.run()


def test_a_round_that_draws_users_of_too_few_hosts_says_so(tmp_path: Path) -> None:
    drawn = {**FEDAVG, "users_per_round": 1}
    experiment = with_rules(descent(drawn, exact_sums=True).experiment(tmp_path), **MASKED)
    with pytest.raises(RunError, match=r"round 1 asks 1 of 3 hosts for masked sums, wanted at least 2: draw more users"):
        World(experiment, tmp_path / "run", 3).run()


# ---- a host refuses what would reveal more


def masks(name: str, experiment: Experiment, **more: Any) -> Masks:
    return Masks(name, experiment, "run", more.get("store"), more.get("tls"))


def task(seq: int = 1) -> Any:
    return SimpleNamespace(stage=1, seq=seq, durable_seq=0)


@pytest.fixture
def global_masked(tmp_path: Path) -> Experiment:
    return CASES["global masked"].experiment(tmp_path)


def test_keys_of_fewer_hosts_than_the_experiment_has_are_refused(global_masked: Experiment) -> None:
    hosts, adverts = keys_of(global_masked, "ab")
    with pytest.raises(ProtocolError, match="2 hosts are to mask their sums, wanted the experiment's 3"):
        hosts["a"].answers(task(), [masking.keys_message(adverts)], [])
    hosts, adverts = keys_of(with_rules(global_masked, min_hosts=2), "ab")
    assert hosts["a"].answers(task(), [masking.keys_message(adverts)], []) == []


def test_a_host_that_has_lost_its_state_folder_says_so_and_gets_no_other_key_into_the_stage(
    global_masked: Experiment, tmp_path: Path
) -> None:
    stores = {name: SnapshotFile(tmp_path / name, name) for name in "abc"}
    hosts, adverts = keys_of(global_masked, "abc", store=stores)
    for host in hosts.values():
        host.answers(task(), [masking.keys_message(adverts)], [])
    (tmp_path / "a" / "a.masks").unlink()
    anew = masks("a", global_masked, store=stores["a"])
    with pytest.raises(ProtocolError, match="keys of stage 1 came before host 'a' had one"):
        anew.answers(task(), [masking.keys_message(adverts)], [])
    (key,) = anew.answers(task(), [AskKey()], [])
    assert isinstance(key, HostKey)
    others = [masking.advert_of("a", key), *adverts[1:]]
    with pytest.raises(ProtocolError, match="the keys of stage 1 are not those that came before"):
        hosts["b"].answers(task(), [masking.keys_message(others)], [])


def test_a_host_whose_disk_is_full_sends_nothing_and_goes_on_with_room_again(
    global_masked: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    host = masks("a", global_masked, store=SnapshotFile(tmp_path, "a"))
    monkeypatch.setattr("coterie.record.secret_log.os.write", full)
    with pytest.raises(RunError, match=r"cannot write .*a\.masks: No space left on device"):
        host.answers(task(), [AskKey()], [])
    monkeypatch.undo()
    (key,) = host.answers(task(), [AskKey()], [])
    (again,) = masks("a", global_masked, store=SnapshotFile(tmp_path, "a")).answers(task(), [AskKey()], [])
    assert isinstance(key, HostKey)
    assert isinstance(again, HostKey)
    assert np.array_equal(key.public, again.public)


def test_a_host_sends_no_sum_without_masks(global_masked: Experiment) -> None:
    from coterie.families.consensus import Slopes

    assert Slopes.total is not None
    sums = Slopes.total(
        groups=np.zeros(1, dtype=np.int64), value=np.zeros((1, 2), dtype=np.int64), gradient=np.zeros((1, 2, 3), dtype=np.int64)
    )
    with pytest.raises(ProtocolError, match="the parent asks for sums without masks") as caught:
        masks("a", global_masked).answers(task(), [], [sums])
    assert caught.value.finding.rule == "C11"


def keys_of(experiment: Experiment, names: str, **more: Any) -> tuple[dict[str, Masks], list[Advert]]:
    hosts = {name: masks(name, experiment, **{key: found[name] for key, found in more.items()}) for name in names}
    adverts = []
    for name, host in hosts.items():
        (key,) = host.answers(task(), [AskKey()], [])
        assert isinstance(key, HostKey)
        adverts.append(masking.advert_of(name, key))
    return hosts, adverts


def test_keys_travel_whole_and_those_of_another_host_are_refused(global_masked: Experiment) -> None:
    hosts, adverts = keys_of(global_masked, "abc")
    message = masking.keys_message(adverts)
    assert masking.adverts_of(message) == adverts
    assert hosts["a"].answers(task(), [message], []) == []
    with pytest.raises(ProtocolError, match="the keys of stage 1 are not those that came before") as caught:
        hosts["a"].answers(task(), [masking.keys_message([*adverts[:2], dataclasses.replace(adverts[2], public=bytes(range(32)))])], [])
    assert caught.value.finding.rule == "C11"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(HostKeys)])
def test_keys_that_were_cut_are_refused(field: str, global_masked: Experiment) -> None:
    hosts, adverts = keys_of(global_masked, "abc")
    message = masking.keys_message(adverts)
    array = getattr(message, field)
    for changed in (array[:-1], np.concatenate([array, array[-1:]]), array - 1):
        with pytest.raises(ProtocolError):
            hosts["a"].answers(task(), [dataclasses.replace(message, **{field: changed})], [])


def test_masks_over_other_sums_than_those_asked_for_are_refused(global_masked: Experiment) -> None:
    hosts, adverts = keys_of(global_masked, "abc")
    asked = AskMasks(np.arange(3), np.ones(1, dtype=np.int64))
    with pytest.raises(ProtocolError, match="asks for masks over 1 sums, but for 0 sums"):
        hosts["a"].answers(task(), [masking.keys_message(adverts), asked], [])


def test_the_secrets_of_a_host_are_in_its_state_folder_for_its_owner_alone(global_masked: Experiment, tmp_path: Path) -> None:
    masks("a", global_masked, store=SnapshotFile(tmp_path / "state", "a")).answers(task(), [AskKey()], [])
    (path,) = (tmp_path / "state").iterdir()
    assert path.name == "a.masks"
    assert path.stat().st_mode & 0o777 == 0o600


# ---- certificates


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    init(folder)
    for name in ("h0", "h1", "h2"):
        issue(folder, Asked("host", name))
    return folder


class Certified(World):
    """Hosts with certificates."""

    authority: Path

    def host(self, name: str, run_id: str) -> Host:
        store, tls = SnapshotFile(self.folder / "hosts" / name, "host"), load_tls(self.authority / name, is_server=False)
        return build_host(name, self.experiment, run_id, self.users[name], data_dir=self.data, store=store, tls=tls)


def warnings(folder: Path) -> list[str]:
    return [text for (text,) in query(folder, "SELECT text FROM events WHERE kind = 'warning'") if "masked sums" in text]


def test_keys_are_signed_where_there_are_certificates_and_else_a_warning_says_so(
    authority: Path, global_masked: Experiment, tmp_path: Path
) -> None:
    world = Certified(global_masked, tmp_path / "tls", 3)
    world.authority = authority
    signed, plain = ran(world), ran(World(global_masked, tmp_path / "plain", 3))
    assert left(signed) == left(plain)
    assert not warnings(tmp_path / "tls")
    (said,) = warnings(tmp_path / "plain")
    assert "are not signed, since the run has no TLS" in said


def test_a_coordinator_cannot_put_a_key_of_its_own_between_hosts(
    authority: Path, global_masked: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = masking.advert_of

    def changed(name: str, message: HostKey) -> Advert:
        advert = real(name, message)
        return dataclasses.replace(advert, public=bytes(range(32))) if name == "h1" else advert

    monkeypatch.setattr(masking, "advert_of", changed)
    world = Certified(global_masked, tmp_path / "tls", 3)
    world.authority = authority
    with pytest.raises((RunError, ProtocolError), match="the parent asks for more than the total of masked sums"):
        world.run()


# ---- experiments


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exact_sums": False}, "exact_sums is false, and numbers with a floating point cannot be masked: want exact_sums: true"),
        ({"federation": {"sums": "masked", "hosts": 1}}, "federation.hosts is 1, whose sum is the total: want at least 2"),
        ({"federation": {**MASKED, "min_summed": 4}}, "min_summed is 4: want at most federation.hosts, which is 3"),
        ({"inference": True}, "inference sends second moments of each user: want inference: false"),
        ({"references": ["local"]}, "'local' needs the answer of each user: want it out of method and references"),
        ({"method": {"name": "squared", "penalty": 0.1}}, "'squared' also sends of each user the final model"),
        (
            {"data": {"source": "ellipses", "users_per_cluster": 3, "standardize": True}},
            "data.standardize sends sums of each user's features: want rows that are standardised and filled before",
        ),
    ],
)
def test_what_masks_would_not_hide_is_refused_with_the_reason(changes: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    content = {"exact_sums": True, "federation": MASKED, **changes}
    method = content.pop("method", {"name": "global"})
    with pytest.raises(ConfigError, match=f"federation.sums is 'masked', but {said}"):
        pairwise(method, **content).experiment(tmp_path)


def test_the_owner_of_a_host_reads_and_accepts_masks(global_masked: Experiment) -> None:
    opened = with_rules(global_masked, sums="open")
    assert changed_parts(consent_parts(opened), consent_parts(global_masked)) == [
        "sums.hosts",
        "sums.shares",
        "sums.sums",
        "sums.threshold",
    ]
    for rules, key in (({"hosts": 2}, "hosts"), ({"min_hosts": 2}, "hosts"), ({"on_loss": "skip"}, "shares")):
        assert changed_parts(consent_parts(global_masked), consent_parts(with_rules(global_masked, **rules))) == [f"sums.{key}"]
    (masked,) = (step for step in steps_of(global_masked) if "under masks" in step.reveal.up)
    assert "the total over all hosts that are asked, and no host's own part" in masked.reveal.concluded
    assert "masking" in answered_by(global_masked)
    assert "masking" not in answered_by(opened)
