"""Requests to servers on behalf of an agent, which are limited in size and time and are sent only to public addresses.

A host name is resolved once, all its addresses are checked, and the connection is made to one of the checked addresses. A change of
the name's address after the check therefore has no effect.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from kapelle.errors import EpisodeError
from kapelle.runtime.http import exchange
from kapelle.types import Json

TIMEOUT_S = 10.0
"""Maximum time in seconds for a request."""

Resolve = Callable[[str, int], Sequence[str]]
"""A function that takes a host and a port and returns the addresses of the host."""


class WebFault(Exception):
    """Raised if a request is not allowed or fails."""


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public internet.

    For an IPv6 address that contains an IPv4 address, the latter is checked.
    """
    found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        found = inner or found
    local = isinstance(found, ipaddress.IPv6Address) and found.is_site_local  # fec0::/10, before RFC 3879
    inside = any(found in network for network in _INSIDE)
    return found.is_global and not (found.is_multicast or found.is_reserved or local or inside)


_INSIDE = tuple(
    map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20"))
)
"""Internal addresses of cloud providers (Azure's platform, Oracle's metadata), and networks that some versions of Python classify as
global: protocol assignments, 6to4 relays and documentation."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def any_address(_address: str) -> bool:
    """Allow every address, for servers that the user has declared as local."""
    return True


def addresses_of(host: str, port: int) -> Sequence[str]:
    """Return the current addresses of a host name. Raises WebFault if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise WebFault(f"the host '{host[:80]}' is not known") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def send_pinned(
    request: Any,
    transport: Any,
    unreachable: type[Exception],
    allowed: Callable[[str], bool],
    resolve: Resolve,
) -> Any:
    """Send a request of httpx (or of its fork httpx2) to a checked address of its host, and return the response.

    Raises WebFault if an address of the host is not allowed. If an address raises `unreachable`, the next address is tried.
    """
    host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
    addresses = await asyncio.to_thread(resolve, host, port)
    if not addresses or not all(map(allowed, addresses)):
        raise WebFault(
            f"the host '{host[:80]}' stands for an address that is not public; `local: true` allows it"
        )
    extensions = {**request.extensions, "sni_hostname": host}
    for address in addresses:
        url = request.url.copy_with(host=address)
        pinned = type(request)(
            request.method, url, headers=request.headers, stream=request.stream, extensions=extensions
        )
        try:
            return await transport.handle_async_request(pinned)
        except unreachable:
            if address == addresses[-1]:
                raise
    raise AssertionError("there is an address")


tls_context = functools.cache(ssl.create_default_context)
"""Return a TLS context with the trusted certificate authorities, which are read once per process."""


class PinnedTransport(httpx.AsyncBaseTransport):
    """An HTTP transport that sends requests only to checked addresses."""

    def __init__(self, allowed: Callable[[str], bool], resolve: Resolve = addresses_of) -> None:
        self._allowed, self._resolve = allowed, resolve
        self._inner = httpx.AsyncHTTPTransport(verify=tls_context(), trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the response. Raises WebFault if the address is not allowed."""
        response: httpx.Response = await send_pinned(
            request, self._inner, httpx.ConnectError, self._allowed, self._resolve
        )
        return response

    async def aclose(self) -> None:
        """Close all connections of the transport."""
        await self._inner.aclose()


def fetch_json(
    url: str,
    headers: Mapping[str, str],
    *,
    allowed: Callable[[str], bool] = is_public,
    resolve: Resolve = addresses_of,
    timeout_s: float = TIMEOUT_S,
) -> Json:
    """Return the JSON document at a URL.

    Raises WebFault if the address is not allowed, or if the response is too large, arrives too late or is not JSON. Redirects are
    not followed. `fetch_json` must be called in a thread without a running event loop.
    """
    transport = PinnedTransport(allowed, resolve)
    try:
        answer = asyncio.run(exchange("GET", url, None, headers, timeout_s, transport))
        if answer.status != 200:
            raise WebFault(f"the server answered {answer.status}")
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        raise WebFault("the answer is not JSON") from None
    except EpisodeError as error:
        raise WebFault(str(error)) from None
    except httpx.HTTPError as error:
        raise WebFault(f"the request failed ({type(error).__name__})") from None
