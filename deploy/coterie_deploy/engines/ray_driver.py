"""The process that speaks with Ray for a coordinator: `python -m coterie_deploy.engines.ray_driver ADDRESS`.

It is a process of its own: Ray takes over signals and both outputs, and ends a process that has lost its cluster. Besides, Ray pickles. The
coordinator speaks with the members over gRPC, and with this process in lines of JSON, so it never unpickles anything.

A line of standard input starts a member (`start`) or ends it (`end`); the end of the input ends all. Lines of standard output say `ready`
with this machine's address, or `failed`; and of a member that it `waits`, is `placed`, has `ended` with a code, or is `lost`.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from coterie.errors import CoterieError
from coterie.extras import needed
from coterie.session.failures import FAILURE
from coterie.text.addresses import host_and_port
from coterie_deploy.engines.interface import GRACE_S, LOG
from coterie_deploy.engines.ray_member import RayMember

CONNECT_S = 5.0
AUTO = "auto"  # for Ray: the cluster of this machine
AGAIN_S = 2.0  # until an actor is made again
MOST_FAILURES = 30  # of actors of one start
_BROKEN = "creation task"  # in the error of an actor that fails wherever it is: its node has no coterie
WAIT_S = 5.0  # for a place, before it is said; then twice as long, and so on

_HOMES: dict[str, str] = {}  # of members whose state is on a node alone: its id


def _node(_: RayMember) -> str:
    """The id of the node; an actor runs it."""
    return str(needed("ray", "ray").get_runtime_context().get_node_id())


class _Lines:
    """Standard output as it was: what Ray and others print goes where errors go."""

    def __init__(self) -> None:
        self._file, self._lock = os.fdopen(os.dup(1), "w"), Lock()
        os.dup2(2, 1)

    def say(self, **message: Any) -> None:
        with self._lock:
            self._file.write(f"{json.dumps(message)}\n")
            self._file.flush()


class _Member:
    """A member and its actor. One that is lost before it had a place is made again here; later the coordinator decides."""

    def __init__(self, ray: Any, lines: _Lines, asked: Mapping[str, Any]) -> None:
        self._ray, self._lines, self._asked = ray, lines, asked
        self.name, self._folder = asked["name"], Path(asked["folder"])
        self._closing = Event()
        self._actor: Any = None
        self.thread = Thread(target=self._follow, daemon=True)
        self.thread.start()

    def end(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            if self._actor is not None:
                self._actor.end.remote(GRACE_S)

    def _follow(self) -> None:
        try:
            self._lines.say(name=self.name, **self._followed())
        except Exception as error:  # of many kinds: whatever it is, this start is over, and the log has all of it
            self._log(error)
            self._lines.say(name=self.name, lost=type(error).__name__)
        finally:
            if self._actor is not None:
                self._ray.kill(self._actor)

    def _followed(self) -> dict[str, Any]:
        place = self._placed()
        if place is None:
            return {"ended": 0}
        if not place[1]:
            _HOMES[self.name] = self._ray.get(self._actor.__ray_call__.remote(_node))
        self._lines.say(name=self.name, placed=place[0], shared=place[1])
        code, log, failure = self._ray.get(self._actor.run.remote())
        if not place[1]:
            with (self._folder / LOG).open("ab") as file:
                file.write(log)
            if failure is not None:
                (self._folder / FAILURE).write_bytes(failure)
        return {"ended": code}

    def _placed(self) -> tuple[str, bool] | None:
        """Waits until an actor runs, and returns what its `place` says. None if the member has to end before."""
        asked, began, said_s = self._asked, time.monotonic(), WAIT_S
        actor = self._ray.remote(RayMember).options(
            num_cpus=asked["cpus"], resources=asked["resources"], max_restarts=0, max_concurrency=3, **self._home()
        )  # fmt: skip
        failures = 0
        while not self._closing.is_set():
            self._actor = actor.remote(*(asked[key] for key in ("arguments", "folder", "token", "tls", "here")))
            place = self._actor.place.remote()
            while not self._ray.wait([place], timeout=1.0)[0]:
                if self._closing.is_set():
                    return None
                if (waited_s := time.monotonic() - began) >= said_s:
                    self._lines.say(name=self.name, waits=round(waited_s))
                    said_s *= 2
            try:
                found: tuple[str, bool] = self._ray.get(place)
                return found
            except self._ray.exceptions.RayActorError as error:  # Ray has not noticed yet that a node is gone
                failures += 1
                if failures == MOST_FAILURES or _BROKEN in str(error):
                    raise
                self._log(error)
                self._closing.wait(AGAIN_S)
        return None

    def _home(self) -> dict[str, Any]:
        """The option that prefers the node which has the state."""
        if self.name not in _HOMES:
            return {}
        home = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(_HOMES[self.name], soft=True)
        return {"scheduling_strategy": home}

    def _log(self, error: Exception) -> None:
        print(f"{self.name}: {error}", file=sys.stderr, flush=True)  # noqa: T201


def main() -> int:
    lines = _Lines()
    try:
        ray = needed("ray", "ray", "--engine ray needs ray")
        if sys.argv[1] != AUTO:  # Ray itself would try for minutes
            with socket.create_connection(host_and_port(sys.argv[1], "--ray-address"), CONNECT_S):
                pass
        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
        lines.say(ready=ray.util.get_node_ip_address())
    except CoterieError as error:
        lines.say(failed=str(error))
        return error.exit_code
    except Exception as error:  # of many kinds
        found = " ".join(str(error).split()).partition(". ")[0]
        where = "on this machine" if sys.argv[1] == AUTO else f"at {sys.argv[1]!r}"
        lines.say(failed=f"there is no Ray cluster {where} ({found}): want one that this machine is a node of, see `ray start`")
        return 2
    members: dict[str, _Member] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "end" in asked:
            members[asked["end"]].end()
        else:
            members[asked["start"]["name"]] = _Member(ray, lines, asked["start"])
    for member in members.values():
        member.end()
    for member in members.values():
        member.thread.join(GRACE_S)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
