"""Who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import rooms
from tests.rooms import PACKAGES, ROOMS, ROOT, breaches, sources


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_imports_only_the_folders_below_it(package: str) -> None:
    assert len(sources(package)) > 20
    assert [sentence for path in sources(package) for sentence in breaches(path)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_above_itself(package: str) -> None:
    assert [room for room in ROOMS[package] if room in rooms.reached(package, room)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_has_each_folder_and_no_other(package: str) -> None:
    folder = ROOT / PACKAGES[package] / package
    there = {path.parent.relative_to(folder).parts[0] for path in folder.rglob("*.py") if path.parent != folder}
    assert there == set(ROOMS[package]) - {""}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_has_at_most_450_lines_and_a_folder_at_most_30_modules(package: str) -> None:
    modules = [path for path in sources(package) if path.suffix == ".py"]
    assert {str(path): n for path in modules if (n := len(path.read_text(encoding="utf-8").splitlines())) > 450} == {}
    in_folder = Counter(path.parent for path in modules)
    assert {str(folder): n for folder, n in in_folder.items() if n > 30} == {}


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("common/coterie/wire/stray.py", "from coterie.record.ledger import Row"),
        ("common/coterie/text/stray.pyi", "import coterie.session.dial"),
        ("server/coterie_server/maths/stray.py", "from coterie_server import run"),
        ("server/coterie_server/run/stray.py", "import coterie_client"),
        ("client/coterie_client/learning/stray.py", "import importlib\nimportlib.import_module('coterie_client.nets.models')"),
        ("deploy/coterie_deploy/read/stray.py", "if TYPE_CHECKING:\n    from coterie_deploy.cli.app import main"),
    ],
)
def test_what_goes_up_is_found(place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    for package, top in PACKAGES.items():
        for room in filter(None, ROOMS[package]):
            (tmp_path / top / package / room).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    assert len(breaches(path)) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_says_in_one_sentence_what_lives_there(package: str) -> None:
    for path in sources(package):
        if path.name == "__init__.py" and path.parent.name != "v1":
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            assert said.split("\n")[0].endswith("."), path


def test_the_picture_in_architecture_is_that_of_the_table() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert rooms.redrawn(text) == text, "run python -m tests.rooms"


def printed(code: str) -> str:
    """By a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True).stdout.strip()


def test_a_client_starts_without_torch_scipy_pandas_pyarrow_cryptography_or_the_server() -> None:
    code = (
        "import sys, coterie.session.dial, coterie_client.hosting.build, coterie.experiment.config\n"
        "from coterie_client.interface.half import client_half\n"
        "for name in ('pdmm', 'consensus', 'evaluation', 'prepare'): assert client_half(name)\n"
        "heavy = {'torch', 'scipy', 'pandas', 'pyarrow', 'vl_convert', 'cryptography', 'coterie_server'}\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & heavy))"
    )
    assert printed(code) == ""


def test_a_client_with_rows_has_loaded_one_source_no_local_steps_and_no_masked_arrays() -> None:
    code = (
        "import sys, coterie.session.dial\n"
        "from coterie.experiment.config import experiment_from\n"
        "from coterie_client.hosting.build import build_host\n"
        "content = {'data': {'source': 'ellipses'}, 'problem': {'loss': 'squared_hinge'}, 'method': {'name': 'pdmm', 'penalty': 1.0}}\n"
        "build_host('a', experiment_from({'name': 'small', **content}), 'run-1', None)\n"
        "unused = ('coterie.families.partial', 'coterie_client.learning', 'coterie_client.data.tables.csv_table')\n"
        "print(*(m for m in sys.modules if m.startswith('numpy.ma.') or m in unused))"
    )
    assert printed(code) == ""


def test_coterie_itself_imports_neither_side() -> None:
    sides = "('coterie_server', 'coterie_client')"
    code = f"import sys, coterie, coterie.experiment.config; print(*sorted(m for m in sys.modules if m.startswith({sides})))"
    assert printed(code) == ""
