"""A method is a value: the type checker finds each misspelt hook, and generic code knows no method by its name."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.experiment.method import Method, Room
from coterie.families.partial import LocalTraining
from coterie.registry import MODULES, built_in_methods, method
from coterie_client.interface.half import ClientHalf
from coterie_client.interface.local_update import LocalUpdate
from coterie_server.families.partial import ServerUpdate
from coterie_server.interface.half import ServerHalf, StageHalf

ROOT = Path(__file__).parents[2]
# One method with each kind of half, right in every line.
RIGHT = """
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.partial import LocalTraining, Training
from coterie.wire.messages import Message
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, own_model
from coterie_server.families import partial
from coterie_server.interface.half import Counts, Federation, Outcome, ServerHalf, Setting, StageHalf, half_of


def first(options: Mapping[str, Any], local: Local, previous: int | None) -> int:
    return 0


def step(state: int, inbox: Inbox, local: Local) -> tuple[int, Sequence[Message]]:
    return state, []


def update(context: Context) -> Moved:
    fitted = context.fit(context.model, context.phases)
    return Moved(fitted.tensors, context.kept, fitted.loss)


def asked(half: partial.PartialSharing, state: partial.SharedState, chosen: Indices, number: int) -> Sequence[Message]:
    return []


class Stage:
    async def init(self, federation: Federation) -> int:
        return 0

    async def round(self, state: int, federation: Federation, number: int) -> tuple[int, Mapping[str, float]]:
        return state, {}

    async def finish(self, state: int, federation: Federation) -> Outcome:
        return Outcome(None)

    def counts(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        return {}

    def labels(self, state: int) -> Indices:
        return np.zeros(3, dtype=np.int64)


class Whole(Stage):
    client_options: Mapping[str, Any] = {}
    expected_vectors = Stage.counts

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        return {}


def build(config: Settings, setting: Setting) -> StageHalf[int]:
    stage = Stage()
    half = StageHalf(client_options={}, init=stage.init, round=stage.round, finish=stage.finish, expected_vectors=stage.counts)
    half = replace(half, labels_of=stage.labels)
    half = replace(half, expected_scalars=stage.counts)
    half = replace(half, spread_of_vectors=stage.counts)
    half = replace(half, drawn_vectors=stage.counts)
    half = replace(half, printed_vectors=lambda n_rounds: {"up": 1.0})
    return replace(half, warnings=("it is slow",))


WHOLE = half_of(Whole())
METHOD = Method(config=Settings, reveals=(), needs_sizes=True)
TRAINING = LocalTraining(config=Training, sharing="head")
SERVER = ServerHalf(build=build, needs_everyone="its sums are of all users")
OF_FAMILY = replace(partial.SERVER, build=build)
CLIENT = ClientHalf(init=first, step=step, changes_rows=True)
OPTIONAL = ClientHalf(init=first, step=step, allows=lambda options, experiment, n: True)
OWN = partial.ServerUpdate(asked=asked)
UPDATE = LocalUpdate(update, start=own_model)
"""
# What is right, and what is written instead: each is one mistake of one line.
MISSPELT = {
    "a hook of a stage": [
        ("labels_of=", "lables_of="),
        ("expected_scalars=", "expected_scalar="),
        ("spread_of_vectors=", "spreads_of_vectors="),
        ("drawn_vectors=", "drawn_vector="),
        ("printed_vectors=", "printed_vector="),
        ("warnings=", "warning="),
        ("expected_vectors=", "expected_vector="),
    ],
    "a hook of an object": [("def expected_scalars(", "def expected_scalar(")],
    "a field of a method": [("needs_sizes=", "need_sizes="), ("sharing=", "shares=")],
    "a field of a server half": [
        ("needs_everyone=", "need_everyone="),
        ("replace(partial.SERVER, build=", "replace(partial.SERVER, built="),
    ],
    "a hook of a client half": [("changes_rows=", "change_rows="), ("allows=", "allow=")],
    "a hook of a local update": [("start=", "starts=")],
    "what a local update knows": [("context.kept", "context.keeps")],
    "a hook of the family of local updates": [("ServerUpdate(asked=", "ServerUpdate(ask=")],
    "a function that a hook is given": [("=own_model", "=own_models"), ("=stage.labels", "=stage.lables")],
}


FOUND_AT = {"def expected_scalars(": "WHOLE = "}  # an object without a hook is one where it is taken for a half


@pytest.mark.timeout(300)  # the checker's first look at all of the packages takes half a minute
def test_each_misspelt_hook_is_an_error_of_the_type_checker(tmp_path: Path) -> None:
    listed = [one for kind in MISSPELT.values() for one in kind]
    (tmp_path / "right.py").write_text(RIGHT)
    for number, (right, wrong) in enumerate(listed):
        assert RIGHT.count(right) == 1, right
        (tmp_path / f"wrong_{number}.py").write_text(RIGHT.replace(right, wrong))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *map(str, sorted(tmp_path.glob("*.py")))]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert found.stderr == ""
    lines: dict[str, set[int]] = {}
    for name, line in re.findall(r"(\w+)\.py:(\d+): error: ", found.stdout):
        lines.setdefault(name, set()).add(int(line))
    assert "right" not in lines, found.stdout
    for number, (right, wrong) in enumerate(listed):
        place = RIGHT[: RIGHT.index(FOUND_AT.get(right, right))].count("\n") + 1
        assert lines.get(f"wrong_{number}") == {place}, (wrong, found.stdout)


# ---- generic code knows no method

# File: the names of methods in it that are something else there, or that it is about; with the reason.
EXCEPTIONS = {
    ("coterie/registry.py", "global"): "the one name that is a keyword of Python, so that its modules are called otherwise",
    ("coterie_deploy/containers/monitoring.py", "global"): "a key of Prometheus",
    ("coterie_deploy/cli/help.py", "adapt"): "the command of this name",
    ("coterie_deploy/cli/help.py", "certify"): "the command of this name",
    ("coterie_deploy/studies/adapt.py", "adapt"): "the command `coterie adapt` is a run of this method",
    ("coterie_deploy/studies/compare/budget.py", "partial"): "passes over the rows are what this family's configurations declare",
    ("coterie_deploy/studies/compare/plan.py", "partial"): "passes over the rows are what this family's configurations declare",
    ("coterie_deploy/studies/compare/result.py", "partial"): "passes over the rows are what this family's configurations declare",
    ("coterie_deploy/studies/certify.py", "certify"): "the command `coterie certify` is a run of this method",
    ("coterie_deploy/studies/certify.py", "pdmm"): "it certifies what this method finds, and looks at its penalty",
    ("coterie_deploy/studies/certify.py", "son_newton"): "it certifies what this method finds, and looks at its penalty",
}
ABOUT_METHODS = (
    "coterie_deploy/studies/reproduce/",  # figures and tables of papers, by the methods that they are about
    "coterie_deploy/studies/check/federations.py",  # one table of the conformance suite, with a row for each of our methods
)
SIDES = ("common/coterie", "server/coterie_server", "client/coterie_client", "deploy/coterie_deploy")


def named_in(path: Path, names: frozenset[str]) -> set[str]:
    """The methods and families that a module names in a string, but for docstrings, or whose modules it imports."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names and id(node) not in said:
            found.add(node.value)
        listed: list[str] = []
        if isinstance(node, ast.Import):
            listed = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            listed = [f"{node.module}.{alias.name}" for alias in node.names]
        for parts in (name.split(".") for name in listed):
            if len(parts) > 2 and parts[0].startswith("coterie") and parts[1] in ("methods", "families"):
                found |= {name for name in names if MODULES.get(name, name) == parts[2]}
    return found


def test_no_generic_module_names_a_method_or_the_family_of_one() -> None:
    names = frozenset(built_in_methods()) | {method(name).room for name in built_in_methods()} - {""}
    assert {"pdmm", "fedrep", "partial", "consensus"} <= names
    found = set()
    for side in SIDES:
        for path in (ROOT / side).rglob("*.py"):
            place = path.relative_to(ROOT / side).parent / path.name
            if place.parts[0] not in ("methods", "families"):
                where = f"{Path(side).name}/{place.as_posix()}"
                found |= {(where, name) for name in named_in(path, names) if not where.startswith(ABOUT_METHODS)}
    assert found == set(EXCEPTIONS)


def test_what_a_module_names_is_found(tmp_path: Path) -> None:
    text = '"""Of pdmm."""\nfrom coterie_server.methods import fedrep\nimport coterie.methods.global_\nx = y == "partial"\n'
    (tmp_path / "module.py").write_text(text)
    assert named_in(tmp_path / "module.py", frozenset({"pdmm", "fedrep", "global", "partial"})) == {"fedrep", "global", "partial"}


def test_no_hook_is_looked_for_by_its_name() -> None:
    kinds = (Method, Room, LocalTraining, ServerHalf, StageHalf, ClientHalf, LocalUpdate, ServerUpdate)
    hooks = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    for side in SIDES:
        for path in (ROOT / side).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
                    asked = node.args[1]
                    assert not (isinstance(asked, ast.Constant) and asked.value in hooks), f"{path}:{node.lineno}"
