"""Whether the servers that a run asks are there: tried before models load, because a run without them earns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import BaseModel

from kapelle.environments.reward_server import RewardServer
from kapelle.errors import ConfigError, EpisodeError
from kapelle.grading.judge import JudgeEndpoint
from kapelle.runtime.credentials import bearer
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.http import Answer, error_message, exchange
from kapelle.team import Team

SECONDS = 5.0
"""For a server to answer in."""


class Asked(NamedTuple):
    """A server that a run will ask."""

    who: str
    """What it is in the team."""
    url: str
    probe: str
    """What is fetched to see whether it is there; whether there is such a page does not matter."""
    key_env: str
    """Environment variable that holds its key."""


def check_endpoints(team: Team, environment: object) -> list[str]:
    """Return the addresses of all servers that a run will ask; ConfigError for one that is not there or refuses the key."""
    asked = check_keys(team, environment)
    if not asked:
        return []

    async def all_of_them() -> list[str | None]:
        return list(await asyncio.gather(*map(_fault, asked)))

    for server, fault in zip(asked, run_async(all_of_them), strict=True):
        if fault is not None:
            raise ConfigError(f"{server.who} at {server.url} {fault}")
    return [server.url for server in asked]


def check_keys(team: Team, environment: object) -> list[Asked]:
    """Return the servers that a run will ask, asking none; ConfigError for one whose key others on the network could read."""
    asked = [*_endpoints(team), *_graders(environment)]
    for server in asked:
        try:
            bearer(server.key_env, server.url)
        except ConfigError as error:
            raise ConfigError(f"{server.who}: {error}") from None
    return asked


def _endpoints(team: Team) -> Iterator[Asked]:
    found = {policy.endpoint: name for name, policy in team.policies.items() if policy.endpoint is not None}
    for endpoint, name in found.items():
        url = endpoint.url
        yield Asked(
            f"The endpoint of policy '{name}'", url, f"{url.rstrip('/')}/models", endpoint.api_key_env
        )


def _graders(settings: object) -> Iterator[Asked]:
    """Yield the servers that grade, at any depth of an environment's settings."""
    if isinstance(settings, JudgeEndpoint):
        url = settings.endpoint
        yield Asked("The judge", url, f"{url.rstrip('/')}/models", settings.api_key_env)
        return
    if isinstance(settings, RewardServer):
        yield Asked("The reward server", settings.address, settings.address, settings.token_env)
    inner = [value for _, value in settings] if isinstance(settings, BaseModel) else []
    inner += settings.values() if isinstance(settings, Mapping) else []
    inner += settings if isinstance(settings, list | tuple) else []
    for value in inner:
        yield from _graders(value)


async def _fault(server: Asked) -> str | None:
    """Return what is wrong with a server, and what to do; None where it answers."""
    import httpx

    headers = bearer(server.key_env, server.url)
    try:
        answer = await exchange("GET", server.probe, None, headers, SECONDS)
    except EpisodeError as error:
        return f"does not answer: {error}. Start it, or mend its address."
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return f"does not answer: {reason}. Start it, or mend its address."
    return _refused(answer, server.key_env, given=bool(headers))


def _refused(answer: Answer, key_env: str, *, given: bool) -> str | None:
    if answer.status in (401, 403):
        held = f"in ${key_env}" if given else f"(${key_env} is empty)"
        return f"refuses the key {held}: HTTP {answer.status}. Put its key into that variable."
    if answer.status >= 500:
        return f"answers HTTP {answer.status}{error_message(answer.body)}. Wait until it is ready, or start it again."
    return None
