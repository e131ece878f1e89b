"""Streams that are cut again and again: counts those after which nothing more had got through, and says what may cut them."""

import math

from coterie.session.member_session import MemberSession

SAID_AT = 3  # cuts without progress in a row, before the first sentence
SAY_AGAIN_S = 30.0


class Cuts:
    """The lost streams of one member, one after another. `n_idle`: how many in a row brought nothing further."""

    def __init__(self) -> None:
        self.n_idle = 0
        self._progress: object = None
        self._said_at = -math.inf

    def add(self, session: MemberSession, progress: object, now: float) -> str:
        """A stream was lost; `progress` changes with what both ends hold. What is to be said now, or "".

        A stream on which nothing of a message travelled does not count: while a member computes or waits, there is no progress to make.
        """
        self.n_idle = 0 if not session.was_busy else self.n_idle + 1 if progress == self._progress else 1
        self._progress = progress
        if self.n_idle < SAID_AT or now - self._said_at < SAY_AGAIN_S:
            return ""
        self._said_at = now
        return self.sentence(session)

    def sentence(self, session: MemberSession) -> str:
        """How often, how much got through, and what usually limits it."""
        carried = f"the last stream carried {session.n_up:,} bytes up and {session.n_down:,} down"
        return (
            f"the stream was cut {self.n_idle} times, and nothing more got through: {carried}. "
            "A proxy may limit what a stream carries, or how long it lasts: in nginx, want client_max_body_size 0"
        )
