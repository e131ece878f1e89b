"""What training costs: head epochs with cached features beside those through the whole network, a step of a linear head, an epoch on all.

Usage:  python -m tests.benchmarks.bench_networks [--rows 500] [--repeats 6]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.experiment.model import CnnModel, LinearModel
from coterie_client.learning import Draw, Phase, Rows
from coterie_client.nets import TorchNetwork

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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=6, help="alternating measurements, of which the best counts")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, arguments.rows).astype(float)
    images = Rows(rng.integers(0, 256, (arguments.rows, 3, 32, 32), dtype=np.uint8), labels)
    features = Rows(rng.standard_normal((arguments.rows, 64)).astype(np.float32), labels)
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
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(arguments.repeats):
        for name, case in cases.items():
            best[name] = min(best[name], case())
    n_steps = many * (arguments.rows // 10)
    print(f"the paper's CNN on {arguments.rows} rows of 3x32x32, one thread, best of {arguments.repeats}")
    print(f"  {HEAD_EPOCHS} head epochs   cached {best['cached']:.3f} s   through the network {best['uncached']:.3f} s", end="   ")
    print(f"{best['uncached'] / best['cached']:.1f} times faster   (wanted: at least 10)")
    further = best["written"] / many, best["uncached"] / HEAD_EPOCHS  # differences of the cached times would be noise
    print("  of the cached ones, the first passes through the network once; of the others, each is", end=" ")
    print(f"{further[1] / further[0]:.0f} times faster ({1e3 * further[0]:.1f} ms, {1e3 * further[1]:.0f} ms)")
    print(f"  1 representation epoch {best['representation']:.3f} s")
    print("a step of a linear head, 10 rows x 64 features x 10 classes")
    print(f"  by the written gradient {1e6 * best['written'] / n_steps:.1f} us", end="   ")
    print(f"differentiated by torch {1e6 * best['differentiated'] / n_steps:.1f} us   (wanted: at most 40 us)")


if __name__ == "__main__":
    main()
