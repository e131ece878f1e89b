"""`local`, problem (2): every user minimizes its own loss in isolation. One exchange."""

from __future__ import annotations

from typing import Literal

from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.consensus import OWN_MODEL


class Config(Settings):
    """No hyper-parameters."""

    name: Literal["local"] = "local"


METHOD = Method(config=Config, is_reference=True, room="consensus", reveals=(OWN_MODEL,))
