"""How charts look: colours, fonts and marks, on light, on dark and in print, as a configuration for Vega-Lite."""

from typing import Any

# Any two of eight colours stay apart for those who see no red, no green or no blue, and have a contrast of 3:1 with the page.
PALETTES = {
    "light": ("#0b69c7", "#d9480f", "#00583f", "#a58a5f", "#8a2be2", "#6b0f1a", "#e366a5", "#23262e"),
    "dark": ("#6cb4ff", "#ff9a5c", "#f2ec9b", "#dd4b9a", "#7d6ff0", "#2fd6a5", "#d5dae2", "#a87a33"),
}
N_COLOURS = 8
PAGES = {"light": "#ffffff", "dark": "#1c2129"}  # what charts stand on


def theme(*, dark: bool, paper: bool = False) -> dict[str, Any]:
    """The configuration for Vega-Lite, on light, on dark or, with `paper`, in print: colours that also the colour-blind can tell apart."""
    name = "dark" if dark else "light"
    ink, faint, grid = ("#e6e9ee", "#6b7685", "#313842") if dark else ("#1f2733", "#8a94a1", "#e3e7ec")
    size = 9 if paper else 12
    font = "Helvetica, Arial, sans-serif" if paper else "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
    words = {"labelColor": ink, "titleColor": ink, "labelFontSize": size, "titleFontSize": size, "titleFontWeight": "normal"}
    return {
        "background": "white" if paper else "transparent",
        "font": font,
        "range": {"category": list(PALETTES[name])},
        "view": {"stroke": None},
        "axis": {**words, "gridColor": grid, "domainColor": faint, "tickColor": faint, "labelLimit": 190, "labelPadding": 5},
        "legend": {**words, "orient": "top", "title": None, "symbolStrokeWidth": 3, "labelLimit": 240, "columns": 2},
        "header": {**words, "labelFontWeight": "bold", "labelAnchor": "start"},
        "text": {"color": ink, "fontSize": size},
        "rule": {"color": faint},
        "mark": {"color": PALETTES[name][0]},
        "style": {
            "line": {"strokeWidth": 1.5 if paper else 2},  # a mark of its own here would win over a width that is drawn from data
            "halo": {"stroke": PAGES[name], "strokeWidth": 4, "strokeJoin": "round", "opacity": 0.9},
            "ringed": {"stroke": PAGES[name], "strokeWidth": 1},  # what lies on lines
            "on-colour": {"color": PAGES[name], "fontSize": size - 2},
            "mark-of-goal": {"color": ink, "strokeDash": [5, 4], "strokeWidth": 1.2, "opacity": 0.8},
            "closed-form": {"color": ink, "opacity": 1},
            "box": {"color": PAGES[name], "stroke": ink, "strokeWidth": 1.2},
            "median": {"color": ink},
        },
    }
