"""Checks the users' arrays and builds stacks of rows and their losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems.blocks import Block
from coterie_client.problems.distances import distance_block
from coterie_client.problems.losses import RowLoss, check_labels
from coterie_client.problems.margins import margin_block
from coterie_client.problems.rows import Stack, read_features, read_targets, stack_rows


def read_stacks(
    loss: RowLoss | None,
    names: Sequence[str],
    features: Sequence[Array],
    targets: Sequence[Array],
    width: int | None = None,
) -> list[Stack]:
    """Stacks of the users' rows. With `loss` None the problem is a distance, which ignores targets.

    With a `width` (the p of an existing problem) users may have no rows; they are then in no stack. Raises `ConfigError` naming the first
    user with an array of the wrong shape, a number that is not finite, or a target outside the loss's domain.
    """
    for what, given in (("features", features), ("targets", targets)):
        if len(given) != len(names) and not (loss is None and what == "targets"):
            raise ConfigError(f"{what} are given for {len(given)} users, wanted {len(names)}: one array for each user")
    read = read_features(names, features, width)
    if loss is None:
        return stack_rows(read, [np.zeros(len(a)) for a in read])
    labels = read_targets(names, targets, read)
    for name, y in zip(names, labels, strict=True):
        if loss.is_classifier:
            check_labels(y, name)
        loss.check_targets(y, name)
    return stack_rows(read, labels)


def make_block(config: ProblemConfig, loss: RowLoss | None, stack: Stack, l2: float) -> Block:
    """The losses of one stack's users. `l2` is c; it is separate from the config because evaluation uses 0."""
    return distance_block(stack, config, l2) if loss is None else margin_block(stack, loss, config, l2)
