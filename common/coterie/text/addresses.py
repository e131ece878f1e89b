"""HOST:PORT as people write it: taken apart, and put together again."""

import contextlib
import ipaddress
import re

from coterie.errors import ConfigError

_PORT = re.compile(r"[0-9]{1,5}")
_MAX_PORT = 65535


def host_and_port(address: str, what: str = "the address", *, least_port: int = 1) -> tuple[str, int]:
    """The host, without the brackets of an IPv6 address, and the port. ConfigError that begins with `what`; a listener may have port 0."""
    host, _, port = address.rpartition(":")
    if not host or not _PORT.fullmatch(port) or not least_port <= int(port) <= _MAX_PORT:
        raise ConfigError(f"{what} is {address!r}, want HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def with_port(host: str, port: int) -> str:
    """HOST:PORT, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the name or address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
