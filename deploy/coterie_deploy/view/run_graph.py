"""The pictures of convex clustering in a run: the graph of its users, and its path of penalties as a tree."""

from collections.abc import Mapping, Sequence

from coterie.arrays import Indices
from coterie.errors import ConfigError
from coterie.families.ties import ALL_PAIRS
from coterie.registry import method
from coterie_deploy.read.models import stage_models
from coterie_deploy.read.report import Report
from coterie_deploy.view.charts import Chart
from coterie_deploy.view.charts_graph import Ties, graph_chart, tree_chart
from coterie_deploy.view.charts_structure import colours_of

_LATER = "The picture of the graph needs the models, which are written when the run has finished."
_EARLIER = "this folder was written by an earlier version, which did not keep the ties, so none are drawn"


def graph_of(report: Report, before: Sequence[Sequence[int]] = ()) -> tuple[Chart | None, str]:
    """The users and their ties at the end of the method's own stage, or a sentence on why there is no picture, "" for other methods.

    Clusters have the colours that follow from those of `before`, the columns of a heat map.
    """
    own = report.own
    planned = None if own is None else report.plan.get(own.name)
    said = "" if planned is None else method(planned.method).ties(planned.config)
    if own is None or not said:
        return None, ""
    try:
        found = stage_models(report.folder, own.name)
    except ConfigError:
        return None, _LATER if report.is_at_work else ""
    if found.models is None or found.labels is None:
        return None, ""
    ties = ties_of(report, own.name)
    if ties is None and said != ALL_PAIRS:
        said = f"{said}; {_EARLIER}"
    colours = colours_of([*before, found.labels.tolist()])[-1]
    return graph_chart(found.users, found.models, found.labels, colours, ties, stage=own.name, said=said), ""


def ties_of(report: Report, stage: str) -> Ties | None:
    """The ties of a stage, or of the one that it goes on from: a path has one graph, in the file of its first stage."""
    own = report.plan[stage].method
    while stage in report.plan and report.plan[stage].method == own:
        try:
            found = stage_models(report.folder, stage).ties
        except ConfigError:
            return None
        if found:
            return Ties(found["first"], found["second"], found["weight"])
        stage = next(iter(report.plan[stage].start), "")
    return None


def tree_of(
    report: Report, penalties: Mapping[str, float], labels: Mapping[str, Indices], users: Sequence[str], colours: Mapping[int, int] | None
) -> Chart | None:
    """The stages of the path that have ended, by increasing penalty, with their clusters (n,); the result's penalty is marked."""
    stages = [name for name in sorted(penalties, key=penalties.__getitem__) if name in labels]
    own = report.own
    chosen = penalties[own.name] if own is not None and report.final is not None and own.name in stages else None
    return tree_chart([penalties[name] for name in stages], [labels[name] for name in stages], users, chosen=chosen, colours=colours)
