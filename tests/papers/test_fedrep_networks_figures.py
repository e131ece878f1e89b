"""Figures 5 and 6 of Collins, Hassani, Mokhtari and Shakkottai (2021), on the data at hand."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from coterie.errors import ConfigError
from coterie_deploy.studies.reproduce import fedrep_networks, reproduce


def test_figure_6_says_which_data_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"figure 6 trains on mnist_writers.npz, which is not in .*: want --data DIR with it"):
        reproduce("fedrep-figure6", seeds=1, output=tmp_path, data=tmp_path, console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_figure_5_more_head_epochs_do_not_hurt_fedrep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "FedRep's performance is monotonically non-decreasing with E": within what a seed of 20 users can tell."""
    said = io.StringIO()
    points = reproduce("fedrep-figure5", seeds=1, output=tmp_path, console=Console(file=said, width=80))
    accuracy = {(point.method, point.epochs): point.accuracy for point in points}  # type: ignore[union-attr]
    fedrep = [accuracy["fedrep", epochs] for epochs in fedrep_networks.EPOCHS]
    assert all(later >= earlier - 0.02 for earlier, later in itertools.pairwise(fedrep))
    assert all(accuracy["fedrep", epochs] > accuracy["fedavg", epochs] + 0.1 for epochs in fedrep_networks.EPOCHS)
    assert (tmp_path / "fedrep-figure5.png").stat().st_size > 10_000
    assert len((tmp_path / "fedrep-figure5.csv").read_text().splitlines()) == 1 + len(points)
    assert "digits" in said.getvalue()

    def again(*_: object) -> None:
        raise AssertionError("what is in the folder was measured again")

    monkeypatch.setattr(fedrep_networks, "_run", again)
    assert reproduce("fedrep-figure5", seeds=1, output=tmp_path, console=Console(file=io.StringIO())) == points
