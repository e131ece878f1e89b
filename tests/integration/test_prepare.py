"""What the members agree on before the first stage: constants of standardisation, facts about losses, names of features."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie import Result, run
from coterie.errors import ConfigError, CoterieError
from coterie.experiment.config import experiment_from
from coterie.methods import fedavg
from coterie_client.problems.margins import MarginBlock
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.roles.consent_page import reveal_lines


def table(
    folder: Path, name: str = "rows.csv", *, scale: float = 1.0, order: tuple[str, ...] = ("a", "b"), users: range = range(6)
) -> None:
    draws = np.random.default_rng(2)
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", *order, "y"])
        for user in users:
            for _ in range(20):
                row = {"a": draws.standard_normal(), "b": draws.standard_normal()}
                y = row["a"] * (1 if user % 2 else -1) + row["b"] + 0.1 * draws.standard_normal()
                row["b"] = 100.0 * scale + 7.0 * scale * row["b"]
                writer.writerow([f"u{user}", *(repr(row[column]) for column in order), repr(y)])


def experiment(**data: object) -> dict[str, object]:
    return {
        "name": "prepared",
        "data": {"source": "csv", "path": "rows.csv", "user_column": "user", "target_column": "y", "standardize": True, **data},
        "problem": {"loss": "least_squares", "l2": 1e-3},
        "method": {"name": "pdmm", "penalty": 0.1},
        "stop": {"rounds": 2000, "residual": 1e-6},
    }


def test_the_facts_are_those_of_the_standardised_rows(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    table(tmp_path / "small")
    table(tmp_path / "large", scale=1000.0)
    small, large = (run(experiment(), data=tmp_path / name) for name in ("small", "large"))
    assert len(small.history()) == len(large.history()) < 500, "rho depends on L_i, and the rounds on rho"
    for user, model in small.models.items():
        np.testing.assert_allclose(large.models[user], model, atol=1e-8)


def test_hosts_agree_on_standardisation_whatever_their_number(tmp_path: Path) -> None:
    table(tmp_path)
    one, three = (run(experiment(), data=tmp_path, hosts=hosts) for hosts in (1, 3))
    for user, model in one.models.items():
        np.testing.assert_array_equal(three.models[user], model)


def test_a_constant_feature_is_named(tmp_path: Path) -> None:
    rows = [f"u{i % 3},{i},5,{i * i}" for i in range(30)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,a,flat,y", *rows]) + "\n")
    with pytest.raises(ConfigError, match="feature 'flat' is the same in all 24 training rows"):
        run(experiment(), data=tmp_path)


CASES = Path(__file__).parent.parent / "fixtures" / "cases"


def case(name: str, **keys: object) -> dict[str, object]:
    data = {"source": "csv", "path": name, "user_column": "school", "cluster_column": "region", "target_column": "score"}
    return {
        "name": "case",
        "seed": 1,
        "data": {**data, "standardize": True},
        "problem": {"loss": "least_squares", "l2": 1e-3},
        "method": {"name": "pdmm", "penalty": 0.3},
        "stop": {"rounds": 5000, "residual": 1e-9},
        **keys,
    }


@pytest.mark.parametrize("name", ["tiny-scale.csv", "large-mean.csv", "huge-scale.csv"])
def test_a_feature_in_other_units_gives_the_same_fit(name: str) -> None:
    plain, other = (run(case(path), data=CASES) for path in ("plain.csv", name))
    assert sorted(plain.models) == [f"s{i}" for i in range(6)]
    for user, model in plain.models.items():
        np.testing.assert_allclose(other.models[user], model, atol=1e-6)
    assert other.clusters == plain.clusters
    assert other.metrics["pdmm"]["heldout_loss"] == pytest.approx(plain.metrics["pdmm"]["heldout_loss"], rel=1e-6)


@pytest.mark.parametrize("value", ["0.1", "10000000.1", "-3e-200", "0"])
def test_a_constant_feature_is_refused_whatever_its_size(tmp_path: Path, value: str) -> None:
    rows = [f"u{i % 3},{i},{value},{i * i}" for i in range(3000)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,a,flat,y", *rows]) + "\n")
    with pytest.raises(ConfigError, match="feature 'flat' is the same in all 2400 training rows"):
        run(experiment(), data=tmp_path)


def test_the_ledger_of_standardisation_is_its_closed_form(tmp_path: Path) -> None:
    run(case("plain.csv"), data=CASES, output=tmp_path / "run")
    verdict = verdict_on(tmp_path / "run")
    assert verdict.agrees
    (up,) = (one.row for one in verdict.judged[0] if one.row.step == "standardize" and one.row.direction == "up")
    (down,) = (one.row for one in verdict.judged[0] if one.row.step == "standardize" and one.row.direction == "down")
    assert (up.scalars, down.scalars) == (2 * 2 * 6, 2 * 2), "a sum and a norm of each of 2 features, from each of 6 users"


def test_models_know_the_names_of_their_features(tmp_path: Path) -> None:
    table(tmp_path)
    run(experiment(), data=tmp_path, output=tmp_path / "run")
    with np.load(tmp_path / "run" / "models" / "pdmm.npz") as arrays:
        assert arrays["features"].tolist() == ["a", "b"]


def test_hosts_with_features_in_another_order_are_refused(tmp_path: Path) -> None:
    import asyncio
    import contextlib
    from collections.abc import AsyncIterator

    from coterie.experiment.config import experiment_from
    from coterie_client.hosting.build import build_host
    from coterie_deploy.engines.loopback import join_all
    from coterie_server.run.coordinator import Options, coordinate
    from coterie_server.session.hub import Hub

    table(tmp_path, "one/rows.csv", users=range(3))
    table(tmp_path, "two/rows.csv", users=range(3, 6), order=("b", "a"))
    described = experiment_from({**experiment(), "federation": {"hosts": 2}})

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        join_all(hub, [build_host(name, described, hub.run_id, None, data_dir=tmp_path / name) for name in ("one", "two")])
        yield

    with pytest.raises(CoterieError, match="host 'two' has other features: its features are in another order"):
        asyncio.run(coordinate(described, connect, Options()))


def test_predictions_go_by_the_names_of_the_columns_wherever_they_stand(tmp_path: Path) -> None:
    import io

    from coterie_deploy.read.predict import predict
    from coterie_deploy.read.shared_models import Whose

    table(tmp_path)
    run(experiment(), data=tmp_path, output=tmp_path / "run")
    (tmp_path / "new.csv").write_text("a,b\n1.0,107.0\n-2.0,93.0\n")
    (tmp_path / "turned.csv").write_text("b,size,a\n107.0,9,1.0\n93.0,9,-2.0\n")
    said = []
    for name in ("new.csv", "turned.csv"):
        out = io.StringIO()
        predict(tmp_path / "run", Whose(user="u1"), tmp_path / name, None, out)
        said.append([line.rpartition(",")[2] for line in out.getvalue().splitlines()])
    assert said[0] == said[1]
    assert float(said[0][1]) > float(said[0][2])
    (tmp_path / "short.csv").write_text("a,size\n1.0,2.0\n")
    with pytest.raises(ConfigError, match=r"short.csv: column 'b' is missing, found 'a', 'size'"):
        predict(tmp_path / "run", Whose(user="u1"), tmp_path / "short.csv", None, io.StringIO())


def told(result: Result) -> dict[str, int]:
    """The scalars that users sent in the steps before the first round."""
    lines = [line for line in result.ledger() if line["step"] in ("describe", "smoothness", "convexity")]
    return {str(line["step"]): int(line["scalars"]) for line in lines if line["direction"] == "up"}


def test_users_send_the_facts_of_their_losses_that_a_method_needs_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path)
    stop = {"stop": {"rounds": 2}}
    steps = {"optimizer": {"lr": 0.1}}
    assert told(run({**experiment(), **stop}, data=tmp_path)) == {"describe": 0, "smoothness": 6}
    given = {"name": "pdmm", "penalty": 0.1, "rho": 1.0}
    assert told(run({**experiment(), **stop, "method": given}, data=tmp_path)) == {"describe": 0}
    averaging = {**experiment(), **stop, "method": {"name": "fedavg", **steps}}
    with monkeypatch.context() as patch:  # nobody computes them either
        patch.delattr(MarginBlock, "curvatures")
        assert told(run(averaging, data=tmp_path)) == {"describe": 0}
    both = replace(fedavg.METHOD, facts=lambda _: frozenset({"smoothness", "strong_convexity"}))
    monkeypatch.setattr(fedavg, "METHOD", both)
    result = run(averaging, data=tmp_path, output=tmp_path / "run")
    assert told(result) == {"describe": 0, "smoothness": 6, "convexity": 6}
    assert verdict_on(tmp_path / "run").agrees


def test_an_owner_reads_only_of_the_facts_that_are_sent() -> None:
    def read(**method: object) -> str:
        return "\n".join(reveal_lines(experiment_from({**experiment(), "method": method})))

    assert "smoothness" in read(name="pdmm", penalty=0.1)
    assert "convexity" not in read(name="pdmm", penalty=0.1)
    assert "smoothness" not in read(name="pdmm", penalty=0.1, rho=1.0)
    assert "row counts" in read(name="fedavg", epochs=1)
    assert "smoothness" not in read(name="fedavg", epochs=1)
