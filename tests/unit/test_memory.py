"""What stages need at the server is said, and refused where it cannot fit: control groups count too."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import run
from coterie.errors import ConfigError
from coterie.experiment.config import StopRule, experiment_from
from coterie.methods import son_newton as newton
from coterie.methods.pdmm import Config
from coterie_server.interface.stages import Stage
from coterie_server.maths import graphs, sieving, ssnal
from coterie_server.methods import son_newton
from coterie_server.methods.pdmm.half import memory
from coterie_server.run import memory as run_memory
from coterie_server.run.memory import check_memory, free_bytes

GB = 1024**3


class Events(list[str]):
    def event(self, kind: str, text: str, **_: Any) -> None:
        assert kind == "memory"
        self.append(text)


def stage(**config: Any) -> Stage:
    return Stage("pdmm", "pdmm", Config(penalty=1.0, **config), StopRule(rounds=1))


def test_what_cannot_fit_is_refused_with_what_fits() -> None:
    sentence = "pdmm on all pairs of 20,000 users needs 22 GB, and this process may use 8 GB more: use graph: {neighbours: 15}"
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        check_memory([stage()], 20_000, 3, Events(), free=8_000_000_000)  # type: ignore[arg-type]
    events = Events()
    check_memory([stage(graph={"neighbours": 15})], 20_000, 3, events, free=8_000_000_000)  # type: ignore[arg-type]
    assert events == []


def test_what_is_large_is_said_once_for_a_path() -> None:
    events = Events()
    check_memory([Stage("local", "local", None, StopRule(rounds=1)), stage(), stage()], 5_000, 3, events, free=8 * GB)  # type: ignore[arg-type]
    assert events == ["pdmm on all pairs of 5,000 users needs 1.4 GB"]


def test_a_method_without_pairs_asks_nothing_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory, "free_bytes", lambda: pytest.fail("it asked"))
    check_memory([Stage("local", "local", None, StopRule(rounds=1))], 20_000, 3, Events())  # type: ignore[arg-type]


def test_acceleration_draws_and_order_need_more_and_edges_less() -> None:
    def needed(**config: Any) -> float:
        need = memory(Config(penalty=1.0, **config), 1000, 4)
        assert need is not None
        return need.bytes

    plain = needed()
    assert needed(acceleration="anderson") > 2 * plain
    assert needed(order="jacobi") > 1.3 * plain
    assert needed(sampling="uniform", s_p=5) > 2 * plain
    assert needed(graph={"neighbours": 10}) == pytest.approx(plain * 10 / 499.5)
    assert needed(graph={"pairs": [("a", "b", 1.0)]}) == pytest.approx(plain / 499_500)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_pairs_of_a_file_are_counted_before_they_are_read(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("\n".join(f"u{number},u{number + 1},1" for number in range(20_000)) + ending)
    configs = (Config(penalty=1.0, graph={"file": str(path)}), newton.Config(penalty=1.0, graph={"file": str(path)}))
    for name, config, hook in zip(("pdmm", "son_newton"), configs, (memory, son_newton.memory), strict=True):
        need = hook(config, 20_001, 3)  # type: ignore[operator]
        assert need is not None
        assert 20_000 * 500 < need.bytes < 20_000 * 3000
        stages = [Stage(name, name, config, StopRule(rounds=1))]
        with pytest.raises(
            ConfigError, match=r"the 20,00\d pairs of .*pairs\.csv and 20,001 users needs \d+ MB, .*: list fewer pairs, or use"
        ):
            check_memory(stages, 20_001, 3, Events(), free=1_000_000)  # type: ignore[arg-type]


def test_a_file_of_pairs_that_is_not_there_is_refused_by_who_reads_it(tmp_path: Path) -> None:
    assert memory(Config(penalty=1.0, graph={"file": str(tmp_path / "none.csv")}), 10, 3) is None


@pytest.mark.parametrize(("n", "d", "graph"), [(300, 8, {"neighbours": 6}), (150, 15, {"neighbours": 5}), (150, 3, "complete")])
def test_son_newton_needs_what_it_says_and_not_much_less(n: int, d: int, graph: Any) -> None:
    need = son_newton.memory(newton.Config(penalty=1.0, graph=graph), n, d)
    assert need is not None
    random = np.random.default_rng(0)
    x = random.normal(size=(4, d))[np.arange(n) % 4] * 2 + 0.3 * random.normal(size=(n, d))
    rows = random.normal(size=(n, 2 * d, d))
    hessians = np.einsum("nri,nrj->nij", rows, rows) / (2 * d)
    linear = np.einsum("nij,nj->ni", hessians, x)
    tracemalloc.start()
    try:
        tied = ssnal.Graph.complete(n) if graph == "complete" else graphs.nearest(x, graph["neighbours"], 2.0)
        sieving.minimise(tied, hessians, linear, 0.2 * n / (2 * tied.m), x, relative=1e-8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < need.bytes < 3 * peak


def test_large_models_want_a_method_without_second_derivatives() -> None:
    stages = [Stage("son_newton", "son_newton", newton.Config(penalty=1.0, graph={"neighbours": 1}), StopRule(rounds=1))]
    wanted = "son_newton with 500 numbers in a model on 1 neighbour of each of 10,000 users needs 280 GB, .*: use method pdmm"
    with pytest.raises(ConfigError, match=wanted):
        check_memory(stages, 10_000, 500, Events(), free=8_000_000_000)  # type: ignore[arg-type]


def machine(root: Path, cgroup: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {16 * GB // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_IN_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    unlimited = {"memory_IN_max": "max\n", "memory_IN_current": "5", "memory_IN_stat": ""}
    assert free_bytes(machine(tmp_path, "0::/\n", **unlimited)) == 16 * GB


def test_the_tightest_group_above_this_process_counts_less_what_is_in_use(tmp_path: Path) -> None:
    files = {
        "a__memory_IN_max": f"{4 * GB}\n",
        "a__memory_IN_current": f"{3 * GB}\n",
        "a__memory_IN_stat": f"anon 1\ninactive_file {GB}\n",
        "a__b__memory_IN_max": f"{8 * GB}\n",
        "a__b__memory_IN_current": f"{GB}\n",
        "a__b__memory_IN_stat": "anon 1\n",
    }
    assert free_bytes(machine(tmp_path, "0::/a/b\n", **files)) == 2 * GB


def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    files = {
        "memory__memory_IN_limit_in_bytes": f"{2 * GB}\n",
        "memory__memory_IN_usage_in_bytes": f"{GB}\n",
        "memory__memory_IN_stat": "total_inactive_file 5\n",
    }
    assert free_bytes(machine(tmp_path, "12:cpu:/x\n9:memory:/docker/1234\n", **files)) == GB + 5


def test_a_system_that_tells_nothing_refuses_nothing(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None


def test_a_run_is_refused_before_its_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory, "free_bytes", lambda: 1000)
    data = {"source": "ellipses", "users_per_cluster": 4, "test_per_class": 0}
    described = {"name": "x", "data": data, "problem": {"loss": "squared_hinge", "l2": 0.1}, "method": {"name": "pdmm", "penalty": 0.1}}
    seen: list[str] = []
    with pytest.raises(ConfigError, match="pdmm on all pairs of 12 users needs 0 MB, and this process may use 0 MB more"):
        run(experiment_from(described), observer=lambda progress: seen.append(progress.stage.name))
    assert seen == []
