"""The base classes of all configuration models, and of all data sources: standardisation, the fold of a cross-validation, paths."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from coterie.errors import ConfigError
from coterie.findings import NO_RULE, Finding

_MAX_MISTAKES = 20
S = TypeVar("S", bound="Settings")


class Settings(BaseModel):
    """Frozen; unknown keys, NaN and infinity are mistakes. Built on first use, since a run uses only a few of the models."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def validated(model: type[S], content: object, where: str, finding: Finding = NO_RULE) -> S:
    """The settings in `content`. ConfigError with all mistakes; `where` names the section in messages."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)[:_MAX_MISTAKES]
        listed = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg'].removeprefix('Value error, ')}" for one in mistakes)
        raise ConfigError(f"{where}: {listed}", finding) from None


FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"^[^\x00]+$")]
TestFraction = Annotated[float, Field(ge=0, lt=1)]
USER = "{user}"  # placeholder for the user's name in a path


class Fold(Settings):
    """One fold of a cross-validation on the users: some training rows of each user are held out, and replace its test rows.

    `coterie_client.data.split.fold_rows` deals the rows to folds. The real test rows are neither trained on nor evaluated.
    """

    number: int = Field(ge=1)  #: Number of this fold, from 1.
    of: int = Field(ge=2, le=1000)  #: Number of folds.

    @model_validator(mode="after")
    def _number_is_one_of_them(self) -> Fold:
        if self.number > self.of:
            raise ValueError(f"number is {self.number}, want 1 to the {self.of} folds there are")
        return self


class SourceSettings(Settings):
    standardize: bool = False  #: Whether features are centred and scaled. The members agree on the constants by sums; rows never move.
    fold: Fold | None = None  #: One fold of a cross-validation: part of the training rows replaces the test rows. `coterie tune` sets it.

    @property
    def target_scale(self) -> tuple[float, float] | None:
        """Mean and standard deviation that the target is standardised by, in its own units; None if it is left as it is."""
        return None

    @property
    def fills_missing(self) -> bool:
        """Whether missing cells of features are filled with means that the members agree on."""
        return False
