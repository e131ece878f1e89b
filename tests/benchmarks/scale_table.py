"""Writes the table and the picture of the page on many users, from the kept lines of `bench_simulation` on this kind of machine.

Usage:  python -m tests.benchmarks.scale_table
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie_deploy.view.report_page import write_figure
from tests.benchmarks import record

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "explanation" / "many-users.md", DOCS / "pictures" / "many-users.svg"
BEGIN, END = "<!-- scale: python -m tests.benchmarks.scale_table -->\n", "<!-- end of scale -->"
PANELS = {
    "CPU ms of a round": {"coordinator": "a round at the coordinator", "busier host": "a round at the busier host"},
    "MB of the larger host": {"busier host": "largest host"},
    "Bytes of a round": {"up": "up in a round", "down": "down in a round"},
}

Case = tuple[float, int, int, int]  # the share of users that a round draws, users, d, rows


def measured() -> tuple[dict[Case, dict[str, float]], str]:
    """The newest figures of each case, and when they were measured, on what, under which load."""
    kind = record.machine()
    lines = [line for line in record.read(record.records_of(kind)) if line["bench"] == "simulation" and line["options"]["hosts"] == 2]
    found: dict[Case, dict[str, float]] = {}
    for line in lines:
        for figure in line["figures"]:
            case, _, what = figure["name"].partition(", ")
            if case.endswith(" in sums"):
                continue
            users, d, rows = map(int, case.split(" x "))
            found.setdefault((line["options"]["participation"], users, d, rows), {})[what] = figure["value"]
    load = max(line["load"] for line in lines)
    said = f"{kind['cpu']}, {kind['cores']} cores, {lines[-1]['date'][:10]}; other work kept up to {load:.1f} of the cores busy"
    return dict(sorted(found.items())), said


def table(found: dict[Case, dict[str, float]], where: str) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"Measured on: {where}."
    yield ""
    yield (
        "| a round draws | users | d | rows of a user | rounds/s | coordinator, ms of CPU | host, ms of CPU | before round 1, s of CPU |"
        + (" larger host | up | down |")
    )
    yield "|" + "---|" * 11
    for (share, users, d, rows), of in found.items():
        cells = [
            "all" if share == 1 else f"{share:.0%}",
            *(f"{number:,}" for number in (users, d, rows)),
            f"{of['rounds a second']:.3g}",
            *(f"{of[name]:.3g}" for name in ("a round at the coordinator", "a round at the busier host", "before round 1, all processes")),
            f"{of['largest host']:.0f} MB",
            *(_bytes(of[name]) for name in ("up in a round", "down in a round")),
        ]
        yield f"| {' | '.join(cells)} |"


def _bytes(number: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def picture(found: dict[Case, dict[str, float]]) -> dict[str, Any]:
    """Three panels over the number of users, for d = 100 and 4 rows each, where all take part."""
    cases = {users: of for (share, users, d, rows), of in found.items() if (share, d, rows) == (1, 100, 4)}
    panels = [
        {
            "title": title,
            "width": 190,
            "height": 190,
            "data": {"values": [{"users": n, "what": what, "y": of[name]} for n, of in cases.items() for what, name in listed.items()]},
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "users", "type": "quantitative", "scale": {"type": "log"}, "axis": {"format": "~s", "values": list(cases)}},
                "y": {"field": "y", "type": "quantitative", "title": None, "scale": {"type": "log"}, "axis": {"format": ".2~s"}},
                "color": {"field": "what", "type": "nominal", "title": None, "legend": {"orient": "bottom"}},
            },
        }
        for title, listed in PANELS.items()
    ]
    return {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "hconcat": panels, "resolve": {"scale": {"color": "independent"}}}


if __name__ == "__main__":
    cases, where = measured()
    page = PAGE.read_text(encoding="utf-8")
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    lines = "\n".join(table(cases, where))
    PAGE.write_text(between.sub(lambda _: f"{BEGIN}{lines}\n{END}", page), encoding="utf-8")
    write_figure(picture(cases), PICTURE)
