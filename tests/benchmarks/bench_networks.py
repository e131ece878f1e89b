"""What training costs: head epochs with cached features beside those through the whole network, a step of a linear head, an epoch on all.

Then CPU milliseconds of a user's local update in shipped experiments, one user after another and in stacks. All are measured in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coterie.experiment.model import CnnModel, LinearModel, MlpModel
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.nets import TorchNetwork
from tests.benchmarks import record
from tests.benchmarks.record import Figure

HEAD_EPOCHS = 10
DRAW = Draw(1, "user", 1, "training")


def phase(part: Any, **changes: Any) -> Phase:
    """The paper's settings: batches of 10, learning rate .01, momentum .5."""
    return Phase(**{"part": part, "epochs": HEAD_EPOCHS, "updates": None, "batch_size": 10, "lr": 0.01, "momentum": 0.5, **changes})


def fit_s(network: TorchNetwork, rows: Rows, step: Phase) -> float:
    """Seconds of one local update."""
    start = network.initial()
    began = time.perf_counter()
    network.fit(start, rows, [step], DRAW)
    return time.perf_counter() - began


class Federation:
    """The drawn users of a round of a shipped experiment with FedRep on an MLP: shapes and row counts, with random rows."""

    def __init__(self, shape: tuple[int, ...], counts: list[int], epochs: int, **model: Any) -> None:
        rng = np.random.default_rng(0)
        self._network = TorchNetwork(MlpModel(name="mlp", classes=10, training="stacked", **model), "cross_entropy", 1, shape)
        self._users = [
            Rows(rng.integers(0, 256, (m, *shape), dtype=np.uint8), rng.integers(0, 10, m).astype(float), f"u{m}") for m in counts
        ]
        self._names = tuple(f"user {number}" for number in range(len(counts)))
        self._counts = np.array(counts)
        self._phases = [phase("head", weight_decay=1e-4), phase("representation", epochs=epochs, weight_decay=1e-4)]
        start = self._network.initial()
        self._start, self._starts = start, {name: np.repeat(array[None], len(counts), axis=0) for name, array in start.items()}

    def alone_ms(self) -> float:
        """CPU time of a user, one after another."""
        began = time.process_time()
        for user, name in zip(self._users, self._names, strict=True):
            self._network.fit(self._start, user, self._phases, Draw(1, name, 1, "training"))
        return 1e3 * (time.process_time() - began) / len(self._users)

    def stacked_ms(self) -> float:
        """CPU time of a user in stacks."""
        began = time.process_time()
        for places in self._network.stacks(self._counts, self._phases):
            tensors = {name: array[places] for name, array in self._starts.items()}
            draw = Draw(1, tuple(self._names[i] for i in places), 1, "training")
            self._network.fit_together(tensors, [self._users[i] for i in places], self._phases, draw)
        return 1e3 * (time.process_time() - began) / len(self._users)


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    return [one / other for one, other in zip(slow, fast, strict=True)]


def stacks(repeats: int) -> Iterator[Figure]:
    """By experiment: the times, and how many times as fast stacks are."""
    rng = np.random.default_rng(1)
    cases = {
        "digits": Federation((64,), rng.integers(60, 85, 10).tolist(), 1),
        "cifar10-jpeg": Federation((3, 32, 32), [400] * 10, 1, pool=4, input_mean=(0.47,), input_std=(0.2,)),
        "writers": Federation((784,), rng.integers(25, 36, 15).tolist(), 5),
        "writers, all 150": Federation((784,), rng.integers(25, 36, 150).tolist(), 5),
    }
    for name, case in cases.items():
        alone, stacked = map(list, zip(*((case.alone_ms(), case.stacked_ms()) for _ in range(repeats)), strict=True))
        yield Figure(f"{name}, a user alone", "CPU ms", alone)
        yield Figure(f"{name}, a user in stacks", "CPU ms", stacked)
        yield Figure(f"{name}, faster in stacks", "times", ratios(alone, stacked), "more")


def figures(rows: int = 500, repeats: int = 6) -> Iterator[Figure]:
    """The paper's CNN on rows of 3x32x32, a linear head of 64 features and 10 classes in batches of 10, and stacks; one thread."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, rows).astype(float)
    images = Rows(rng.integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8), labels)
    features = Rows(rng.standard_normal((rows, 64)).astype(np.float32), labels)
    cnn = TorchNetwork(CnnModel(name="cnn", classes=10), "cross_entropy", 1, (3, 32, 32))
    linear = TorchNetwork(LinearModel(name="linear", classes=10), "cross_entropy", 1, (64,))
    many = 20 * HEAD_EPOCHS
    cases: dict[str, Callable[[], float]] = {
        "cached": lambda: fit_s(cnn, images, phase("head")),
        "uncached": lambda: fit_s(cnn, images, phase("head", cache=False)),
        "representation": lambda: fit_s(cnn, images, phase("representation", epochs=1)),
        "written": lambda: fit_s(linear, features, phase("head", epochs=many)),
        "differentiated": lambda: fit_s(linear, features, phase("head", epochs=many, cache=False)),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            found[name].append(case())
    yield Figure(f"CNN, {HEAD_EPOCHS} head epochs, cached", "s", found["cached"])
    yield Figure(f"CNN, {HEAD_EPOCHS} head epochs, through the network", "s", found["uncached"])
    yield Figure("CNN, faster when cached", "times", ratios(found["uncached"], found["cached"]), "more", wanted=10)
    # The first of the cached epochs passes through the network once; differences of the cached times would be noise.
    further = [one / 20 for one in found["written"]]
    yield Figure("CNN, a further head epoch faster when cached", "times", ratios(found["uncached"], further), "more")
    yield Figure("CNN, a representation epoch", "s", found["representation"])
    n_steps = many * (rows // 10)
    yield Figure("linear head, a step by the written gradient", "us", [1e6 * one / n_steps for one in found["written"]], wanted=40)
    yield Figure("linear head, a step differentiated by torch", "us", [1e6 * one / n_steps for one in found["differentiated"]], None)
    yield from stacks(repeats)


if __name__ == "__main__":
    record.main(figures)
