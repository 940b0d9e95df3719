"""A judge behind an OpenAI-compatible URL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from kapelle.errors import EpisodeError
from kapelle.grading.judge.grade import Ask
from kapelle.runtime.asking_again import post_again
from kapelle.runtime.tokens import bearer
from kapelle.settings.addresses import Address
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.types import Message, conversation

if TYPE_CHECKING:
    import httpx


TIMEOUT = 120.0
"""Seconds of one attempt to get a verdict, from connecting to the last byte."""
RETRIES = 4
"""Further attempts, where another one may help."""


class JudgeEndpoint(Settings):
    """Where a judging model answers."""

    endpoint: Annotated[Address, FROM_HERE_ON]
    """Such as `http://localhost:8000/v1`."""
    model: str
    """Name of the model, as the server has it."""
    api_key_env: Annotated[str, FREE] = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is never stored."""
    max_tokens: int = 512
    """Most tokens of one verdict with its reasons."""


def ask_endpoint(settings: JudgeEndpoint, transport: httpx.AsyncBaseTransport | None = None) -> Ask:
    """Return the judge; asking raises EpisodeError when it does not answer. `transport` is for tests.

    Raises ConfigError for a key that others on the network could read.
    """
    headers = bearer(settings.api_key_env, settings.endpoint)

    async def ask(messages: Sequence[Message]) -> str:
        body = {
            "model": settings.model,
            "messages": conversation(messages),
            "max_tokens": settings.max_tokens,
            "temperature": 0.0,
        }
        url = f"{settings.endpoint.rstrip('/')}/chat/completions"
        try:
            answer = await post_again(url, body, headers, TIMEOUT, RETRIES, transport)
            said = json.loads(answer)["choices"][0]["message"]["content"]
        except (EpisodeError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            reason = str(error) if isinstance(error, EpisodeError) else f"{type(error).__name__}: {error}"
            raise EpisodeError(f"The judge at {settings.endpoint} gave no answer: {reason}") from None
        return str(said or "")

    return ask
