"""Methods are found by their modules."""

from __future__ import annotations

import sys
import types

import pytest

import coterie.methods
from coterie.errors import ConfigError
from coterie.experiment.config import experiment_from
from coterie.experiment.method import ANY_MODEL, CONVEX, NETWORK
from coterie.families.partial import LocalTraining
from coterie.methods.fedavg import Config
from coterie.registry import is_method, method, methods


def test_a_module_with_a_method_of_its_name_is_a_method_and_no_other() -> None:
    assert {"pdmm", "global", "fedavg"} <= set(methods())
    for name in ("partial", "prepare", "known_clusters", "schedule", "global_", "nothing", "", "fedavg.Config", "../fedavg", None, 3):
        assert not is_method(name)
        assert name not in methods()


def test_methods_say_what_models_they_are_for() -> None:
    assert set(methods("convex")) | set(methods("network")) == set(methods())
    assert set(methods("convex")) & set(methods("network")) >= {"fedavg", "ditto", "ifca"}
    assert method("pdmm").models == CONVEX
    assert method("fedrep").models == NETWORK


def test_a_new_module_is_a_method_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Config):
        name: str = "mine"  # type: ignore[assignment]

    module = types.ModuleType("coterie.methods.mine")
    module.METHOD = LocalTraining(config=Mine, models=ANY_MODEL)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "coterie.methods.mine", module)
    monkeypatch.setattr(coterie.methods, "mine", module, raising=False)
    content = {"name": "e", "data": {"source": "hsb"}, "problem": {"loss": "least_squares"}, "method": {"name": "mine"}}
    assert isinstance(experiment_from(content).method, Mine)
    with pytest.raises(ConfigError, match="the method 'mime' is unknown, want one of adapt, apfl, "):
        experiment_from({**content, "method": {"name": "mime"}})
