"""Checks the servers that a run calls, before models are loaded."""

from __future__ import annotations

import asyncio

from kapelle.environment import ExternalServer, UsesServers
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.credentials import bearer
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.http import error_message, exchange
from kapelle.settings.base import parts_of
from kapelle.team import Team

SECONDS = 5.0
"""Maximum time in seconds until a server responds."""


def check_endpoints(team: Team, environment: object) -> list[str]:
    """Return the URLs of all servers that a run calls. Raises ConfigError for a server that does not respond or rejects the key."""
    servers = check_keys(team, environment)
    if not servers:
        return []

    async def faults() -> list[str | None]:
        return list(await asyncio.gather(*map(_fault, servers)))

    for server, fault in zip(servers, run_async(faults), strict=True):
        if fault is not None:
            raise ConfigError(f"{server.who} at {server.url} {fault}")
    return [server.url for server in servers]


def check_keys(team: Team, environment: object) -> list[ExternalServer]:
    """Return the servers that a run calls, without calling them. Raises ConfigError if an API key would be sent unencrypted."""
    found = {policy.endpoint: name for name, policy in team.policies.items() if policy.endpoint is not None}
    servers = [
        ExternalServer(
            f"The endpoint of policy '{name}'", each.url, f"{each.url.rstrip('/')}/models", each.api_key_env
        )
        for each, name in found.items()
    ]
    for _, part in parts_of(environment):
        servers += part.servers() if isinstance(part, UsesServers) else ()
    for server in servers:
        try:
            bearer(server.key_env, server.url)
        except ConfigError as error:
            raise ConfigError(f"{server.who}: {error}") from None
    return servers


async def _fault(server: ExternalServer) -> str | None:
    """Return what is wrong with a server and how to fix it, or None if the server responds."""
    import httpx

    headers = bearer(server.key_env, server.url)
    try:
        answer = await exchange("GET", server.probe, None, headers, SECONDS)
    except (EpisodeError, httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return f"does not respond: {reason}. Start it, or correct its address."
    if answer.status in (401, 403):
        held = f"in ${server.key_env}" if headers else f"(${server.key_env} is empty)"
        return f"rejects the key {held}: HTTP {answer.status}. Set this variable to the server's key."
    if answer.status >= 500:
        return f"returns HTTP {answer.status}{error_message(answer.body)}. Wait until it is ready, or restart it."
    return None
