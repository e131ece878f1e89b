"""Every check of a method can fail: a sound method is broken in one way, and exactly the check that is for it says so."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from coterie import load_run, run
from coterie.errors import ConfigError, RunError
from coterie.record import snapshot
from coterie_deploy.studies.check import CHECKS, Checked, check_method, verdict
from coterie_deploy.studies.check.federations import cases_of, small_experiment
from coterie_deploy.studies.check.table import BY_NAME
from coterie_deploy.studies.check.trial import Trial
from tests.packaged import installed

SOUND = Path(__file__).parents[1] / "healthy_method.py"
IN_PROCESS = tuple(check.name for check in CHECKS if check.name not in ("grpc", "aggregators", "processes"))


@dataclass(frozen=True)
class Break:
    """Pieces of the sound method and what stands there instead, the check that fails, and a piece of its sentence."""

    changes: Mapping[str, str]
    fails: str
    says: str
    only: tuple[str, ...] = IN_PROCESS


def broken(name: str, changes: Mapping[str, str]) -> str:
    """The source of a method of this name, with these changes."""
    source = SOUND.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    return source.replace("healthy", name)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Mapping[str, str]], None]:
    """Installs a package with a method of this name, for this process and those that it starts."""
    monkeypatch.setattr(snapshot, "PACKAGES", set(snapshot.PACKAGES))

    def made(name: str, changes: Mapping[str, str]) -> None:
        folder = installed(tmp_path / "site", name, "1", {"coterie.methods": {name: name}}, {name: broken(name, changes)})
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return made


def failures(found: list[Checked]) -> dict[str, str]:
    """The checks that have failed, and why."""
    return {one.check.name: one.reason for one in found if one.state == "failed"}


GRADIENT = "local.problem.gradient(x)\n"
MOMENTUM = "    velocity = state.velocity / 2 + "
CLIENT = "# ---- the client\n"
BREAKS: Mapping[str, Break] = {
    "without_server": Break({"SERVER = ServerHalf(build=build)": "SERVER = None"}, "halves", "has no server half: want SERVER"),
    "without_client": Break(
        {"CLIENT = ClientHalf(init=init, step=step, private=private)": "CLIENT = None"},
        "halves",
        "has no client half: want CLIENT, or the room of a family",
    ),
    "without_reveal": Break({'("healthy",)),)': '("healthy/model",)),)'}, "reveals", "step 'gradient' of method 'without_reveal'"),
    "conditional_reveal": Break(
        {'("healthy",)),)': '("healthy",), needs={"step": 0.5}),)'},
        "reveals",
        "no reveal holds with these settings: host 'h0': the parent asks for step 'model'",
    ),
    "reveal_of_nothing": Break(
        {'("healthy",)),)': '("healthy", "healthy/other")),)'}, "reveals", "names step 'reveal_of_nothing/other', but no message"
    ),
    "reveal_of_no_setting": Break(
        {'("healthy",)),)': '("healthy",), unless={"stp": 1}),)'}, "reveals", "depends on stp, which is none of its settings"
    ),
    "crashing": Break({GRADIENT: "local.problem.gradient(y)\n"}, "runs", "NameError: name 'y' is not defined"),
    "unwritable": Break(
        {'Kept(options["step"],': 'Kept({options["step"]},', "state.step *": "min(state.step) *"},
        "runs",
        "Kept.step is of type set, want arrays, numbers, strings, ",
    ),
    "infinite": Break(
        {"Outcome(np.tile(state.x, (len(self.setting.members), 1)))": "Outcome(np.full((9, 3), np.inf), is_judged=True)"},
        "runs",
        "stage 'infinite' has left models that are not finite",
    ),
    "miscounting": Break({'"down"): n_asked': '"down"): n_asked + 1'}, "closed-form", "108 vectors, closed form 109: 1 too few"),
    "uncounted": Break(
        {', ("gradient", "up"): sum(row["users"] for row in figures)}': "}", '{("gradient", "up"): (self': '{("other", "up"): 0 * (self'},
        "closed-form",
        "step gradient up: 108 vectors, no closed form",
    ),
    "telling_rows": Break(
        {"local.problem.value(x))]": "local.problem.value(x) * 0 + [user.features[0, 0] for user in local.users])]"},
        "private",
        "has sent numbers of the rows of user 'u",
    ),
    "telling_state": Break(
        {"[Gradient(velocity, ": "[Gradient(own, "}, "private", "has sent numbers of telling_state.own of host 'h0', in a reply with"
    ),
    "timed": Break(
        {GRADIENT: "local.problem.gradient(x) + 1e-9 * __import__('time').perf_counter()\n"},
        "repeat",
        "when the run is made again, figure 'loss' of round 2 of stage 'timed' is ",
    ),
    "unseeded": Break({GRADIENT: "local.problem.gradient(x) + 1e-9 * np.random.random()\n"}, "repeat", "when the run is made again, "),
    "in_order_of_arrival": Break(
        {
            "wanted=[Wanted(Gradient)])": "wanted=[Wanted(Gradient, check=lambda sent, users: came.append(sent.g.sum(axis=0)))])",
            "        replies = await": "        came: list[Array] = []\n        replies = await",
            "sent.g.mean(axis=0)": "sum(came) / answered.size",
        },
        "arrival",
        "when answers arrive in another order, ",  # the last bits of sums depend on the processor: not every one shows in the loss
    ),
    "neighbours": Break(
        {GRADIENT: "local.problem.gradient(x).mean(axis=0)\n"}, "hosts", "with one host instead of 3, figure 'loss' of round "
    ),
    "forgetful": Break(
        {
            MOMENTUM: "    velocity = MEMORY.get(local.users[0], state.velocity) / 2 + ",
            "    own = state.own - ": "    MEMORY[local.users[0]] = velocity\n    own = state.own - ",
            "velocity=velocity, own=own": "own=own",
            CLIENT: f"{CLIENT}MEMORY: Any = __import__('weakref').WeakKeyDictionary()\n",
        },
        "snapshots",
        "when everybody is restarted from disk now and then, figure 'loss' of round ",
    ),
    "needing_everyone": Break(
        {"sent.g.mean(axis=0)": "(sent.g + sent.g[8] - sent.g[8]).mean(axis=0)"}, "left-out", "IndexError: index 8 is out"
    ),
    "counting_the_absent": Break(
        {'{"users": float(answered.size)': '{"users": float(everyone.size)'}, "left-out", "when host 'h1' is lost in exchange "
    ),
    "broadcasting": Break(
        {
            "class Model(Rows)": "class Model(Broadcast)",
            'x, to each user."""\n\n    x: Annotated[Array, Vectors("rows", "d")]': 'x."""\n\n    x: Annotated[Array, Vectors("d")]',
            "Model(np.tile(state.x, (everyone.size, 1)))": "Model(state.x)",
            "x = inbox[Model].x": "x = np.tile(inbox[Model].x, (local.n_own, 1))",
            '"down"): n_asked': '"down"): float(len(figures))',
            "import Message": "import Broadcast, Message",
        },
        "aggregators",
        "step model down (within-cluster): 36 vectors, closed form 12: 24 too many",
        ("runs", "closed-form", "repeat", "hosts", "aggregators"),
    ),
    # What is remembered by process is there again when a host is restarted in the same one.
    "of_one_process": Break(
        {GRADIENT: "local.problem.gradient(x) + 1e-12 * __import__('os').getpid()\n"},
        "grpc",
        "with 1 client processes over gRPC, figure 'loss' of round ",
        ("runs", "repeat", "hosts", "grpc", "processes"),
    ),
    "remembering": Break(
        {
            MOMENTUM: "    before = (local.names, inbox.round - 1)\n    velocity = MEMORY.get(before, 0 * x) / 2 + ",
            "    own = state.own - ": "    MEMORY[local.names, inbox.round] = velocity\n    own = state.own - ",
            CLIENT: f"{CLIENT}MEMORY: Any = {{}}\n",
        },
        "processes",
        "after SIGKILL of a client process in round ",
        ("runs", "repeat", "hosts", "snapshots", "kills", "grpc", "processes"),
    ),
}


def test_the_sound_method_passes_all_checks(install: Callable[[str, Mapping[str, str]], None]) -> None:
    install("sound", {})
    found = check_method("sound", only=IN_PROCESS)
    assert [(one.check.name, one.reason) for one in found if one.state != "passed"] == []
    assert {one.check.name: one.reason for one in found}["private"] == "looked for rows and sound.own"


@pytest.mark.parametrize("name", [name for name, found in BREAKS.items() if found.only == IN_PROCESS])
def test_exactly_the_right_check_fails(name: str, install: Callable[[str, Mapping[str, str]], None]) -> None:
    check_broken(name, install)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name, found in BREAKS.items() if found.only != IN_PROCESS])
def test_exactly_the_right_check_fails_in_processes(name: str, install: Callable[[str, Mapping[str, str]], None]) -> None:
    check_broken(name, install)


def check_broken(name: str, install: Callable[[str, Mapping[str, str]], None]) -> None:
    wanted = BREAKS[name]
    install(name, wanted.changes)
    found = failures(check_method(name, only=wanted.only))
    assert list(found) == [wanted.fails], found
    assert wanted.says in found[wanted.fails]
    assert ("refuse aggregators with ServerHalf(tiers='flat only')" in found[wanted.fails]) == (wanted.fails == "aggregators")


MODELS = "Outcome(np.tile(state.x, (len(self.setting.members), 1)))"
RETURNS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "too_few": (
        {MODELS: "Outcome(np.zeros((6, 3)))"},
        "`finish` of 'too_few' returned models of shape (6, 3), want (9, 3): one row for each user, also for users whose host is lost",
    ),
    "too_narrow": ({MODELS: "Outcome(np.zeros((9, 2)))"}, "`finish` of 'too_narrow' returned models of shape (9, 2), want (9, 3): one row"),
    "listing": ({MODELS: "Outcome([[0.0] * 3] * 9)"}, "`finish` of 'listing' returned models of type list, want an array of shape (9, 3)"),
    "by_some": (
        {MODELS: "Outcome(None, by_user={'n': np.zeros(8)})"},
        "returned by_user['n'] of shape (8,), want (9,): one number for each",
    ),
    "modelless": ({MODELS: "state"}, "`finish` of 'modelless' returned a value of type State, want an Outcome"),
    "arrays": ({"float(sent.loss.sum())": "sent.loss"}, "`round` of 'arrays' returned the figure 'loss' of shape (9,), want one number"),
    "called": (
        {"State(np.zeros(": "State(lambda: ("},
        "State.x is of type function, want arrays, numbers, ",
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_what_a_server_half_returns_is_checked(name: str, install: Callable[[str, Mapping[str, str]], None]) -> None:
    changes, sentence = RETURNS[name]
    install(name, changes)
    with pytest.raises(RunError) as caught:
        run(small_experiment({"name": name}))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("changes", [{'Kept(options["step"],': 'Kept({options["step"]},'}, {"own=own)": "own=own, step={1})"}])
def test_a_state_that_cannot_be_saved_is_found_without_a_folder(
    changes: Mapping[str, str], install: Callable[[str, Mapping[str, str]], None]
) -> None:
    install("unsaved", changes)
    with pytest.raises(
        RunError, match=r"host 'host-1': Kept.step is of type set, want arrays, numbers, .*what is kept between rounds must be"
    ):
        run(small_experiment({"name": "unsaved"}))


def test_a_residual_that_no_round_gives_is_a_warning(install: Callable[[str, Mapping[str, str]], None], tmp_path: Path) -> None:
    install("endless", {})
    install("converging", {'"unasked": float': '"primal_residual": 1.0, "unasked": float'})
    warnings = {}
    for name in ("endless", "converging"):
        run(small_experiment({"name": name}, stop={"rounds": 2, "residual": 0.1}), output=tmp_path / name)
        events = load_run(tmp_path / name).events()
        warnings[name] = [text for kind, text in zip(events["kind"], events["text"], strict=True) if kind == "warning"]
    sentence = "stop.residual is set, and 'endless' gives no primal_residual, so the stage did not stop by it"
    assert warnings == {"endless": [sentence], "converging": []}


def test_a_module_without_a_half_is_refused_before_any_check(install: Callable[[str, Mapping[str, str]], None]) -> None:
    install("halved", {"SERVER = ServerHalf(build=build)": ""})
    with pytest.raises(ConfigError, match="has no server half: want SERVER in module 'halved', or the room of a family"):
        check_method("halved")


def test_settings_that_a_small_federation_does_not_have_are_asked_for(install: Callable[[str, Mapping[str, str]], None]) -> None:
    install("demanding", {"step: float = 0.1": "step: float"})
    with pytest.raises(ConfigError, match=r"method\.step: .*give them with --set method\.KEY=VALUE, or in checked_with of its METHOD"):
        check_method("demanding")
    assert [one.state for one in check_method("demanding", only=["runs"], changes=["method.step=0.1"])] == ["passed"]


def test_a_method_can_have_settings_for_the_small_federation(install: Callable[[str, Mapping[str, str]], None]) -> None:
    install("prepared", {"step: float = 0.1": "step: float", "METHOD = Method(": 'METHOD = Method(checked_with=("method.step=0.1",), '})
    assert [one.state for one in check_method("prepared", only=["runs"])] == ["passed"]


def test_books_that_differ_are_found(tmp_path: Path) -> None:
    """No half can bring that about, so a row is changed."""
    trial = Trial(cases_of("local")["local"], tmp_path)
    assert verdict(BY_NAME["books"], trial).state == "passed"
    with contextlib.closing(sqlite3.connect(trial.calm.folder / "run.db")) as connection, connection:
        connection.execute(
            "UPDATE host_ledger SET vectors = vectors + 1 WHERE rowid = (SELECT MAX(rowid) FROM host_ledger WHERE vectors > 0)"
        )
    found = verdict(BY_NAME["books"], trial)
    assert found.state == "failed"
    assert "vectors" in found.reason
