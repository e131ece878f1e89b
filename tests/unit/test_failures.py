"""What is said of a failure elsewhere: findings as frames, sentences with declared values, and the three halves of an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coterie
import coterie_client
import coterie_deploy
import coterie_server
from coterie.errors import ConfigError, ProtocolError, RunError, default_finding
from coterie.experiment.config import experiment_from
from coterie.findings import NO_RULE, ROLES, RULES, Finding, Role
from coterie.session.failures import FAILURE, declared, failure_of, failures_left, finding_in, left_failure, sentence_of
from coterie.v1 import session_pb2

EXPERIMENT = experiment_from(
    {
        "name": "small",
        "data": {
            "source": "csv",
            "path": "rows.csv",
            "user_column": "school",
            "target_column": "score",
            "feature_columns": ["ses", "hours"],
        },
        "problem": {"loss": "least_squares", "l2": 0.1},
        "method": {"name": "pdmm", "penalty": 0.05},
    }
)
TEXTS = st.text(max_size=300)


@given(
    rule=TEXTS | st.sampled_from(sorted(RULES)), role=TEXTS | st.sampled_from(sorted(ROLES)), place=TEXTS, count=st.integers(0, 2**64 - 1)
)
def test_whatever_a_peer_sends_is_a_finding_of_the_table(rule: str, role: str, place: str, count: int) -> None:
    found = finding_in(session_pb2.Finding(rule=rule, role=role, place=place, count=count))
    assert found.rule in RULES
    assert found.role in ROLES
    assert sentence_of(found, EXPERIMENT).endswith(f"(rule {found.rule})")


def test_every_rule_is_raised_somewhere() -> None:
    rooms = [Path(room.__file__ or "").parent for room in (coterie, coterie_client, coterie_deploy, coterie_server)]
    sources = [path.read_text() for room in rooms for path in room.rglob("*.py") if path.name != "findings.py"]
    unused = [rule for rule in RULES if rule != NO_RULE.rule and not any(f'"{rule}"' in source for source in sources)]
    assert unused == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("role", ["", "feature", "user"])
def test_every_rule_has_a_sentence_and_comes_back_from_the_wire(rule: str, count: int, role: Role) -> None:
    finding = Finding(rule, count, role, "data.path")
    sentence = finding.sentence
    assert "{" not in sentence
    assert sentence.isprintable()
    assert finding_in(failure_of(RunError("secret", finding)).finding) == finding


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("data.target_column", "score"),
        ("data.feature_columns[1]", "hours"),
        ("method.penalty", 0.05),
        ("data.feature_columns[2]", None),
        ("data.feature_columns", None),
        ("data.model_fields", None),
        ("data.standardize", None),
        ("nothing.at_all", None),
        ("data.path.upper", None),
        ("", None),
    ],
)
def test_a_place_is_looked_up_among_the_keys_of_the_experiment_alone(place: str, value: object) -> None:
    assert declared(EXPERIMENT, place) == value


def test_a_sentence_has_what_the_receivers_own_experiment_declares() -> None:
    finding = Finding("T2", 1, "target", "data.target_column")
    said = "a column that the experiment names is missing (data.target_column: 'score') (rule T2)"
    assert sentence_of(finding, EXPERIMENT) == said
    assert sentence_of(finding, None) == said.replace(": 'score'", "")


def test_an_error_without_a_finding_says_nothing_and_one_that_is_not_ours_is_a_mistake() -> None:
    assert failure_of(ConfigError("SECRET")) == session_pb2.Failure(config=True, finding=session_pb2.Finding(rule="X1", count=1))
    assert failure_of(ValueError("SECRET")) == session_pb2.Failure(finding=session_pb2.Finding(rule="X2", count=1))
    assert failure_of(ProtocolError("SECRET")).finding.rule == "J6"


def test_members_below_hear_rules_of_runs_alone() -> None:
    assert RunError("SECRET", Finding("R3", 2)).below == Finding("R3", 2)
    assert ConfigError("SECRET", Finding("T3")).below == Finding("R6")
    assert ConfigError("SECRET", Finding("T3"), below=Finding("R1")).below == Finding("R1")


def test_what_may_be_written_down_is_the_message_unless_something_else_is_given() -> None:
    assert RunError("need 2 hosts").public == "need 2 hosts"
    assert RunError("SECRET", public="host 'e' has ended").public == "host 'e' has ended"


def test_a_finding_given_at_the_raise_site_wins_over_that_of_the_block() -> None:
    with pytest.raises(RunError) as silent, default_finding(Finding("M2")):
        raise RunError("something")
    with pytest.raises(RunError) as said, default_finding(Finding("M2")):
        raise RunError("something", Finding("R5"))
    assert (silent.value.finding, said.value.finding) == (Finding("M2"), Finding("R5"))


def test_a_launched_member_leaves_its_finding_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), failures_left(tmp_path):
        raise ConfigError("SECRET", Finding("T3", 4, "feature"))
    assert left_failure(tmp_path) == Finding("T3", 4, "feature")
    assert b"SECRET" not in (tmp_path / FAILURE).read_bytes()
    (tmp_path / FAILURE).write_bytes(b"\xff\xff")
    assert left_failure(tmp_path) is None
    (tmp_path / FAILURE).write_bytes(session_pb2.Failure(finding=session_pb2.Finding(rule="SECRET")).SerializeToString())
    assert left_failure(tmp_path) == NO_RULE
