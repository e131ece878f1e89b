"""Converts a user's private rows to a network's inputs, and checks them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.experiment.model import CnnModel, LstmModel, ModelConfig
from coterie.findings import Finding
from coterie_client.data import UserData

FEWEST_ROWS = 2


class Reader:
    """Reads rows of one shape for the network of a model section."""

    def __init__(self, config: ModelConfig, has_classes: bool, shape: tuple[int, ...], device: torch.device) -> None:
        self._config, self._has_classes, self._shape, self._device = config, has_classes, shape, device
        self._mean, self._std = self._by_channel("input_mean", config.input_mean), self._by_channel("input_std", config.input_std)
        self._is_scaled = bool(self._mean.any() or (self._std != 1).any())

    def _by_channel(self, name: str, constants: Sequence[float]) -> NDArray[np.float32]:
        if len(constants) not in (1, *self._shape[:1]):
            wanted = f"1, or one for each of {self._shape[0]} channels" if self._shape else "1"
            raise ConfigError(f"model.{name} has {len(constants)} numbers, want {wanted}")
        return np.array(constants, np.float32).reshape(-1, *[1] * (len(self._shape) - 1))

    def inputs(self, features: NDArray[Any]) -> torch.Tensor:
        """Rows (m, ...) on the device. Bytes are divided by 255. Everything but symbols is centred and scaled by channel, in float32.

        Whole numbers wider than bytes are symbols, and stay unchanged.
        """
        if isinstance(self._config, LstmModel) or (features.dtype.kind in "iu" and features.dtype != np.uint8):
            return self._owned(features.astype(np.int64))
        single = features.astype(np.float32)
        if features.dtype == np.uint8:
            single /= np.float32(255)
        if self._is_scaled:
            single -= self._mean
            single /= self._std
        return self._owned(single, torch.channels_last if isinstance(self._config, CnnModel) else torch.contiguous_format)

    def targets(self, target: NDArray[Any]) -> torch.Tensor:
        """(m,) classes, or numbers for losses such as least squares."""
        return self._owned(target.astype(np.int64 if self._has_classes else np.float32))

    def _owned(self, array: NDArray[Any], layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """A copy in memory that torch aligned: products of unaligned matrices have other bits."""
        return torch.from_numpy(array).clone(memory_format=layout).to(self._device)

    def check(self, user: UserData) -> None:
        """ConfigError naming a user with fewer than two training rows, rows of another shape, or an invalid label or symbol."""
        n_rows = len(user.target)
        if n_rows < FEWEST_ROWS:
            found = "1 training row" if n_rows == 1 else f"{n_rows} training rows"
            raise ConfigError(f"user {user.name!r} has {found}, want at least {FEWEST_ROWS}", Finding("D4"))
        for features, target in ((user.features, user.target), (user.test_features, user.test_target)):
            if len(target) and features.shape[1:] != self._shape:
                found = f"user {user.name!r} has rows of shape {list(features.shape[1:])}"
                raise ConfigError(f"{found}, want {list(self._shape)}, as the host's first user has")
            if isinstance(self._config, LstmModel):
                _check_whole(user.name, "symbol", features, self._config.symbols)
            if self._has_classes:
                _check_whole(user.name, "label", target, None)

    def check_labels(self, user: UserData, n_classes: int) -> None:
        """ConfigError naming a user with a label that the network has no output for."""
        if self._has_classes:
            for target in (user.target, user.test_target):
                _check_whole(user.name, "label", target, n_classes)


def _check_whole(user: str, what: str, found: NDArray[Any], n_known: int | None) -> None:
    """ConfigError unless these are whole numbers from 0, fewer than `n_known`."""
    limit = np.inf if n_known is None else n_known
    wrong = found[~((found >= 0) & (found < limit) & (found == np.floor(found)))]
    if wrong.size:
        wanted = "whole numbers from 0" if n_known is None else f"whole numbers from 0 to {n_known - 1}, which the model has"
        finding = Finding("L6", wrong.size, "label" if what == "label" else "feature", "problem.loss")
        raise ConfigError(f"user {user!r} has the {what} {wrong.flat[0]:g}, want {wanted}", finding)
