"""Where a member finds its parent: at HOST:PORT, or at the address in a file (@FILE), which the parent writes once it listens.

A parent that is started again may listen elsewhere. So a member reads the file each time it dials. The second line of the file is the id
of the run: a parent that was killed leaves its file, and another run may have its port by now.
"""

from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.text.addresses import host_and_port, is_loopback

ADDRESS = "address"  # the file in a run folder
FILE = "@"  # begins the name of a file


@dataclass(frozen=True)
class Where:
    """What `--server` says. ConfigError unless it is HOST:PORT, on this machine or allowed to be elsewhere, or @FILE."""

    said: str
    insecure: bool = False  # allowed: plain text to another machine
    tls_name: str | None = None  # the name in the parent's certificate, if that is another than the one dialled
    has_tls: bool = False

    def __post_init__(self) -> None:
        if self.tls_name is not None and not self.has_tls:
            raise ConfigError(f"--tls-name is {self.tls_name!r}, but there is no certificate to compare it with: want --tls too")
        if self.file is None:
            self._check(self.said, "--server")
        elif self.said == FILE:
            raise ConfigError(f"--server is {FILE!r}, want {FILE}FILE with the file's name")

    @property
    def file(self) -> Path | None:
        """The file that says where; None for a fixed address."""
        return Path(self.said.removeprefix(FILE)) if self.said.startswith(FILE) else None

    def place(self) -> tuple[str, str] | None:
        """HOST:PORT and the run that should be there, "" if nobody says which. None while there is no such file.

        ConfigError when the file has something else, or cannot be read.
        """
        if self.file is None:
            return self.said, ""
        try:
            with self.file.open(encoding="utf-8") as file:
                text, _, run_id = file.read(512).strip().partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the address file {self.file}: {getattr(error, 'strerror', None) or error}") from None
        self._check(text, f"the address in {self.file}")
        return text, run_id.strip()

    def _check(self, address: str, what: str) -> None:
        host, _ = host_and_port(address, what)
        if not is_loopback(host) and not self.insecure and not self.has_tls:
            allow = "give a certificate with --tls, or allow it with --insecure"
            raise ConfigError(f"joining {address} without TLS sends models in plain text: {allow}")
