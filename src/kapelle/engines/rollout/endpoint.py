"""Frozen agents behind an OpenAI-compatible URL.

The server returns text without token ids and log-probs, so such an agent is never
trained. A request that fails ends its episode with an error; the run continues.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine
from kapelle.engines.rollout.scripted import ByteRenderer
from kapelle.errors import ConfigError, EngineError, EpisodeError, did_you_mean
from kapelle.runtime.characters import defused, replace_surrogates
from kapelle.runtime.credentials import bearer, without_secrets
from kapelle.runtime.http import NoAnswer, post_with_retries
from kapelle.settings.base import open_address
from kapelle.team import Endpoint
from kapelle.types import Constraint, Json, conversation

if TYPE_CHECKING:
    import httpx

RETRIES = 6
"""Most retries of a request, each within `engine.timeout`; their pauses add up to half a minute."""

WITHHELD = ("content_filter", "error")
"""Values of `finish_reason` with which a server returns no text; an empty text is then an error."""


def _response_format(constraint: Constraint | None) -> dict[str, Json]:
    """Return the `response_format` of a JSON constraint; servers share no form for other constraints, which are ignored."""
    if constraint is None or constraint.kind not in ("json_schema", "json_object"):
        return {}
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": json.loads(constraint.text)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class EndpointEngine(RolloutEngine):
    """Sends requests to remote servers; keeps no state between them."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        timeout: float = 120.0,
        retries: int = RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Allow `timeout` seconds per HTTP request, from connecting to the last byte; `transport` replaces the network in tests."""
        for policy, endpoint in endpoints.items():
            try:
                open_address(endpoint.url)
            except ValueError as wrong:
                shown = without_secrets(endpoint.url)
                raise ConfigError(f"The endpoint of policy '{policy}' is '{shown}': {wrong}.") from None
            bearer(endpoint.api_key_env, endpoint.url)
        self._endpoints = dict(endpoints)
        self._timeout = timeout
        self._retries = retries
        self._transport = transport
        self._renderer = ByteRenderer()

    @property
    def policies(self) -> Sequence[str]:
        """Names of its policies."""
        return tuple(self._endpoints)

    def renderer(self, policy: str) -> ByteRenderer:
        """Return a renderer with bytes as tokens; the server has its own tokeniser."""
        return self._renderer

    async def generate(self, request: Request) -> Completion:
        """Return the server's completion; EpisodeError after the last failed request."""
        endpoint = self._endpoints.get(request.policy)
        if endpoint is None:
            raise EngineError(
                f"No endpoint is set for the policy '{request.policy}'.{did_you_mean(request.policy, self._endpoints)}"
            )
        body = {
            "model": endpoint.model,
            "messages": conversation(defused(request.messages)),
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seed % (1 << 31),
            **({"stop": list(request.sampling.stop)} if request.sampling.stop else {}),
            **_response_format(request.sampling.constraint),
        }
        headers = bearer(endpoint.api_key_env, endpoint.url)
        url = f"{endpoint.url.rstrip('/')}/chat/completions"
        try:
            answer = await post_with_retries(
                url, body, headers, self._timeout, self._retries, self._transport
            )
        except NoAnswer as error:
            reason = str(error).rstrip(".")
            raise EpisodeError(
                f"The endpoint of policy '{request.policy}' ({endpoint.url}) did not answer: {reason}."
            ) from None
        try:
            parsed = json.loads(answer)
            choice = parsed["choices"][0]
            text = replace_surrogates(choice["message"]["content"] or "")
            ids = tuple(text.encode())
            ended = choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise EpisodeError(
                f"{endpoint.url} did not answer in the form of OpenAI's chat completions."
            ) from None
        if not text and ended in WITHHELD:
            raise EpisodeError(f"{endpoint.url} gave no text, but `finish_reason: {ended}`.")
        return Completion(
            ids,
            (0.0,) * len(ids),
            "length" if ended == "length" else "stop",
            text,
            0,
            endpoint.model,
            usage=_usage(parsed.get("usage")),
        )

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Raise EngineError: a remote server has its own weights."""
        raise EngineError(f"Policy '{policy}' is a remote endpoint and takes no weights. Mark it as frozen.")


def _usage(counted: object) -> tuple[int, int] | None:
    """Return the server's count of prompt and completion tokens; None if it reports none."""
    if not isinstance(counted, dict):
        return None
    read, written = counted.get("prompt_tokens"), counted.get("completion_tokens")
    if (
        type(read) is int
        and type(written) is int
        and min(read, written) >= 0
        and max(read, written) < 1 << 40
    ):
        return read, written
    return None
