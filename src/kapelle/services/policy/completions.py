"""Implements completions of plain prompts (`POST /v1/completions`).

An agent continues a text or a list of token ids without a conversation.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from kapelle.engines.rollout.protocol import ReadsPrompts
from kapelle.services.policy.agents import Agents, Chat, NewTokens, Sampled, read_chat
from kapelle.services.policy.chat_form import (
    MOST_ALTERNATIVES,
    MOST_CHOICES,
    ChatMessage,
    ChatRequest,
    Finished,
    SamplingBody,
    StreamOptions,
    finished,
    read_request,
    usage_of,
)
from kapelle.services.request_errors import RequestError, read_body, wrong
from kapelle.types import Json

MOST_PROMPTS = 128
"""The maximum number of prompts of one call."""

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingBody):
    """A completion request. Parameters that are not listed raise a RequestError."""

    model: str
    prompt: str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
    """The prompt as a string or as token ids, or a list of prompts."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Only the neutral values of these parameters are accepted.
    echo: Literal[False] = False
    best_of: int = Field(default=1, ge=1, le=1)
    suffix: Literal[""] = ""
    # This parameter has no effect.
    user: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [each for each in self.prompt if not isinstance(each, int)]
        return several or [[each for each in self.prompt if isinstance(each, int)]]


_Begun = tuple[Chat, AsyncIterator[NewTokens | Sampled]]
"""A chat for a prompt that is in progress, and the iterator over its choices."""


@dataclass
class CompletionForm:
    """A completion call and the format of its response."""

    given: CompletionRequest
    prompts: Sequence[str | Sequence[int]]
    request: ChatRequest
    """The chat completion request with the same sampling parameters."""

    @classmethod
    def read(cls, body: Json) -> CompletionForm:
        """Parse a call. Raises RequestError (400), which names the first parameter that is incorrect or not supported."""
        if isinstance(body, dict):
            body = dict(body)
            if body.get("best_of") == (body.get("n") or 1):
                body.pop("best_of", None)  # the best n of n samples are all samples
        given = read_body(CompletionRequest, body)
        settings = given.model_dump(
            include={
                "model",
                "max_tokens",
                "temperature",
                "top_p",
                "n",
                "stream",
                *SamplingBody.model_fields,
            },
            exclude_none=True,
        )
        logprobs = {"logprobs": given.logprobs is not None, "top_logprobs": given.logprobs or 0}
        request = read_request({**settings, **logprobs, "messages": [{"role": "user", "content": "?"}]})
        return cls(given, given.prompts, request)

    @property
    def answers(self) -> int:
        """The number of completions."""
        return self.given.n * len(self.prompts)

    async def begin(self, agents: Agents, model: str) -> list[_Begun]:
        """Return a chat for each prompt, with its completions. Raises RequestError (400) for a prompt that the agent does not support."""
        agent = model.rpartition("/")[2]
        renderer = agents.setup.engine.renderer(agents.setup.team.policy(agent).name)
        if not isinstance(renderer, ReadsPrompts):
            raise wrong(f"'{agent}' supports only conversations. Use `/v1/chat/completions`.", "model")
        begun = list[_Begun]()
        try:
            for prompt in self.prompts:
                message = ChatMessage(role="user", content=prompt if isinstance(prompt, str) else "")
                request = self.request.model_copy(update={"messages": [message]})
                chat = read_chat(agents, model, agent, request)
                chat = await chat.prompted(partial(renderer.plain, prompt))
                begun.append((chat, agents.answers(chat.prompt, listening=request.listens)))
        except RequestError as error:
            raise _renamed(error) from None
        return begun

    async def whole(self, begun: Sequence[_Begun]) -> Json:
        """Return the whole response as one JSON object."""
        answers = await asyncio.gather(*(finished(*each) for each in begun))
        choices = [
            self._choice(k * self.given.n + each.choice, each.message["content"], each.tokens, each.reason)
            for k, several in enumerate(answers)
            for each in several
        ]
        first = answers[0][0]
        return {
            **self._head(),
            "choices": choices,
            "usage": usage_of([each for several in answers for each in several]),
            "system_fingerprint": first.about["weights_hash"],
            "kapelle": dict(first.about),
        }

    async def events(self, begun: Sequence[_Begun]) -> AsyncGenerator[Json | str, None]:
        """Yield the response in chunks, one prompt after another."""
        head, done = self._head(), list[Finished]()
        yield {**head, "choices": [self._choice(k, "", None, None) for k in range(self.answers)]}
        for k, (chat, answers) in enumerate(begun):
            offsets = [0] * self.given.n
            async with aclosing(chat.pieces(answers)) as coming:
                async for each in coming:
                    reason = None
                    if isinstance(each, Finished):
                        reason = each.reason
                        done.append(each)
                    if each.words or each.tokens or reason:
                        index = k * self.given.n + each.choice
                        row = self._choice(index, each.words, each.tokens, reason, offsets[each.choice])
                        offsets[each.choice] += len(each.words)
                        yield {**head, "choices": [row]}
        if self.given.stream_options is not None and self.given.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage_of(done)}
        yield "[DONE]"

    failed = staticmethod(RequestError.row)

    def _head(self) -> dict[str, Json]:
        identity = f"cmpl-{secrets.token_hex(12)}"
        return {
            "id": identity,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.given.model,
        }

    def _choice(
        self, index: int, text: str, tokens: list[Json] | None, reason: str | None, offset: int = 0
    ) -> Json:
        row: dict[str, Json] = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if tokens is not None:
            offsets = []
            for each in tokens:
                offsets.append(offset)
                offset += len(each["token"])
            tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in tokens]
            row["logprobs"] = {
                "tokens": [each["token"] for each in tokens],
                "token_logprobs": [each["logprob"] for each in tokens],
                "top_logprobs": tops if self.given.logprobs else None,
                "text_offset": offsets,
            }
        return row


def _renamed(error: RequestError) -> RequestError:
    name = {"messages": "prompt", "top_logprobs": "logprobs"}.get(error.parameter or "", error.parameter)
    return RequestError(error.status, error.message, name, error.code)
