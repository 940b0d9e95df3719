"""One agent's answer to one request: whole, or as the chunks of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kapelle.engines.rollout.protocol import Completion, Likeliest
from kapelle.services.http.refusals import wrong
from kapelle.services.policy.agents import Agents, Decodes, Done, News, Prompt
from kapelle.services.policy.chat_form import ChatRequest
from kapelle.services.policy.completions import (
    Decode,
    Head,
    choice_row,
    chunk_row,
    message_of,
    token_rows,
    usage_row,
    weights_row,
)
from kapelle.services.policy.conversation import read_messages
from kapelle.services.policy.words import Words
from kapelle.types import Json, Message


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that is about to be answered."""

    model: str
    agent: str
    request: ChatRequest
    prompt: Prompt
    head: Head
    decodes: Decodes | None
    session: str | None = None
    """The session that it is part of; None where none are kept."""

    @property
    def extra(self) -> dict[str, Json]:
        """What the answer says of itself beyond OpenAI's form."""
        return {} if self.session is None else {"session": self.session}

    @property
    def decode(self) -> Decode | None:
        """What turns single tokens into text, where log-probs are asked for."""
        return self.decodes.decode if self.decodes is not None and self.request.logprobs else None

    @property
    def tools(self) -> bool:
        """Whether calls are looked for in the answer."""
        return self.request.calls_tools

    def whole(self, done: Sequence[Done], alternatives: Sequence[Sequence[Likeliest]]) -> Json:
        """Return the answer; `alternatives` are those of each choice's tokens, empty where they are not asked for."""
        completions = [each.completion for each in done]
        choices = [
            choice_row(k, each, alternatives[k], tools=self.tools, decode=self.decode)
            for k, each in enumerate(completions)
        ]
        return {
            **self.head.row("chat.completion"),
            "choices": choices,
            "usage": usage_row(done[0].prompt_tokens, completions),
            "system_fingerprint": completions[0].weights_hash,
            "kapelle": {**weights_row(completions[0]), **self.extra},
        }

    async def chunks(self, answers: AsyncIterator[News | Done]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces."""
        marks = ("<tool_call>",) if self.tools else ()
        stops = self.prompt.sampling.stop
        words = {
            k: Words(self.decodes.spoken, stops, marks, trims=self.tools)
            for k in range(self.request.n)
            if self.decodes is not None
        }
        told = [0] * self.request.n
        done: list[Done] = []
        for k in range(self.request.n):
            yield self._chunk(k, {"role": "assistant", "content": "", "refusal": None}, extra=self.extra)
        async with aclosing(answers) as coming:  # type: ignore[type-var]
            async for each in coming:
                k = each.choice
                if isinstance(each, News):
                    told[k] += len(each.ids)
                    text = words[k].hear(each.ids) if k in words else ""
                    if text or self.decode is not None:
                        yield self._chunk(k, {"content": text}, each.ids, each.logprobs)
                    continue
                completion = each.completion
                done.append(each)
                deltas, reason = self._last_words(completion, words.get(k))
                for delta in deltas:
                    yield self._chunk(k, delta, completion.ids[told[k] :], completion.logprobs[told[k] :])
                    told[k] = len(completion.ids)
                yield self._chunk(k, {}, reason=reason, extra=dict(weights_row(completion)))
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            usage = usage_row(done[0].prompt_tokens, [each.completion for each in done])
            yield {**self.head.row("chat.completion.chunk"), "choices": [], "usage": usage}
        yield "[DONE]"

    def _last_words(self, completion: Completion, words: Words | None) -> tuple[list[dict[str, Json]], str]:
        """Return what has not been told of a choice, words first and then each call, and why it ended."""
        message, reason = message_of(completion, tools=self.tools)
        text = message["content"] or ""
        left = text if words is None else words.end(text)
        # Each call in a piece of its own, as OpenAI sends them: some clients read the first one of a piece.
        calls = [
            {"tool_calls": [{"index": k, **call}]} for k, call in enumerate(message.get("tool_calls", ()))
        ]
        return [*([{"content": left}] if left or not calls else []), *calls], reason

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Json],
        ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        *,
        reason: str | None = None,
        extra: dict[str, Json] | None = None,
    ) -> Json:
        rows = None if self.decode is None else {"content": token_rows(ids, logprobs, self.decode)}
        return chunk_row(self.head, choice, delta, rows, reason, extra)


def read_chat(agents: Agents, model: str, agent: str, request: ChatRequest) -> tuple[Chat, list[Message]]:
    """Return a chat whose prompt is not known yet, and the conversation that the agent reads; Refusal (400)."""
    decodes = agents.decodes(agent)
    if request.logprobs and decodes is None:
        raise wrong(
            f"The tokens of '{agent}' are not known here, and so neither are their log-probs.", "logprobs"
        )
    if request.top_logprobs and not request.logprobs:
        raise wrong("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    if request.top_logprobs and request.stream:
        raise wrong(
            "`top_logprobs` are known when an answer is complete. Leave out `stream`.", "top_logprobs"
        )
    if request.top_logprobs and not agents.knows_alternatives:
        raise wrong("What the agents might have said instead is not known here.", "top_logprobs")
    tools = request.tools if request.calls_tools else ()
    messages = read_messages(request.messages, tools, agents.play.team[agent].system)
    prompt = Prompt(agent, tuple(messages), (), request.sampling(agents.play.team[agent].sampling), ())
    return Chat(model, agent, request, prompt, Head(model), decodes), messages


async def prompted(
    chat: Chat, agents: Agents, messages: Sequence[Message], ids: Callable[[], Sequence[int]] | None
) -> Chat:
    """Return a chat with its prompt as tokens, which `ids` knows or the conversation gives; Refusal (400)."""

    def render() -> Prompt:
        return agents.prompt(chat.agent, chat.request, messages, None if ids is None else ids())

    rendering: Awaitable[Prompt] = asyncio.to_thread(render)
    return replace(chat, prompt=await rendering)
