"""The fixtures' rows as a data source, so that an experiment can be run on them: what CVXPY has solved, solved by a federation."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import JsonValue

from coterie.experiment.config import Experiment, experiment_from
from coterie_client.data import UserData
from coterie_client.data.sources import user_source

FOLDER = Path(__file__).parents[1] / "fixtures"


@functools.cache
def fixture(n_users: int) -> dict[str, Any]:
    """The fixture with 6 or 60 users."""
    content: dict[str, Any] = json.loads((FOLDER / f"convex_clustering_{n_users}.json").read_text(encoding="utf-8"))
    return content


@user_source
def users(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """Users "u0", "u1", ... of the fixture with `n_users` users; those of a cluster share its test rows."""
    n_users = options["n_users"]
    assert isinstance(n_users, int)
    content = fixture(n_users)
    made = []
    for place in range(n_users):
        rows, targets, label = np.array(content["A"][place]), np.array(content["Y"][place], float), content["label"][place]
        test = content["test"][label]
        made.append(UserData(f"u{place}", f"c{label}", rows, targets, np.array(test["A"]), np.array(test["Y"], float)))
    return made


def experiment(n_users: int, method: Mapping[str, Any], **more: Any) -> Experiment:
    """An experiment on the fixture's rows, with its loss."""
    data = {"source": "python", "path": "tests.papers.fixture_data:users", "options": {"n_users": n_users}}
    problem = {"loss": "squared_hinge", "l2": fixture(n_users)["c"]}
    return experiment_from({"name": "fixture", "data": data, "problem": problem, "method": dict(method), **more})


__all__ = ["experiment", "fixture", "users"]
