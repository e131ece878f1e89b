"""Who learns what, as data: every method says it, every message is covered, and SECURITY.md has the table made from it.

python -m tests.unit.test_reveals      writes the table into SECURITY.md
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import coterie.families
import coterie.methods
from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.reveals import AFTER, BEFORE, answered_by, is_answered, steps_of, table
from coterie.families.consensus import AskLocalModels, GroupModel
from coterie.families.prepare import AskSums
from coterie.methods import async_l2gd
from coterie.registry import is_method, method, methods, room
from coterie.wire.messages import _KINDS, Message
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.read.shipped import load, shipped
from coterie_deploy.roles.consent_page import reveal_lines

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
BEGIN, END = "<!-- made by python -m tests.unit.test_reveals -->\n", "<!-- end -->\n"
SMALL = {
    "name": "small",
    "data": {"source": "ellipses", "users_per_cluster": 2},
    "problem": {"loss": "squared_hinge", "l2": 0.001},
    "method": {"name": "local"},
}


def experiment(**changes: object) -> Experiment:
    return experiment_from({**SMALL, **changes})


def with_table(text: str) -> str:
    """SECURITY.md with the table of today's methods."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}" + "".join(f"{line}\n" for line in table()) + f"{END}{after}"


@pytest.mark.parametrize("name", methods())
def test_every_method_says_what_it_reveals(name: str) -> None:
    assert method(name).reveals
    for reveal in method(name).reveals:
        assert reveal.up
        assert reveal.concluded
        assert reveal.steps


def test_every_step_that_can_travel_is_said() -> None:
    for package in (coterie.methods, coterie.families):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    said = frozenset(step for name in (*BEFORE, *methods(), *AFTER) for reveal in room(name).reveals for step in reveal.steps)
    declared = {(cls.method, cls.step) for cls in _KINDS.values() if cls.__module__.startswith(("coterie.methods.", "coterie.families."))}
    assert len(declared) > 40
    assert [step for step in sorted(declared) if not is_answered(said, *step)] == []


def test_every_step_that_is_said_is_that_of_a_message() -> None:
    for name in (*BEFORE, *methods(), *AFTER):
        for reveal in room(name).reveals:
            for step in reveal.steps:
                whose, _, of_room = step.partition("/")
                steps = {cls.step for cls in _KINDS.values() if cls.method == whose}
                assert steps, step
                assert not of_room or of_room in steps, step


def test_every_step_is_said_in_words() -> None:
    """By its method, or by the family whose steps it has too."""
    for cls in _KINDS.values():
        if cls.__module__.startswith(("coterie.methods.", "coterie.families.")) and cls.step != "control":
            family = method(cls.method).room if is_method(cls.method) else ""
            words = {**(room(family).steps if family else {}), **room(cls.method).steps}
            assert words.get(cls.step), (cls.kind, cls.step)


def test_the_conditions_of_reveals_are_keys_of_settings() -> None:
    for name in methods():
        for reveal in method(name).reveals:
            assert {*reveal.needs, *reveal.unless} <= set(method(name).config.model_fields), name


def test_the_table_of_the_security_page_is_that_of_the_methods() -> None:
    text = SECURITY.read_text(encoding="utf-8")
    assert BEGIN in text
    assert with_table(text) == text, "run python -m tests.unit.test_reveals and look at what has changed in SECURITY.md"


def test_a_table_has_a_row_for_every_method() -> None:
    text = "\n".join(table())
    assert [name for name in methods() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_experiment_says_who_learns_what(name: str) -> None:
    lines = reveal_lines(load(name))
    assert any(f"method {load(name).method.name}" in line for line in lines)
    assert not any("`" in line or "**" in line for line in lines)


def test_settings_decide_what_is_revealed() -> None:
    def ups(found: Experiment) -> list[str]:
        return [step.reveal.up for step in steps_of(found)]

    plain = experiment(method={"name": "pdmm", "penalty": 0.1, "start": "zero"})
    assert not any("Hessian" in up for up in ups(plain))
    assert any("Hessian" in up for up in ups(experiment(method={"name": "pdmm", "penalty": 0.1, "start": "zero", "refit": True})))
    assert any("Hessian" in up for up in ups(experiment(references=["global"])))
    assert any("norm of its deviations" in up for up in ups(experiment(data={**SMALL["data"], "standardize": True})))  # type: ignore[dict-item]
    assert not any("norm of its deviations" in up for up in ups(experiment()))
    assert any("losses, metrics" in up for up in ups(experiment()))
    assert not any("losses, metrics" in up for up in ups(experiment(evaluate=False)))


def test_with_aggregators_the_coordinator_sees_sums_and_in_a_flat_run_all() -> None:
    two_tiers = load("schools")
    seen = {step.reveal.up: step.seen_by for step in steps_of(two_tiers)}
    assert seen["models at averaging rounds"] == "aggregator"
    assert seen["only sums of models over a cluster"] == "coordinator"
    flat = load("schools", ["federation.topology=flat"])
    assert {step.seen_by for step in steps_of(flat)} == {"coordinator"}


# ---- a host answers no other step


def host(found: Experiment) -> Host:
    return build_host("h", found, "r", None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "local"}, GroupModel(np.zeros((6, 3)))),
        ({"name": "global"}, AskLocalModels()),
        ({"name": "local"}, AskSums(np.array([0]))),
        ({"name": "async_l2gd", "gamma": 1.0, "lam": 1.0}, async_l2gd.MESSAGES.collect()),
    ],
)
def test_a_host_refuses_a_step_that_its_experiment_does_not_have(section: dict[str, object], message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"step '{message.step}' of '{message.method}', which is no part") as caught:
        host(experiment(method=section))._dispatch([message], 1)
    assert caught.value.finding.rule == "C9"


def test_a_host_answers_the_steps_of_its_references() -> None:
    assert is_answered(answered_by(experiment(references=["global"])), "consensus", "hessian")
    assert not is_answered(answered_by(experiment()), "consensus", "hessian")


def test_markdown_does_not_reach_the_terminal() -> None:
    assert re.search(r"[`*]", " ".join(reveal_lines(load("hsb")))) is None


if __name__ == "__main__":
    SECURITY.write_text(with_table(SECURITY.read_text(encoding="utf-8")), encoding="utf-8")
