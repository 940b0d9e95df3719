"""Sample the completions of frozen agents from OpenAI-compatible servers.

The server returns text without token ids and log-probs, so an agent on such a server is never trained. A request that
fails ends its episode with an error, and the run continues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kapelle.engines.rollout.protocol import Completion, Request, RolloutEngine
from kapelle.engines.rollout.scripted import ByteRenderer
from kapelle.errors import ConfigError, EngineError, EpisodeError, RequestRefused, did_you_mean
from kapelle.runtime.characters import defused, replace_surrogates
from kapelle.runtime.credentials import bearer, without_secrets
from kapelle.runtime.http import NoAnswer, post_with_retries
from kapelle.settings.base import open_address
from kapelle.team import Endpoint
from kapelle.types import Constraint, Json, Message, conversation

if TYPE_CHECKING:
    import httpx

RETRIES = 6
"""The maximum number of retries of a request. Each attempt may take `engine.timeout` seconds; the pauses between
attempts add up to half a minute."""

WITHHELD = ("content_filter", "error")
"""Values of `finish_reason` with which a server may withhold the text. An empty completion with one of these values
raises an error."""


def constraint_fields(constraint: Constraint | None) -> dict[str, Json]:
    """Return the request fields that apply a constraint.

    A constraint of kind `endpoint` contains the request fields themselves. Of the other constraints, only JSON
    constraints have a form that servers have in common; all others are ignored.
    """
    if constraint is not None and constraint.kind == "endpoint":
        fields: dict[str, Json] = json.loads(constraint.text)
        return fields
    if constraint is None or constraint.kind not in ("json_schema", "json_object"):
        return {}
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": json.loads(constraint.text)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


class EndpointEngine(RolloutEngine):
    """An engine that sends requests to remote servers. Between requests, the engine only keeps which fields a server does not support."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        timeout: float = 120.0,
        retries: int = RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Create an engine for these endpoints.

        The argument `timeout` is the maximum time in seconds for an HTTP request, from the connection to the last byte.
        The argument `transport` replaces the network in tests.
        """
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
        self._unsupported: dict[str, set[str]] = {policy: set() for policy in endpoints}
        """Mapping from a policy to the fields that its server has rejected and that have a substitute (`_supported`)."""

    @property
    def policies(self) -> Sequence[str]:
        """The names of the policies that are served by endpoints."""
        return tuple(self._endpoints)

    def renderer(self, policy: str) -> ByteRenderer:
        """Return a renderer that uses bytes as token ids, because the server has its own tokeniser."""
        return self._renderer

    async def generate(self, request: Request) -> Completion:
        """Return the server's completion.

        Raises RequestRefused if the server refuses the request, and EpisodeError if all retries fail or the server's
        answer is invalid.
        """
        endpoint = self._endpoints.get(request.policy)
        if endpoint is None:
            raise EngineError(
                f"No endpoint is set for the policy '{request.policy}'.{did_you_mean(request.policy, self._endpoints)}"
            )
        body = {
            "model": endpoint.model,
            "messages": _rows(request.messages),
            "max_tokens": request.sampling.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seed % (1 << 31),
            **({"stop": list(request.sampling.stop)} if request.sampling.stop else {}),
            **constraint_fields(request.sampling.constraint),
        }
        headers = bearer(endpoint.api_key_env, endpoint.url)
        url = f"{endpoint.url.rstrip('/')}/chat/completions"
        unsupported = self._unsupported[request.policy]
        while True:
            sent = _supported(body, unsupported)
            try:
                answer = await post_with_retries(
                    url, sent, headers, self._timeout, self._retries, self._transport
                )
                break
            except NoAnswer as error:
                rejected = {*unsupported, error.parameter or ""}
                if _supported(body, rejected) != sent:
                    unsupported |= rejected
                    continue
                reason = str(error).rstrip(".")
                kind = RequestRefused if error.refused else EpisodeError
                raise kind(
                    f"The endpoint of policy '{request.policy}' ({endpoint.url}) did not answer: {reason}."
                ) from error
        try:
            parsed = json.loads(answer)
            choice = parsed["choices"][0]
            text = replace_surrogates(_text(choice["message"]))
            ids = tuple(text.encode())
            ended = choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise EpisodeError(
                f"{endpoint.url} did not answer in the format of OpenAI's chat completions."
            ) from None
        if not text and ended in WITHHELD:
            raise EpisodeError(f"{endpoint.url} returned no text; `finish_reason` is {ended}.")
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
        """Raise EngineError, because weights cannot be loaded into a remote server."""
        raise EngineError(
            f"Policy '{policy}' is a remote endpoint, which cannot load weights. Mark it as frozen."
        )


def _supported(body: Mapping[str, Json], unsupported: Collection[str]) -> dict[str, Json]:
    """Return the fields of a request for a server that does not support some of them.

    OpenAI's reasoning models support `max_completion_tokens` instead of `max_tokens`, and only the value 1 of `temperature`
    and `top_p`, which is then left out. Fields without a substitute are sent, so that the server reports the error.
    """
    left_out = {name for name in ("temperature", "top_p") if body[name] == 1.0} | {"seed", "max_tokens"}
    sent = {name: value for name, value in body.items() if name not in left_out.intersection(unsupported)}
    if "max_tokens" in unsupported:
        sent["max_completion_tokens"] = body["max_tokens"]
    return sent


def _rows(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Return messages in the format of OpenAI's API, with tool calls and tool results in the API's own fields."""
    rows: list[dict[str, Json]] = []
    for message, row in zip(messages, conversation(defused(messages)), strict=True):
        fields = {} if message.structured is None else json.loads(message.structured)
        if message.role == "tool" and "tool_call_id" in fields:
            row["tool_call_id"] = fields["tool_call_id"]
        elif message.role == "assistant":
            row["tool_calls"] = fields.get("tool_calls") or _calls_of(message.content)
        rows.append(row)
    for place, row in enumerate(rows):
        if not (calls := row.pop("tool_calls", [])):
            continue
        # An earlier answer has no call ids; the ids of the results that follow are in the order of its calls.
        results = takewhile(lambda each: each["role"] == "tool", rows[place + 1 :])
        ids = [each["tool_call_id"] for each in results if "tool_call_id" in each]
        if "id" not in calls[0] and len(ids) != len(calls):
            continue  # it stays a string
        row["content"] = row["content"].partition("<tool_call>")[0].strip() or None
        row["tool_calls"] = [
            {"id": call.get("id") or ids[number], "type": "function", "function": call["function"]}
            for number, call in enumerate(calls)
        ]
        for call in row["tool_calls"]:
            if not isinstance(arguments := call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(arguments)
    return rows


# Completions are strings in which calls have the format `hermes`.

_CALL = re.compile(r"<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)


def _text(message: Any) -> str:
    """Return the text of a server's answer, including its tool calls in text form."""
    texts = [message.get("content") or message.get("refusal") or ""]
    for call in message.get("tool_calls") or ():
        name, arguments = json.dumps(call["function"]["name"]), call["function"]["arguments"] or "{}"
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}')
        with suppress(ValueError, RecursionError):  # the token limit may have cut the arguments
            json.loads(arguments)
            texts[-1] += "}\n</tool_call>"
    return "\n".join(filter(None, texts))


def _calls_of(text: str) -> list[dict[str, Json]]:
    """Return the tool calls in the text of an earlier answer, or an empty list if the calls are not valid JSON."""
    try:
        return [{"function": json.loads(found)} for found in _CALL.findall(text)]
    except (ValueError, RecursionError):
        return []


def _usage(counted: object) -> tuple[int, int] | None:
    """Return the numbers of prompt and completion tokens that the server counted, or None if the server does not report them."""
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
