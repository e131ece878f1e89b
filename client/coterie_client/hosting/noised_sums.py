"""A host's sums of users' changes with its share of the noise (`privacy.where: hosts`). See `coterie.draws.shares`.

It trusts neither the parent nor the method's half. Whatever is to leave the host in a sum is shortened to the clip here, gets the noise
that the owner has accepted, and is the only sum of its exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.draws.secret import Secret
from coterie.draws.shares import Shares
from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment
from coterie.families.shares import form_of, shares_of
from coterie.wire.messages import AskTotal, Rows, Total
from coterie_client.hosting.noise_keys import NoiseKeys
from coterie_client.hosting.totals import Noised


def share_of(experiment: Experiment, keys: NoiseKeys) -> Noised | None:
    """What adds up a host's changes, with the key of the task at hand; None where hosts add no noise to sums.

    How much noise there is is computed with the first sum: it may need the accountant.
    """
    if experiment.privacy is None or not experiment.privacy.is_shared:
        return None
    found = functools.cache(lambda: shares_of(experiment))

    def of_task(ask: AskTotal, messages: Sequence[Rows]) -> Total:
        shares = found()
        assert shares is not None  # noqa: S101 - see above
        return noised(ask, messages, shares, keys.secret)

    return of_task


def noised(ask: AskTotal, found: Sequence[Rows], shares: Shares, secret: Secret) -> Total:
    """The sum of the changes in the messages, each shortened, plus a share of the noise: once for this key.

    ProtocolError for weights, groups, another form than that of the noise, and fields that are no vectors. ConfigError where these are too
    long for the noise.
    """
    cls = ask.of
    if ask.weight.shape[1] or ask.group.shape[1] or any(row != list(form_of(shares)) for row in ask.form.tolist()):
        raise ProtocolError(f"the parent asks for sums of {cls.kind} in another form than that of their noise")
    columns: dict[str, Any] = {}
    n_noised = 0
    for name, spec in cls.specs:
        parts = [getattr(message, name) for message in found]
        size = parts[0][0].size
        total = np.zeros(size, dtype=np.int64)
        if size:
            n_noised += 1
            shares.check(sum(map(len, parts)), size)
            for part in parts:
                for row in part:
                    total += shares.whole(row.reshape(1, -1))[0]
            total += shares.noise(secret.child("share").numbers(), size)
        if n_noised > 1 or (size and not spec.is_float):
            raise ProtocolError(f"the parent asks for sums of {cls.kind}, which has more than one vector of floating-point numbers")
        columns[name] = total.reshape(1, 1, *parts[0].shape[1:])
    assert cls.total is not None  # noqa: S101 - it has been asked for
    return cls.total(groups=np.zeros(1, dtype=np.int64), **columns)
