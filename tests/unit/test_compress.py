"""Compression of vectors: what is sent, what every receiver reads from it, and what no receiver takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.compress.choice import Drawn, Largest, kept
from coterie.compress.draws import Draws
from coterie.compress.link import Link, Place
from coterie.compress.memory import Memory
from coterie.compress.packing import Packing
from coterie.compress.rotation import rotated, turned_back
from coterie.errors import ConfigError, ProtocolError
from coterie.experiment import plugins
from coterie.experiment.compress import Thin, Up
from coterie.experiment.config import Experiment, experiment_from, named_code
from coterie.experiment.consent import consent_parts
from coterie.families.partial import Delivery, Shared, Updated
from coterie.v1 import session_pb2
from coterie.wire.codec import Received, check_announced, encode
from coterie.wire.messages import Message, kind_class
from coterie.wire.precision import FLOAT32, FLOAT64, Precision
from coterie_deploy.roles.consent_page import asked_lines
from coterie_server.session.run_state import Host, Sent
from coterie_server.session.thinning import Thinning
from tests.packaged import installed

D = 300
RULES: dict[str, dict[str, Any]] = {
    "8 bits": {"quantize": {}},
    "4 bits rotated": {"quantize": {"bits": 4, "rotate": "hadamard"}},
    "2 bits": {"quantize": {"bits": 2}},
    "4 bits eden": {"quantize": {"bits": 4, "rotate": "hadamard", "stochastic": False}},
    "2 bits eden": {"quantize": {"bits": 2, "rotate": "hadamard", "stochastic": False}},
    "1 bit drive": {"quantize": {"bits": 1, "rotate": "hadamard", "stochastic": False}},
    "top_k": {"top_k": 0.3},
    "few of them": {"top_k": 0.01, "quantize": {"bits": 4}},
    "rand_k": {"rand_k": 0.25},
    "zlib": {"lossless": "zlib"},
    "all": {"top_k": 0.1, "quantize": {"bits": 4, "rotate": "hadamard"}, "lossless": "zlib"},
}


def rows(n: int = 4, d: int = D, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal((n, d)) * np.array([[1.0], [1e-3], [50.0], [0.0]])[:n]


def draws(n: int = 4, round_number: int = 1) -> Draws:
    return Draws(7, ("kind", "x", 1, round_number), [(i, 0) for i in range(n)])


def through(rule: dict[str, Any], x: NDArray[np.float64], given: Draws, dtype: np.dtype[Any] = FLOAT32) -> NDArray[np.float64]:
    packing = Packing.of(Thin(**rule), dtype)
    values, aside = packing.pack(x, given)
    assert packing.fits(values.size, aside.size, *x.shape)
    return packing.unpack(values, aside, *x.shape, given)


@pytest.mark.parametrize("name", RULES)
def test_rows_are_compressed_each_by_itself(name: str) -> None:
    x = rows()
    together = through(RULES[name], x, draws())
    for row in range(4):
        alone = through(RULES[name], x[row : row + 1], Draws(7, ("kind", "x", 1, 1), [(row, 0)]))
        assert alone.tobytes() == together[row : row + 1].tobytes()
    assert not together[3].any()


@pytest.mark.parametrize(
    ("name", "most"), [("8 bits", 0.02), ("4 bits rotated", 0.35), ("4 bits eden", 0.12), ("2 bits eden", 0.4), ("1 bit drive", 0.8)]
)
def test_errors_are_as_small_as_the_bits_allow(name: str, most: float) -> None:
    x = rows(3)
    error = np.linalg.norm(through(RULES[name], x, draws(3)) - x, axis=1) / np.linalg.norm(x, axis=1)
    assert (error < most).all()
    assert (error > most / 20).all()


@pytest.mark.parametrize("name", ["2 bits", "4 bits rotated", "2 bits eden", "1 bit drive", "rand_k"])
def test_the_mean_over_rounds_is_right(name: str) -> None:
    x, n = rows(1, 64), 800
    total = sum(through(RULES[name], x, draws(1, number)) for number in range(n))
    single = through(RULES[name], x, draws(1))
    spread = np.linalg.norm(single - x) / np.sqrt(n)
    assert np.linalg.norm(total / n - x) < 1.5 * spread


def test_the_largest_are_kept_and_places_cost_what_they_must() -> None:
    x = rows(1)
    found = through(RULES["top_k"], x, draws(1), FLOAT64)
    k = kept(0.3, D)
    assert np.count_nonzero(found) == k == 90
    assert np.array_equal(np.flatnonzero(found[0]), np.sort(np.argsort(-np.abs(x[0]))[:k]))
    assert np.array_equal(found[found != 0], x[found != 0])
    assert Largest(0.3).size(D) == 38  # a bit each
    assert Largest(0.01).size(D) == 4  # 3 places of 9 bits
    assert Drawn(0.3).size(D) == 0


def test_no_bits_are_lost_without_loss() -> None:
    x = rows().astype(np.float32).astype(np.float64)
    assert through(RULES["zlib"], x, draws()).tobytes() == x.tobytes()


@pytest.mark.parametrize("d", [1, 2, 5, 64, 100])
def test_rotations_keep_lengths_and_turn_back(d: int) -> None:
    x = np.random.default_rng(1).standard_normal((3, d))
    signs = draws(3).signs(d)
    y = rotated(x, signs)
    assert np.linalg.norm(y, axis=1) == pytest.approx(np.linalg.norm(x, axis=1))
    assert turned_back(y, signs) == pytest.approx(x)
    assert d < 3 or not np.allclose(np.abs(y), np.abs(x))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", ["8 bits", "all", "zlib"])
def test_nothing_is_nothing(name: str, shape: tuple[int, int]) -> None:
    packing = Packing.of(Thin(**RULES[name]), FLOAT32)
    values, aside = packing.pack(np.zeros(shape), draws(shape[0]))
    assert (values.size, aside.size) == (0, 0) == packing.sizes(*shape)
    assert packing.unpack(values, aside, *shape, draws(shape[0])).shape == shape


@pytest.mark.parametrize("name", RULES)
def test_other_bytes_than_those_of_the_shape_are_refused(name: str) -> None:
    packing, x = Packing.of(Thin(**RULES[name]), FLOAT32), rows()
    values, aside = packing.pack(x, draws())
    for wrong in (values[:-1], np.append(values, values[:1])):
        with pytest.raises(ProtocolError):
            packing.unpack(wrong, aside, *x.shape, draws())
    with pytest.raises(ProtocolError):
        packing.unpack(values, np.append(aside, np.uint8(0)), *x.shape, draws())


@pytest.mark.parametrize("name", ["top_k", "few of them"])
def test_places_that_are_none_are_refused(name: str) -> None:
    packing, x = Packing.of(Thin(**RULES[name]), FLOAT32), rows(1)
    values, aside = packing.pack(x, draws(1))
    with pytest.raises(ProtocolError, match="places"):
        packing.unpack(values, np.full_like(aside, 255), *x.shape, draws(1))


def test_bytes_that_would_grow_without_end_are_refused() -> None:
    packing, x = Packing.of(Thin(**RULES["zlib"]), FLOAT32), np.zeros((1, 100_000))
    values, aside = packing.pack(x, draws(1))
    with pytest.raises(ProtocolError, match="not the 40 bytes"):
        packing.unpack(values, aside, 1, 10, draws(1))


# ---- messages


def experiment(**compress: Any) -> Experiment:
    content: dict[str, Any] = {
        "name": "thin",
        "seed": 3,
        "data": {"source": "digits", "partition": {"by": "classes", "users": 4, "classes_per_user": 2}},
        "model": {"name": "mlp", "classes": 10},
        "method": {"name": "fedrep"},
    }
    return experiment_from({**content, "federation": {"compress": compress} if compress else {}})


def place(task: tuple[Message, ...] = ()) -> Place:
    own = np.array([3, 5, 8])
    return Place(1, 2, lambda users: own if users is None else users, task)


def shared(d: int = D) -> Shared:
    return Shared(rows(1, d)[0].astype(np.float32), np.array([7]), users=np.array([3, 8]))


def updated(d: int = D) -> Updated:
    return Updated(rows(2, d, 1).astype(np.float32), np.ones((2, 1), np.int64), users=np.array([3, 8]))


def up_link(rule: dict[str, Any]) -> Link:
    return Link.of(Up(**rule), experiment())


def down_link(rule: dict[str, Any]) -> Link:
    return Link.of(Thin(**rule), experiment())


@pytest.mark.parametrize("name", RULES)
def test_what_is_decoded_is_what_was_sent(name: str) -> None:
    up, down = up_link(RULES[name]), down_link(RULES[name])
    sent = down.packed([shared()], place())
    [seen] = down.unpacked(sent, place())
    answer = place((seen,))
    parts = up.packed([updated()], answer)
    encoded = encode(session_pb2.Reply(seq=1), parts, Precision.of("float64"))
    frame = session_pb2.JoinRequest.FromString(encoded.head).reply
    received = Received(frame, tuple(bytearray(tail) for tail in encoded.tails), len(encoded.head))
    check_announced(frame, 3, {})
    up.check_announced(frame)
    messages, entries = received.decode(3)
    assert [str(entry) for entry in entries] == [str(entry) for entry in encoded.entries]
    [found] = up.unpacked(messages, answer)
    [here] = up.unpacked(parts, answer)
    assert isinstance(found, Updated)
    assert isinstance(here, Updated)
    assert found.weights.dtype == np.float32
    assert found.weights.tobytes() == here.weights.tobytes()
    assert found.counts.tolist() == [[1], [1]]
    booked = next(entry for entry in entries if entry.kind == "partial.UpdatedPacked")
    assert (booked.vectors, booked.scalars) == (2, 2 * D)
    if "lossless" not in RULES[name]:
        assert booked.payload_bytes == up.weights.sizes(2, D).values


def test_an_answer_is_its_difference_from_the_task() -> None:
    up = up_link({"top_k": 0.1})
    task, answer = shared(), updated()
    before = place((task,))
    [found] = up.unpacked(up.packed([answer], before), before)
    assert isinstance(found, Updated)
    changed = found.weights != task.weights
    assert changed.sum(axis=1).tolist() == [30, 30]
    assert np.allclose(found.weights[changed], answer.weights[changed], atol=1e-6)


def test_an_answer_without_a_task_to_differ_from_travels_whole() -> None:
    up = up_link({"top_k": 0.1})
    answer = updated()
    assert up.packed([answer], place()) == [answer]
    other = shared(D - 1)
    assert up.packed([answer], place((other,))) == [answer]
    forged = up.packed([answer], place((shared(),)))
    with pytest.raises(ProtocolError, match="nothing to differ from"):
        up.unpacked(forged, place())


def test_what_both_ends_keep_travels_whole() -> None:
    down = down_link({"quantize": {"bits": 2}})
    message = Delivery(np.ones(3, np.float32), np.zeros(0, np.int64), users=np.array([3]))
    assert down.packed([message], place()) == [message]


def test_what_is_announced_must_fit_the_shape() -> None:
    up = up_link({"quantize": {"bits": 4}, "against": "nothing"})
    encoded = encode(session_pb2.Reply(seq=1), up.packed([updated()], place()), Precision.of("float64"))
    frame = session_pb2.JoinRequest.FromString(encoded.head).reply
    frame.parts[0].tensors[1].shape[0] = 10**9
    with pytest.raises(ProtocolError, match="announces 1000000000"):
        up.check_announced(frame)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if "quantize" in rule])
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_give_numbers_that_a_parent_refuses(name: str, scale: float) -> None:
    up = up_link({**RULES[name], "against": "nothing"})
    packed, aside = up.packed([updated()], place())
    field = next(field for field, _ in aside.specs)
    listed = np.array(getattr(aside, field))
    listed[:4] = np.full(1, scale, "<f4").view(np.uint8)
    [found] = up.unpacked([packed, replace(aside, **{field: listed})], place())
    assert not np.isfinite(found.weights[0]).all()  # type: ignore[attr-defined]


def test_scales_without_numbers_are_refused() -> None:
    up = up_link({"quantize": {}, "against": "nothing"})
    packed, aside = up.packed([updated()], place())
    with pytest.raises(ProtocolError, match="without the numbers"):
        up.unpacked([aside], place())
    with pytest.raises(ProtocolError, match="wanted"):
        up.unpacked([packed], place())


def test_only_what_is_declared_has_a_compressed_kind() -> None:
    assert kind_class("partial.UpdatedPacked").step == "shared"
    for kind in ("partial.TrainingLossPacked", "partial.NobodyPacked", "partial.UpdatedPackedPacked"):
        with pytest.raises(ProtocolError, match="not declared"):
            kind_class(kind)


# ---- experiments


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"federation": {"compress": {"up": {"top_k": 0.1, "rand_k": 0.1}}}}, "give one"),
        ({"federation": {"compress": {"up": {}}}}, "compresses nothing"),
        ({"federation": {"compress": {"up": {"quantize": {"bits": 1}}}}}, "want rotate: hadamard and stochastic: false"),
        ({"federation": {"compress": {"up": {"quantize": {"bits": 3}}}}}, "8, 4, 2 or 1"),
        ({"federation": {"compress": {"up": {"top_k": 1.0}}}}, "less than 1"),
        ({"federation": {"compress": {"up": {"quantize": {}}}}, "exact_sums": True}, "whole numbers of 64 bits"),
        ({"federation": {"compress": {"up": {"quantize": {}}}}, "method": {"name": "scaffold"}}, "want lossless alone"),
        (
            {
                "federation": {"compress": {"up": {"quantize": {}}}},
                "privacy": {"unit": "user", "clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3},
                "method": {"name": "fedavg"},
            },
            "longer than privacy.clip",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    content = experiment().model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ConfigError, match=said):
        experiment_from({**content, "method": {"name": "fedrep"}, **changes})


def test_nothing_is_lost_with_methods_that_need_it_all() -> None:
    content = {
        "name": "x",
        "data": {"source": "ellipses"},
        "problem": {"loss": "squared_hinge"},
        "method": {"name": "pdmm", "penalty": 0.1},
    }
    rules = {"up": {"lossless": "zlib"}, "down": {"lossless": "zlib"}}
    assert experiment_from({**content, "federation": {"compress": rules}}).federation.compress is not None
    with pytest.raises(ConfigError, match="go on with numbers that the other has sent"):
        experiment_from({**content, "federation": {"compress": {"down": {"quantize": {}}}}})


def test_owners_are_asked() -> None:
    thin = experiment(up={"quantize": {"bits": 4}})
    assert consent_parts(thin)["compress"] == {"up": {"quantize": {"bits": 4}}}
    assert "compress" not in consent_parts(experiment())
    told = "up (quantize (bits 4, stochastic true), against task, feedback false)"
    assert f"  vectors are compressed on their way: {told}" in asked_lines(thin)


def test_a_host_that_names_other_users_or_fields_is_told_so() -> None:
    up, number_of = up_link({"quantize": {}, "against": "nothing"}), np.array([3, 5, 8])
    encoded = encode(session_pb2.Reply(seq=1), up.packed([updated()], place()), Precision.of("float64"))
    frame = session_pb2.JoinRequest.FromString(encoded.head).reply
    frame.parts[0].tensors[1].name = "other"
    up.check_announced(frame)  # names are checked with the rest
    with pytest.raises(ProtocolError, match="wanted 'weights_values'"):
        Received(frame, (), 0).decode(3)
    roster = SimpleNamespace(layout=SimpleNamespace(own={"h": np.array([0, 2])}), fixed=SimpleNamespace(number_of=number_of))
    thinning = Thinning(experiment(up={"quantize": {}, "against": "nothing"}), roster)  # type: ignore[arg-type]
    host = Host("h", ("a", "b"), ("", ""))
    host.log.append(Sent(1, encoded, 1))
    with pytest.raises(ProtocolError, match="users that are not on host 'h'"):
        thinning.answer(host, 1, up.packed([updated()], place()))
    with pytest.raises(ProtocolError, match="task 2, which is not kept"):
        thinning.answer(host, 2, [])


# ---- compressors of others

SIGNS = """
    import numpy as np
    from coterie.plugin import Compressor

    def sizes(k):
        return (k + 7) // 8, 8

    def write(x, draws):
        return np.packbits(x > 0, axis=1), np.abs(x).mean(axis=1, keepdims=True).view(np.uint8)

    def read(values, aside, k, draws):
        return (2.0 * np.unpackbits(values, axis=1, count=k) - 1.0) * np.ascontiguousarray(aside).view(np.float64)

    def broken(x, draws):
        return x / 0 if x is None else x["no"], x

    SIGNS = Compressor(sizes=sizes, write=write, read=read)
    SHORT = Compressor(sizes=lambda k: (1, 8), write=write, read=read)
    FLAT = Compressor(sizes=sizes, write=write, read=lambda values, aside, k, draws: np.zeros(k))
    BROKEN = Compressor(sizes=sizes, write=broken, read=read)
    NONE = sizes
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = installed(tmp_path, "pack-signs", "1.5", {"coterie.compressors": {"signs": "pack_signs:SIGNS"}}, {"pack_signs": SIGNS})
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["signs", "pack_signs:SIGNS"])
def test_a_compressor_of_a_package_or_a_file_writes_the_numbers(name: str) -> None:
    x = rows()
    found = through({"by": name}, x, draws())
    assert np.array_equal(found, np.where(x > 0, 1.0, -1.0) * np.abs(x).mean(axis=1, keepdims=True))
    assert np.count_nonzero(through({"by": name, "top_k": 0.1, "lossless": "zlib"}, x[:3], draws(3))) == 90
    made = experiment(up={"by": name})
    assert made.packages == ({"pack-signs": "1.5"} if name == "signs" else {})
    assert named_code(made) == ([] if name == "signs" else [name])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SHORT", r"writes uint8 of shape \(4, 38\), want uint8 of \(4, 1\)"),
        ("FLAT", r"reads rows of shape \(300,\), want \(4, 300\)"),
        ("BROKEN", "has raised IndexError"),
        ("NONE", "is a function, want a coterie.plugin.Compressor"),
        ("LOST", "does not exist"),
    ],
)
def test_what_is_wrong_with_a_compressor_is_said(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        through({"by": f"pack_signs:{name}"}, rows(), draws())


def test_a_compressor_is_known_and_allowed() -> None:
    with pytest.raises(ConfigError, match="compressor 'sings' is unknown"):
        experiment(up={"by": "sings"})
    with pytest.raises(ConfigError, match="by and quantize both"):
        experiment(up={"by": "signs:SIGNS", "quantize": {}})
    with plugins.code_allowed(False), pytest.raises(ConfigError, match="--allow-code"):
        Packing.of(Thin(by="signs:SIGNS"), FLOAT32)


# ---- memories


def test_a_memory_knows_what_it_was_after_earlier_exchanges_of_the_round() -> None:
    memory, users = Memory(), np.array([4, 9])
    memory.begin(5, (1, 1))
    memory.put("x", users, np.array([[1.0], [2.0]]))
    after_round = memory.tree()
    for seq, value in ((6, 3.0), (8, 5.0)):
        memory.begin(seq, (1, 2))
        memory.put("x", users[:1], np.array([[value]]))
    memory.begin(9, (1, 2))
    memory.put("y", users, np.zeros((2, 3)))

    def held(seq: int | None) -> dict[str, list[float]]:
        return {name: [float(row[0]) for row in one["rows"]] for name, one in memory.tree(seq).items()}

    assert held(None) == held(9) == {"x": [5.0, 2.0], "y": [0.0, 0.0]}
    assert held(8) == {"x": [5.0, 2.0]}
    assert held(7) == held(6) == {"x": [3.0, 2.0]}
    assert held(5) == {"x": [1.0, 2.0]}
    again = Memory.from_tree(after_round)
    assert [None if row is None else row.tolist() for row in again.of("x", np.array([9, 1, 4]))] == [[2.0], None, [1.0]]
