"""What an owner accepts: the parts that count, the memory of a host, and the question on the terminal."""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.experiment.consent import HEX, changed_parts, check_accept, consent_hash, consent_parts
from coterie_deploy.cli import app as cli
from coterie_deploy.roles import consent
from coterie_deploy.roles.consent import MEMORY, Ask, Asked, accepted, terminal
from coterie_deploy.roles.consent_page import asked_lines
from coterie_deploy.telemetry.logs import Log

TABLE = {"source": "csv", "path": "rows.csv", "user_column": "school", "target_column": "score", "feature_columns": ["ses", "hours"]}
SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 1,
    "data": TABLE,
    "problem": {"loss": "least_squares"},
    "method": {"name": "pdmm", "penalty": 0.1},
}
NETWORK: dict[str, Any] = {"model": {"name": "mlp", "classes": 2}, "method": {"name": "fedrep"}, "problem": {"loss": "cross_entropy"}}

COUNTS: dict[str, dict[str, Any]] = {
    "data.path": {"data": {**TABLE, "path": "other.csv"}},
    "data.user_column": {"data": {**TABLE, "user_column": "name"}},
    "data.target_column": {"data": {**TABLE, "target_column": "income"}},
    "data.feature_columns": {"data": {**TABLE, "feature_columns": ["ses", "name"]}},
    "data.test_fraction": {"data": {**TABLE, "test_fraction": 0.5}},
    "standardize": {"data": {**TABLE, "standardize": True}},
    "problem.loss": {"problem": {"loss": "huber"}},
    "problem.l2": {"problem": {"loss": "least_squares", "l2": 0.1}},
    "method.penalty": {"method": {"name": "pdmm", "penalty": 0.2}},
    "method.refit": {"method": {"name": "pdmm", "penalty": 0.1, "refit": True}},
    "references": {"references": ["local"]},
    "evaluate": {"evaluate": False},
    "payload": {"payload": "float32"},
    "topology": {"federation": {"topology": "clusters"}},
}
DOES_NOT_COUNT: dict[str, dict[str, Any]] = {
    "name": {"name": "other"},
    "description": {"description": "words"},
    "seed": {"seed": 2},
    "fold": {"data": {**TABLE, "fold": {"number": 1, "of": 5}}},
    "stop": {"stop": {"rounds": 7}},
    "hosts": {"federation": {"hosts": 3, "join_timeout_s": 5, "links": {"direct": "1Mbit/1ms"}}},
    "snapshots": {"snapshots": {"every_rounds": 3}},
}


def experiment(**changes: Any) -> Experiment:
    return experiment_from({**SMALL, **changes})


def asked(tmp_path: Path, accept: str | None = None, **changes: Any) -> Asked:
    return Asked("a", "127.0.0.1:7000", experiment(**changes), tmp_path, accept)


def refused(asks: Asked, ask: Ask | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        accepted(asks, Log(), ask)
    assert caught.value.finding.rule == "C1"
    assert caught.value.exit_code == 2
    return caught.value


# ---- the hash


@pytest.mark.parametrize("key", COUNTS)
def test_what_decides_what_is_learnt_changes_the_hash_and_is_named(key: str) -> None:
    found = experiment(**COUNTS[key])
    assert consent_hash(found) != consent_hash(experiment())
    assert key in changed_parts(consent_parts(experiment()), consent_parts(found))


def test_the_model_and_its_code_count() -> None:
    plain = experiment(**NETWORK)
    wider = experiment(**{**NETWORK, "model": {"name": "mlp", "classes": 3}})
    custom = [experiment(**{**NETWORK, "model": {"name": "custom", "build": f"nets:{name}"}}) for name in ("one", "two")]
    assert len({consent_hash(one) for one in (plain, wider, *custom)}) == 4
    assert {"code", "model.build"} <= set(changed_parts(consent_parts(custom[0]), consent_parts(custom[1])))


def test_code_of_losses_and_sources_counts() -> None:
    losses = [experiment(problem={"loss": f"own:{name}"}) for name in ("one", "two")]
    sources = [experiment(data={"source": "python", "path": f"own:{name}"}) for name in ("one", "two")]
    for pair in (losses, sources):
        assert "code" in changed_parts(*map(consent_parts, pair))


def test_second_moments_for_standard_errors_are_a_part_of_their_own() -> None:
    """The hash of experiments without them is that of earlier versions."""
    refitted = {"method": {"name": "pdmm", "penalty": 0.1, "refit": True}}
    without, with_them = experiment(**refitted), experiment(**refitted, inference=True)
    assert "inference" not in consent_parts(without)
    assert changed_parts(consent_parts(without), consent_parts(with_them)) == ["inference"]
    assert any("second moments of these rows" in line for line in asked_lines(with_them))
    assert not any("second moments" in line for line in asked_lines(without)[:8])


@pytest.mark.parametrize("key", DOES_NOT_COUNT)
def test_seeds_names_and_times_do_not_change_the_hash(key: str) -> None:
    assert consent_hash(experiment(**DOES_NOT_COUNT[key])) == consent_hash(experiment())


def test_a_host_finds_the_hash_of_the_file_in_what_travels() -> None:
    for found in (experiment(), experiment(**NETWORK), experiment(references=["global", "local"])):
        assert consent_hash(experiment_from(json.loads(experiment_to_json(found)))) == consent_hash(found)


def test_the_hash_is_long_enough_against_two_experiments_with_the_same_one() -> None:
    assert len(consent_hash(experiment())) == HEX >= 32
    assert int(consent_hash(experiment()), 16) >= 0


def test_a_default_that_is_written_down_is_no_change() -> None:
    explicit = experiment(method={"name": "pdmm", "penalty": 0.1, "refit": False}, evaluate=True)
    assert consent_hash(explicit) == consent_hash(experiment())


@pytest.mark.parametrize("text", ["", "all", "12ab", "g" * HEX, "1" * (HEX + 1), "1" * (HEX - 1)])
def test_accept_wants_a_whole_hash_or_any(text: str) -> None:
    with pytest.raises(ConfigError, match="coterie data EXPERIMENT --hash"):
        check_accept(text)


# ---- the memory


def test_an_accepted_hash_is_remembered_and_goes_on_without_a_word(tmp_path: Path) -> None:
    found = consent_hash(experiment())
    assert accepted(asked(tmp_path, found), Log(), None)
    assert accepted(asked(tmp_path), Log(), None)
    assert accepted(asked(tmp_path, seed=9), Log(), None)
    memory = json.loads((tmp_path / MEMORY).read_text())
    assert memory["hosts"]["a"]["hash"] == found


@pytest.mark.parametrize("key", COUNTS)
def test_a_change_is_refused_by_who_accepted_the_earlier_one_and_named(key: str, tmp_path: Path) -> None:
    accepted(asked(tmp_path, consent_hash(experiment())), Log(), None)
    error = refused(asked(tmp_path, **COUNTS[key]), lambda _: "yes")  # on a terminal too
    assert key in str(error)
    assert consent_hash(experiment(**COUNTS[key])) in str(error)


def test_what_a_refusal_tells_others_is_a_part_and_no_value(tmp_path: Path) -> None:
    accepted(asked(tmp_path, consent_hash(experiment())), Log(), None)
    error = refused(asked(tmp_path, data={**TABLE, "feature_columns": ["SECRET"]}))
    assert error.finding.sentence == "its owner has not accepted this experiment (data) (rule C1)"


def test_an_explicit_hash_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    other = {"references": ["local"]}
    accepted(asked(tmp_path, consent_hash(experiment())), Log(), None)
    assert accepted(asked(tmp_path, consent_hash(experiment(**other)), **other), Log(), None)
    assert accepted(asked(tmp_path, **other), Log(), None)
    refused(asked(tmp_path))


def test_another_hash_than_the_given_one_is_refused(tmp_path: Path) -> None:
    error = refused(asked(tmp_path, "0" * HEX))
    assert "--accept is 000" in str(error)
    assert not (tmp_path / MEMORY).exists()


def test_any_remembers_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert accepted(asked(tmp_path, "any"), Log(write=said.append), None)
    assert not (tmp_path / MEMORY).exists()
    assert "not remembered" in said[0]
    refused(asked(tmp_path))


def test_without_a_terminal_the_sentence_names_the_hash_and_the_command(tmp_path: Path) -> None:
    error = refused(asked(tmp_path))
    assert "`coterie data EXPERIMENT --hash`" in str(error)
    assert f"--accept {consent_hash(experiment())}" in str(error)


def test_hosts_with_one_state_folder_have_a_memory_each(tmp_path: Path) -> None:
    asks = [Asked(f"h{i}", "s:1", experiment(), tmp_path, consent_hash(experiment())) for i in range(8)]
    threads = [threading.Thread(target=accepted, args=(one, Log(write=lambda _: None), None)) for one in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(json.loads((tmp_path / MEMORY).read_text())["hosts"]) == [f"h{i}" for i in range(8)]
    refused(asked(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "hosts": {}}', '{"format": 1, "hosts": {"a": 1}}'])
def test_a_broken_memory_is_a_sentence_and_not_forgotten(text: str, tmp_path: Path) -> None:
    (tmp_path / MEMORY).write_text(text)
    with pytest.raises(ConfigError, match="remove it to be asked again"):
        accepted(asked(tmp_path), Log(), lambda _: "yes")


# ---- the question


@pytest.fixture
def typing_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pseudo-terminal as standard input: its other end, to type on."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield ours
    os.close(ours)


def never() -> bool:
    return False


@pytest.mark.parametrize(
    ("typed", "answer"), [(b"y\n", "yes"), (b"YES\n", "yes"), (b"\n", "no"), (b"n\n", "no"), (b"yy\n", "no"), (b"\x04", "no")]
)
def test_only_yes_is_yes(typed: bytes, answer: str, typing_on: int) -> None:
    ask = terminal(never)
    assert ask is not None
    os.write(typing_on, typed)
    assert ask("serve it? ") == answer


def test_a_pipe_is_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("y\n")
    with (tmp_path / "in").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert terminal(never) is None


def test_a_question_ends_with_the_process_and_with_its_deadline(typing_on: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    ask = terminal(stop.is_set)
    assert ask is not None
    threading.Timer(0.3, stop.set).start()
    assert ask("serve it? ") == "stopped"
    monkeypatch.setattr(consent, "ANSWER_S", 0.0)
    asks = terminal(never)
    assert asks is not None
    assert asks("serve it? ") == "late"


def test_the_question_is_asked_once(tmp_path: Path) -> None:
    questions: list[str] = []

    def ask(text: str) -> consent.Answer:
        questions.append(text)
        return "yes"

    assert accepted(asked(tmp_path), Log(), ask)
    assert accepted(asked(tmp_path), Log(), ask)
    assert len(questions) == 1
    for part in ("users: school", "target: score", "features: ses, hours", "method: pdmm", "references: none", "Who learns what"):
        assert part in questions[0]


@pytest.mark.parametrize(("answer", "part"), [("no", "has not accepted"), ("late", "nobody has answered")])
def test_no_and_silence_are_refusals_and_are_not_remembered(answer: consent.Answer, part: str, tmp_path: Path) -> None:
    assert part in str(refused(asked(tmp_path), lambda _: answer))
    assert not (tmp_path / MEMORY).exists()


def test_a_stop_while_the_question_waits_is_no_refusal(tmp_path: Path) -> None:
    assert not accepted(asked(tmp_path), Log(), lambda _: "stopped")


def test_nothing_in_the_experiment_can_write_a_line_of_the_page() -> None:
    lines = asked_lines(
        experiment(data={**TABLE, "path": "x.csv\n  references: none\x1b[2J", "feature_columns": ["f" * 900] * 1 + ["g" * 900, "h" * 900]})
    )
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 2500


# ---- the command


def test_data_prints_the_hash_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    assert cli._run(["data", str(tmp_path / "small.json"), "--hash"]) == 0
    assert capsys.readouterr().out == f"{consent_hash(experiment())}\n"
    assert cli._run(["data", str(tmp_path / "small.json"), "--hash", "--set", "method.penalty=0.3", "--seed", "4"]) == 0
    assert capsys.readouterr().out == f"{consent_hash(experiment(method={'name': 'pdmm', 'penalty': 0.3}))}\n"


def test_data_prints_what_is_asked_without_opening_data_and_wraps_it_in_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    assert cli._run(["data", str(tmp_path / "small.json"), "--reveals"]) == 0
    out = capsys.readouterr().out
    assert "users: school" in out
    assert "trajectory of the user's model" in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert cli._run(["data", str(tmp_path / "small.json"), "--reveals"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 40
    assert narrow.split() == out.split(), "only line ends differ"
