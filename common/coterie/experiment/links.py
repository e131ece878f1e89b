"""Emulated links: a rate and a delay for each scope, `federation.links` of an experiment.

Parents impose them at their end of each link (`coterie_server.transport.links`). So a run on one machine can take as long as one over a
wide-area network between clusters and a local one inside them. Each link has its own rate; hosts of one parent do not share it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from coterie.experiment.settings import Settings
from coterie.text.quoting import quoted
from coterie.wire.fields import CHUNK_BYTES

_FORM = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|Mbit|Gbit)/(\d+(?:\.\d+)?)(us|ms|s)", re.ASCII)
_WANTED = "RATE/DELAY such as 20Mbit/40ms, in bit, kbit, Mbit or Gbit a second and us, ms or s each way"
_MAX_CHARS = 100
_BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = (1e3, 1e12)  # bit/s
_MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkRule:
    """A link with a rate in each direction, and a delay."""

    bits_per_s: float
    delay_s: float  # one way

    def transmission_s(self, n_bytes: float) -> float:
        """The transmission time of this many bytes."""
        return 8 * n_bytes / self.bits_per_s

    @property
    def text(self) -> str:
        """RATE/DELAY, as `link_rule` reads it."""
        rate = next((f"{self.bits_per_s / scale:g}{unit}" for unit, scale in reversed(_BITS.items()) if self.bits_per_s >= scale), "")
        return f"{rate}/{self.delay_s * 1e3:g}ms"


def link_rule(text: str) -> LinkRule:
    """The link in a text "RATE/DELAY". ValueError with a sentence if it is invalid."""
    found = _FORM.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if found is None:
        raise ValueError(f"is {quoted(text)}, want {_WANTED}")
    rule = LinkRule(float(found[1]) * _BITS[found[2]], float(found[3]) * _SECONDS[found[4]])
    if not _RATES[0] <= rule.bits_per_s <= _RATES[1]:
        raise ValueError(f"is {quoted(text)}, want a rate of at least 1kbit and at most 1000Gbit")
    if rule.delay_s > _MAX_DELAY_S:
        raise ValueError(f"is {quoted(text)}, want a delay of at most {_MAX_DELAY_S:g}s")
    return rule


LinkText = Annotated[str, AfterValidator(lambda text: link_rule(text) and text)]


class LinkRules(Settings):
    """The links of each scope, as "RATE/DELAY". A scope without one has the network's own speed."""

    direct: LinkText | None = None  #: Link between the coordinator and each host of a flat run, as RATE/DELAY: 20Mbit/40ms.
    between: LinkText | None = None  #: Link between the coordinator and each aggregator.
    within: LinkText | None = None  #: Link between an aggregator and each of its hosts.
    peers: LinkText | None = None  #: Link between each two aggregators, with topology peers.

    def given(self) -> Iterator[tuple[str, str]]:
        """(scope, text) of the emulated links."""
        return ((scope, text) for scope, text in self if text is not None)

    def check(self, silence_s: float) -> None:
        """ValueError if a large frame, or a round trip, would take so long that one end declares the other silent.

        `silence_s` is how long an end waits for a frame; half of it is reserved for other delays.
        """
        for scope, text in self.given():
            rule = link_rule(text)
            needed_s = rule.transmission_s(CHUNK_BYTES) + 2 * rule.delay_s
            if needed_s > silence_s / 2:
                frame = f"a frame of {CHUNK_BYTES >> 10} KiB"
                raise ValueError(
                    f"links.{scope} is {text!r}, so that {frame} and two delays take {needed_s:.3g} s, want at most "
                    f"{silence_s / 2:g} s: half of the smaller of silence_s and 10 heartbeat_s"
                )
