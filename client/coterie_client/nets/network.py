"""A host's network: one module that loads, trains and returns the tensors of one user after another.

It never changes its arguments, returns fresh arrays, and keeps nothing of a user's tensors for the next user. With one torch thread, CPU
arithmetic and seeded draws, the same inputs give the same bits, whatever was trained before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.draws.streams import stream
from coterie.errors import ConfigError, CoterieError, RunError, default_finding
from coterie.experiment.model import CnnModel, CustomModel, ModelConfig, Part, TensorInfo
from coterie.findings import Finding
from coterie.text.suggestions import suggestion
from coterie_client.data import UserData
from coterie_client.learning import Draw, Fitted, Phase, Rows, Tensors, Trained, count_steps, epochs, gradient, steps_of, train
from coterie_client.nets.heads import has_written_gradient, train_linear_head
from coterie_client.nets.losses import CROSS_ENTROPY, resolve_network_loss
from coterie_client.nets.models import build_module
from coterie_client.nets.rows import FEWEST_ROWS, Reader
from coterie_client.nets.slope import TorchSlope

_CHUNK = 100  # rows in one forward pass without gradients: activations of many more leave the CPU cache
_MAX_SHOWN = 4
_RAISED = Finding("L2", place="model.build")


class TorchNetwork:
    """The network of a model section, for rows of one shape.

    Raises ConfigError if it cannot be built, or has tensors that cannot be sent as arrays. Parameters of a custom model that need no
    gradient keep their values.
    """

    tensors: tuple[TensorInfo, ...]  # parameters and buffers, in state_dict order

    def __init__(self, config: ModelConfig, loss: str, seed: int, shape: tuple[int, ...]) -> None:
        torch.set_num_threads(1)
        self._config, self._loss_name, self._shape, self._seed = config, loss, shape, seed
        self._loss = resolve_network_loss(loss)
        self._device = _device(config.device)
        self._reader = Reader(config, self._loss.has_classes, shape, self._device)
        self._module = self._built(seed)
        self._head_prefixes = tuple(prefix.rstrip(".") for prefix in config.head) if isinstance(config, CustomModel) else ("head",)
        self.tensors = self._described()
        self._fixed = {name for name, parameter in self._module.named_parameters() if not parameter.requires_grad}
        self._own_memory()
        self._initial = self._taken()
        # Buffers outside the state_dict are reset to their initial values for each user.
        self._hidden = {name: buffer.clone() for name, buffer in self._module.named_buffers() if name not in self._initial}
        if isinstance(config, CustomModel):
            self._check_is_seeded(seed)

    # ---- building

    def _built(self, seed: int, *number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, "model", *number))
            return build_module(self._config, self._shape)

    @default_finding(Finding("L4", place="model.build"))
    def _described(self) -> tuple[TensorInfo, ...]:
        parameters = dict(self._module.named_parameters())
        modules = dict(self._module.named_modules(remove_duplicate=False))
        listed: list[TensorInfo] = []
        first_at: dict[int, str] = {}  # address -> the first name with this address
        for name, tensor in self._module.state_dict().items():
            _check_can_travel(name, tensor)
            if tensor.numel() and (other := first_at.setdefault(tensor.data_ptr(), name)) != name:
                raise ConfigError(f"tensors {other!r} and {name!r} of the model are one and the same, want each to have its own numbers")
            part: Part = "head" if self._is_of_head(name) else "representation"
            layer = _kind(modules.get(name.rpartition(".")[0]))
            listed.append(TensorInfo(name, tuple(tensor.shape), tensor.dtype == torch.int64, part, name not in parameters, layer))
        if not listed:
            raise ConfigError("the model has no tensors, want parameters to train")
        for prefix in self._head_prefixes:
            if not any(_is_inside(tensor.name, prefix) for tensor in listed):
                shown = ", ".join(tensor.name for tensor in listed[:_MAX_SHOWN]) + (", ..." if len(listed) > _MAX_SHOWN else "")
                raise ConfigError(
                    f"head prefix {prefix!r} names no tensor of the model, which has {shown}{suggestion(prefix, _prefixes(listed))}"
                )
        return tuple(listed)

    def _own_memory(self) -> None:
        """Copies tensors into memory that torch aligned: products of unaligned matrices, such as arrays from a file, have other bits."""
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format).to(self._device)
        if isinstance(self._config, CnnModel):  # convolutions and pooling are one and a half times as fast with channels last
            self._module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @default_finding(Finding("L4", place="model.build"))
    def _check_is_seeded(self, seed: int) -> None:
        again = self._built(seed).state_dict()
        for name, array in self._initial.items():
            if not np.array_equal(array, again[name].cpu().numpy(), equal_nan=True):
                raise ConfigError(f"tensor {name!r} of the model is another each time it is built, want no random numbers but torch's")

    def _is_of_head(self, name: str) -> bool:
        return any(_is_inside(name, prefix) for prefix in self._head_prefixes)

    @property
    def numerics(self) -> str:
        """What determines the bits: torch's version, and its kernels for this processor or device."""
        return f"torch {torch.__version__}, {self._device.type} {torch.backends.cpu.get_cpu_capability()}"

    def initial(self, number: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors' initial values, drawn from the seed. Each further model number has a seed of its own."""
        if number:
            return {name: _array(tensor) for name, tensor in self._built(self._seed, number).state_dict().items()}
        return {name: array.copy() for name, array in self._initial.items()}

    @default_finding(Finding("L7"))
    def check_users(self, users: Sequence[UserData]) -> None:
        """ConfigError naming a user with fewer than two training rows, rows of another shape, or an unknown label."""
        for user in users:
            self._reader.check(user)
        n_outputs = self._try(users[0])
        for user in users:
            self._reader.check_labels(user, n_outputs)

    def _try(self, user: UserData) -> int:
        """The number of outputs per row."""
        self._load(self._initial)
        self._module.eval()
        inputs = self._reader.inputs(user.features[:FEWEST_ROWS])
        try:
            with torch.no_grad():
                outputs = self._module(inputs)
        except Exception as error:  # the model's own code may raise anything
            finding = _RAISED if isinstance(self._config, CustomModel) else Finding("L7")
            raise ConfigError(f"the model cannot take rows of shape {list(self._shape)}: {_said(error)}", finding) from error
        if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or len(outputs) != len(inputs):
            found = list(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise ConfigError(f"the model gives {found} for {len(inputs)} rows, want scores of shape [{len(inputs)}, classes]")
        n_outputs = int(outputs.shape[1])
        if self._loss.n_outputs not in (None, n_outputs):
            raise ConfigError(f"the model has {n_outputs} outputs, want {self._loss.n_outputs} for the loss {self._loss_name}")
        return n_outputs

    # ---- training and evaluating

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw) -> Fitted:
        """One local update of one user. RunError naming user, round and tensor if a number is not finite."""
        self._load(tensors)
        inputs, targets = self._reader.inputs(rows.features), self._reader.targets(rows.target)
        loss: float | None = None
        beside: dict[str, NDArray[Any]] = {}
        with self._model_errors(draw.place), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(draw.seed, f"torch {draw.purpose}", draw.user, draw.round))
            for number, phase in enumerate(phases):
                found = self._phase(inputs, targets, phase, draw, number)
                loss = loss if found.loss is None else found.loss
                beside |= {name: _array(tensor) for name, tensor in found.beside.items()}
        fitted = self._taken()
        if loss is None:
            loss, _ = self.judge(fitted, rows)
        n_steps = sum(count_steps(len(targets), phase) for phase in phases)
        return Fitted(fitted, loss, n_steps, beside).checked(draw.place)

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss and metric on the rows. For least_squares: half the mean squared error, and the mean squared error."""
        scores = self._scores(tensors, rows.features)
        targets = self._reader.targets(rows.target)
        loss = right = 0.0
        for outputs, wanted in zip(scores, torch.split(targets, _CHUNK), strict=True):
            loss += float(self._loss.mean(outputs, wanted)) * len(wanted)
            right += self._loss.total(outputs, wanted)
        return loss / len(targets), right / len(targets)

    def outputs(self, tensors: Tensors, features: NDArray[Any]) -> NDArray[np.float32]:
        """(m, classes) scores of rows (m, ...)."""
        return np.concatenate([piece.cpu().numpy() for piece in self._scores(tensors, features)])

    def _scores(self, tensors: Tensors, features: NDArray[Any]) -> list[torch.Tensor]:
        """Outputs in chunks of _CHUNK rows."""
        self._load(tensors)
        self._module.eval()
        with self._model_errors("a model to be judged"), torch.no_grad():
            return [self._module(chunk) for chunk in torch.split(self._reader.inputs(features), _CHUNK)]

    def _phase(self, inputs: torch.Tensor, targets: torch.Tensor, phase: Phase, draw: Draw, number: int) -> Trained:
        """Trains the parameters of the phase, if there are any."""
        self._set_modes(phase)
        names = [name for name, _ in self._module.named_parameters() if self._is_moved(name, phase) and name not in self._fixed]
        if not names:
            return Trained(None)
        n_rows = len(targets)
        head = self._head_module()
        is_cached = phase.part == "head" and phase.cache and phase.rule is None
        if is_cached and head is not None and (features := self._features(inputs, head)) is not None:
            prefix = f"{self._head_prefixes[0]}."
            inside = [name.removeprefix(prefix) for name in names]
            if has_written_gradient(head, phase) and self._loss is CROSS_ENTROPY and not self._fixed:
                return Trained(train_linear_head(cast(nn.Linear, head), features, targets, epochs(n_rows, phase, draw, number), phase))
            phase = phase.inside(prefix)
            slope = TorchSlope(head, inside, features, targets, self._loss.mean)
        else:
            slope = TorchSlope(self._module, names, inputs, targets, self._loss.mean)
        with torch.no_grad():
            return train(slope, gradient(phase, slope), steps_of(n_rows, phase, draw, number), phase)

    def _set_modes(self, phase: Phase) -> None:
        """Only the trained part is in training mode: a fixed part has no dropout, and keeps its statistics."""
        for name, module in self._module.named_modules():
            module.training = self._is_moved(name, phase)

    def _is_moved(self, name: str, phase: Phase) -> bool:
        return phase.part == "all" or self._is_of_head(name) == (phase.part == "head")

    def _head_module(self) -> nn.Module | None:
        """The module that is the whole head, or None."""
        if len(self._head_prefixes) != 1:
            return None
        return dict(self._module.named_modules()).get(self._head_prefixes[0])

    @torch.no_grad()
    def _features(self, inputs: torch.Tensor, head: nn.Module) -> torch.Tensor | None:
        """The head's input for each row. None if the outputs are not a function of it alone, or rows affect each other."""
        seen: list[torch.Tensor] = []

        def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if len(given) == 1 and not named and isinstance(given[0], torch.Tensor):
                seen.append(given[0].clone())  # a head may work in place

        was_training = head.training
        head.eval()  # dropout would break the comparison
        handle = head.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            chunks = [inputs[:FEWEST_ROWS], *torch.split(inputs, _CHUNK)]
            outputs = [self._module(chunk) for chunk in chunks]
            handle.remove()
            if [len(given) for given in seen] != [len(chunk) for chunk in chunks] or not torch.equal(head(seen[1].clone()), outputs[1]):
                return None
        finally:
            handle.remove()
            head.train(was_training)
        # If features depend on other rows of the batch, they cannot be cached. The tolerance allows for rounding with other batch sizes.
        is_by_row = torch.allclose(seen[0], seen[1][:FEWEST_ROWS], rtol=1e-3, atol=1e-5)
        return torch.cat(seen[1:]) if is_by_row else None

    @contextlib.contextmanager
    def _model_errors(self, where: str) -> Iterator[None]:
        """Exceptions of a custom model become RunErrors; those of ours are bugs."""
        try:
            yield
        except CoterieError:
            raise
        except Exception as error:
            if not isinstance(self._config, CustomModel):
                raise
            raise RunError(f"{where}: model {self._config.build!r} has failed: {_said(error)}", _RAISED) from error

    # ---- arrays in and out

    @torch.no_grad()
    def _load(self, tensors: Tensors) -> None:
        for name, tensor in self._module.state_dict().items():
            tensor.copy_(torch.from_numpy(np.array(tensors[name])))
        if self._hidden:
            buffers = dict(self._module.named_buffers())
            for name, built in self._hidden.items():
                buffers[name].copy_(built)

    def _taken(self) -> dict[str, NDArray[Any]]:
        return {name: _array(tensor) for name, tensor in self._module.state_dict().items()}


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device is {name!r}, want cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {name!r}, want cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name!r}, but torch finds no such device here: want cpu")
    return device


def _check_can_travel(name: str, tensor: Any) -> None:
    """ConfigError unless this entry of a state_dict is an initialised tensor of floats, or of counts."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name!r} in the state of the model is a {type(tensor).__name__}, want tensors alone")
    if nn.parameter.is_lazy(tensor):
        raise ConfigError(f"tensor {name!r} of the model has no shape before its first rows, want all sizes given")
    if tensor.dtype not in (torch.float32, torch.int64):
        raise ConfigError(f"tensor {name!r} of the model is {tensor.dtype}, want torch.float32 or, for counts, torch.int64")


def _is_inside(name: str, prefix: str) -> bool:
    """Whether a tensor or module has the name `prefix`, or lies inside it."""
    return name == prefix or name.startswith(f"{prefix}.")


def _kind(module: nn.Module | None) -> str:
    """The layer's kind: the first of its classes that is torch's own."""
    classes = () if module is None else type(module).__mro__
    return next((cls.__name__ for cls in classes if cls.__module__.startswith("torch.nn.")), "")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _seed_of(seed: int, purpose: str, *index: int | str) -> int:
    return int(stream(seed, purpose, *index).words.random_raw() >> 1)


def _prefixes(tensors: Sequence[TensorInfo]) -> list[str]:
    """All prefixes of tensor names that end before a dot."""
    pieces = [tensor.name.split(".") for tensor in tensors]
    return list(dict.fromkeys(".".join(piece[:length]) for piece in pieces for length in range(1, len(piece))))
