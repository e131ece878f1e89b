"""From an experiment to its stages: which there are, in which order, and what each one starts from."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.experiment.config import StopRule, experiment_from
from coterie_deploy.engines.api import run
from coterie_server.interface.stages import REFERENCE_STOP
from coterie_server.run.plan import stages_of

STOP = {"residual": 1e-3, "rounds": 77}


def experiment(method, **more):
    data = {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 50}
    problem = {"loss": "squared_hinge", "l2": 1e-3}
    return experiment_from({"name": "plan", "data": data, "problem": problem, "method": method, "stop": STOP, **more})


def names_and_starts(method, **more):
    return [(stage.name, stage.start) for stage in stages_of(experiment(method, **more))]


def test_a_single_penalty_starts_from_the_global_model():
    assert names_and_starts({"name": "pdmm", "penalty": 0.1}) == [("global", ()), ("pdmm", ("global",))]


def test_a_start_at_zero_needs_no_stage_before():
    assert names_and_starts({"name": "pdmm", "penalty": 0.1, "start": "zero"}) == [("pdmm", ())]


def test_a_path_goes_on_from_stage_to_stage_and_each_penalty_is_refitted():
    assert names_and_starts({"name": "pdmm", "path": [0.2, 0.1, 0.05], "refit": True}) == [
        ("global", ()),
        ("pdmm-0.2", ("global",)),
        ("pdmm-0.1", ("pdmm-0.2",)),
        ("pdmm-0.05", ("pdmm-0.1",)),
        ("refit-0.2", ("pdmm-0.2",)),
        ("refit-0.1", ("pdmm-0.1",)),
        ("refit-0.05", ("pdmm-0.05",)),
    ]


def test_a_path_from_zero_is_warm_from_its_second_penalty_on():
    listed = stages_of(experiment({"name": "pdmm", "path": [0.2, 0.1], "start": "zero"}))
    assert [(stage.name, stage.start, stage.config.start) for stage in listed] == [
        ("pdmm-0.2", (), "zero"),
        ("pdmm-0.1", ("pdmm-0.2",), "global"),
    ]


def test_references_come_first_and_a_stage_that_is_also_a_start_comes_once():
    listed = names_and_starts({"name": "pdmm", "penalty": 0.1, "refit": True}, references=["local", "global", "oracle"])
    assert listed == [("local", ()), ("global", ()), ("oracle", ()), ("pdmm", ("global",)), ("refit", ("pdmm",))]


def test_the_stop_rule_holds_for_each_penalty_and_not_for_references_and_refit():
    listed = stages_of(experiment({"name": "pdmm", "path": [0.2, 0.1], "refit": True}, references=["local"]))
    assert {stage.name for stage in listed if stage.stop == StopRule(**STOP)} == {"pdmm-0.2", "pdmm-0.1"}
    assert {stage.name for stage in listed if stage.stop == REFERENCE_STOP} == {"local", "global", "refit-0.2", "refit-0.1"}


def test_each_stage_of_a_path_has_one_penalty_and_the_refit_takes_the_clusters_found():
    *_, first, second, refit, _ = stages_of(experiment({"name": "pdmm", "path": [0.2, 0.1], "refit": True}))
    assert [(stage.config.penalty, stage.config.path, stage.config.refit) for stage in (first, second)] == [
        (0.2, None, False),
        (0.1, None, False),
    ]
    assert (refit.method, refit.config.partition) == ("oracle", "found")


@pytest.mark.parametrize("penalty", ["lambda_eq3", "lambda_eq14"])
def test_a_penalty_in_another_convention_stays_as_it_is_until_the_users_are_known(penalty):
    listed = stages_of(experiment({"name": "pdmm", penalty: 0.1}))
    assert getattr(listed[-1].config, penalty) == 0.1


@pytest.mark.parametrize("method", [{"name": "certify"}, {"name": "local"}, {"name": "squared", "penalty": 1.0}])
def test_other_methods_are_one_stage_with_the_stop_rule(method):
    (stage,) = stages_of(experiment(method))
    assert (stage.name, stage.method, stage.start, stage.stop) == (method["name"], method["name"], (), StopRule(**STOP))


def results(method, **more):
    return [stage.name for stage in stages_of(experiment(method, **more)) if stage.is_result]


def test_the_result_is_the_refit_asked_for_or_any_stage_of_a_path_or_the_only_stage():
    assert results({"name": "pdmm", "penalty": 0.1}) == ["pdmm"]
    assert results({"name": "pdmm", "penalty": 0.1, "refit": True}) == ["refit"]
    assert results({"name": "pdmm", "path": [0.2, 0.1], "refit": True}) == ["pdmm-0.2", "pdmm-0.1", "refit-0.2", "refit-0.1"]
    assert results({"name": "global"}, references=["global", "local"]) == ["global"]


def test_held_out_rows_choose_among_a_path_and_its_refits():
    result = run(experiment({"name": "pdmm", "path": [3.0, 0.5, 0.05], "refit": True}))
    losses = {name: figures["heldout_loss"] for name, figures in result.metrics.items() if name.startswith(("pdmm-", "refit-"))}
    assert len(losses) == 6
    assert losses[result.final_stage] == min(losses.values())
    for penalty in ("3.0", "0.5", "0.05"):
        np.testing.assert_array_equal(result.outcomes[f"refit-{penalty}"].labels, result.outcomes[f"pdmm-{penalty}"].labels)
