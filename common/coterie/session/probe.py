"""Finds out why a server does not answer as expected.

gRPC reports a failed handshake like a server that is not up yet: as unavailable. So that nobody waits in vain, we open our own connection.
It shows whether the other side wants TLS, and whose certificate is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from coterie.errors import ConfigError
from coterie.session.tls import CA, CERTIFICATE, Tls, distrust_reason

_PROBE_S = 5.0  # timeout of each wait
# The start of HTTP/2 with empty SETTINGS; a server answers with its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4  # the kind of an HTTP/2 frame, at byte 3
_AGAIN_S = 0.5  # before a second look, since a stopping server looks like one that refuses us
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
PLAIN = "it speaks plain text, wanted TLS: start it with --tls, or this member without"


async def mismatch(address: str, tls: Tls | None) -> str | None:
    """The permanent problem between us and the server at HOST:PORT; None if there is none, or no server."""
    if tls is not None:
        try:
            tls.check(is_server=False)  # it may have expired meanwhile
        except ConfigError as error:
            return str(error)
    found = await asyncio.to_thread(_looked, address, tls)
    if found is None:
        return None
    await asyncio.sleep(_AGAIN_S)
    return found if await asyncio.to_thread(_looked, address, tls) == found else None


def _looked(address: str, tls: Tls | None) -> str | None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        return _in_plain_text(host, int(port)) if tls is None else _with_tls(host, int(port), tls)
    except ssl.SSLCertVerificationError as error:
        return _not_believed(error, host)
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


def _with_tls(host: str, port: int, tls: Tls) -> str | None:
    if _answer(host, port, tls.dialling) is not None:
        return None
    # Our certificate is valid by our own authority, so the authorities differ.
    return f"it does not believe {tls.folder / CERTIFICATE}: its own authority is not the one in {tls.folder / CA}, or the clocks differ"


def _in_plain_text(host: str, port: int) -> str | None:
    if _answer(host, port, None) is not None:
        return None
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only tests for TLS, and sends no data to an unverified peer
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    _answer(host, port, anybody)
    return "it wants TLS: give this member its certificate with --tls"


def _answer(host: str, port: int, context: ssl.SSLContext | None) -> bytes | None:
    """The first bytes of the answer to the HTTP/2 preface; None if the connection is closed instead. TimeoutError without an answer."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), timeout=_PROBE_S))
        if context is not None:  # asyncio would not send the server the reason for a refused certificate
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname=host))
        try:
            connection.sendall(_PREFACE)
            answer = connection.recv(9)
        except ConnectionError:
            return None
    return answer if len(answer) > 3 and answer[3] == _SETTINGS else None


def _not_believed(error: ssl.SSLCertVerificationError, host: str) -> str:
    if "mismatch" in error.verify_message:
        return f"its certificate is not for {host!r}: issue one with --address {host}, or dial a name that it is for"
    return f"its certificate is not believed: {distrust_reason(error)}"
