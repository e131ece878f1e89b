"""Steps of networks on rows with noise: what is clipped, that rows are apart, and that noise is drawn once for what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.draws import secret
from coterie.draws.secret import KEY_BYTES, Secret
from coterie.errors import ConfigError
from coterie.experiment.model import CnnModel, LstmModel, MlpModel
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.learning.private import RowNoise, clipped
from coterie_client.nets import TorchNetwork
from coterie_client.nets.private import RowwiseSlope, check_rows_apart
from tests.integration.test_privacy import Heard, final
from tests.networks import CLASSES, WIDTH, network_experiment, write_users
from tests.simulation import query, random_faults

ROW = {"unit": "row", "clip": 0.5, "noise_multiplier": 1.5, "delta": 1e-2}
METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedrep": {"name": "fedrep", "head_epochs": 1},
    "ditto": {"name": "ditto"},
    "fed_mtl": {"name": "fed_mtl", "mu": 0.3},
}
KEY = Secret(bytes(KEY_BYTES))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_users(tmp_path_factory.mktemp("privacy") / "users.npz")


def mlp() -> TorchNetwork:
    return TorchNetwork(MlpModel(name="mlp", hidden=(4,), classes=CLASSES), "cross_entropy", 0, (WIDTH,))


def rows_of(n_rows: int = 6) -> Rows:
    rng = np.random.default_rng(0)
    return Rows(rng.standard_normal((n_rows, WIDTH)), rng.integers(0, CLASSES, n_rows).astype(float), "u")


def fitted(network: TorchNetwork, rows: Rows, multiplier: float, phase: Phase) -> dict[str, Any]:
    noise = RowNoise(0.5, multiplier, KEY.child("test").numbers())
    return network.fit(network.initial(), rows, [phase], Draw(0, "u", 1, "test"), noise).tensors


def by_hand(network: TorchNetwork, rows: Rows, names: list[str], pull: tuple[float, Mapping[str, Any]] = (0.0, {})) -> np.ndarray[Any, Any]:
    """(m, d) gradients of rows, by one backward pass each."""
    module, start = network._built(0), network.initial()
    parameters, found = dict(module.named_parameters()), []
    for x, y in zip(rows.features, rows.target, strict=True):
        module.zero_grad()
        nn.functional.cross_entropy(module(torch.tensor(x[None], dtype=torch.float32)), torch.tensor([int(y)])).backward()  # type: ignore[no-untyped-call]
        moved = [parameters[name].grad.numpy() + pull[0] * (start[name] - pull[1].get(name, start[name])) for name in names]  # type: ignore[union-attr]
        found.append(np.concatenate([array.ravel() for array in moved]))
    return np.array(found, np.float64)


@pytest.mark.parametrize("part", ["all", "head"])
def test_a_step_of_a_network_shortens_the_gradient_of_each_row_with_its_pull_over_all_parameters(part: Any) -> None:
    network, rows = mlp(), rows_of()
    names = [tensor.name for tensor in network.tensors if part in ("all", tensor.part)]
    pull = (0.7, {name: np.full_like(array, 0.2) for name, array in network.initial().items()})
    after = fitted(network, rows, 2.0, Phase(part, None, 1, None, 0.1, pull=pull))
    each = by_hand(network, rows, names, pull)
    assert (np.linalg.norm(each, axis=1) > 0.5).any()
    total = clipped(each, 0.5).sum(axis=0) + 2.0 * 0.5 * KEY.child("test").numbers().normal(each.shape[1])
    before = network.initial()
    found = np.concatenate([((before[name] - after[name]) / 0.1).ravel() for name in names])
    np.testing.assert_allclose(found, total / len(each), rtol=1e-3, atol=1e-5)
    assert all(np.array_equal(before[name], after[name]) for name in before if name not in names)


def test_no_row_moves_a_sum_by_more_than_the_clip() -> None:
    """With all rows in each step: a row that is huge, against one without a gradient."""
    network, rows = mlp(), rows_of()
    names = [tensor.name for tensor in network.tensors]
    large = Rows(np.concatenate([rows.features, np.full((1, WIDTH), 1e4)]), np.append(rows.target, 0.0), "u")
    slope = RowwiseSlope(
        network._module, names, network._reader.inputs(large.features), network._reader.targets(large.target), network._loss.mean
    )
    each = clipped(np.concatenate(list(slope.of_rows(np.arange(7)))), 0.5)
    assert np.linalg.norm(each[:6].sum(axis=0) - each.sum(axis=0)) <= 0.5 * (1 + 1e-12)
    assert max(np.linalg.norm(each, axis=1)) > 0.49


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CnnModel(name="cnn", classes=3, channels=(2, 3), hidden=(5, 4)), (1, 16, 16)),
        (LstmModel(name="lstm", classes=3, symbols=9, embedding=3, hidden=4), (6,)),
    ],
    ids=["cnn", "lstm"],
)
def test_gradients_of_rows_add_up_to_that_of_their_mean(config: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie_client.nets.private._AT_ONCE", 500)  # in several pieces
    rng = np.random.default_rng(1)
    network = TorchNetwork(config, "cross_entropy", 0, shape)
    features = rng.integers(0, 9, (7, *shape)) if isinstance(config, LstmModel) else rng.standard_normal((7, *shape))
    inputs, targets = network._reader.inputs(features), network._reader.targets(rng.integers(0, 3, 7).astype(float))
    names = [name for name, _ in network._module.named_parameters()]
    slope = RowwiseSlope(network._module, names, inputs, targets, network._loss.mean)
    pieces = list(slope.of_rows(np.arange(7)))
    assert len(pieces) > 1
    _, wanted = slope(torch.arange(7))
    found = slope.split(np.concatenate(pieces).mean(axis=0))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.BatchNorm1d(3), "'1' of the model is BatchNorm1d, which mixes the rows of a batch: want a norm by rows"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "is InstanceNorm1d, which keeps statistics of rows without noise"),
        (nn.Dropout(0.1), "is Dropout, which follows the public seed and the place of a row among others: want no dropout"),
    ],
)
def test_layers_in_which_rows_are_not_apart_are_refused(layer: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_rows_apart(nn.Sequential(nn.Linear(3, 3), layer))
    check_rows_apart(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3)))


@pytest.mark.parametrize("method", METHODS)
def test_a_network_with_noise_on_rows_spends_what_was_asked(method: str, archive: Path, tmp_path: Path) -> None:
    asked = {**ROW, "noise_multiplier": None, "epsilon": 3.0}
    Heard(
        network_experiment(archive, {**METHODS[method], "participation": 1.0}, privacy=asked, stop={"rounds": 3}), tmp_path / "run", 2
    ).run()
    spent = [value for (value,) in query(tmp_path / "run", "select value from figures where name = 'epsilon' order by round")]
    assert len(spent) == 3
    assert 2.95 < spent[-1] <= 3.0
    assert not query(tmp_path / "run", "select * from ledger where step = 'loss'")


def test_networks_with_noise_on_rows_survive_kills_with_the_same_bits(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret, "new_key", lambda: b"k" * KEY_BYTES)
    monkeypatch.setattr("coterie_server.run.coordinator.secrets.token_hex", lambda n: "ab" * n)
    experiment = network_experiment(archive, {**METHODS["fedrep"], "participation": 1.0}, privacy=ROW, stop={"rounds": 4})
    calm = Heard(experiment, tmp_path / "calm", 2)
    wanted = final(calm.run())
    n_exchanges = query(tmp_path / "calm", "select max(seq) from ledger")[0][0]
    for seed in range(2):
        world = Heard(experiment, tmp_path / f"{seed}", 2, random_faults(seed, n_exchanges, list(calm.users)), keeps_hosts=seed % 2 == 0)
        assert final(world.run()) == wanted
        assert {len(contents) for contents in world.sent.values()} == {1}
