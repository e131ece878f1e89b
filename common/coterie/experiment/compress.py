"""The keys of `federation.compress`: how vectors and weights are made smaller on their way, by direction.

What the keys do is in `coterie.compress`; here is what they may be, and which experiments they are refused for.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from coterie.experiment import plugins
from coterie.experiment.settings import Settings

Fraction = Annotated[float, Field(gt=0, lt=1)]


class Quantize(Settings):
    """Numbers in a few bits and one scale for each vector."""

    bits: Literal[8, 4, 2, 1] = 8  #: Bits of a number. 1 wants `rotate: hadamard` and `stochastic: false`.
    #: Whether a number is rounded up or down at random, so that its mean is right (QSGD). false: to the nearest value that there is.
    stochastic: bool = True
    #: hadamard: the vector is rotated at random first, so that its numbers have about the same size. Not stochastic, in 4 bits or less, it
    #: has the values and the scale of EDEN, and of DRIVE in 1 bit.
    rotate: Literal["hadamard"] | None = None

    @model_validator(mode="after")
    def _a_sign_needs_a_rotation(self) -> Self:
        if self.bits == 1 and (self.stochastic or self.rotate is None):
            raise ValueError("bits is 1, but signs alone are good for rotated vectors: want rotate: hadamard and stochastic: false")
        return self


class Thin(Settings):
    """How vectors are sent in one direction: a part of their numbers, these in a few bits, and the bytes without repetitions."""

    top_k: Fraction | None = None  #: Share of the numbers of a vector that are sent: the largest. Their places are sent too.
    rand_k: Fraction | None = None  #: Share of the numbers of a vector that are sent: drawn from the seed, so that places are not sent.
    quantize: Quantize | None = None  #: Bits of the numbers that are sent; null: those of `payload`.
    #: Instead of `quantize`, a compressor of a package, or of your own code as module:name.
    by: Annotated[str, AfterValidator(partial(plugins.check_known, "compressor", built_in=()))] | None = None
    lossless: Literal["zlib"] | None = None  #: zlib: the bytes of the numbers are compressed. It loses nothing, and alone it saves little.

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
        if self.top_k is not None and self.rand_k is not None:
            raise ValueError("top_k and rand_k both say which numbers are sent: give one")
        if self.by is not None and self.quantize is not None:
            raise ValueError("by and quantize both say how numbers are written: give one")
        if not (self.loses or self.lossless):
            raise ValueError("it compresses nothing: want low_rank (of up alone), top_k, rand_k, quantize, by or lossless, or no such key")
        return self

    @property
    def loses(self) -> bool:
        """Whether the receiver gets other numbers than the sender had."""
        return (self.top_k, self.rand_k, self.quantize, self.by) != (None, None, None, None)


class Up(Thin):
    """How users' answers are sent."""

    #: Instead of each matrix of a network's weights, two thin ones of this rank are sent (PowerSGD). The kernels of a convolution are one
    #: matrix, with a row for each output. Biases, and matrices that would not become smaller, are sent whole.
    low_rank: Annotated[int, Field(ge=1, le=1000)] | None = None
    #: task: an answer is sent as its difference from what the task brought to the user, where both have the same axes; answers without such
    #: a task travel whole. last: as its difference from what the server has of the user's last answer, which both ends remember (EF21); the
    #: first is against its task. nothing: numbers are sent as they are.
    against: Literal["task", "last", "nothing"] = "task"
    #: Whether a user remembers what its last answer lost, and adds it to the next. With `against: last` that is so anyway.
    feedback: bool = False

    @property
    def loses(self) -> bool:
        """Whether the receiver gets other numbers than the sender had."""
        return self.low_rank is not None or super().loses

    @model_validator(mode="after")
    def _changes_have_a_low_rank(self) -> Self:
        if self.low_rank is not None and (self.top_k, self.rand_k) != (None, None):
            raise ValueError("low_rank wants whole matrices, but top_k and rand_k send some of their numbers: give one")
        if self.low_rank is not None and self.against == "nothing":
            raise ValueError("low_rank is for changes of matrices, which themselves have a high rank: want against 'task' or 'last'")
        return self

    @model_validator(mode="after")
    def _memories_hold_losses(self) -> Self:
        if (self.feedback or self.against == "last") and not self.loses:
            raise ValueError("nothing is lost, so there is nothing to remember: want neither feedback nor against 'last' beside lossless")
        if self.feedback and self.against == "last":
            raise ValueError("feedback is true, but against 'last' sends again what was lost anyway: want one of both")
        return self

    @property
    def remembers(self) -> bool:
        """Whether users remember something from answer to answer."""
        return self.feedback or self.against == "last"


class Compress(Settings):
    """Lossy or lossless compression of vectors and weights on the wire."""

    up: Up | None = None  #: From users to the server; null: as they are.
    down: Thin | None = None  #: From the server to users; null: as they are.

    @property
    def loses(self) -> bool:
        """Whether a receiver gets other numbers than its sender had."""
        return any(one is not None and one.loses for one in (self.up, self.down))


def why_not_thin(experiment: Any) -> str:
    """Why an experiment cannot have its `federation.compress`, and what is wanted; "" if it can."""
    from coterie.registry import method  # noqa: PLC0415 - methods import settings

    rules: Compress | None = experiment.federation.compress
    if rules is None:
        return ""
    if rules.up is not None and experiment.exact_sums:
        return "federation.compress.up is for answers of users, but exact_sums sends sums, whole numbers of 64 bits: want one of both"
    if not rules.loses:
        return ""
    if rules.up is not None and rules.up.low_rank is not None and experiment.model is None:
        return "federation.compress.up.low_rank is for matrices of networks, but a convex problem has one vector: want a model, or top_k"
    if rules.up is not None and rules.up.against == "last" and "skip" in (experiment.federation.late, experiment.federation.on_loss):
        return (
            "federation.compress.up.against is 'last', but with late or on_loss 'skip' the server may not see an answer from which "
            "its user counts on: want against 'task'"
        )
    for name in (experiment.method.name, *experiment.references):
        if why := method(name).continues:
            wanted = "want lossless alone"
            return f"federation.compress rounds what is sent, but {why}, so method {name!r} would lose its way: {wanted}"
    if experiment.privacy is not None and experiment.privacy.unit == "user" and rules.up is not None and rules.up.loses:
        return (
            "federation.compress.up makes changes of users longer than privacy.clip, on which epsilon rests: want lossless alone beside "
            "privacy.unit 'user'"
        )
    return ""
