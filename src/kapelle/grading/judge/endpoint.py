"""A judge behind an OpenAI-compatible URL."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from kapelle.errors import EpisodeError
from kapelle.grading.judge.grade import Ask
from kapelle.runtime.http import post
from kapelle.settings.addresses import Address
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.types import Message, conversation

if TYPE_CHECKING:
    import httpx


TIMEOUT = 120.0
"""Seconds for one verdict, from connecting to the last byte."""


class JudgeEndpoint(Settings):
    """Where a judging model answers."""

    endpoint: Annotated[Address, FROM_HERE_ON]
    """Such as `http://localhost:8000/v1`."""
    model: str
    api_key_env: Annotated[str, FREE] = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is never stored."""
    max_tokens: int = 512
    """Most tokens of one verdict with its reasons."""


def ask_endpoint(settings: JudgeEndpoint, transport: httpx.AsyncBaseTransport | None = None) -> Ask:
    """Return the judge; asking raises EpisodeError when it does not answer. `transport` is for tests."""

    async def ask(messages: Sequence[Message]) -> str:
        import httpx

        key = os.environ.get(settings.api_key_env, "")
        body = {
            "model": settings.model,
            "messages": conversation(messages),
            "max_tokens": settings.max_tokens,
            "temperature": 0.0,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{settings.endpoint.rstrip('/')}/chat/completions"
        try:
            status, answer = await post(url, body, headers, TIMEOUT, transport)
            said = json.loads(answer)["choices"][0]["message"]["content"] if status == 200 else None
        except (
            EpisodeError,
            httpx.HTTPError,
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            RecursionError,
        ) as error:
            raise EpisodeError(
                f"The judge at {settings.endpoint} gave no answer: {type(error).__name__}: {error}"
            ) from None
        if status != 200:
            raise EpisodeError(f"The judge at {settings.endpoint} gave no answer: HTTP {status}")
        return str(said or "")

    return ask
