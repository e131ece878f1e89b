"""The digits of scikit-learn over gRPC with four host processes: what FedRep must reach, and that alternating updates beat joint ones."""

from __future__ import annotations

import pytest

from coterie import run

JOINT = "method={name: fedper, participation: 0.5, optimizer: {lr: 0.01, momentum: 0.5, weight_decay: 1.0e-4}}"


def accuracy(classes: int, *overrides: str) -> float:
    """The mean of the users' accuracies over the last rounds."""
    result = run("digits", transport="grpc", hosts=4, overrides=[f"data.partition.classes_per_user={classes}", *overrides])
    return result.metrics[result.final_stage]["last_rounds_accuracy"]


@pytest.mark.slow
def test_users_in_stacks_learn_what_they_learn_one_after_another() -> None:
    found = {training: accuracy(2, f"model.training={training}") for training in ("alone", "stacked")}
    assert found["stacked"] == pytest.approx(found["alone"], abs=0.005)  # the rounding of one model reaches all users


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "wanted"), [(2, 0.94), (5, 0.85)])
def test_fedrep_reaches_its_figures_and_is_above_fedper(classes: int, wanted: float) -> None:
    fedrep = accuracy(classes)
    assert fedrep >= wanted
    assert fedrep > accuracy(classes, JOINT) + 0.02
