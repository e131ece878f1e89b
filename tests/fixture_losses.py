"""The losses of the fixture files, written down once more: what server mathematics is tested with, without a client."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"


class SquaredHinge:
    """f_i(x) = c|w|^2/2 + mean over rows of max(0, 1 - y(<w, a> - b))^2, x = [w, b], for all users of a fixture."""

    def __init__(self, n_users):
        self.fixture = json.loads((FIXTURES / f"convex_clustering_{n_users}.json").read_text())
        rows, signs = np.array(self.fixture["A"]), np.array(self.fixture["Y"], float)
        self.rows = signs[..., None] * np.concatenate([rows, -np.ones((*rows.shape[:2], 1))], axis=2)
        self.ridge = self.fixture["c"] * np.array([1.0, 1.0, 0.0])
        self.labels = np.array(self.fixture["label"])

    def __call__(self, x):
        slack = np.maximum(0, 1 - np.einsum("nmd,nd->nm", self.rows, x))
        m = slack.shape[1]
        values = 0.5 * (self.ridge * x * x).sum(axis=1) + (slack**2).sum(axis=1) / m
        gradients = self.ridge * x - 2 / m * np.einsum("nmd,nm->nd", self.rows, slack)
        hessians = np.diag(self.ridge) + 2 / m * np.einsum("nmd,nme,nm->nde", self.rows, self.rows, 1.0 * (slack > 0))
        return values, gradients, hessians
