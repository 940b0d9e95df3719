"""Requests to servers of the network, on behalf of an agent: bounded, and to public addresses only.

A name is resolved once, every address that it stands for is checked, and the connection goes to exactly the address
that was checked: changing the name's address in between has no effect. The same holds for every redirection.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import SplitResult, urljoin, urlsplit

from kapelle.types import Json

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_HOPS = 5
MAX_BYTES = 1 << 20
TIMEOUT_S = 10.0
"""Seconds for one request with all its redirections."""

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port → addresses."""


class WebFault(Exception):
    """A request that was refused, or that failed."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a server answered at last."""

    url: str
    body: bytes


def fetch_json(url: str, headers: Mapping[str, str], *, local: bool = False) -> Json:
    """Return the JSON value at an address; WebFault if it has none."""
    page = fetch(url, headers, allowed=any_address if local else is_public)
    try:
        return json.loads(page.body)
    except (ValueError, RecursionError):
        raise WebFault("the answer is not JSON") from None


def is_public(address: str) -> bool:
    """Return whether an address is one of the public internet, whatever it is wrapped in."""
    found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        found = inner or found
    local = isinstance(found, ipaddress.IPv6Address) and found.is_site_local  # fec0::/10, of before RFC 3879
    inside = any(found in network for network in _INSIDE)
    return found.is_global and not (found.is_multicast or found.is_reserved or local or inside)


_INSIDE = tuple(
    map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20"))
)
"""What some clouds answer by inside (Azure's platform, Oracle's metadata), and what some versions of Python call global:
assignments of protocols, relays of 6to4, documentation."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def any_address(_address: str) -> bool:
    """Allow every address: for servers that whoever runs the training has named as their own."""
    return True


def addresses_of(host: str, port: int) -> Sequence[str]:
    """Return the addresses that a name stands for now; WebFault if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise WebFault(f"the host '{host[:80]}' is not known") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def fetch(
    url: str,
    headers: Mapping[str, str],
    *,
    allowed: Callable[[str], bool] = is_public,
    resolve: Resolve = addresses_of,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BYTES,
) -> Page:
    """Return the page at an address; WebFault if it is refused, too large, too slow or missing.

    `headers` go to the first server only: a redirection to another scheme, host or port goes without them, and so do all
    that follow it.
    """
    deadline = time.monotonic() + timeout_s
    first: tuple[str, str, int] | None = None
    sent = headers
    for _ in range(MAX_HOPS):
        parts = _checked(url)
        origin = parts.scheme, (parts.hostname or "").lower(), _port(parts)
        first = first or origin
        sent = sent if origin == first else {}
        moved, body = _one_hop(parts, sent, allowed, resolve, deadline, max_bytes)
        if moved is None:
            return Page(url, body)
        try:
            url = urljoin(url, moved)
        except ValueError:
            raise WebFault("the address cannot be read") from None
    raise WebFault(f"it redirects more than {MAX_HOPS} times")


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise WebFault("the address cannot be read") from None
    if parts.scheme not in {"http", "https"}:
        raise WebFault(f"only http and https are fetched, not '{parts.scheme[:20]}'")
    if not parts.hostname or parts.username is not None or port == 0:
        raise WebFault("the address names no host, or a user")
    if any(ord(character) <= 32 or ord(character) == 127 for character in url):
        raise WebFault("the address holds spaces or control characters")
    return parts


def _one_hop(
    parts: SplitResult,
    headers: Mapping[str, str],
    allowed: Callable[[str], bool],
    resolve: Resolve,
    deadline: float,
    max_bytes: int,
) -> tuple[str | None, bytes]:
    """Ask one server; return where it redirects to, or its answer."""
    host, port = parts.hostname or "", _port(parts)
    addresses = resolve(host, port)
    refused = [address for address in addresses if not allowed(address)]
    if refused or not addresses:
        raise WebFault(f"the host '{host[:80]}' stands for an address that is not public")
    try:
        with socket.create_connection((addresses[0], port), timeout=_left(deadline)) as plain:
            plain.settimeout(_left(deadline))
            stream = (
                ssl.create_default_context().wrap_socket(plain, server_hostname=host)
                if parts.scheme == "https"
                else plain
            )
            connection = http.client.HTTPConnection(host, port)
            connection.sock = cast("socket.socket", _Bounded(stream, deadline))
            path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            named = f"[{host}]" if ":" in host else host
            named += "" if parts.port is None else f":{port}"
            asked = {"Host": named, "Accept-Encoding": "identity", "User-Agent": "kapelle", **headers}
            connection.request("GET", path, headers=asked)
            answer = connection.getresponse()
            if answer.status in {301, 302, 303, 307, 308}:
                return answer.headers.get("Location", ""), b""
            if answer.status != 200:
                raise WebFault(f"the server answered {answer.status}")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise WebFault("the server answered in a compressed form")
            data = bytearray()
            while part := answer.read1(65536):
                data += part
                if len(data) > max_bytes:
                    raise WebFault(f"the answer has more than {max_bytes:,} bytes")
            return None, bytes(data)
    except (OSError, http.client.HTTPException, UnicodeError) as fault:
        raise WebFault(f"the request failed ({type(fault).__name__})") from None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise WebFault("it took too long")
    return left


class _Bounded(io.RawIOBase):
    """A connection that ends at a deadline, as `http.client` uses one; whoever opened the stream closes it.

    A trickle of bytes cannot extend it.
    """

    def __init__(self, stream: socket.socket, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def sendall(self, data: bytes) -> None:
        self._stream.settimeout(_left(self._deadline))
        self._stream.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._stream.settimeout(_left(self._deadline))
        return self._stream.recv_into(buffer)

    def close(self) -> None:
        pass
