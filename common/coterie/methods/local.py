"""`local`, problem (2): every user minimizes its own loss in isolation. One exchange."""

from typing import Literal

from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.consensus import OWN_MODEL


class Config(Settings):
    name: Literal["local"] = "local"


METHOD = Method(config=Config, is_reference=True, room="consensus", reveals=(OWN_MODEL,), intervals=lambda _: "groups")
