"""The table of rooms: which folder may import which. `test_rooms.py` checks it, and ARCHITECTURE.md's picture is made from it.

A folder imports itself and what stands in its row. Imports for type checkers count, and so do modules that are named in strings.

Usage:  python -m tests.rooms    (writes the picture into ARCHITECTURE.md)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"coterie": "common", "coterie_server": "server", "coterie_client": "client", "coterie_deploy": "deploy"}
# Package, folder: the folders of the same package that it may import besides itself. "" is what lies beside the folders.
ROOMS: Mapping[str, Mapping[str, str]] = {
    "coterie": {
        "session": "compress families experiment record wire masked text v1",
        "compress": "experiment wire draws v1",
        "methods": "families experiment wire draws text",
        "families": "experiment wire masked draws text",
        "masked": "",
        "experiment": "wire draws text",
        "record": "wire text v1",
        "wire": "v1 text",
        "draws": "",
        "text": "",
        "v1": "",
        "": "",
    },
    "coterie_server": {
        "run": "methods families session record interface",
        "methods": "families record interface maths",
        "families": "record interface maths",
        "transport": "session",
        "session": "interface",
        "record": "interface",
        "interface": "",
        "maths": "",
        "": "",
    },
    "coterie_client": {
        "hosting": "families nets interface problems learning data",
        "methods": "families interface problems learning data",
        "families": "interface problems learning data",
        "interface": "problems learning data",
        "nets": "learning data",
        "problems": "learning",
        "learning": "",
        "data": "",
        "": "",
    },
    "coterie_deploy": {
        "cli": "studies containers engines roles view telemetry read terminal",
        "studies": "engines roles view telemetry read terminal",
        "containers": "engines roles read terminal",
        "engines": "roles view telemetry read terminal",
        "roles": "view telemetry read terminal",
        "view": "telemetry read terminal",
        "telemetry": "read terminal",
        "read": "terminal",
        "terminal": "",
        "": "",
    },
}
# Package: the packages that all its folders may import.
OTHERS: Mapping[str, frozenset[str]] = {
    "coterie": frozenset(),
    "coterie_server": frozenset({"coterie"}),
    "coterie_client": frozenset({"coterie"}),
    "coterie_deploy": frozenset({"coterie", "coterie_server", "coterie_client"}),
}
# What looks names up in any room: the front doors, for those of `coterie.FETCHED` and `coterie.plugin.FETCHED`, and the registry.
DOORS = frozenset(
    {f"common/coterie/{name}" for name in ("__init__.py", "__init__.pyi", "__main__.py", "plugin.py", "plugin.pyi", "registry.py")}
)
_NAMED = re.compile(r"(coterie|coterie_server|coterie_client|coterie_deploy)(\.[a-z_0-9]+)+(:\w+)?\.?")
_BEGIN, _END = "<!-- rooms: python -m tests.rooms -->\n", "<!-- end of rooms -->"


def room_of(path: Path) -> tuple[str, str]:
    """The package and the folder of a source file."""
    parts = path.relative_to(ROOT).parts[1:]
    return parts[0], parts[1] if len(parts) > 2 else ""


def sources(package: str) -> list[Path]:
    """The modules and stubs of a package, but for generated ones."""
    folder = ROOT / PACKAGES[package] / package
    return sorted(path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi") and "_pb2" not in path.name)


def named(path: Path) -> Iterator[tuple[int, str]]:
    """The modules of ours that a source file imports, with their lines; of strings those that look like one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            first = node.args[0]
            texts = [part.value for part in ast.walk(first) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if function in ("import_module", "find_spec", "files"):
                yield from ((node.lineno, text) for text in texts if _NAMED.fullmatch(text))


def room_named(module: str) -> tuple[str, str]:
    """The package and folder that a dotted name lies in."""
    package, *rest = module.split(".")
    is_folder = bool(rest) and (ROOT / PACKAGES[package] / package / rest[0]).is_dir()
    return package, rest[0] if is_folder else ""


def breaches(path: Path) -> list[str]:
    """What a source file imports against the table."""
    if path.relative_to(ROOT).as_posix() in DOORS:
        return []
    package, folder = room_of(path)
    allowed = {folder, "", *ROOMS[package][folder].split()}
    found = []
    for line, module in named(path):
        other, room = room_named(module)
        if other != package and other not in OTHERS[package]:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {module}, but {package} may not import {other}")
        elif other == package and room not in allowed:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {module}, but {folder or 'the root'} may not import {room}")
    return found


def picture() -> str:
    """The table as a Mermaid diagram: an arrow from each folder to those that it may import, but for what follows from other arrows."""
    lines = ["```mermaid", "flowchart TD"]
    for package, rooms in ROOMS.items():
        node = {room: f"{PACKAGES[package]}_{room}[{room}]" for room in rooms}
        lines.append(f"  subgraph {package}")
        for room, lower in rooms.items():
            beyond = {further for other in lower.split() for further in reached(package, other)}
            if direct := [node[other] for other in lower.split() if other not in beyond]:
                lines.append(f"    {node[room]} --> {' & '.join(direct)}")
        lines.append("  end")
    lines += [f"  {package} --> {' & '.join(sorted(others - _below(others)))}" for package, others in OTHERS.items() if others]
    return "\n".join([*lines, "```", ""])


def reached(package: str, room: str) -> set[str]:
    """The folders that a folder may import, or that those may, and so on."""
    found: set[str] = set()
    todo = ROOMS[package][room].split()
    while todo:
        if (other := todo.pop()) not in found:
            found.add(other)
            todo += ROOMS[package][other].split()
    return found


def _below(packages: frozenset[str]) -> set[str]:
    return {other for package in packages for other in OTHERS[package]}


def redrawn(text: str) -> str:
    """ARCHITECTURE.md with the picture as the table says."""
    head, _, rest = text.partition(_BEGIN)
    return f"{head}{_BEGIN}{picture()}{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    page = ROOT / "ARCHITECTURE.md"
    page.write_text(redrawn(page.read_text(encoding="utf-8")), encoding="utf-8")
