"""The policy of a client's owner: its file, what it refuses, and which users take part under which names."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.findings import Finding
from coterie.session.tls import Tls
from coterie_client.data import UserData
from coterie_client.hosting.policy import FILE, Policy, breaches, check_policy, read_policy
from coterie_client.hosting.pseudonyms import Admitted, admitted, key_in, pseudonym, write_list
from coterie_deploy.roles.joining import state_name
from coterie_deploy.telemetry.logs import Log, LogLevel
from coterie_deploy.terminal.tables import counted

KEY_BESIDE, KEY = "policy.key", "pseudonyms.key"
_USERS = b"coterie:users:"  # in the certificate of a member that may speak for some users only


@dataclass(frozen=True)
class HostPolicy:
    """A policy, and the folder where a host keeps its state."""

    policy: Policy
    path: Path
    state: Path

    def check_certificate(self, tls: Tls | None) -> None:
        """ConfigError when the certificate lists users, who would go by other names."""
        if self.policy.pseudonyms and tls is not None and _USERS in ssl.PEM_cert_to_DER_cert(tls.certificate.decode("ascii")):
            lists = f"the certificate in {tls.folder} lists users by name: want one that was issued without --users"
            raise ConfigError(f"the policy {self.path} wants pseudonyms, but {lists}", Finding("C8"))

    def check(self, experiment: Experiment, log: Log) -> None:
        """ConfigError when the experiment asks for more; each breach is a line of the host's own log."""
        for breach in breaches(self.policy, experiment):
            log.say("policy", f"not allowed by {self.path}: {breach.sentence}", LogLevel.warning, rule=breach.finding.rule)
        check_policy(self.policy, experiment, str(self.path))

    def _key(self) -> bytes | None:
        """Of the pseudonyms, where there are any."""
        return key_in(self.path.with_name(KEY_BESIDE), self.state / KEY) if self.policy.pseudonyms else None

    def called(self, users: str | None) -> str | None:
        """A selection of users as part of the host's name, which others see: by a keyed hash where users go by pseudonyms."""
        key = self._key() if users is not None else None
        return users if key is None or users is None else pseudonym(key, users)

    def admit(self, name: str, log: Log, users: Sequence[UserData]) -> Admitted:
        """The users that take part. Says how many do not, and where the list of pseudonyms is."""
        key = self._key()
        found = admitted(users, self.policy.min_rows, key)
        if found.n_left_out:
            few = f"{counted(found.n_left_out, 'user')} with fewer than {self.policy.min_rows} training rows"
            log.say("policy", f"{few}: left out by {self.path}", users=found.n_left_out)
        if key is not None:
            place = self.state / f"{state_name(name, 'pseudonyms')}.json"
            write_list(place, found.true_names)
            log.say("policy", f"users go by pseudonyms; who is who is in {place}", users=len(found.users))
        return found


def host_policy(path: Path | None, data: Path, state: Path) -> HostPolicy | None:
    """The policy in a file, or in the data folder; None where there is none. ConfigError when it cannot be read."""
    found = path or data / FILE
    if path is None and not found.exists():
        return None
    return HostPolicy(read_policy(found), found, state)


__all__ = ["HostPolicy", "host_policy"]
