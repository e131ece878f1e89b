"""The events of a run as lines of the log of its coordinator or aggregator."""

import json
from collections.abc import Mapping
from typing import Any

from coterie_deploy.read.sentences import feature_lines
from coterie_deploy.telemetry.logs import Log, LogLevel, level_of
from coterie_deploy.terminal.tables import counted
from coterie_server.session.hub import Hub

_SAID_AT_THE_END = ("start", "finished", "failed")  # a person sees these by the next lines: the wait for hosts, the report, the error
_MAX_SHOWN = 5  # hosts


class RunLog:
    """Call it with each event of a run; set `hub` once the run has one."""

    def __init__(self, log: Log, of_data: Log | None = None, width: int | None = None) -> None:
        self.hub: Hub | None = None
        self.log = log.with_(where=self.where)
        self._of_data = of_data or self.log  # where features, and sizes of networks, are said
        self._refused: tuple[str, list[str]] = ("", [])  # the latest reason, and the hosts that were turned away for it
        self._width = width  # of a terminal

    def __call__(self, kind: str, text: str, data: Mapping[str, Any]) -> None:
        """Logs an event. A log that cannot be written does not end the run."""
        if kind == "insecure" or (kind in _SAID_AT_THE_END and not self.log.is_json):
            return
        try:
            if kind != "refused":
                self._say_alike()
            if kind == "features" and self.hub is not None and not self.log.is_json:
                for line in feature_lines(self.hub.roster.schema, self._width):
                    self._of_data.say(kind, line)
            elif kind == "model" and not self.log.is_json:
                self._of_data.say(kind, text)
            elif kind == "refused" and not self.log.is_json and self._is_alike(text, data):
                return
            else:
                self.log.say(kind, self._sentence(kind, text, data), level_of(kind), **data)
        except OSError:
            return

    def _is_alike(self, text: str, data: Mapping[str, Any]) -> bool:
        """Whether the latest line has said this of another host. If not, those that it has not named are said now."""
        host = data.get("host", "")
        reason, hosts = text.replace(repr(host), ""), self._refused[1]
        if reason == self._refused[0]:
            if host not in hosts:
                hosts.append(host)
            return True
        self._say_alike()
        self._refused = (reason, [host])
        return False

    def _say_alike(self) -> None:
        others, self._refused = self._refused[1][1:], ("", [])
        if others:
            shown = ", ".join(map(repr, others[:_MAX_SHOWN])) + (", ..." if len(others) > _MAX_SHOWN else "")
            self.log.say("refused", f"the same of {counted(len(others), 'more host')}: {shown}", LogLevel.warning)

    def where(self) -> dict[str, Any]:
        """The run, and, once it has begun, the stage and the round."""
        if (hub := self.hub) is None:
            return {}
        stage = {"stage": json.loads(hub.state.stage_json)["stage"], "round": hub.state.round} if hub.state.stage_json else {}
        return {"run": hub.run_id, **stage}

    def _sentence(self, kind: str, text: str, data: Mapping[str, Any]) -> str:
        if kind == "warning":
            return f"warning: {text}"
        if self.hub is None or "host" not in data or kind not in ("join", "lost") or "book" in data:
            return text
        host, rules, hosts = data["host"], self.hub.rules, self.hub.roster.hosts
        of_all = f"of {counted(rules.hosts, rules.noun)}"
        if kind == "join":
            return f"{rules.noun} {host!r} is here with {counted(len(hosts[host].users), 'user')}: {data['hosts_here']} {of_all}"
        n_left = sum(other.link is not None for other in list(hosts.values()))
        return f"{text.replace('host', rules.noun, 1)}; {n_left} {of_all} left"
