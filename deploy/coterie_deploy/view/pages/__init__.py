"""The pages that the report and the dashboard are made of: templates, style, and the script that draws charts. Extra `report`."""

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from coterie.extras import needed
from coterie_deploy.terminal.printable import without_nan
from coterie_deploy.terminal.tables import figure
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.theme import theme

MOST_ROWS = 500  # of the table behind a chart
# Charts as wide as the page.
_WIDE = ("clusters", "events", "graph", "topology", "tree", *(f"coefficients-{place}" for place in range(1, 14)))


def text_of(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


@functools.cache
def environment() -> Any:
    """The jinja2 environment of the templates; everything is escaped but what is marked as safe."""
    jinja2 = needed("jinja2", "report")
    made = jinja2.Environment(loader=jinja2.FunctionLoader(text_of), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters["shown"] = _shown
    made.globals |= {"most_rows": MOST_ROWS, "numeric": _numeric, "wide_charts": _WIDE}
    return made


@functools.cache
def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, for `window.vegaEmbed`."""
    script: str = needed("vl_convert", "report").javascript_bundle()
    return script.replace("</script", "<\\/script")


def safe_json(content: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element. NaN becomes null."""
    text = json.dumps(without_nan(content), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def themes() -> Mapping[str, Any]:
    return {"light": theme(dark=False), "dark": theme(dark=True)}


def _numeric(chart: Chart) -> list[bool]:
    """Which columns of the table behind a chart are numbers."""
    return [all(row[place] is None or isinstance(row[place], int | float) for row in chart.rows) for place in range(len(chart.columns))]


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) or float(value).is_integer() else figure(value, 6)
