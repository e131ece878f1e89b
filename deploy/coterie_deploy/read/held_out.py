"""Which rows are held out, in a sentence: a fifth of each user's is, where an experiment does not say."""

from __future__ import annotations

from coterie.experiment.data import DataConfig

_WITHOUT_OWN = ("csv", "parquet", "stata", "spss", "npz", "digits", "hsb", "exams", "growth")  # sources that bring no test rows


def held_out_sentence(data: DataConfig) -> str:
    """How many rows models are judged on, and by which key; "" for sources with test rows of their own."""
    if data.fold is not None:
        return f"fold {data.fold.number} of {data.fold.of} of each user's training rows is held out (data.fold)"
    fraction = getattr(data, "test_fraction", None)
    if fraction is None or getattr(data, "test_features", None) is not None:
        return ""
    if not fraction:
        return "no rows are held out (data.test_fraction: 0)"
    may_bring = "" if data.source in _WITHOUT_OWN else ", unless the source has test rows of its own"
    return f"{100 * fraction:.4g} % of each user's rows are held out (data.test_fraction){may_bring}"
