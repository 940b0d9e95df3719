"""Completions of plain prompts (`POST /v1/completions`): a text or token ids, continued by an agent without a conversation."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import Field

from kapelle.engines.rollout.protocol import ReadsPrompts
from kapelle.services.policy.agents import Agents, Chat, Done, Ended, News, read_chat
from kapelle.services.policy.chat_form import (
    MOST_ALTERNATIVES,
    MOST_CHOICES,
    ChatMessage,
    ChatRequest,
    StreamOptions,
    read_request,
    usage_row,
)
from kapelle.services.refusals import Biases, Body, Penalty, Refusal, read_body, wrong
from kapelle.types import Json

MOST_PROMPTS = 128
"""Of one call."""


class CompletionRequest(Body):
    """One request; other parameters are refused."""

    model: str
    prompt: str | list[Any]
    """A text or token ids, or several of either."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Accepted with their neutral values only.
    echo: Literal[False] = False
    best_of: int = Field(default=1, ge=1, le=1)
    suffix: Literal[""] = ""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = Field(default={})
    # It changes nothing.
    user: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return its prompts; Refusal (400) where they are none."""
        given = self.prompt
        if isinstance(given, str) or (given and all(_is_id(each) for each in given)):
            return [given]
        good = all(
            isinstance(each, str) or (each and all(map(_is_id, each))) for each in given if _is_some(each)
        )
        if not given or not good or not all(map(_is_some, given)):
            raise wrong("`prompt` is a text or a list of token ids, or a list of such.", "prompt")
        if len(given) > MOST_PROMPTS:
            raise wrong(
                f"`prompt` has {len(given)} prompts; at most {MOST_PROMPTS} are answered at once.", "prompt"
            )
        return given


def _is_id(each: object) -> bool:
    return isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 31


def _is_some(each: object) -> bool:
    return isinstance(each, str | list)


@dataclass
class CompletionForm:
    """One call: what it asks of an agent, and its answer."""

    given: CompletionRequest
    prompts: Sequence[str | Sequence[int]]
    request: ChatRequest
    """How answers are sampled."""

    @classmethod
    def read(cls, body: Json) -> CompletionForm:
        """Read a call; raises Refusal (400) that names the first parameter that is wrong or not supported."""
        if isinstance(body, dict):
            body = dict(body)
            if body.get("best_of") == (body.get("n") or 1):
                body.pop("best_of", None)  # of as many samples all are returned
        given = read_body(CompletionRequest, body)
        settings = given.model_dump(
            include={"model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream"},
            exclude_none=True,
        )
        logprobs = {"logprobs": given.logprobs is not None, "top_logprobs": given.logprobs or 0}
        request = read_request({**settings, **logprobs, "messages": [{"role": "user", "content": "?"}]})
        return cls(given, given.prompts, request)

    @property
    def answers(self) -> int:
        """How many answers it asks for."""
        return self.given.n * len(self.prompts)

    async def ask(self, agents: Agents, model: str) -> list[tuple[Chat, AsyncIterator[News | Done]]]:
        """Return a chat for each prompt, with its answers; Refusal (400) for a prompt that the agent cannot read."""
        agent = model.rpartition("/")[2]
        renderer = agents.play.engine.renderer(agents.play.team.policy(agent).name)
        if not isinstance(renderer, ReadsPrompts):
            raise wrong(f"'{agent}' reads conversations alone here. Ask for a chat completion.", "model")
        asked = list[tuple[Chat, AsyncIterator[News | Done]]]()
        try:
            for prompt in self.prompts:
                words = prompt if isinstance(prompt, str) else ""
                request = self.request.model_copy(
                    update={"messages": [ChatMessage(role="user", content=words)]}
                )
                chat = await read_chat(agents, model, agent, request).prompted(
                    partial(renderer.plain, prompt)
                )
                asked.append((chat, agents.answers(chat.prompt, listening=self.given.stream)))
        except Refusal as refusal:
            raise _renamed(refusal) from None
        return asked

    async def whole(self, asked: Sequence[tuple[Chat, AsyncIterator[News | Done]]]) -> Json:
        """Return the answer."""

        async def ended(chat: Chat, answers: AsyncIterator[News | Done]) -> list[Ended]:
            return [each async for each in chat.heard(answers) if isinstance(each, Ended)]

        answers = await asyncio.gather(*(ended(*each) for each in asked))
        choices = [
            self._choice(k * self.given.n + each.choice, each.message["content"], each.tokens, each.reason)
            for k, several in enumerate(answers)
            for each in several
        ]
        first = answers[0][0]
        return {
            **self._head(),
            "choices": choices,
            "usage": _usage(answers),
            "system_fingerprint": first.about["weights_hash"],
            "kapelle": dict(first.about),
        }

    async def events(
        self, asked: Sequence[tuple[Chat, AsyncIterator[News | Done]]]
    ) -> AsyncGenerator[Json | str, None]:
        """Yield the answer in pieces, one prompt after the other."""
        head, answers = self._head(), list[list[Ended]]()
        yield {**head, "choices": [self._choice(k, "", None, None) for k in range(self.answers)]}
        for k, (chat, coming) in enumerate(asked):
            answers.append([])
            offsets = [0] * self.given.n
            async with aclosing(chat.heard(coming)) as heard:
                async for each in heard:
                    reason = None
                    if isinstance(each, Ended):
                        reason = each.reason
                        answers[-1].append(each)
                    if each.words or each.tokens or reason:
                        index = k * self.given.n + each.choice
                        row = self._choice(index, each.words, each.tokens, reason, offsets[each.choice])
                        offsets[each.choice] += len(each.words)
                        yield {**head, "choices": [row]}
        if self.given.stream_options is not None and self.given.stream_options.include_usage:
            yield {**head, "choices": [], "usage": _usage(answers)}
        yield "[DONE]"

    failed = staticmethod(Refusal.row)

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


def _renamed(refusal: Refusal) -> Refusal:
    name = {"messages": "prompt", "top_logprobs": "logprobs"}.get(refusal.parameter or "", refusal.parameter)
    return Refusal(refusal.status, refusal.message, name, refusal.code)


def _usage(answers: Sequence[Sequence[Ended]]) -> Json:
    read = sum(several[0].usage[0] for several in answers)
    return usage_row(read, sum(each.usage[1] for several in answers for each in several))
