"""The packages of `deploy/plugins`, and those that `coterie new` writes, pass `coterie check` as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie_deploy.cli.new import write_package
from coterie_deploy.studies.check import check_method
from tests.packaged import checked

PLUGINS = Path(__file__).parents[2] / "deploy" / "plugins"
NAMES = sorted(path.parent.name for path in PLUGINS.glob("*/pyproject.toml"))


def test_the_packages_are_found() -> None:
    assert {"evidence_mtl", "fedala", "fedbabu", "fedrod"} <= set(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_each_package_passes_all_checks(name: str) -> None:
    said = checked(name, PLUGINS / name)
    assert "14 checks passed, 1 not applicable" in said or "15 checks passed" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["method", "halves"])
def test_a_new_package_passes_all_checks(kind: str, tmp_path: Path) -> None:
    write_package(kind, f"new_{kind}", tmp_path / "package")
    said = checked(f"new_{kind}", tmp_path / "package")
    assert "14 checks passed, 1 not applicable" in said or "15 checks passed" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_new_compressor_passes_all_checks(tmp_path: Path) -> None:
    write_package("compressor", "new_compressor", tmp_path / "package")
    assert "15 checks passed, 0 not applicable" in checked("new_compressor", tmp_path / "package", "compressor")


def test_a_package_says_with_what_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows weigh as a sum, which the small federation does not say by itself."""
    monkeypatch.syspath_prepend(PLUGINS / "evidence_mtl")
    assert [one.state for one in check_method("evidence_mtl:METHOD", only=["runs", "closed-form"])] == ["passed", "passed"]
    (found,) = check_method("evidence_mtl:METHOD", only=["runs"], changes=["problem.reduction=mean"])
    assert (found.state, "want sum" in found.reason) == ("failed", True)


@pytest.mark.parametrize(("says", "state"), [("", "passed"), ("**weights, ", "failed")])
def test_what_is_kept_and_not_returned_is_private(says: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedALA keeps the model that it returns, and also weights, which stay private. This variant sends the weights instead of the head."""
    source, name = (PLUGINS / "fedala" / "fedala.py").read_text(), f"fedala_{state}"
    sent = "weights = {name: kept[f'{WEIGHT}{name}'] for name in own}\n    return Moved({**fitted.tensors, " + says + "},"
    assert source.count("    return Moved(fitted.tensors,") == 1
    source = source.replace('"fedala"', f'"{name}"').replace("return Moved(fitted.tensors,", sent)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check_method(f"{name}:METHOD", only=["private"])
    assert found.state == state, found.reason
    told = "has sent numbers of partial.kept.weight of head." if says else "looked for rows and partial.kept.rounds, partial.kept.weight of"
    assert told in found.reason
