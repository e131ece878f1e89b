"""Finds out why a server does not answer as expected.

gRPC reports a failed handshake like a server that is not up yet: as unavailable. So that nobody waits in vain, we open our own connection.
It shows whether the other side wants TLS, and whose certificate is refused.
"""

import asyncio
import contextlib
import socket
import ssl

from coterie.errors import ConfigError
from coterie.session.tls import CA, CERTIFICATE, Tls, distrust_reason
from coterie.text.addresses import host_and_port

_PROBE_S = 5.0  # timeout of each wait
# The start of HTTP/2 with empty SETTINGS; a server answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4  # the kind of an HTTP/2 frame, at byte 3
_AGAIN_S = 0.5  # before a second look, since a stopping server looks like one that refuses us
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
PLAIN = "it speaks plain text, wanted TLS: start it with --tls, or this member without"


async def mismatch(address: str, tls: Tls | None, name: str | None = None) -> str | None:
    """The permanent problem between us and the server at HOST:PORT; None if there is none, or no server.

    `name` is that of its certificate, if it is another than HOST.
    """
    if tls is not None:
        try:
            tls.check(is_server=False)  # it may have expired meanwhile
        except ConfigError as error:
            return str(error)
    found = await asyncio.to_thread(_looked, address, tls, name)
    if found is None:
        return None
    await asyncio.sleep(_AGAIN_S)
    return found if await asyncio.to_thread(_looked, address, tls, name) == found else None


async def unreachable(address: str) -> str:
    """Why no connection to HOST:PORT comes about, as a clause; "" if one does."""
    return await asyncio.to_thread(_unreachable, address)


def _unreachable(address: str) -> str:
    host, port = host_and_port(address)
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S):
            return ""
    except (socket.gaierror, UnicodeError):
        return f"the name {host!r} was not found"
    except ConnectionRefusedError:
        return "the connection was refused, so nothing listens at this port"
    except TimeoutError:
        return "the connection timed out: the machine is off, or a firewall is between"
    except OSError as error:
        return f"the connection failed: {error.strerror or error}"


def _looked(address: str, tls: Tls | None, name: str | None) -> str | None:
    host, port = host_and_port(address)
    try:
        if tls is None:
            return _in_plain_text(host, port)
        if _answer(host, port, tls.dialling, name) is not None:
            return None
        ours, authority = tls.folder / CERTIFICATE, tls.folder / CA  # our certificate is valid by our own authority: the authorities differ
        return f"it does not believe {ours}: its own authority is not the one in {authority}, or the clocks differ"
    except ssl.SSLCertVerificationError as error:
        if "mismatch" in error.verify_message:
            wanted = "dial a name that it is for" if name is None else "correct --tls-name"
            return f"its certificate is not for {name or host!r}: issue one with --address {name or host}, or {wanted}"
        return f"its certificate is not believed: {distrust_reason(error)}"
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # a proxy of a server that is down may do this
        return None
    except ssl.SSLError as error:
        if error.reason in _NO_TLS:
            return None if tls is None else PLAIN  # a server that answers now was only restarting
        return f"it ends the TLS handshake: {(error.reason or str(error)).replace('_', ' ').lower()}"
    except OSError:
        return None
    except ValueError:  # from the idna codec, and from ssl
        return f"{host!r} is no name of a host"


def _in_plain_text(host: str, port: int) -> str | None:
    if _answer(host, port, None) is not None:
        return None
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only tests for TLS, and sends no data to an unverified peer
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    _answer(host, port, anybody)
    return "it wants TLS: give this member its certificate with --tls"


def _answer(host: str, port: int, context: ssl.SSLContext | None, name: str | None = None) -> bytes | None:
    """The first bytes of the answer to the HTTP/2 preface; None if the connection is closed instead. TimeoutError without an answer."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), timeout=_PROBE_S))
        if context is not None:  # asyncio would not send the server the reason for a refused certificate
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname=name or host))
        try:
            connection.sendall(_PREFACE)
            answer = connection.recv(9)
        except ConnectionError:
            return None
    return answer if len(answer) > 3 and answer[3] == _SETTINGS else None
