"""What is printed and written of the stand-in for tables 2 and 3 and figure 2 of Lyu, Hanzely and Kolar (2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from coterie.arrays import Array
from coterie_deploy.studies.reproduce.files import write_csv
from coterie_deploy.studies.reproduce.known_clusters_exams import Estimator, Scores
from coterie_deploy.terminal.tables import table

TITLES: dict[Estimator, str] = {
    "local": "local models",
    "single_model": "single model",
    "single_cluster": "single cluster",
    "known_clusters": "known clusters",
}
CAP = 100.0  # on the loss of a user, whom an overconfident model may cost any amount
HIGH = 1.0  # "183 ZIP codes have cross-entropy loss greater than 1 in the personalized model, whereas 202 [...] in the single-model"

# Of other data, 29,490 ZIP codes of donors in 5 clusters: mean, standard deviation, quartiles, maximum; the share of ZIP codes above 1.
PAPER_TABLE2: Mapping[Estimator, tuple[str, ...]] = {
    "local": ("0.413", "0.932", "0.173", "0.247", "0.313", "6", ""),
    "single_model": ("0.211", "0.176", "0.058", "0.201", "0.273", "2.76", "0.0068"),
    "known_clusters": ("0.215", "0.179", "0.069", "0.209", "0.283", "2.668", "0.0062"),
}
# Mean, standard deviation, quartiles, performance ratio.
PAPER_TABLE3: Mapping[Estimator, tuple[str, ...]] = {
    "local": ("0.940", "0.070", "0.919", "0.947", "1", "0.972"),
    "single_model": ("0.942", "0.067", "0.921", "0.948", "1", "0.986"),
    "known_clusters": ("0.942", "0.066", "0.921", "0.948", "1", "1"),
}
# Mean losses on these data, with other held-out rows, found independently of this system.
OTHER_DRAWS: Mapping[Estimator, str] = {
    "local": "1.090",
    "single_model": "0.4756",
    "single_cluster": "0.4529",
    "known_clusters": "0.4529",
}


@dataclass(frozen=True)
class Summary:
    """Of a figure of the users of one estimator: means over the seeds."""

    mean: float
    error: float  # standard deviation of a seed's mean, 0 for a single seed
    spread: float  # over the users of a seed
    quartiles: tuple[float, float, float]
    maximum: float


def summary(values: Sequence[Array]) -> Summary:
    """Of each seed's values (n,), which differ by user."""
    means = [each.mean() for each in values]
    low, middle, high = np.mean([np.quantile(each, [0.25, 0.5, 0.75]) for each in values], axis=0).tolist()
    return Summary(
        mean=float(np.mean(means)),
        error=float(np.std(means, ddof=1)) if len(means) > 1 else 0.0,
        spread=float(np.mean([each.std() for each in values])),
        quartiles=(low, middle, high),
        maximum=float(np.mean([each.max() for each in values])),
    )


def losses_of(rows: Sequence[Scores], estimator: Estimator) -> list[Array]:
    """Each seed's losses (n,), capped."""
    return [np.minimum(row.losses, CAP) for row in rows if row.estimator == estimator]


def accuracies_of(rows: Sequence[Scores], estimator: Estimator) -> list[Array]:
    """Each seed's accuracies (n,)."""
    return [np.array(row.accuracies) for row in rows if row.estimator == estimator]


def performance_ratio(rows: Sequence[Scores], estimator: Estimator) -> float:
    """ "The proportion of clients with accuracy no less than the model being compared to", here the known clusters; mean over the seeds."""
    pairs = zip(accuracies_of(rows, estimator), accuracies_of(rows, "known_clusters"), strict=True)
    return float(np.mean([(own >= known).mean() for own, known in pairs]))


def table2(rows: Sequence[Scores], output: Path, console: Console) -> None:
    """Tables 2 and 3 and a plot like figure 2; numbers and plot go to the folder `output`."""
    from coterie_deploy.studies.reproduce import known_clusters_plots  # noqa: PLC0415 - needs the extra `plots`

    seeds = sorted({row.seed for row in rows})
    where = f"{len(rows[0].users):,} schools, " + (f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}")
    shared = ("", "mean", "+-", "sd", "25 %", "50 %", "75 %")
    console.print(table(f"Cross-entropy of a user, {where}", (*shared, "largest", "above 1"), _loss_lines(rows)))
    console.print(table(f"Accuracy of a user, {where}", (*shared, "ratio"), _accuracy_lines(rows)))
    n_capped = sum(int((np.array(row.losses) > CAP).sum()) for row in rows)
    console.print(
        "On held-out rows, a fifth of each school's; means over the seeds. +- is the standard deviation between seeds, sd that between "
        f"users. Losses are capped at {CAP:g} ({n_capped} were above). "
        "ratio: the share of users with an accuracy no less than by known clusters."
    )
    console.print(
        "The paper's numbers are of other data, 29,490 ZIP codes of donors, which are not public: orders compare, digits do not. "
        "Other draws are of these data, with other held-out rows."
    )
    plot = output / "known-clusters-table2.png"
    known_clusters_plots.losses({title: losses_of(rows, estimator) for estimator, title in TITLES.items()}, plot)
    console.print(f"\nplot: {plot}", soft_wrap=True)
    numbers = output / "known-clusters-table2.csv"
    lines = [(row.seed, row.estimator, *user) for row in rows for user in zip(row.users, row.losses, row.accuracies, strict=True)]
    write_csv(("seed", "estimator", "user", "loss", "accuracy"), lines, numbers)
    console.print(f"numbers: {numbers}", soft_wrap=True)


def _loss_lines(rows: Sequence[Scores]) -> list[tuple[str, ...]]:
    lines = []
    for estimator, title in TITLES.items():
        values = losses_of(rows, estimator)
        found = summary(values)
        high = float(np.mean([(each > HIGH).mean() for each in values]))
        lines.append((title, *_shown(found), f"{found.maximum:.2f}", f"{high:.4f}"))
        lines.append(("  other draws", OTHER_DRAWS[estimator], *[""] * 7))
        if estimator in PAPER_TABLE2:
            mean, *others = PAPER_TABLE2[estimator]
            lines.append(("  paper, donors", mean, "", *others))
    return lines


def _accuracy_lines(rows: Sequence[Scores]) -> list[tuple[str, ...]]:
    lines = []
    for estimator, title in TITLES.items():
        found = summary(accuracies_of(rows, estimator))
        lines.append((title, *_shown(found), f"{performance_ratio(rows, estimator):.3f}"))
        if estimator in PAPER_TABLE3:
            mean, *others = PAPER_TABLE3[estimator]
            lines.append(("  paper, donors", mean, "", *others))
    return lines


def _shown(found: Summary) -> tuple[str, ...]:
    return f"{found.mean:.4f}", f"{found.error:.4f}", f"{found.spread:.3f}", *(f"{quartile:.3f}" for quartile in found.quartiles)
