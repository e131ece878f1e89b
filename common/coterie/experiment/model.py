"""The model of an experiment with networks: how to build it, and which of its tensors are the head.

A model is a representation followed by a head, distinguished by the names of tensors; a method decides which of the two is shared. Only the
client builds the network and needs torch. The server receives names, shapes and parts in the hosts' hellos, as `TensorInfo`s.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PositiveFloat, StringConstraints

from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.plugins import check_known, is_path, is_there
from coterie.experiment.settings import Settings
from coterie.findings import Finding
from coterie.text.quoting import quoted
from coterie.text.suggestions import suggestion

Part = Literal["representation", "head"]
Sharing = Literal["all", "representation", "head", "none"]  # which part of the model is shared; the rest is private

Prefix = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Extent = Annotated[int, Field(ge=1, le=1_000_000)]
_MAX_TENSORS = 100_000
X = "x"  # the model of a convex problem


class _Model(Settings):
    #: Constant that is subtracted from each channel of a row; one number, or one per channel. Bytes are divided by 255 first.
    input_mean: tuple[float, ...] = (0.0,)
    input_std: tuple[PositiveFloat, ...] = (1.0,)  #: Constant by which each channel is then divided.
    #: alone: users are trained one after another. stacked: all drawn users of a host in the same steps, which is several times as fast for
    #: small networks of fully connected layers. Its last bits differ from those of `alone`, and not by hosts, transport or resume.
    training: Literal["alone", "stacked"] = "alone"
    device: str = "cpu"  #: Device of torch: cpu or cuda. Equal bits are guaranteed for cpu alone.


class LinearModel(_Model):
    """Softmax regression on the flattened row: all of it is the head."""

    name: Literal["linear"]
    classes: Extent  #: Number of classes: the size of the output.


class MlpModel(_Model):
    """Fully connected layers with ReLU between them; the last one is the head."""

    name: Literal["mlp"]
    #: Sizes of the hidden layers, from the input on.
    hidden: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=100)] = (128, 64)
    classes: Extent  #: Number of classes: the size of the output.
    pool: Annotated[int, Field(ge=1, le=1000)] = 1  #: Images are first averaged over squares of this many pixels a side.


class CnnModel(_Model):
    """Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, then two fully connected layers with ReLU; the fifth layer is the head.

    The 5-layer network of the official code of Collins, Hassani, Mokhtari and Shakkottai (2021) for CIFAR is (64, 64, 120, 64).
    """

    name: Literal["cnn"]
    channels: tuple[Extent, Extent] = (64, 64)  #: Channels of the two convolutions.
    hidden: tuple[Extent, Extent] = (120, 64)  #: Sizes of the two fully connected layers.
    classes: Extent  #: Number of classes: the size of the output.


class LstmModel(_Model):
    """An embedding, an LSTM and a linear head on its last output: rows are sequences of symbols 0 to `symbols` - 1."""

    name: Literal["lstm"]
    symbols: Extent  #: Number of symbols in the rows, which are 0 to symbols - 1.
    embedding: Extent = 8  #: Size of a symbol's embedding.
    hidden: Extent = 128  #: Size of the LSTM's state.
    layers: Annotated[int, Field(ge=1, le=10)] = 1  #: Number of LSTM layers.
    classes: Extent  #: Number of classes: the size of the output.


class CustomModel(_Model):
    """A function of a package or of the client's own code that returns a `torch.nn.Module`; it is called with `options`."""

    name: Literal["custom"]
    #: Name that a package gives the model, or package.module:function.
    build: Annotated[str, AfterValidator(partial(check_known, "model", built_in=()))]
    options: dict[str, JsonValue] = Field(default_factory=dict)  #: Arguments of the function.
    #: Tensors whose names begin with one of these are the head; all others are the representation.
    head: Annotated[tuple[Prefix, ...], Field(min_length=1)] = ("head",)


def _named(value: Any) -> Any:
    """`model: package.module:function`, a mapping with `build`, and a mapping with a package's name are custom models."""
    if isinstance(value, str):
        value = {"build": value}
    if not isinstance(value, dict):
        return value
    if isinstance(name := value.get("name"), str) and name not in MODELS and (is_path(name) or is_there("model", name)):
        value = {"build": name, **value, "name": "custom"}
    return {"name": "custom", **value} if "build" in value else value


MODELS = ("linear", "mlp", "cnn", "lstm", "custom")
ModelConfig = Annotated[LinearModel | MlpModel | CnnModel | LstmModel | CustomModel, Field(discriminator="name"), BeforeValidator(_named)]


PARTS = ("all", "representation", "head")  # parts that a phase of local steps may train


def check_part(part: str) -> None:
    """ConfigError for an unknown part of a model."""
    if part not in PARTS:
        wanted = f"want one of {', '.join(PARTS)}{suggestion(part, PARTS)}"
        raise ConfigError(f"a phase trains {quoted(part)}, which is no part of a model: {wanted}", Finding("L4"))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a model, which all hosts must have alike."""

    name: str
    shape: tuple[int, ...]  # () for a single number
    is_integer: bool  # a count, such as batches seen: int64; otherwise float32 in networks
    part: Part
    is_statistic: bool = False  # a buffer without gradient, such as a running mean
    layer: str = ""  # torch's class of its layer (a base class for the user's own classes); "" in convex problems

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def convex_tensors(d: int) -> tuple[TensorInfo, ...]:
    """The model of a convex problem as a tensor, x in R^d: float64 on both sides, and all head."""
    return (TensorInfo(X, (d,), False, "head"),)


def to_json(tensors: Sequence[TensorInfo]) -> str:
    """The format in hellos."""
    return json.dumps([asdict(tensor) for tensor in tensors])


def from_json(text: str) -> tuple[TensorInfo, ...]:
    """The inverse of `to_json`. ProtocolError for any other text."""
    try:
        listed = json.loads(text)
        if not 0 < len(listed) <= _MAX_TENSORS:
            raise ValueError(f"{len(listed)} tensors")
        for item in listed:
            if item["part"] not in ("representation", "head") or not all(
                isinstance(extent, int) and extent >= 0 for extent in item["shape"]
            ):
                raise ValueError("a part or an extent")
        return tuple(
            TensorInfo(
                str(item["name"]),
                tuple(item["shape"]),
                bool(item["is_integer"]),
                item["part"],
                bool(item["is_statistic"]),
                str(item.get("layer", "")),  # absent in old runs
            )
            for item in listed
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"the tensors of a model are {text[:100]!r}, wanted a list with name, shape and part of each") from error


def shared_tensors(
    tensors: Sequence[TensorInfo], sharing: Sharing, *, statistics_travel: bool = True, private_layers: Collection[str] = ()
) -> tuple[TensorInfo, ...]:
    """The shared tensors, in the model's order. All others are private, including those of `private_layers`.

    ConfigError when a shared part has none.
    """
    if sharing == "none":
        return ()
    travelling = [t for t in tensors if t.layer not in private_layers and (statistics_travel or not t.is_statistic)]
    chosen = tuple(t for t in travelling if sharing in ("all", t.part))
    if not chosen:
        raise ConfigError(f"the model has no tensors in its {sharing}, which the method shares: want at least one there")
    return chosen


def stacked(tensors: Sequence[TensorInfo], n_models: int) -> tuple[TensorInfo, ...]:
    """The tensors of several models, with a first axis of models."""
    return tuple(replace(tensor, shape=(n_models, *tensor.shape)) for tensor in tensors)


def check_sizes(weights: NDArray[Any], counts: NDArray[Any], listed: Sequence[TensorInfo]) -> None:
    """ProtocolError unless these numbers have the total size of the listed tensors, for floats and integers."""
    wanted = [sum(tensor.size for tensor in listed if tensor.is_integer == kind) for kind in (False, True)]
    if [weights.shape[-1], counts.shape[-1]] != wanted:
        raise ProtocolError(f"{weights.shape[-1]} weights and {counts.shape[-1]} counts came, wanted {wanted[0]} and {wanted[1]}")


def named_tensors(weights: NDArray[Any], counts: NDArray[Any], listed: Sequence[TensorInfo]) -> dict[str, NDArray[Any]]:
    """The listed tensors by name, as views of concatenated floats and integers; these may have further first axes, such as one of users."""
    check_sizes(weights, counts, listed)
    at = {False: 0, True: 0}
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in listed:
        start = at[tensor.is_integer]
        source = counts if tensor.is_integer else weights
        tensors[tensor.name] = source[..., start : start + tensor.size].reshape((*source.shape[:-1], *tensor.shape))
        at[tensor.is_integer] = start + tensor.size
    return tensors


def difference(model: str, wanted: str) -> str:
    """The difference between two hosts' models, for the middle of a sentence: "host 'a' ... the hosts before"."""
    if not model:
        return "has no model, unlike"
    here, there = ({tensor.name: tensor for tensor in from_json(text)} for text in (model, wanted))
    for name in {**there, **here}:
        found, expected = here.get(name), there.get(name)
        if found != expected:
            said = f"tensor {name!r} of {_said(found)}" if found else f"no tensor {name!r}"
            return f"has a model with {said}, wanted {_said(expected) if expected else 'none'} as"
    return "has the tensors of its model in another order than"


def _said(tensor: TensorInfo | None) -> str:
    assert tensor is not None  # noqa: S101 - callers check
    return f"shape {list(tensor.shape)} in the {tensor.part}" + (f", of a {tensor.layer}" if tensor.layer else "")
