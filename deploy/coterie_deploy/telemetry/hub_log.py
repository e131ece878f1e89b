"""The events of a run as lines of the log of the role that is its parent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coterie_deploy.read.feature_lines import feature_lines
from coterie_deploy.telemetry.logs import Log, level_of
from coterie_deploy.terminal.tables import counted
from coterie_server.session.hub import Hub

_SAID_AT_THE_END = ("start", "finished", "failed")  # a person sees it by what comes next: who is waited for, the report, or the error


class RunLog:
    """Call it with each event of a run; `hub` is there once the run has one."""

    def __init__(self, log: Log, features: Log | None = None, width: int | None = None) -> None:
        self.hub: Hub | None = None
        self.log = log.with_(where=self.where)
        self._features = features or self.log  # where the features are said
        self._width = width  # of a terminal

    def __call__(self, kind: str, text: str, data: Mapping[str, Any]) -> None:
        """An event was written down. A log that cannot be written is no reason to end a run."""
        if kind == "insecure" or (kind in _SAID_AT_THE_END and not self.log.is_json):
            return
        try:
            if kind == "features" and self.hub is not None and not self.log.is_json:
                for line in feature_lines(self.hub.roster.schema, self._width):
                    self._features.say(kind, line)
                return
            self.log.say(kind, self._sentence(kind, text, data), level_of(kind), **data)
        except OSError:
            return

    def where(self) -> dict[str, Any]:
        """The run, and, once it has begun, the stage and the round."""
        hub = self.hub
        if hub is None:
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
