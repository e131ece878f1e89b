"""A host's network: one module, into which the tensors of one user after another are loaded, trained and taken out again.

Arrays handed in are never changed, results are fresh arrays, and nothing of a user's tensors stays for the next one. One torch thread, CPU
arithmetic, seeded draws: the same inputs give the same bits, whatever was trained before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.arrays import Array
from coterie.draws import stream
from coterie.errors import ConfigError, RunError
from coterie.model import CustomModel, LstmModel, ModelConfig, TensorInfo
from coterie_client.data import UserData
from coterie_client.nets.models import build_module
from coterie_client.nets.training import Draw, Phase, batches, has_written_gradient, train, train_linear_head

Tensors = Mapping[str, NDArray[Any]]

_FEWEST_ROWS = 2
_CHUNK = 500  # rows that are judged at once
_MAX_SHOWN = 4


@dataclass(frozen=True)
class Rows:
    """A user's rows (m, ...) and targets (m,)."""

    features: NDArray[Any]
    target: NDArray[Any]


@dataclass(frozen=True)
class Fitted:
    """What a local update leaves."""

    tensors: dict[str, NDArray[Any]]
    loss: float  # mean over the batches of the last phase that had any


class TorchNetwork:
    """The network of a model section, for rows of one shape."""

    def __init__(self, config: ModelConfig, loss: str, seed: int, shape: tuple[int, ...]) -> None:
        torch.set_num_threads(1)
        if config.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"model.device is {config.device!r}, but torch finds no such device here: want cpu")
        self._config, self._loss_name, self._shape = config, loss, shape
        self._device = torch.device(config.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, "model"))
            self._module = build_module(config, shape).to(self._device)
        self._head_prefixes = config.head if isinstance(config, CustomModel) else ("head",)
        self.tensors = self._described()
        self._initial = self._taken()

    # ---- what it is

    def _described(self) -> tuple[TensorInfo, ...]:
        parameters = dict(self._module.named_parameters())
        listed = []
        for name, tensor in self._module.state_dict().items():
            if tensor.dtype not in (torch.float32, torch.int64):
                raise ConfigError(f"tensor {name!r} of the model is {tensor.dtype}, want torch.float32 or, for counts, torch.int64")
            part = "head" if self._is_of_head(name) else "representation"
            is_integer = tensor.dtype == torch.int64
            listed.append(TensorInfo(name, tuple(tensor.shape), is_integer, part, name not in parameters))  # type: ignore[arg-type]
        if not listed:
            raise ConfigError("the model has no tensors, want parameters to train")
        for prefix in self._head_prefixes:
            if not any(_begins(tensor.name, prefix) for tensor in listed):
                shown = ", ".join(tensor.name for tensor in listed[:_MAX_SHOWN]) + (", ..." if len(listed) > _MAX_SHOWN else "")
                raise ConfigError(f"head prefix {prefix!r} names no tensor of the model, which has {shown}")
        return tuple(listed)

    def _is_of_head(self, name: str) -> bool:
        return any(_begins(name, prefix) for prefix in self._head_prefixes)

    def initial(self) -> dict[str, NDArray[Any]]:
        """The tensors' first values, which the seed gives."""
        return {name: array.copy() for name, array in self._initial.items()}

    def check_users(self, users: Sequence[UserData]) -> None:
        """ConfigError that names a user with fewer than two training rows, rows of another shape, or a label that there is not."""
        for user in users:
            if len(user.target) < _FEWEST_ROWS:
                raise ConfigError(f"user {user.name!r} has {len(user.target)} training row, want at least {_FEWEST_ROWS}")
            for features, target in ((user.features, user.target), (user.test_features, user.test_target)):
                if features.shape[1:] != self._shape and len(features):
                    found, wanted = list(features.shape[1:]), list(self._shape)
                    raise ConfigError(f"user {user.name!r} has rows of shape {found}, want {wanted}, as the host's first user has")
                self._check_labels(user.name, target)
        n_outputs = self._try(users[0])
        for user in users if self._loss_name == "cross_entropy" else ():
            for target in (user.target, user.test_target):
                if len(target) and target.max() >= n_outputs:
                    raise ConfigError(f"user {user.name!r} has the label {target.max():g}, want 0 to {n_outputs - 1}: the model's classes")

    def _check_labels(self, user: str, target: Array) -> None:
        if self._loss_name != "cross_entropy" or not len(target):
            return
        wrong = target[(target < 0) | (target != np.floor(target))]
        if wrong.size:
            raise ConfigError(f"user {user!r} has the label {wrong[0]:g}, want whole numbers from 0")

    def _try(self, user: UserData) -> int:
        """How many outputs the model has for a row."""
        self._load(self._initial)
        self._module.eval()
        inputs = self._inputs(user.features[:_FEWEST_ROWS])
        try:
            with torch.no_grad():
                outputs = self._module(inputs)
        except Exception as error:  # whatever the model's own code raises
            said = str(error).partition("\n")[0]
            raise ConfigError(f"the model cannot take rows of shape {list(self._shape)}: {said}") from error
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or len(outputs) != len(inputs):
            found = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise ConfigError(f"the model gives {found} for {len(inputs)} rows, want scores of shape [{len(inputs)}, classes]")
        n_outputs = int(outputs.shape[1])
        if self._loss_name == "least_squares" and n_outputs != 1:
            raise ConfigError(f"the model has {n_outputs} outputs, want 1 for the loss least_squares")
        return n_outputs

    # ---- what it does

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw) -> Fitted:
        """One local update of one user, from its tensors. RunError that names user, round and tensor of a number that is not finite."""
        self._load(tensors)
        inputs, targets = self._inputs(rows.features), self._targets(rows.target)
        losses: list[float] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(draw.seed, f"torch {draw.purpose}", draw.user, draw.round))
            for number, phase in enumerate(phases):
                losses = self._phase(inputs, targets, phase, draw, number) or losses
        fitted = self._taken()
        for name, array in fitted.items():
            if not np.isfinite(array).all():
                found = "nan" if np.isnan(array).any() else "inf"
                raise RunError(
                    f"user {draw.user!r} in round {draw.round}: tensor {name!r} has {found} after training, want finite numbers: "
                    "a smaller learning rate may help"
                )
        return Fitted(fitted, float(np.mean(losses)) if losses else self.judge(fitted, rows)[0])

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss and accuracy on the rows; with least_squares half the mean squared error, and the mean squared error."""
        self._load(tensors)
        self._module.eval()
        inputs, targets = self._inputs(rows.features), self._targets(rows.target)
        loss = right = 0.0
        with torch.no_grad():
            for start in range(0, len(targets), _CHUNK):
                outputs, wanted = self._module(inputs[start : start + _CHUNK]), targets[start : start + _CHUNK]
                value = float(self._loss(outputs, wanted)) * len(wanted)
                loss += value
                right += 2 * value if self._loss_name == "least_squares" else float((outputs.argmax(dim=1) == wanted).sum())
        return loss / len(targets), right / len(targets)

    def outputs(self, tensors: Tensors, features: NDArray[Any]) -> NDArray[np.float32]:
        """(m, classes) scores of rows (m, ...)."""
        self._load(tensors)
        self._module.eval()
        inputs = self._inputs(features)
        with torch.no_grad():
            pieces = [self._module(inputs[start : start + _CHUNK]).cpu().numpy() for start in range(0, len(inputs), _CHUNK)]
        return np.concatenate(pieces)

    def _phase(self, inputs: torch.Tensor, targets: torch.Tensor, phase: Phase, draw: Draw, number: int) -> list[float]:
        self._set_modes(phase)
        names = [name for name, _ in self._module.named_parameters() if self._is_moved(name, phase)]
        if not names:
            return []
        steps = batches(len(targets), phase, draw, number)
        head = self._head_module()
        if phase.part == "head" and phase.cache and head is not None and (features := self._features(inputs, head)) is not None:
            if has_written_gradient(head, phase, self._loss_name):
                return train_linear_head(head, features, targets, steps, phase)  # type: ignore[arg-type]
            prefix = f"{self._head_prefixes[0]}."
            cut = _without_prefix(phase, prefix)
            return train(head, features, targets, steps, cut, self._loss, [name.removeprefix(prefix) for name in names])
        return train(self._module, inputs, targets, steps, phase, self._loss, names)

    def _set_modes(self, phase: Phase) -> None:
        """Only what is trained is in training mode: a part that is fixed drops nothing out, and its statistics stay."""
        for name, module in self._module.named_modules():
            module.training = self._is_moved(name, phase)

    def _is_moved(self, name: str, phase: Phase) -> bool:
        return phase.part == "all" or self._is_of_head(name) == (phase.part == "head")

    def _head_module(self) -> nn.Module | None:
        """The one module that is the head, where there is one."""
        if len(self._head_prefixes) != 1:
            return None
        return dict(self._module.named_modules()).get(self._head_prefixes[0])

    def _features(self, inputs: torch.Tensor, head: nn.Module) -> torch.Tensor | None:
        """What the head is given for each row; None where the model's outputs are not simply what the head makes of it."""
        seen: list[torch.Tensor] = []
        was_training = head.training
        head.eval()  # its dropout would make the comparison say nothing
        handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            with torch.no_grad():
                outputs = [self._module(inputs[start : start + _CHUNK]) for start in range(0, len(inputs), _CHUNK)]
                handle.remove()
                is_last = len(seen) == len(outputs) and torch.equal(head(seen[0]), outputs[0])
        finally:
            handle.remove()
            head.train(was_training)
        return torch.cat(seen) if is_last else None

    def _loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._loss_name == "least_squares":
            return ((outputs[:, 0] - targets) ** 2).mean() / 2
        return nn.functional.cross_entropy(outputs, targets)

    # ---- arrays in and out

    def _load(self, tensors: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in self._module.state_dict().items():
                tensor.copy_(torch.from_numpy(np.array(tensors[name])))

    def _taken(self) -> dict[str, NDArray[Any]]:
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._module.state_dict().items()}

    def _inputs(self, features: NDArray[Any]) -> torch.Tensor:
        """Bytes are divided by 255, all but symbols is centred and scaled by channel; (m, ...) on the device."""
        if isinstance(self._config, LstmModel) or (features.dtype.kind in "iu" and features.dtype != np.uint8):
            return torch.from_numpy(features.astype(np.int64)).to(self._device)
        single = features.astype(np.float32)
        if features.dtype == np.uint8:
            single /= np.float32(255)
        centred = single - self._by_channel(self._config.input_mean)
        return torch.from_numpy(centred / self._by_channel(self._config.input_std)).to(self._device)

    def _by_channel(self, constants: Sequence[float]) -> NDArray[np.float32]:
        if len(constants) not in (1, self._shape[0]):
            wanted = f"1, or one for each of {self._shape[0]} channels"
            raise ConfigError(f"model.input_mean or input_std has {len(constants)} numbers, want {wanted}")
        return np.array(constants, np.float32).reshape(-1, *[1] * (len(self._shape) - 1))

    def _targets(self, target: NDArray[Any]) -> torch.Tensor:
        dtype = np.float32 if self._loss_name == "least_squares" else np.int64
        return torch.from_numpy(target.astype(dtype)).to(self._device)


def _begins(name: str, prefix: str) -> bool:
    """Whether a tensor or module is the one named `prefix`, or inside it; a prefix that ends in a dot is taken as it is."""
    return name == prefix or name.startswith(prefix if prefix.endswith(".") else f"{prefix}.")


def _without_prefix(phase: Phase, prefix: str) -> Phase:
    """The phase for the head alone, whose tensors are called without the prefix there."""

    def cut(named: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}

    pull = None if phase.pull is None else (phase.pull[0], cut(phase.pull[1]))
    return replace(phase, pull=pull, shift=None if phase.shift is None else cut(phase.shift))


def _seed_of(seed: int, purpose: str, *index: int | str) -> int:
    return int(stream(seed, purpose, *index).words.random_raw() >> 1)
