"""A method with messages both ways and state at the server can be written from `coterie.plugin` alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie_deploy.studies.check import CHECKS, check_method
from tests.packaged import checked

SOURCE = Path(__file__).parents[1] / "variates_method.py"
QUICK = [check.name for check in CHECKS if not check.is_slow]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the method's module, which can be imported."""
    shutil.copy(SOURCE, tmp_path / "variates.py")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_it_imports_public_names_alone() -> None:
    assert set(re.findall(r"^(?:from|import) ([\w.]+)", SOURCE.read_text(), re.M)) == {
        "collections.abc",
        "coterie.plugin",
        "dataclasses",
        "numpy",
        "numpy.typing",
        "typing",
    }


@pytest.mark.usefixtures("folder")
def test_it_is_scaffold() -> None:
    """With all rows and all users nothing is drawn, so both have the same steps."""
    content: dict[str, Any] = {
        "name": "variates",
        "data": {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 5},
        "problem": {"loss": "logistic", "l2": 0.1},
        "stop": {"rounds": 6},
    }
    method = {"participation": 1.0, "batch_size": None, "epochs": 3, "optimizer": {"lr": 0.1}, "server_lr": 0.7, "fine_tune": []}
    found = [coterie.run({**content, "method": {"name": name, **method}}) for name in ("variates:METHOD", "scaffold")]
    assert found[0].models.keys() == found[1].models.keys()
    for user, model in found[0].models.items():
        np.testing.assert_allclose(model, found[1].models[user], rtol=1e-12)
    moved = [{(row["step"], row["direction"]): row["vectors"] for row in result.ledger()} for result in found]
    assert moved[0] == moved[1]
    assert moved[0]["variate", "up"] > 0


@pytest.mark.usefixtures("folder")
def test_it_passes_the_quick_checks() -> None:
    found = check_method("variates:METHOD", only=QUICK)
    assert [(one.check.name, one.reason) for one in found if one.state != "passed"] == []
    assert {one.check.name: one.reason for one in found}["private"] == "looked for rows and partial.kept, partial.private"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_passes_all_checks(folder: Path) -> None:
    assert "14 checks passed, 1 not applicable" in checked("variates", folder)
