"""Methods of installed packages, and beside an experiment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from coterie import registry, run
from coterie.errors import ConfigError
from coterie.experiment.config import as_written, experiment_from, experiment_to_json, named_code
from coterie.experiment.consent import consent_hash, consent_parts
from coterie.experiment.plugins import code_allowed
from coterie.record import snapshot
from coterie_client.hosting.build import build_host
from coterie_deploy.cli import app as cli
from coterie_deploy.roles.consent_page import asked_lines
from coterie_server.interface.half import server_half
from tests.packaged import installed

CODE = """
    from typing import Literal
    from coterie.plugin import JointTraining, LocalTraining

    class Config(JointTraining):
        name: Literal["bodies"] = "bodies"
        tau: int = 1

        def phases(self):
            return [self.phase("representation", updates=self.tau)]

    METHOD = LocalTraining(config=Config, sharing="representation")
"""
NETWORK: dict[str, Any] = {
    "name": "digits",
    "data": {"source": "digits", "partition": {"by": "classes", "users": 4, "classes_per_user": 3, "rows_per_user": 20}},
    "model": {"name": "mlp", "hidden": [8], "classes": 10},
    "method": {"name": "bodies", "participation": 1.0, "fine_tune": []},
    "stop": {"rounds": 2},
}


def names(module: str, name: str = "bodies") -> dict[str, dict[str, str]]:
    return {"coterie.methods": {name: module}}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process remembers of code from outside is this test's own."""
    monkeypatch.setattr(registry, "_beside", {})
    monkeypatch.setattr(snapshot, "PACKAGES", set(snapshot.PACKAGES))
    for module in ("pack_m", "pack_n", "mine"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = installed(tmp_path / "site", "pack-m", "1.2", names("pack_m"), {"pack_m": CODE})
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = installed(tmp_path / "here", "unused", "1", {}, {"mine": CODE})
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return folder


def with_method(name: str, **more: Any) -> dict[str, Any]:
    return {**NETWORK, "method": {**NETWORK["method"], "name": name, **more}}


# ---- what a name stands for


def test_a_method_of_a_package_runs_by_its_name(pack: Path) -> None:
    found = run(NETWORK)
    assert found.metrics["bodies"]["last_rounds_accuracy"] > 0
    experiment = experiment_from(NETWORK)
    assert experiment.packages == {"pack-m": "1.2"}
    assert experiment_from(json.loads(experiment_to_json(experiment))) == experiment
    assert experiment_from(as_written(experiment)) == experiment
    assert "bodies" in registry.methods("network")
    assert "bodies" not in registry.methods("convex")
    assert "pack_m" in snapshot.PACKAGES


def test_a_method_beside_an_experiment_is_the_same(pack: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(NETWORK)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(pack)])
    content = with_method("mine:METHOD")
    found = run(content)
    assert found.metrics == wanted.metrics
    experiment = experiment_from(content)
    assert (experiment.method.name, experiment.packages, named_code(experiment)) == ("bodies", {}, ["mine:METHOD"])
    assert "  code to import here: mine:METHOD (that of the method is imported before its owner is asked)" in asked_lines(experiment)
    for written in (json.loads(experiment_to_json(experiment)), as_written(experiment)):
        assert written["method"]["name"] == "mine:METHOD"
        assert experiment_from(written) == experiment


def test_a_path_into_an_installed_package_is_its_name(pack: Path) -> None:
    """So what `coterie new` writes still runs once pip has installed it."""
    experiment = experiment_from(with_method("pack_m:METHOD"))
    assert experiment == experiment_from(NETWORK)
    assert (experiment.packages, named_code(experiment)) == ({"pack-m": "1.2"}, [])


def test_settings_are_checked_by_the_plug_in_s_own_configuration(pack: Path) -> None:
    assert experiment_from(with_method("bodies", tau=3)).method.tau == 3
    with pytest.raises(ConfigError, match=r"method.tau: is 'many', want a whole number"):
        experiment_from(with_method("bodies", tau="many"))
    with pytest.raises(ConfigError, match=r"method.tua: unknown key; did you mean 'tau'\?"):
        experiment_from(with_method("bodies", tua=3))
    with pytest.raises(ConfigError, match=r"the method 'bodis' is unknown, want one of .*, bodies; did you mean 'bodies'\?"):
        experiment_from(with_method("bodis"))
    with pytest.raises(ConfigError) as caught:
        experiment_from(with_method("pp"))
    assert str(caught.value).endswith("bodies; if it is a package of yours: pip install -e . in its folder, or method.name=pp:METHOD there")
    with pytest.raises(ConfigError, match=r"method 'bodies' trains a network, but there is no key 'model'"):
        experiment_from({**with_method("bodies"), "model": None, "problem": {"loss": "logistic"}})


def test_methods_from_outside_are_compared_and_resumed(pack: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "net.json").write_text(json.dumps({**NETWORK, "method": {"name": "fedrep", "head_epochs": 1, "fine_tune": []}}))
    (mine / "mine.py").write_text((mine / "mine.py").read_text().replace('"bodies"', '"bones"'))
    command = ["compare", "net.json", "--methods", "fedrep,bodies,mine:METHOD", "--seeds", "0", "--output", "compared", "--quiet"]
    assert cli._run([*command, "--set", "bones:method.tau=2"]) == 0, capsys.readouterr().err
    written = {
        name: json.loads((mine / "compared" / f"{name}-0" / "experiment.json").read_text()) for name in ("fedrep", "bodies", "bones")
    }
    assert [content["method"]["name"] for content in written.values()] == ["fedrep", "bodies", "mine:METHOD"]
    assert written["bones"]["method"]["tau"] == 2
    assert written["bodies"]["packages"] == {"pack-m": "1.2"}
    registry._beside.clear()
    assert cli._run(["compare", "compared", "--resume", "--quiet"]) == 0, capsys.readouterr().err
    assert cli._run(["compare", "net.json", "--methods", "mine:METHOD,mine:METHOD", "--output", "other"]) == 2
    assert "--methods has 'bones' twice" in capsys.readouterr().err


# ---- leave


def test_a_path_needs_leave_before_anything_is_imported(mine: Path) -> None:
    with code_allowed(False), pytest.raises(ConfigError) as caught:
        experiment_from(with_method("mine:METHOD"))
    assert str(caught.value) == "the coordinator's experiment wants to import 'mine:METHOD' on this machine; allow it with --allow-code"
    assert caught.value.finding.rule == "L5"
    assert "mine" not in sys.modules


def test_consent_names_the_package_or_the_path_of_a_method(pack: Path, mine: Path) -> None:
    package = experiment_from(NETWORK)
    assert consent_parts(package)["packages"] == {"pack-m": "1.2"}
    assert "  code of installed packages: pack-m 1.2" in asked_lines(package)
    assert any("the shared tensors after local training" in line for line in asked_lines(package))
    (mine / "mine.py").write_text((mine / "mine.py").read_text().replace('"bodies"', '"bones"'))
    beside = experiment_from(with_method("mine:METHOD"))
    assert consent_parts(beside)["code"] == ["mine:METHOD"]
    assert consent_hash(beside) != consent_hash(package)


# ---- mistakes

NO_SERVER = "from coterie.experiment.method import Method\n" + CODE.replace("    ", "", 1).replace("\n    ", "\n").replace(
    'LocalTraining(config=Config, sharing="representation")', "Method(config=Config, reveals=())"
)
MISTAKES = {
    "raise ValueError('no')": "method 'bodies' of the package pack-n 3 cannot be imported: ValueError: no",
    "OTHER = 1": "method 'bodies' of the package pack-n 3 is no method: METHOD in module 'pack_n' is missing, want a coterie.plugin.Method",
    "METHOD = 1": "pack-n 3 is no method: METHOD in module 'pack_n' is of class int, want a coterie.plugin.Method",
    CODE.replace('"bodies"', '"bones"'): "calls itself 'bones': want the same name in the package and in `config`",
    NO_SERVER: "method 'bodies' of the package pack-n 3 has no server half: want SERVER in module 'pack_n', or the room of a family",
    NO_SERVER + "\nSERVER = 'pack_n:Config'": "has no client half: want CLIENT in module 'pack_n', or the room of a family",
    CODE + "\n    from coterie.plugin import LocalUpdate\n    UPDATE = LocalUpdate(lambda context: None, judgd=None)": (
        "cannot be imported: TypeError: LocalUpdate.__init__() got an unexpected keyword argument 'judgd'; did you mean 'judged'?"
    ),
    CODE + "\n    from coterie.plugin import LocalUpdate\n    UPDTE = LocalUpdate(lambda context: None)": (
        "method 'bodies' of the package pack-n 3 calls its LocalUpdate UPDTE, want it called UPDATE"
    ),
}


@pytest.mark.parametrize("code", MISTAKES)
def test_code_that_is_no_method_is_one_sentence(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "pack-n", "3", names("pack_n"), {"pack_n": code}))
    with pytest.raises(ConfigError) as caught:
        experiment_from(NETWORK)
    assert MISTAKES[code] in str(caught.value)
    assert caught.value.finding.sentence == "code that the experiment names cannot be used (method.name) (rule L4)"
    assert "bodies" not in registry.methods()


def test_a_half_of_another_class_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = CODE + "\n    SERVER = 'pack_n:Config'\n    UPDATE = 7\n"
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "pack-n", "3", names("pack_n"), {"pack_n": code}))
    experiment = experiment_from(NETWORK)
    with pytest.raises(
        ConfigError, match=r"^method 'bodies' has as SERVER a value of class ModelMetaclass, want a coterie.plugin.ServerHalf$"
    ):
        server_half("bodies")
    with pytest.raises(ConfigError, match=r"^method 'bodies' has as UPDATE a value of class int, want a coterie.plugin.LocalUpdate$"):
        build_host("a", experiment, "run", None)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("mine:NOTHING", "method 'mine:NOTHING' does not exist: module 'mine' has no 'NOTHING'"),
        ("nowhere:METHOD", "method 'nowhere:METHOD' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "mine:Config",
            "method 'mine:Config' is no method: Config in module 'mine' is of class ModelMetaclass, want a coterie.plugin.Method",
        ),
    ],
)
def test_a_path_that_leads_to_no_method_is_one_sentence(path: str, sentence: str, mine: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment_from(with_method(path))
    assert str(caught.value) == sentence


def test_a_folder_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `coterie new method yours`, before `cd yours`."""
    (tmp_path / "yours").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        experiment_from(with_method("yours:METHOD"))
    monkeypatch.delitem(sys.modules, "yours")
    wanted = "'yours' is a folder here, want a module; if the module is in the folder: cd yours"
    assert str(caught.value) == f"method 'yours:METHOD' cannot be imported: {wanted}"


PERSONAL = CODE.replace('sharing="representation"', "is_personal=True")
UPDATE = "\n    from coterie.plugin import LocalUpdate, judge_own, own_model\n    UPDATE = LocalUpdate(lambda context: None"


@pytest.mark.parametrize(
    ("code", "lacks"),
    [
        (PERSONAL, "there is no UPDATE"),
        (f"{PERSONAL}{UPDATE}, start=own_model)", "UPDATE has no `judged`"),
        (f"{PERSONAL}{UPDATE}, judged=judge_own)", ""),
        (PERSONAL.replace("is_personal", 'private_layers=("BatchNorm2d",), is_personal'), ""),
        (CODE.replace('"representation"', '"representation", is_personal=True'), ""),
    ],
)
def test_a_personal_method_keeps_something(code: str, lacks: str, mine: Path) -> None:
    (mine / "mine.py").write_text(dedent(code))
    if not lacks:
        assert experiment_from(with_method("mine:METHOD")).method.name == "bodies"
        return
    with pytest.raises(ConfigError) as caught:
        experiment_from(with_method("mine:METHOD"))
    begin = "method 'mine:METHOD' has is_personal=True, but nothing stays with a user: all tensors are shared, and "
    assert str(caught.value).startswith(f"{begin}{lacks}; want LocalUpdate(update, ")


MESSAGES = """
    from dataclasses import dataclass
    from typing import Annotated, Literal
    from coterie.plugin import Array, Method, Reveal, Rows, Scalars, Settings, declare

    @declare(method="spoken", step="say")
    @dataclass(frozen=True)
    class Said(Rows):
        n: Annotated[Array, Scalars("rows")]

    class Config(Settings):
        name: Literal["spoken"] = "spoken"

    METHOD = Method(config=Config, reveals=(Reveal("n", "n", ("spkoen",)),))
    SERVER = CLIENT = "mine:Config"
"""


def test_messages_that_no_reveal_names_are_refused_before_a_run(mine: Path) -> None:
    (mine / "mine.py").write_text(dedent(MESSAGES))
    with pytest.raises(ConfigError) as caught:
        registry.method("mine:METHOD")
    said = "declares messages of 'spoken', but no Reveal of its METHOD names 'spoken' among its steps"
    assert str(caught.value) == f"method 'mine:METHOD' {said}: want Reveal(up, concluded, ('spoken',))"


def test_a_name_that_is_taken_is_one_sentence(pack: Path, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the file is written twice within a second

    def refused() -> str:
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        with pytest.raises(ConfigError) as caught:
            experiment_from(with_method("mine:METHOD"))
        return str(caught.value)

    assert refused() == (
        "method 'mine:METHOD' calls itself 'bodies' as the method of the package pack-m 1.2 does: want another name in its configuration"
    )
    (mine / "mine.py").write_text((mine / "mine.py").read_text().replace('"bodies"', '"fedavg"'))
    assert "calls itself 'fedavg' as a built-in method does" in refused()
    monkeypatch.syspath_prepend(installed(tmp_path / "second", "pack-n", "3", names("pack_n"), {"pack_n": CODE}))
    with pytest.raises(ConfigError, match=r"^method 'bodies' is of 2 packages, pack-m 1.2 and pack-n 3: want one of them uninstalled$"):
        experiment_from(NETWORK)
