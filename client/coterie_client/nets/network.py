"""A host's network: one module that loads, trains and returns the tensors of one user after another.

It never changes its arguments, returns fresh arrays, and keeps nothing of a user's tensors for the next user. With one torch thread, CPU
arithmetic and seeded draws, the same inputs give the same bits, whatever was trained before.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.arrays import Array, Indices
from coterie.draws.streams import stream
from coterie.errors import ConfigError, CoterieError, RunError, default_finding
from coterie.experiment.model import CnnModel, CustomModel, ModelConfig, Part, TensorInfo
from coterie.findings import Finding
from coterie.text.suggestions import suggestion
from coterie_client.data import UserData
from coterie_client.learning import Draw, Fitted, Phase, Rows, Tensors, Trained, count_steps, epochs, gradient, steps_of, train
from coterie_client.learning.private import RowNoise, train_privately
from coterie_client.nets.heads import has_written_gradient, train_linear_head
from coterie_client.nets.layers import Plan
from coterie_client.nets.losses import CROSS_ENTROPY, LEAST_SQUARES, resolve_network_loss
from coterie_client.nets.models import build_module
from coterie_client.nets.private import RowwiseSlope, check_rows_apart
from coterie_client.nets.rows import FEWEST_ROWS, Reader
from coterie_client.nets.slope import TorchSlope
from coterie_client.nets.stack import fit_stack, stacks

_CHUNK = 100  # rows in one forward pass without gradients: activations of many more leave the CPU cache
_MAX_SHOWN = 4
_MAX_KEPT = 1 << 24  # numbers in the inputs that stacks keep: 64 MiB
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
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            # In memory that torch aligned: products of unaligned matrices, such as arrays from a file, have other bits.
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format).to(self._device)
        self._kept: dict[int, tuple[NDArray[Any], torch.Tensor, torch.Tensor]] = {}  # by identity of the rows
        self._n_kept = 0
        self._plan = self._planned() if config.training == "stacked" else None
        if isinstance(config, CnnModel):  # convolutions and pooling are one and a half times as fast with channels last
            self._module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._initial = self._taken()
        # Buffers outside the state_dict are reset to their initial values for each user.
        self._hidden = {name: buffer.clone() for name, buffer in self._module.named_buffers() if name not in self._initial}
        if isinstance(config, CustomModel):
            again = self._built(seed).state_dict()
            for name, array in self._initial.items():
                if not np.array_equal(array, again[name].cpu().numpy(), equal_nan=True):
                    said = f"tensor {name!r} of the model is another each time it is built, want no random numbers but torch's"
                    raise ConfigError(said, Finding("L4", place="model.build"))

    def _planned(self) -> Plan:
        """ConfigError for a loss or a layer that cannot be trained for several users at once."""
        if self._loss not in (CROSS_ENTROPY, LEAST_SQUARES):
            wanted = "want cross_entropy or least_squares, or model.training: alone"
            raise ConfigError(
                f"model.training is stacked, but the loss is {self._loss_name!r}: {wanted}", Finding("L4", place="problem.loss")
            )
        return Plan.of(self._module)

    @property
    def is_stacked(self) -> bool:
        return self._plan is not None

    def _built(self, seed: int, *number: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            _seed_torch(_seed_of(seed, "model", *number))
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
            classes = type(modules.get(name.rpartition(".")[0])).__mro__  # the layer's kind is the first of them that is torch's own
            layer = next((cls.__name__ for cls in classes if cls.__module__.startswith("torch.nn.")), "")
            listed.append(TensorInfo(name, tuple(tensor.shape), tensor.dtype == torch.int64, part, name not in parameters, layer))
        if not listed:
            raise ConfigError("the model has no tensors, want parameters to train")
        for prefix in self._head_prefixes:
            if not any(_is_inside(tensor.name, prefix) for tensor in listed):
                ends = ((tensor.name, dot.start()) for tensor in listed for dot in re.finditer(r"\.", tensor.name))
                known = list(dict.fromkeys(name[:end] for name, end in ends)) or [tensor.name for tensor in listed]
                shown = ", ".join(known[:_MAX_SHOWN]) + (", ..." if len(known) > _MAX_SHOWN else "")
                said = f"head prefix {prefix!r} names no layer of the model, want one or more of {shown}"
                raise ConfigError(f"{said}{suggestion(prefix, known)}")
        return tuple(listed)

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

    def check_rows_apart(self) -> None:
        """ConfigError that names a layer in which rows are not apart."""
        check_rows_apart(self._module)

    def fit(self, tensors: Tensors, rows: Rows, phases: Sequence[Phase], draw: Draw, noise: RowNoise | None = None) -> Fitted:
        """One local update of one user. RunError naming user, round and tensor if a number is not finite."""
        self._load(tensors)
        inputs, targets = self._reader.inputs(rows.features), self._reader.targets(rows.target)
        loss: float | None = None
        beside: dict[str, NDArray[Any]] = {}
        with self._model_errors(draw.place()), torch.random.fork_rng(devices=[]):
            _seed_torch(_seed_of(draw.seed, f"torch {draw.purpose}", str(draw.user), draw.round))
            for number, phase in enumerate(phases):
                found = self._phase(inputs, targets, phase, draw, number, noise)
                loss = loss if found.loss is None else found.loss
                beside |= {name: _array(tensor) for name, tensor in found.beside.items()}
        fitted = self._taken()
        if noise is not None:
            loss = 0.0
        elif loss is None:
            loss, _ = self.judge(fitted, rows)
        n_steps = sum(count_steps(len(targets), phase) for phase in phases)
        return Fitted(fitted, loss, n_steps, beside).checked(draw)

    def stacks(self, counts: Indices, phases: Sequence[Phase]) -> Iterator[Indices]:
        """The places, in a list of users with these numbers of rows, of those for whom `fit_together` can be called."""
        assert self._plan is not None  # noqa: S101 - see `is_stacked`
        return stacks(self._plan, counts, phases)

    def fit_together(self, tensors: Tensors, rows: Sequence[Rows], phases: Sequence[Phase], draw: Draw) -> Fitted:
        """As `fit`, for several users: arrays have a first axis of users. Phases with rules, and phases without steps, go user by user."""
        assert self._plan is not None  # noqa: S101 - see `is_stacked`
        if not any(phase.rule for phase in phases):
            with torch.no_grad():
                inputs, targets = zip(*(self._read(self._plan, own) for own in rows), strict=True)
                found = fit_stack(self._plan, tensors, inputs, targets, phases, draw, self._is_moved, self._loss.has_classes)
            if found is not None:
                return Fitted(*found, sum(count_steps(len(rows[0].target), phase) for phase in phases)).checked(draw)
        alone = [
            self.fit({name: array[i] for name, array in tensors.items()}, own, [phase.of_user(i) for phase in phases], draw.of_user(i))
            for i, own in enumerate(rows)
        ]

        def stacked(of: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
            return {name: np.stack([each[name] for each in of]) for name in of[0]}

        first = alone[0]
        losses = np.array([each.loss for each in alone])
        return Fitted(stacked([each.tensors for each in alone]), losses, first.n_steps, stacked([each.beside for each in alone]))

    def _read(self, plan: Plan, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of the first layer with weights, and targets. They are kept, as training rows are the same in all rounds."""
        key = id(rows.features)  # of nothing else, as the rows are kept too
        if key in self._kept:
            return self._kept[key][1:]
        inputs, targets = plan.reading(self._reader.inputs(rows.features)).flatten(1), self._reader.targets(rows.target)
        self._n_kept += inputs.numel()
        if self._n_kept <= _MAX_KEPT:
            self._kept[key] = rows.features, inputs, targets
        return inputs, targets

    def judge(self, tensors: Tensors, rows: Rows) -> tuple[float, float]:
        """Mean loss and metric on the rows. For least_squares: half the mean squared error, and the mean squared error."""
        return self._judgement(self._scores(tensors, rows.features), self._reader.targets(rows.target))

    def _judgement(self, scores: Sequence[torch.Tensor], targets: torch.Tensor) -> tuple[float, float]:
        """Mean loss and metric, from outputs in chunks of _CHUNK rows."""
        loss = right = 0.0
        for outputs, wanted in zip(scores, torch.split(targets, _CHUNK), strict=True):
            loss += float(self._loss.mean(outputs, wanted)) * len(wanted)
            right += self._loss.total(outputs, wanted)
        return loss / len(targets), right / len(targets)

    def judge_together(self, tensors: Tensors, rows: Sequence[Rows]) -> tuple[Array, Array]:
        """As `judge`, with the same bits, for several users: arrays have a first axis of users. A tensor that all share is loaded once."""
        plan = self._plan
        assert plan is not None  # noqa: S101 - see `is_stacked`
        own = {name: torch.empty(array.shape[1:]) for name, array in tensors.items()}
        found = np.empty((2, len(rows)))
        with torch.no_grad():
            for i, of_user in enumerate(rows):
                for name, array in tensors.items():
                    if not i or array.strides[0]:
                        own[name].numpy()[...] = array[i]
                weights = {name: tensor.to(self._device) for name, tensor in own.items()}
                inputs, targets = self._read(plan, of_user)
                found[:, i] = self._judgement([plan.outputs(weights, chunk) for chunk in torch.split(inputs, _CHUNK)], targets)
        return found[0], found[1]

    def outputs(self, tensors: Tensors, features: NDArray[Any]) -> NDArray[np.float32]:
        """(m, classes) scores of rows (m, ...)."""
        return np.concatenate([piece.cpu().numpy() for piece in self._scores(tensors, features)])

    def _scores(self, tensors: Tensors, features: NDArray[Any]) -> list[torch.Tensor]:
        """Outputs in chunks of _CHUNK rows."""
        self._load(tensors)
        self._module.eval()
        with self._model_errors("a model to be judged"), torch.no_grad():
            return [self._module(chunk) for chunk in torch.split(self._reader.inputs(features), _CHUNK)]

    def _phase(self, inputs: torch.Tensor, targets: torch.Tensor, phase: Phase, draw: Draw, number: int, noise: RowNoise | None) -> Trained:
        """Trains the parameters of the phase, if there are any."""
        for name, module in self._module.named_modules():  # a fixed part has no dropout, and keeps its statistics
            module.training = self._is_moved(name, phase)
        names = [name for name, _ in self._module.named_parameters() if self._is_moved(name, phase) and name not in self._fixed]
        if not names:
            return Trained(None)
        n_rows = len(targets)
        if noise is not None:
            with torch.no_grad():
                train_privately(RowwiseSlope(self._module, names, inputs, targets, self._loss.mean), n_rows, phase, noise)
            return Trained(None)
        prefixes = self._head_prefixes
        head = dict(self._module.named_modules()).get(prefixes[0]) if len(prefixes) == 1 else None  # the module that is the whole head
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

    def _is_moved(self, name: str, phase: Phase) -> bool:
        return phase.part == "all" or self._is_of_head(name) == (phase.part == "head")

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
    return tensor.detach().cpu().numpy().copy()


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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _seed_torch(seed: int) -> None:
    """Seeds torch's generators. `torch.manual_seed` also takes a stack trace for each kind of device: a millisecond, kept for ever."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _seed_of(seed: int, purpose: str, *index: int | str) -> int:
    return int(stream(seed, purpose, *index).words.random_raw() >> 1)
