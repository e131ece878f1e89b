"""What the tests of several engines compare with."""

from __future__ import annotations

import pytest

from tests.commands import LONG, in_one_process, models


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The models of LONG, undisturbed in one process."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "long.yaml").write_text(LONG)
    return models(in_one_process(folder, "long.yaml"))
