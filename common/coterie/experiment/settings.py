"""The root of all configuration models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen; unknown keys, NaN and infinity are mistakes. Built at first use, since a run uses few of all the models there are."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


__all__ = ["Settings"]
