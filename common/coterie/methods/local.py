"""`local`, problem (2): every user minimizes its own loss in isolation. One exchange."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """No hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["local"] = "local"
