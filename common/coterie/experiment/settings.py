"""The base class of all configuration models."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

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
