"""Rules that bear hosts who lie, where users' answers are averaged: the section `federation.robust`."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from coterie.experiment.plugins import check_known
from coterie.experiment.settings import Settings
from coterie.registry import method

if TYPE_CHECKING:
    from coterie.experiment.config import Experiment

RULES: Final = ("median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "norm_clip")
HALF: Final = ("median", "geometric_median")  # which need no fraction
_USUAL = 0.2


class Robust(Settings):
    """How answers of users are averaged, some of whom may lie."""

    #: median: of each number. trimmed_mean: without the largest and smallest of each number. geometric_median: the point nearest to all
    #: answers. krum: the answer nearest to its neighbours. multi_krum: the mean of the answers nearest to theirs. norm_clip: the mean, with
    #: the longest changes shortened. Or a rule of a package, or of your own code as module:name.
    rule: Annotated[str, AfterValidator(partial(check_known, "rule", built_in=RULES))]
    #: Largest part of the users in an average who may lie, rounded up to whole users; 0.2 unless given. The medians bear almost a half, and
    #: take no such key.
    fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = None

    @property
    def is_own(self) -> bool:
        """Whether the rule is code of a package, or beside the experiment."""
        return self.rule not in RULES

    @model_validator(mode="after")
    def _medians_have_no_fraction(self) -> Self:
        if self.fraction is not None and self.rule in HALF:
            raise ValueError(f"fraction is {self.fraction:g}, but rule {self.rule!r} bears almost a half without one: want no fraction")
        return self

    def most(self, k: int) -> int:
        """How many of k users may lie, as it is wanted: half of them, without one, for the medians."""
        if self.rule in HALF:
            return (k - 1) // 2
        return math.ceil((self.fraction or _USUAL) * k - 1e-9)

    def bears(self, k: int) -> int:
        """f: how many of k users may lie for what the rule promises. krum asks for k >= 2f + 3, all others for k >= 2f + 1."""
        return max(0, min(self.most(k), (k - 3 if self.rule in ("krum", "multi_krum") else k - 1) // 2))


def why_not_robust(experiment: Experiment) -> str:
    """Why `federation.robust` cannot work in an experiment, and what is wanted; "" where it does."""
    name, privacy = experiment.method.name, experiment.privacy
    robust = experiment.federation.robust
    if robust is None:
        return ""
    if why := method(name).no_rule(experiment.method, "convex" if experiment.model is None else "network"):
        return f"federation.robust is for methods that average users' models, but with {name!r} {why}: want no such key"
    if experiment.masks_sums:
        return (
            "federation.robust looks at the answer of each user, but federation.sums 'masked' hides them, and hosts that clip their own "
            "answers may lie about that too: want one of them"
        )
    if experiment.exact_sums:
        return "federation.robust looks at the answer of each user, but with exact_sums hosts add them up: want exact_sums: false"
    if privacy is not None and privacy.unit == "user":
        return "federation.robust replaces the mean, but the noise of privacy.unit 'user' is for a mean: want one of the two"
    if robust.rule == "norm_clip" and method(name).has_known_clusters:
        return "federation.robust.rule is 'norm_clip', but models of known clusters do not begin at a common point: want another rule"
    return ""
