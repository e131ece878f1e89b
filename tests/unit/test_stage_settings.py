"""A parent's settings of a stage decide what travels, as steps do: a host takes those of its experiment and no others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment, experiment_from
from coterie.families.consensus import AskModels
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_client.interface.half import client_half

NETWORK = {"model": {"name": "mlp", "classes": 2}, "problem": {"loss": "cross_entropy"}}


def experiment(method: dict[str, Any], **more: Any) -> Experiment:
    data = {"source": "ellipses", "clusters": 1, "users_per_cluster": 2}
    return experiment_from({"name": "one", "data": data, "problem": {"loss": "least_squares"}, "method": method, **more})


def allows(room: str, options: dict[str, Any], served: Experiment, n_members: int = 2) -> bool:
    found = client_half(room)
    assert found is not None
    return found[1].allows(json.loads(json.dumps(options)), served, n_members)


@pytest.mark.parametrize("changes", [{"sharing": "all"}, {"delivers": "all"}, {"n_models": 2}, {"update": "ditto"}, {"phases": []}])
@pytest.mark.parametrize("name", ["fedrep", "local_network"])
def test_private_tensors_stay_whatever_the_parent_says_is_shared(name: str, changes: dict[str, Any]) -> None:
    served = experiment({"name": name}, **NETWORK)
    options = served.method.client_options()
    assert allows("partial", options, served)
    assert not allows("partial", {**options, **changes}, served)


def test_no_network_is_trained_for_a_method_without_one() -> None:
    options = experiment({"name": "fedrep"}, **NETWORK).method.client_options()
    assert not allows("partial", options, experiment({"name": "local"}))


def test_heads_stay_whatever_the_parent_says_is_shared() -> None:
    served = experiment({"name": "fedrep_linear"})
    options = served.method.model_dump(mode="json")
    assert allows("fedrep_linear", options, served)
    assert not allows("fedrep_linear", {**options, "heads": "shared"}, served)


def test_a_ridge_is_that_of_the_penalty() -> None:
    squared, local = experiment({"name": "squared", "penalty": 0.1}), experiment({"name": "local"})
    grid = experiment({"name": "squared", "penalty": 0.1, "grid": [{"penalty": 0.5}]})
    for served, ridge, allowed in (
        (squared, 2 * 0.1 * 2, True),
        (grid, 2 * 0.5 * 2, True),
        (squared, 1.0, False),
        (squared, None, True),
        (local, 1.0, False),
    ):
        assert allows("consensus", {"ridge": ridge, "with_hessians": False}, served) == allowed


def test_below_an_aggregator_a_ridge_is_that_of_some_number_of_users() -> None:
    clusters = {"federation": {"topology": "clusters"}}
    for method, ridge, allowed in (
        ({"name": "squared", "penalty": 0.1}, 2 * 0.1 * 9, True),
        ({"name": "squared", "gamma_eq4": 0.1}, 2 * (2 * 9 * 0.1) * 9, True),
        ({"name": "squared", "penalty": 0.1}, 2 * 0.1 * 1, False),
        ({"name": "squared", "penalty": 0.1}, 2 * 0.1 * 9.5, False),
    ):
        assert allows("consensus", {"ridge": ridge, "with_hessians": False}, experiment(method, **clusters)) == allowed


def host(served: Experiment) -> Host:
    return build_host("h", served, "r", None)


def test_a_host_refuses_settings_that_its_experiment_does_not_have() -> None:
    stage = {"stage": "local", "options": {"consensus": {"ridge": 1.0, "with_hessians": False}}}
    with pytest.raises(ProtocolError, match="settings of 'consensus' are not those of the experiment") as caught:
        host(experiment({"name": "local"}))._begin_stage(json.dumps(stage))
    assert caught.value.finding.rule == "C10"


def test_models_near_a_point_are_for_stages_with_a_ridge() -> None:
    served = host(experiment({"name": "local"}))
    served._begin_stage(json.dumps({"stage": "local", "options": {"consensus": {"ridge": None, "with_hessians": False}}}))
    with pytest.raises(ProtocolError, match="has no ridge"):
        served._dispatch([AskModels(np.zeros((2, 3)))], 1)
