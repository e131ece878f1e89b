"""Runs with aggregators and masked sums: the bits of open sums, whoever is killed, and no parent sees more than its members' total."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import changed_parts, consent_parts
from coterie.experiment.reveals import steps_of
from coterie.families.masking import Covered
from coterie.masked.party import Party
from coterie.masked.roster import Rules
from coterie.session.masks import _Memory, _signing
from coterie.session.tls import load_tls
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received, encode
from coterie.wire.messages import Total
from coterie.wire.precision import Precision
from coterie_client.hosting.host import Host
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.read.verify import verdict_on
from coterie_server.run.aggregator import Aggregator
from coterie_server.session.hub import Hub
from tests.two_tier import COORDINATOR, Death, Tiers, bits, flat, small

GLOBAL = {"name": "global", "newton_up_to": 1, "tolerance": 1e-13}
LOCAL = ("127.0.0.1",)
CLUSTERS = ("c0", "c1", "c2")
N_HOSTS = 2  # of a cluster


def made(sums: str = "masked", method: dict[str, Any] | None = None, **rules: Any) -> Experiment:
    federation = {"sums": sums, "hosts_per_cluster": N_HOSTS, **rules}
    return small(method or GLOBAL, exact_sums=True, federation=federation, snapshots={"every_rounds": 2})


@pytest.fixture(scope="module")
def flat_bits() -> dict[str, bytes]:
    return bits(flat(made("open"), 2))


def n_exchanges(tiers: Tiers, scope: str) -> int:
    ((n,),) = tiers.query(f"SELECT MAX(seq) FROM ledger WHERE scope = '{scope}'")
    return int(n)


def test_masked_sums_in_two_tiers_leave_the_bits_of_a_flat_run_with_open_ones(flat_bits: dict[str, bytes], tmp_path: Path) -> None:
    tiers = Tiers(made(), tmp_path, N_HOSTS)
    assert bits(tiers.run()) == flat_bits
    assert tiers.books().agree
    assert verdict_on(tmp_path / "run").agrees
    for scope, n_links in (("between-cluster", 3), ("within-cluster", 6)):
        found = dict(
            tiers.query(f"SELECT step, COUNT(DISTINCT link) FROM ledger WHERE scope = '{scope}' AND kind LIKE 'masking.%' GROUP BY step")
        )
        assert found == {"advertise": n_links, "share": n_links, "masked": n_links}
    assert not list(tmp_path.rglob("*.masks"))


def test_the_secrets_of_both_tiers_are_their_owners_alone_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    finish = Hub.finish

    async def watched(hub: Hub, *args: Any, **how: Any) -> None:
        found.update({str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.masks")})
        await finish(hub, *args, **how)

    monkeypatch.setattr(Hub, "finish", watched)
    Tiers(made(), tmp_path, N_HOSTS).run()
    assert set(found.values()) == {0o600}
    assert sorted({name.split("/")[0] for name in found}) == sorted(
        [*(f"aggregator-{cluster}" for cluster in CLUSTERS), *(f"{cluster}-{place}" for cluster in CLUSTERS for place in range(N_HOSTS))]
    )
    assert not list(tmp_path.rglob("*.masks"))


def test_a_run_that_fails_keeps_the_secrets_for_its_resumption(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="users of 1 of the aggregators"):
        Tiers(made(method={"name": "oracle"}), tmp_path / "failed", N_HOSTS).run()
    assert list((tmp_path / "failed").rglob("*.masks"))


def test_what_masks_add_is_known_to_the_byte_on_both_tiers(tmp_path: Path) -> None:
    tiers = Tiers(made(), tmp_path, N_HOSTS)
    tiers.run()

    def n_bytes(m: int) -> int:
        message = Covered(np.full(1, 1 << 62), np.full((m, 2), 1 << 62), np.zeros((0, -(-(17 * (1 + m) + 16) // 8)), dtype=np.int64))
        entries = encode(session_pb2.Reply(seq=1), [message], Precision.of("float64", is_convex=True)).entries
        return next(entry.message_bytes for entry in entries if entry.kind == Covered.kind)

    for scope, m in (("between-cluster", 2), ("within-cluster", 1)):
        sizes = {size for (size,) in tiers.query(f"SELECT message_bytes FROM ledger WHERE kind = 'masking.Covered' AND scope = '{scope}'")}
        assert sizes == {n_bytes(m)}
    assert n_bytes(2) - n_bytes(1) == 16


# ---- kills


@pytest.mark.parametrize("in_exchange", ["advertise", "masked"])
def test_members_are_killed_while_keys_or_sums_are_on_their_way_and_the_bits_stay(
    in_exchange: str, flat_bits: dict[str, bytes], tmp_path: Path
) -> None:
    calm = Tiers(made(), tmp_path / "calm", N_HOSTS)
    calm.run()
    of = {
        scope: [
            seq for (seq,) in calm.query(f"SELECT DISTINCT seq FROM ledger WHERE step = '{in_exchange}' AND scope = '{scope}' ORDER BY seq")
        ]
        for scope in ("between-cluster", "within-cluster")
    }
    at, below = of["between-cluster"][-1], of["within-cluster"][-1]
    deaths = [Death("c0", COORDINATOR, at), Death("c1", "c1", below), Death("c2-1", "c2", below), Death(COORDINATOR, COORDINATOR, at + 1)]
    tiers = Tiers(made(), tmp_path / "run", N_HOSTS, deaths)
    assert bits(tiers.run()) == flat_bits
    assert tiers.books().agree


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_aggregator_is_killed_at_every_exchange_and_the_bits_stay(flat_bits: dict[str, bytes], tmp_path: Path) -> None:
    calm = Tiers(made(), tmp_path / "calm", N_HOSTS)
    calm.run()
    n = n_exchanges(calm, "between-cluster")
    assert n >= 8
    for seq in range(1, n + 1):
        deaths = [Death("c0", COORDINATOR, seq), Death("c1", "c1", seq)]
        tiers = Tiers(made(), tmp_path / f"{seq}", N_HOSTS, deaths)
        assert bits(tiers.run()) == flat_bits
        assert tiers.books().agree


# ---- what parents see


class Listening:
    """The words of the sums that members send, by who sends them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: dict[str, list[np.ndarray[Any, Any]]] = {"host": [], "aggregator": []}
        of_host, of_aggregator = Host.handle, Aggregator.handle

        def heard_host(host: Host, received: Received) -> Encoded | None:
            return self._heard("host", len(host.users), of_host(host, received))

        async def heard_aggregator(aggregator: Aggregator, received: Received) -> Encoded | None:
            return self._heard("aggregator", len(aggregator.indices), await of_aggregator(aggregator, received))

        monkeypatch.setattr(Host, "handle", heard_host)
        monkeypatch.setattr(Aggregator, "handle", heard_aggregator)

    def _heard(self, role: str, n_own: int, encoded: Encoded | None) -> Encoded | None:
        if encoded is not None:
            reply = session_pb2.JoinRequest.FromString(encoded.head).reply
            messages, _ = Received(reply, tuple(memoryview(bytes(tail)) for tail in encoded.tails), len(encoded.head)).decode(n_own)
            for message in messages:
                if isinstance(message, Total):
                    self.words[role] += [getattr(message, name).reshape(-1) for name, _ in message.specs if name != "groups"]
        return encoded


@pytest.mark.parametrize("sums", ["masked", "open"])
def test_what_hosts_and_aggregators_send_is_uniform_bits_under_masks_and_is_not_without(
    sums: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Listening(monkeypatch)
    Tiers(made(sums), tmp_path, N_HOSTS).run()
    for words in heard.words.values():
        octets = np.concatenate(words).astype("<i8").view(np.uint8)
        expected = octets.size / 256
        assert expected >= 5
        statistic = ((np.bincount(octets, minlength=256) - expected) ** 2).sum() / expected
        assert (statistic < chi2.isf(1e-9, 255)) == (sums == "masked")


def test_the_aggregators_total_over_its_hosts_is_the_one_that_it_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aggregator knows the total of its cluster, and a coordinator that knows the others' masks would too: none of it goes up."""
    totals: list[np.ndarray[Any, Any]] = []
    masked = Aggregator._masked

    async def watched(self: Aggregator, *asked: Any) -> Any:
        replies = await masked(self, *asked)
        totals.extend(getattr(one, name).copy() for one in replies.messages for name, _ in one.specs if name != "groups")
        return replies

    monkeypatch.setattr(Aggregator, "_masked", watched)
    heard = Listening(monkeypatch)
    Tiers(made(), tmp_path, N_HOSTS).run()
    known = {total.reshape(-1).tobytes() for total in totals}
    assert totals
    assert not known & {words.tobytes() for words in heard.words["aggregator"]}


# ---- certificates


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    init(folder)
    issue(folder, Asked("coordinator", "server", LOCAL))
    for cluster in CLUSTERS:
        issue(folder, Asked("aggregator", cluster, LOCAL, cluster))
        for place in range(N_HOSTS):
            issue(folder, Asked("host", f"{cluster}-{place}", cluster=cluster))
    return folder


def test_keys_of_both_tiers_are_signed_by_certificates(authority: Path, flat_bits: dict[str, bytes], tmp_path: Path) -> None:
    tiers = Tiers(made(), tmp_path, N_HOSTS, authority=authority)
    assert bits(tiers.run()) == flat_bits
    assert not [text for (text,) in tiers.query("SELECT text FROM events WHERE kind = 'warning'") if "signed" in text]


def test_without_certificates_each_parent_warns(tmp_path: Path) -> None:
    tiers = Tiers(made(), tmp_path, N_HOSTS)
    tiers.run()
    said = {text for (text,) in tiers.query("SELECT text FROM events WHERE kind = 'warning'") if "signed" in text}
    assert {re.search(r"(an? \w+) that changes them would see each (\w+)'s", text).groups() for text in said} == {  # type: ignore[union-attr]
        ("a coordinator", "aggregator"),
        ("an aggregator", "host"),
    }


def test_a_key_that_a_host_has_signed_is_none_of_an_aggregator(authority: Path) -> None:
    members = {name: load_tls(authority / name, is_server=False) for name in ("c0", "c1", "c1-0")}
    for signed_by, is_right in (("c1", True), ("c1-0", False)):
        parties = {
            name: Party("run", name, Rules(), _Memory(), *_signing(members[signed_by if name == "c1" else name], "aggregator"))
            for name in ("c0", "c1")
        }
        adverts = [party.advertise("1") for party in parties.values()]
        if is_right:
            parties["c0"].meet("1", adverts)
        else:
            with pytest.raises(ProtocolError, match="what aggregator 'c1' has signed came with a certificate of another member"):
                parties["c0"].meet("1", adverts)


# ---- experiments


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"hosts_per_cluster": 1}, "federation.hosts_per_cluster is 1, whose sum is the total of its cluster: want at least 2"),
        ({"hosts": 1}, "federation.hosts is 1, whose sum is the total: want at least 2"),
        ({"min_summed": 3}, "min_summed is 3: want at most federation.hosts_per_cluster, which is 2"),
        ({"on_loss": "skip"}, "every aggregator takes part"),
    ],
)
def test_what_masks_would_not_hide_in_two_tiers_is_refused_with_the_reason(rules: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**rules)


def test_a_total_of_one_cluster_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has users of 1 of the aggregators that are asked, but the total of a group must be of at least 2"):
        Tiers(made(method={"name": "oracle"}), tmp_path, N_HOSTS).run()


def test_the_owner_of_a_host_reads_who_sees_which_total_and_accepts_the_numbers_of_both_tiers() -> None:
    experiment = made()
    (masked,) = (step for step in steps_of(experiment) if "under masks" in step.reveal.up)
    assert "the aggregator: the total over the hosts of its cluster; the coordinator: that over all clusters" in masked.reveal.concluded
    assert changed_parts(consent_parts(experiment), consent_parts(made(hosts_per_cluster=3))) == ["sums.hosts"]
    assert changed_parts(consent_parts(experiment), consent_parts(made(hosts=4))) == ["sums.aggregators"]
