"""The built-in networks, and those from packages or the user's own code. A built-in one is a `representation` followed by a `head`."""

import itertools
from typing import assert_never

import torch
from torch import nn

from coterie.errors import ConfigError, default_finding
from coterie.experiment import plugins
from coterie.experiment.model import CnnModel, CustomModel, LinearModel, LstmModel, MlpModel, ModelConfig
from coterie.findings import Finding

_UNUSABLE, _RAISED = Finding("L4", place="model.build"), Finding("L2", place="model.build")


class Composed(nn.Module):
    """A representation, then a head. Rows (m, ...) give scores (m, classes)."""

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation = representation
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.representation(x))
        return found


class LastOutput(nn.Module):
    """An embedding of symbols (m, T), then an LSTM. Returns its output after the last symbol, (m, hidden)."""

    def __init__(self, config: LstmModel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.symbols, config.embedding)
        self.lstm = nn.LSTM(config.embedding, config.hidden, config.layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(x))
        last: torch.Tensor = outputs[:, -1]
        return last


@default_finding(Finding("L7", place="model.kind"))
def build_module(config: ModelConfig, shape: tuple[int, ...]) -> nn.Module:
    """The network for rows of this shape, with torch's initial values. ConfigError if it does not fit the rows or cannot be built."""
    match config:
        case LinearModel():
            return Composed(nn.Flatten(), nn.Linear(_size(shape), config.classes))
        case MlpModel():
            return Composed(_mlp(config, shape), nn.Linear(config.hidden[-1], config.classes))
        case CnnModel():
            return Composed(_cnn(config, shape), nn.Linear(config.hidden[1], config.classes))
        case LstmModel():
            if len(shape) != 1:
                raise ConfigError(f"model 'lstm' reads sequences of symbols, but a row has shape {list(shape)}: want one axis")
            return Composed(LastOutput(config), nn.Linear(config.hidden, config.classes))
        case CustomModel():
            return _custom(config)
        case _:
            assert_never(config)


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _mlp(config: MlpModel, shape: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    if config.pool > 1:
        if len(shape) != 3 or min(shape[1:]) < config.pool:
            raise ConfigError(f"model.pool is {config.pool}, but a row has shape {list(shape)}: want images of at least that size")
        layers.append(nn.AvgPool2d(config.pool))
        shape = (shape[0], *(extent // config.pool for extent in shape[1:]))
    layers.append(nn.Flatten())
    for before, after in itertools.pairwise((_size(shape), *config.hidden)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


def _cnn(config: CnnModel, shape: tuple[int, ...]) -> nn.Module:
    smallest = 16  # two convolutions of 5 and two halvings leave one pixel
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(f"model 'cnn' reads images of at least {smallest}x{smallest}, but a row has shape {list(shape)}")
    first, second = config.channels
    left = [((extent - 4) // 2 - 4) // 2 for extent in shape[1:]]
    return nn.Sequential(
        # ReLU after the maximum gives the same numbers at a quarter of the cost.
        *(nn.Conv2d(shape[0], first, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(first, second, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
        *(nn.Linear(second * left[0] * left[1], config.hidden[0]), nn.ReLU()),
        *(nn.Linear(config.hidden[0], config.hidden[1]), nn.ReLU()),
    )


def _custom(config: CustomModel) -> nn.Module:
    build = plugins.load("model", config.build)
    try:
        built = build(**config.options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = f"model {config.build!r} cannot be built with {config.options}: {type(error).__name__}: {error}"
        raise ConfigError(said, _RAISED) from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model {config.build!r} has built a {type(built).__name__}, want a torch.nn.Module", _UNUSABLE)
    return built
