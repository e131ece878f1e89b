"""The local work that a method declares, against the gradients that its users take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coterie_client.nets import slope
from tests.local_updates import PLAIN, Users, a_model

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedprox", {}),
    ("ditto", {}),
    ("ditto", {"personal_epochs": 3}),
    ("apfl", {}),
    ("pfedme", {"personal_steps": 3}),
    ("per_fedavg", {}),
    ("per_fedavg", {"hessian": "hf"}),
]


@pytest.mark.parametrize(("name", "keys"), METHODS)
def test_a_pass_of_a_method_is_a_gradient_of_each_row_of_its_user(name: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    users = Users({"name": name, **PLAIN, **keys})
    n_rows, taken = len(users.users[0].target), 0
    plain = slope.TorchSlope.__call__

    def counted(self: Any, rows: torch.Tensor) -> Any:
        nonlocal taken
        taken += len(rows)
        return plain(self, rows)

    monkeypatch.setattr(slope.TorchSlope, "__call__", counted)
    users.round(1, a_model(users, seed=1), (0,))
    assert taken == n_rows * users.experiment.method.work.passes
