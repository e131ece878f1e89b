"""`coterie report`: runs as one HTML file that needs no network, and their charts as figures for a paper."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie import __version__
from coterie.extras import needed
from coterie.record.files import written_whole
from coterie_deploy.read.costs import Weighing
from coterie_deploy.view.charts import Chart, Section, Spec
from coterie_deploy.view.comparison import comparison_of, labels_of
from coterie_deploy.view.pages import environment, safe_json, text_of, themes, vega_script
from coterie_deploy.view.run_view import RunView, view_of
from coterie_deploy.view.theme import theme
from coterie_server.record.curves import reached

REPORT = "report.html"
_MOST_WHOLE = 6  # of the runs that are compared, those shown with all their charts too
_WIDTH = 340  # points of a figure: a column of a paper
_PPI = 300
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Page:
    """What is on a page: one run, or several, compared; and all its charts, each with its key there."""

    runs: Sequence[RunView]  # with all their charts
    comparison: Section | None
    n_runs: int
    labels: Sequence[str]  # of the runs
    charts: Sequence[tuple[str, Chart]]


def write_report(
    folders: Sequence[Path], output: Path | None, weighing: Weighing, figures: Path | None = None, formats: Sequence[str] = ("pdf",)
) -> tuple[Path, list[Path]]:
    """Writes the report of one run or several; its file and the figures.

    ConfigError for a folder without a run, a missing library and a goal whose figure no run has; RunError if a file cannot be written.
    """
    environment()  # raises an error for a missing library before all the work
    page = page_of([view_of(folder, weighing) for folder in folders], weighing)
    path = output or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    text = html_of(page)
    with written_whole(path, "the report") as file:
        file.write(text.encode())
    return path, [] if figures is None else write_figures(page.charts, figures, formats)


def page_of(views: Sequence[RunView], weighing: Weighing) -> Page:
    """What is on the page of these runs. ConfigError when none of them has the figure of the goal."""
    labels = labels_of(views)
    if len(views) == 1:
        found = views[0].curves
        if weighing.goal is not None and found is not None:
            reached(found, weighing.goal)  # raises an error that lists the figures
        return Page(views, None, 1, labels, [(chart.key, chart) for section in views[0].sections for chart in section.all_charts])
    comparison = comparison_of(views, weighing)
    whole = views if len(views) <= _MOST_WHOLE else []
    charts = [(chart.key, chart) for chart in comparison.all_charts]
    for number, view in enumerate(whole, start=1):
        charts += [(f"{_prefix(number)}{chart.key}", chart) for section in view.sections for chart in section.all_charts]
    return Page(whole, comparison, len(views), labels, charts)


def _prefix(number: int) -> str:
    return f"run{number}-"


def html_of(page: Page) -> str:
    """The HTML of a page, which needs no network."""
    from markupsafe import Markup  # noqa: PLC0415 - comes with jinja2

    title = page.labels[0] if page.comparison is None else f"{page.n_runs} runs compared"
    scripts = {"style": text_of("style.css"), "draw": text_of("draw.js"), "vega": vega_script(), "themes": safe_json(themes())}
    scripts["specs"] = safe_json({key: chart.spec for key, chart in page.charts})
    safe = {name: Markup(text) for name, text in scripts.items()}  # noqa: S704 - ours, a library's, or escaped
    return str(environment().get_template("report.html").render(title=title, page=page, prefix=_prefix, version=__version__, **safe))


def write_figures(charts: Sequence[tuple[str, Chart]], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Each chart as a file KEY.FORMAT, png, svg or pdf: a column of a paper wide, PNG with 300 dots an inch."""
    written = [folder / f"{_NOT_IN_A_NAME.sub('-', key)}.{form}" for key, _ in charts for form in dict.fromkeys(formats)]
    sizes = ({"width": _WIDTH, **({"height": chart.paper_height} if chart.paper_height else {})} for _, chart in charts)
    drawn = ({**chart.spec, **size} for (_, chart), size in zip(charts, sizes, strict=True) for _ in dict.fromkeys(formats))
    for path, spec in zip(written, drawn, strict=True):
        write_figure(spec, path)
    return written


def write_figure(spec: Spec, path: Path) -> None:
    """A specification drawn in the format that the ending of its file names. Raises RunError when the file cannot be written."""
    library, config = needed("vl_convert", "report"), theme(dark=False, paper=True)
    if path.suffix == ".png":
        drawn = bytes(library.vegalite_to_png(spec, config=config, ppi=_PPI, scale=1))
    elif path.suffix == ".pdf":
        drawn = bytes(library.vegalite_to_pdf(spec, config=config))
    else:
        drawn = str(library.vegalite_to_svg(spec, config=config)).encode()
    with written_whole(path, "a figure") as file:
        file.write(drawn)
