"""Names of installed packages: losses, models, data sources and partition rules."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import plugin, run
from coterie.errors import ConfigError, CoterieError
from coterie.experiment import plugins
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json, named_code
from coterie.experiment.consent import changed_parts, consent_hash, consent_parts
from coterie_client.data import list_users, load_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.policy import Policy, breaches
from coterie_deploy.read.shipped import FOLDER, load
from coterie_deploy.roles.consent_page import asked_lines
from tests.packaged import installed
from tests.rooms import ROOT

CODE = """
    import numpy as np
    import torch
    from torch import nn
    from coterie.plugin import ConfigError, DataSource, LabelledRows, NetworkLoss, PartitionRule, Settings, User

    class Square:
        is_classifier = False
        curvature_floor = curvature_bound = 1.0
        def value(self, s, y): return (s - y) ** 2 / 2
        def slope(self, s, y): return s - y
        def curvature(self, s, y): return np.ones_like(s)
        def check_targets(self, y, user): pass
        def predict(self, s): return s

    SMOOTHED = NetworkLoss(lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1))
    PLAIN = NetworkLoss(lambda outputs, targets: nn.functional.cross_entropy(outputs, targets))
    PINBALL = NetworkLoss(
        lambda outputs, targets: torch.maximum(0.9 * (targets - outputs[:, 0]), 0.1 * (outputs[:, 0] - targets)).mean(),
        targets="numbers", n_outputs=1,
    )
    VECTOR = NetworkLoss(lambda outputs, targets: (outputs[:, 0] - targets) ** 2)
    DETACHED = NetworkLoss(lambda outputs, targets: nn.functional.cross_entropy(outputs.detach(), targets))

    class Small(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.representation = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
            self.head = nn.Linear(8, classes)
        def forward(self, x):
            return self.head(self.representation(x))

    class Made(Settings):
        users: int
        scale: float = 1.0

    def lines(request):
        random = np.random.default_rng(request.seed)
        for i in range(request.options.users):
            a = random.normal(size=(20, 2)) * request.options.scale
            yield User(f"u{i}", a, a @ [1, i % 2], cluster=str(i % 2))

    LINES = DataSource(lines, Made)

    class File(Settings):
        path: str

    def read(request):
        with np.load(request.path(request.options.path)) as arrays:
            return LabelledRows(arrays["x"], arrays["y"])

    ROWS = DataSource(read, File)

    class Every(Settings):
        skip: int = 0

    def turns(request):
        order = request.rows[request.stream("order").order(len(request.rows))][request.options.skip:]
        return {f"t{i}": order[i :: request.n_users] for i in range(request.n_users)}

    TURNS = PartitionRule(turns, Every)
    TWICE = PartitionRule(lambda request: {"a": [0, 1], "b": [1, 2]})
    NOBODY = PartitionRule(lambda request: {})
    BEYOND = PartitionRule(lambda request: {"a": [10**6]})
    WORDS = PartitionRule(lambda request: {"a": ["x"]})
"""
NAMES = {
    "coterie.losses": {
        "square": "pack_a:Square",
        **{name: f"pack_a:{name.upper()}" for name in ("smoothed", "plain", "pinball", "vector", "detached")},
    },
    "coterie.models": {"small": "pack_a:Small"},
    "coterie.data": {"lines": "pack_a:LINES", "rows": "pack_a:ROWS"},
    "coterie.partitions": {name: f"pack_a:{name.upper()}" for name in ("turns", "twice", "nobody", "beyond", "words")},
}  # fmt: skip
CONVEX: dict[str, Any] = {
    "name": "convex",
    "data": {"source": "lines", "options": {"users": 4}},
    "problem": {"loss": "square", "l2": 0.1},
    "method": {"name": "local"},
}
DIGITS: dict[str, Any] = {
    "name": "digits",
    "data": {"source": "digits", "partition": {"by": "classes", "users": 4, "classes_per_user": 3, "rows_per_user": 20}},
    "model": {"name": "small", "options": {"classes": 10}},
    "method": {"name": "fedrep", "participation": 1.0, "head_epochs": 1, "fine_tune": []},
    "stop": {"rounds": 2},
}


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = installed(tmp_path / "site", "Pack_A", "1.2", NAMES, {"pack_a": CODE})
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pack_a", raising=False)
    return folder


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name])


def figures(content: dict[str, Any]) -> dict[str, float]:
    """Of the method's stage."""
    return run(content).metrics[content["method"]["name"]]


def refused(content: dict[str, Any]) -> CoterieError:
    """What a run of it ends with."""
    with pytest.raises(CoterieError) as caught:
        run(content)
    return caught.value


# ---- what a name stands for


def test_losses_and_sources_of_a_package_are_named_like_built_in_ones(pack: Path) -> None:
    assert_equal(run(CONVEX).models, run({**CONVEX, "problem": {"loss": "least_squares", "l2": 0.1}}).models)
    experiment = experiment_from(CONVEX)
    assert [user.name for user in list_users(experiment.data, 0)] == ["u0", "u1", "u2", "u3"]
    assert experiment.packages == {"pack-a": "1.2"}
    assert named_code(experiment) == []
    assert experiment_from(json.loads(experiment_to_json(experiment))) == experiment


def test_an_import_path_stands_for_the_same(pack: Path) -> None:
    paths = {**CONVEX, "problem": {"loss": "pack_a:Square", "l2": 0.1}, "data": {"source": "pack_a:LINES", "options": {"users": 4}}}
    assert_equal(run(paths).models, run(CONVEX).models)
    assert named_code(experiment_from(paths)) == ["pack_a:Square", "pack_a:LINES"]
    assert experiment_from(paths).packages == {}


def test_models_losses_and_partitions_of_a_package_train_networks(pack: Path) -> None:
    by_turns = {"by": "turns", "users": 5, "options": {"skip": 1700}, "seed": 3}
    content = {**DIGITS, "problem": {"loss": "smoothed"}, "data": {"source": "digits", "partition": by_turns}}
    assert 0 <= figures(content)["last_rounds_metric"] <= 1
    plain, built_in = figures({**DIGITS, "problem": {"loss": "plain"}}), figures(DIGITS)
    assert plain["last_rounds_metric"] == built_in["last_rounds_accuracy"] > 0
    assert plain["heldout_loss"] == pytest.approx(built_in["heldout_loss"], rel=1e-4)


def test_a_rule_deals_rows_by_the_seed_and_its_options(pack: Path) -> None:
    def shares(**more: Any) -> list[tuple[str, int]]:
        partition = {"by": "turns", "users": 5, "options": {"skip": 1700}, **more}
        data = experiment_from({**DIGITS, "data": {"source": "digits", "test_fraction": 0, "partition": partition}}).data
        return [(user.name, int(user.features.sum())) for user in load_users(data, 0, None)]

    found = shares()
    assert [name for name, _ in found] == ["t0", "t1", "t2", "t3", "t4"]
    assert found == shares(seed=0)
    assert found != shares(seed=1)
    assert shares(classes=[0, 1], options={}) != found


def test_numbers_may_be_targets_of_a_network_loss(pack: Path) -> None:
    model = {"build": "small", "options": {"classes": 1}}
    assert figures({**DIGITS, "problem": {"loss": "pinball"}, "model": model})["last_rounds_metric"] > 1, "a mean squared error"


def test_labelled_rows_of_a_package_are_dealt_as_those_of_other_sources(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", x=random.normal(size=(60, 64)).astype(np.float32), y=np.arange(60) % 3)
    partition = {"by": "classes", "users": 3, "classes_per_user": 2}
    data = {"source": "rows", "options": {"path": "rows.npz"}, "partition": partition}
    monkeypatch.chdir(tmp_path)
    users = load_users(experiment_from({**DIGITS, "data": data}).data, 0, None, tmp_path)
    npz = {"source": "npz", "path": "rows.npz", "features": "x", "target": "y", "partition": partition}
    wanted = load_users(experiment_from({**DIGITS, "data": npz}).data, 0, None, tmp_path)
    for mine, other in zip(users, wanted, strict=True):
        np.testing.assert_array_equal(mine.features, other.features)
        np.testing.assert_array_equal(mine.test_target, other.test_target)
    outside = experiment_from({**DIGITS, "data": {**data, "options": {"path": "../rows.npz"}}})
    with pytest.raises(ConfigError, match=r"^data path '../rows.npz' leaves the data folder"):
        load_users(outside.data, 0, None, tmp_path)
    without = experiment_from({**DIGITS, "data": {**data, "partition": None}})
    with pytest.raises(ConfigError, match=r"partition.by is 'user', but the rows of rows have no users"):
        load_users(without.data, 0, None, tmp_path)
    users_too = {"source": "lines", "options": {"users": 3}, "partition": partition}
    with pytest.raises(ConfigError, match=r"^lines returned users, and data.partition deals labelled rows: want one of the two$"):
        load_users(experiment_from({**CONVEX, "data": users_too}).data, 0, None)


# ---- mistakes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"problem": {"loss": "sqare"}}, "problem.loss: loss 'sqare' is unknown: want one of squared_hinge, "),
        ({"problem": {"loss": "sqare"}}, "; did you mean 'square'?"),
        ({"model": {"name": "smal"}}, "model.name: is 'smal', want one of linear, mlp, cnn, lstm, custom, small; did you mean 'small'?"),
        ({"data": {"source": "line"}}, "growth, ilea, digits, lines, rows; did you mean 'lines'?"),
        ({"model": {"build": "nothing"}}, "model.build: model 'nothing' is unknown: want one of small, or an import path"),
        (
            {"data": {"source": "digits", "partition": {"by": "turn", "users": 2}}},
            "data.partition.by: partition 'turn' is unknown: want one of classes, dirichlet, user, beyond, nobody, turns, ",
        ),
        (
            {"data": {"source": "digits", "partition": {"by": "turns", "alpha": 2}}},
            "data.partition: alpha is 2.0 and by is 'turns', want it with by: dirichlet",
        ),
        ({"data": {"source": "digits", "partition": {"by": "user", "options": {"a": 1}}}}, "want it with by: a rule of your own"),
    ],
)
def test_unknown_names_are_answered_with_those_there_are(pack: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment_from({**DIGITS, **change})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": {"source": "lines", "options": {"user": 4}}}, "data.options: users: Field required; user: Extra inputs"),
        ({"problem": {"loss": "plain"}}, "loss 'plain' is a NetworkLoss without value()"),
    ],
)
def test_what_does_not_fit_a_convex_experiment_is_one_sentence(pack: Path, change: dict[str, Any], sentence: str) -> None:
    assert sentence in str(refused({**CONVEX, **change}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"problem": {"loss": "square"}}, "loss 'square' is a type, and the experiment has a network: want a coterie.plugin.NetworkLoss"),
        ({"problem": {"loss": "vector"}}, "loss 'vector' gives a value of shape ["),
        ({"problem": {"loss": "detached"}}, "loss 'detached' has no gradient in the outputs: want it to be made of them by torch"),
        ({"problem": {"loss": "pinball"}}, "the model has 10 outputs, want 1 for the loss pinball"),
        (
            {"data": {"source": "digits", "partition": {"by": "twice"}}},
            "partition 'twice' gives row 1 to users 'a' and 'b', want each row once",
        ),
        ({"data": {"source": "digits", "partition": {"by": "nobody"}}}, "partition 'nobody' has dealt to 0 users"),
        ({"data": {"source": "digits", "partition": {"by": "beyond"}}}, "gives user 'a' row 1000000, want one of the 1797 rows to deal"),
        ({"data": {"source": "digits", "partition": {"by": "words"}}}, "gives user 'a' <U1 of shape (1,), want row numbers"),
        ({"data": {"source": "digits", "partition": {"by": "turns"}}}, "partition 'turns' has raised TypeError: "),
        ({"data": {"source": "digits", "partition": {"by": "pack_a:Square"}}}, "is a type, want a coterie.plugin.PartitionRule"),
    ],
)
def test_what_does_not_fit_a_network_is_one_sentence(pack: Path, change: dict[str, Any], sentence: str) -> None:
    assert sentence in str(refused({**DIGITS, **change}))


def test_a_name_of_two_packages_is_one_sentence(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"coterie.losses": {"square": "pack_b:Square"}}
    monkeypatch.syspath_prepend(installed(tmp_path / "second", "pack-b", "0.3", names, {"pack_b": CODE}))
    with pytest.raises(ConfigError) as caught:
        experiment_from(CONVEX)
    assert str(caught.value) == "loss 'square' is of 2 packages, pack-a 1.2 and pack-b 0.3: want one of them uninstalled"
    assert caught.value.finding.sentence == "a name of the experiment is of two packages (problem.loss) (rule L9)"


@pytest.mark.parametrize("statement", ["raise SystemExit(7)", "raise ValueError('SECRET')", "import no_such_module_either"])
def test_a_package_that_fails_at_import_is_one_sentence_of_which_others_hear_no_word(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"coterie.losses": {"broken": "pack_broken:LOSS"}}
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "pack-broken", "2", names, {"pack_broken": statement}))
    experiment = experiment_from({**CONVEX, "data": {"source": "ellipses"}, "problem": {"loss": "broken"}})
    with pytest.raises(ConfigError, match=r"^loss 'broken' of the package pack-broken 2 cannot be imported: ") as caught:
        build_host("a", experiment, "run", None)
    assert caught.value.finding.sentence == "code that the experiment names cannot be used (problem.loss) (rule L4)"


def test_an_entry_point_to_nothing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"coterie.losses": {"empty": "pack_empty:LOSS.inner"}}
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "pack-empty", "2", names, {"pack_empty": "LOSS = 1"}))
    with pytest.raises(
        ConfigError, match=r"^loss 'empty' of the package pack-empty 2 does not exist: module 'pack_empty' has no 'LOSS.inner'$"
    ):
        plugins.load("loss", "empty")


# ---- versions, consent and policy


def test_another_version_is_refused_with_one_sentence(pack: Path) -> None:
    content = json.loads(experiment_to_json(experiment_from(CONVEX)))
    other = experiment_from({**content, "packages": {"pack-a": "1.3"}})
    with pytest.raises(ConfigError) as caught:
        build_host("a", other, "run", None)
    assert str(caught.value) == "the package pack-a is installed here in version 1.2, and the experiment needs version 1.3"
    assert caught.value.finding.sentence == "a package of the experiment has another version (rule L10)"
    assert str(refused({**CONVEX, "packages": {"pack-a": "1.3"}})) == str(caught.value)


def test_a_package_that_is_not_installed_is_one_sentence(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(experiment_to_json(experiment_from(CONVEX)))
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(pack)])
    with pytest.raises(ConfigError) as caught:
        experiment_from(content)
    assert str(caught.value) == "the experiment needs the package pack-a '1.2', which is not installed here"
    assert caught.value.finding.rule == "L8"


def test_packages_that_take_no_part_are_left_out_and_names_that_are_none_are_refused(pack: Path) -> None:
    changed = {**json.loads(experiment_to_json(experiment_from(CONVEX))), "data": {"source": "ellipses"}, "problem": {"loss": "logistic"}}
    assert experiment_from(changed).packages == {}
    for packages in ({"../x": "1"}, {"pack-a": "1 or 2"}, {"pack-a": 1}, ["pack-a"]):
        with pytest.raises(ConfigError, match="packages"):
            experiment_from({**CONVEX, "packages": packages})


def test_consent_names_the_package_and_its_version(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = experiment_from(CONVEX)
    other = experiment.model_copy(update={"packages": {"pack-a": "1.3"}})
    assert consent_hash(experiment) != consent_hash(other)
    assert changed_parts(consent_parts(experiment), consent_parts(other)) == ["packages.pack-a"]
    assert "  code of installed packages: pack-a 1.2" in asked_lines(experiment)
    assert not [line for line in asked_lines(load("ellipses")) if "packages" in line]


def test_a_policy_may_list_the_packages_and_sees_no_columns_of_theirs(pack: Path) -> None:
    experiment = experiment_from(CONVEX)
    assert breaches(Policy(code=False), experiment) == []
    assert breaches(Policy(packages=("pack-a",)), experiment) == []
    (found,) = breaches(Policy(packages=("other",)), experiment)
    assert (found.sentence, found.finding.rule) == ("code of the package 'pack-a', want one of 'other'", "C5")
    (found,) = breaches(Policy.model_validate({"columns": {"features": ["a"]}}), experiment)
    assert found.finding.sentence == "its policy and the data source do not fit (data.path) (rule C7)"


# ---- what it costs


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_packages_are_not_searched_where_all_names_are_built_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(**_: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(importlib.metadata, "entry_points", searched)
    plugins._entries.cache_clear()
    experiment = load(name)
    assert isinstance(experiment, Experiment)
    assert experiment.packages == {}
    if experiment.data.source == "ellipses":
        build_host("a", experiment, "run", None)


# ---- the public names

NAMES_OF_AUTHORS = """
    ABSENT Array Broadcast ClientHalf Compressor ConfigError Context ConvexProblem Counts DataSource Draws Federation Fit Fitted
    Gradient Gradients Inbox Indices JointTraining LOCAL_UPDATE LabelledRows Local LocalTraining LocalUpdate Message Method Moved
    NetworkLoss Numbers Optimizer Outcome PartialSharing PartitionRequest PartitionRule Phase PlainSgd Positions Received Replies
    Reveal RobustRule RowLoss Rows RunError Scalars ServerHalf ServerUpdate Setting Settings SharedState Slope SourceRequest StageHalf
    Stream Sum Tensors Totals Training UNASKED User Vectors Wanted Weights declare evaluated judge_own normal own_model pulled stream
"""


def test_the_public_names_are_these() -> None:
    assert plugin.__all__ == sorted(NAMES_OF_AUTHORS.split())
    assert all(getattr(plugin, name) is not None for name in plugin.__all__)
    stub = Path(plugin.__file__).with_suffix(".pyi").read_text()
    assert {name: module for module, name in re.findall(r"from (coterie\S+) import (\w+) as ", stub)} == plugin.FETCHED
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        plugin.Nothing  # noqa: B018


def test_the_packages_of_this_repository_import_public_names_only() -> None:
    modules = list((ROOT / "deploy/plugins").glob("*/*.py"))
    assert len(modules) >= 8
    imported = {module for path in modules for module in re.findall(r"^\s*(?:from|import) (coterie[\w.]*)", path.read_text(), re.M)}
    assert imported == {"coterie", "coterie.plugin"}
    assert len((ROOT / "deploy/plugins/fedbabu/fedbabu.py").read_text().splitlines()) <= 60


WRITTEN = """
    ClientHalf Context Inbox Local LocalTraining LocalUpdate Method Moved Outcome PartialSharing Received ServerHalf ServerUpdate Setting
    SharedState StageHalf Wanted
"""


@pytest.mark.parametrize("name", WRITTEN.split())
def test_each_field_of_what_authors_write_is_documented(name: str) -> None:
    """By `#:` behind it or above it, which documentation and editors read."""
    lines = inspect.getsource(getattr(plugin, name)).splitlines()
    fields = {node.target.id: node for node in _body(lines) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert fields
    for field, node in fields.items():
        assert lines[node.lineno - 2].startswith("    #: ") or "  #: " in lines[(node.end_lineno or 0) - 1], f"{name}.{field}"


def _body(lines: list[str]) -> list[ast.stmt]:
    (node,) = ast.parse("\n".join(lines)).body
    assert isinstance(node, ast.ClassDef)
    return node.body


def test_a_stream_of_an_author_is_the_same_everywhere() -> None:
    numbers = plugin.normal(plugin.stream(5, "noise of mine", 3, "u1"), 4)
    np.testing.assert_array_equal(numbers, plugin.normal(plugin.stream(5, "noise of mine", 3, "u1"), 4))
    assert not np.isin(numbers, plugin.normal(plugin.stream(5, "noise of mine", 3, "u2"), 4)).any()
    assert (plugin.stream.__doc__ or "").count("normal(draws, d)") == 1
