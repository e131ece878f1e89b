"""Parts of pages about a run: sections of sentences, charts and tables; and which stage of a run they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coterie_deploy.read.report import Report
from coterie_deploy.view.charts import Chart
from coterie_server.record import summary
from coterie_server.record.summary import StageSummary


@dataclass(frozen=True)
class Table:
    """The first `n_text` columns are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_text: int = 1


@dataclass(frozen=True)
class Section:
    """A part of a page. `tabs`: charts of which one group is seen at a time."""

    key: str
    title: str
    sentences: Sequence[str] = ()
    tabs: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()

    @property
    def all_charts(self) -> list[Chart]:
        """Those of all tabs, and the others."""
        return [*(chart for group in self.tabs.values() for chart in group), *self.charts]


def main_stage(report: Report) -> StageSummary | None:
    """The stage that is the result, or the latest one."""
    return report.final or (report.stages[-1] if report.stages else None)


def method_stage(report: Report) -> StageSummary | None:
    """The stage in which the experiment's method worked: the result, or what the result refits; or else the latest one."""
    return summary.method_stage(report.stages, report.final, report.experiment.method.name)


def sentence(text: str) -> str:
    """Words as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."
