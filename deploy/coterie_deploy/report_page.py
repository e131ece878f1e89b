"""`coterie report`: runs as one HTML file that needs no network, and their charts as figures for a paper."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie import __version__
from coterie.errors import ConfigError
from coterie.files import written_whole
from coterie_deploy.charts import Chart, theme
from coterie_deploy.comparison import Weighing, comparison_of
from coterie_deploy.pages import environment, needed, safe_json, specs_of, text_of, themes, vega_script
from coterie_deploy.run_view import RunView, view_of

REPORT = "report.html"
_WIDTH = 340  # points of a figure: a column of a paper
_PPI = 300


@dataclass(frozen=True)
class Written:
    """What was written."""

    page: Path
    figures: Sequence[Path]


def write_report(
    folders: Sequence[Path], output: Path | None, weighing: Weighing, figures: Path | None = None, formats: Sequence[str] = ("pdf",)
) -> Written:
    """The report of one run or several; ConfigError for what is no run folder, a library that is missing, a figure that no run has."""
    views = [view_of(folder) for folder in folders]
    page = output or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    text = page_of(views, weighing)
    with _writing(page), written_whole(page, "the report") as file:
        file.write(text.encode())
    written = [] if figures is None else write_figures(_charts(views, weighing), figures, formats)
    return Written(page, written)


def page_of(views: Sequence[RunView], weighing: Weighing) -> str:
    """The HTML of a report."""
    from markupsafe import Markup  # noqa: PLC0415 - comes with jinja2

    template = environment().get_template("report.html")
    comparison = comparison_of(views, weighing) if len(views) > 1 else None
    title = views[0].name if comparison is None else f"{len(views)} runs"
    return str(
        template.render(
            title=f"{title} \N{MIDDLE DOT} Coterie" if comparison is None else title,
            runs=views,
            comparison=comparison,
            version=__version__,
            style=Markup(text_of("style.css")),  # noqa: S704 - ours
            draw=Markup(text_of("draw.js")),  # noqa: S704 - ours
            vega=Markup(vega_script()),  # noqa: S704 - a library's
            specs=Markup(safe_json(specs_of(_charts(views, weighing)))),  # noqa: S704 - escaped
            themes=Markup(safe_json(themes())),  # noqa: S704 - escaped
        )
    )


def _charts(views: Sequence[RunView], weighing: Weighing) -> list[tuple[str, Chart]]:
    """All charts of a page, each with its key there."""
    if len(views) == 1:
        return [(chart.key, chart) for section in views[0].sections for chart in section.all_charts]
    found = [(chart.key, chart) for chart in comparison_of(views, weighing).all_charts]
    for number, view in enumerate(views, start=1):
        found += [(f"r{number}-{chart.key}", chart) for section in view.sections for chart in section.all_charts]
    return found


def write_figures(charts: Sequence[tuple[str, Chart]], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Each chart as a file KEY.FORMAT, png, svg or pdf: a column of a paper wide, PNG with 300 dots an inch."""
    library = needed("vl_convert", "report")
    written = []
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for key, chart in charts:
        spec = {**chart.spec, "width": _WIDTH}
        for form in formats:
            path = folder / f"{key}.{form}"
            with _writing(path), written_whole(path, "a figure") as file:
                file.write(_drawn(library, spec, form))
            written.append(path)
    return written


def _drawn(library: Any, spec: Any, form: str) -> bytes:
    config = theme(dark=False, paper=True)
    if form == "png":
        return bytes(library.vegalite_to_png(spec, config=config, ppi=_PPI, scale=1))
    if form == "pdf":
        return bytes(library.vegalite_to_pdf(spec, config=config))
    return str(library.vegalite_to_svg(spec, config=config)).encode()


@contextlib.contextmanager
def _writing(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
