"""What a privacy budget has bought, as a Vega-Lite specification."""

import math
from typing import Any

from coterie_deploy.view.charts import Chart, figure_name, number, short, spec_of, told
from coterie_server.record.curves import Curves

EPSILON = "epsilon"  # the figure of what the rounds so far have spent


def spent_chart(curves: Curves, figure: str) -> Chart:
    """A figure of the rounds against the epsilon that they have spent."""
    pairs = zip(curves.figures[EPSILON].tolist(), curves.figures[figure].tolist(), strict=True)
    rows: list[tuple[Any, ...]] = [(short(x), short(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    title = figure_name(figure)
    encoding = {
        "x": number("x", "epsilon spent", scale={"nice": False, "zero": True}, axis={"tickCount": 6}),
        "y": number("y", title, scale={"zero": False}),
        "tooltip": told(formats={"x": ".4~g", "y": ".4~g"}, titles={"x": "epsilon spent", "y": title}),
    }
    mark = {"type": "line", "clip": True, "point": {"filled": True, "size": 28}}
    spec = spec_of({"mark": mark, "encoding": encoding, "height": 240}, ("x", "y"), rows)
    note = "Users who train alone and send nothing spend nothing. The vertical axis does not begin at 0."
    return Chart(f"{figure}-{EPSILON}", f"{title[:1].upper()}{title[1:]} against epsilon", note, spec, ("epsilon spent", title), rows)
