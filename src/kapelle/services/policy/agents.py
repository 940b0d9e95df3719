"""What answers a call of one agent: its policy, sampled by the rollout engine beside all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from kapelle.engines.rollout.protocol import (
    Completion,
    KnowsAlternatives,
    Likeliest,
    Request,
    stream_or_generate,
)
from kapelle.errors import ContextError, EngineError
from kapelle.rollout.play import Play
from kapelle.runtime.randomness import derive_seed
from kapelle.services.http.refusals import Refusal, wrong
from kapelle.services.log import LOG
from kapelle.services.policy.chat_form import (
    ChatRequest,
    Decode,
    Head,
    choice_row,
    chunk_row,
    message_of,
    read_messages,
    token_rows,
    usage_row,
    weights_row,
)
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.types import Json, Message, Sampling, Task


@runtime_checkable
class Decodes(Protocol):
    """A renderer that turns tokens into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones as they are written."""
        ...

    def spoken(self, ids: Sequence[int]) -> str:
        """Return tokens as an agent's text: without special ones."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an agent is asked."""

    agent: str
    messages: tuple[Message, ...]
    """Its whole conversation."""
    ids: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    """One for each choice."""


@dataclass(frozen=True, slots=True)
class News:
    """Tokens of a choice that came."""

    choice: int
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Done:
    """A choice that is complete."""

    choice: int
    completion: Completion
    prompt_tokens: int
    turn: int | None = None
    """Its number in the episode that it is part of; None where no episode is played."""


Tell = Callable[[Any], None]
"""Takes news for whoever listens."""


class Agents:
    """The agents of a team, each asked by itself."""

    def __init__(self, play: Play, thread: EngineThread) -> None:
        self.play = play
        self.thread = thread

    def prompt(
        self, agent: str, request: ChatRequest, messages: Sequence[Message], ids: Sequence[int] | None
    ) -> Prompt:
        """Return what an agent is asked by a request; Refusal (400) for what it cannot read.

        `messages` are its whole conversation; `ids` the same as tokens, where they are known already.
        """
        renderer = self.play.engine.renderer(self.play.team.policy(agent).name)
        try:
            ids = tuple(ids if ids is not None else renderer.start(messages))
        except ContextError as error:
            raise too_long(str(error)) from None
        room = renderer.context - len(ids)
        if room <= 0:
            raise too_long(
                f"The prompt has {len(ids):,} tokens; the agent's model reads {renderer.context:,}."
            )
        sampling = request.sampling(self.play.team[agent].sampling)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        seeds = (seed, *(derive_seed(seed, "choice", k) for k in range(1, request.n)))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return Prompt(agent, tuple(messages), ids, sampling, seeds)

    def decodes(self, agent: str) -> Decodes | None:
        """Return what turns an agent's tokens into text; None where its engine has nothing that does."""
        renderer = self.play.engine.renderer(self.play.team.policy(agent).name)
        return renderer if isinstance(renderer, Decodes) else None

    async def complete(self, prompt: Prompt) -> list[Completion]:
        """Return a completion for each seed."""
        return [
            each.completion async for each in self.answers(prompt, listening=False) if isinstance(each, Done)
        ]

    def answers(self, prompt: Prompt, *, listening: bool) -> AsyncIterator[News | Done]:
        """Yield each choice, in their order unless somebody is listening; then with its tokens as they come."""
        return told(self.thread, lambda tell: self._complete(prompt, tell, listening=listening))

    @property
    def knows_alternatives(self) -> bool:
        """Whether it can be told what an agent might have said instead."""
        return self.thread.begun and isinstance(self.play.engine, KnowsAlternatives)

    async def alternatives(self, prompt: Prompt, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the likeliest tokens in the place of each id of a completion; nothing for a count of 0."""
        if not count:
            return ()
        request = self._request(prompt, 0)

        async def find() -> Sequence[Likeliest]:
            assert isinstance(self.play.engine, KnowsAlternatives), "`read_chat` has asked"
            return self.play.engine.alternatives(request, ids, count)

        return await self.thread.ask(find)

    def _request(self, prompt: Prompt, seed: int) -> Request:
        policy, task = self.play.team.policy(prompt.agent).name, Task("served", prompt.messages[-1].content)
        return Request(policy, prompt.agent, prompt.messages, prompt.ids, prompt.sampling, seed, task)

    async def _complete(self, prompt: Prompt, tell: Tell, *, listening: bool) -> None:
        policy = self.play.team.policy(prompt.agent).name

        async def one(choice: int, seed: int) -> Completion:
            request = self._request(prompt, seed)

            def on_tokens(ids: Sequence[int], logprobs: Sequence[float]) -> None:
                tell(News(choice, ids, logprobs))

            completion = checked(
                await stream_or_generate(self.play.engine, request, on_tokens if listening else None), policy
            )
            if listening:
                tell(Done(choice, completion, len(prompt.ids)))
            return completion

        completions = await asyncio.gather(*(one(k, seed) for k, seed in enumerate(prompt.seeds)))
        if not listening:
            for choice, completion in enumerate(completions):
                tell(Done(choice, completion, len(prompt.ids)))


async def told(
    thread: EngineThread, work: Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]]
) -> AsyncIterator[Any]:
    """Yield what work beside the engine tells, until it ends; work that nobody listens to any more is cancelled.

    Raises Refusal where the work fails.
    """
    here = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    over = object()

    def tell(news: Any) -> None:
        with suppress(RuntimeError):  # the loop of a server that was closed meanwhile
            here.call_soon_threadsafe(queue.put_nowait, news)

    task = asyncio.ensure_future(thread.ask(lambda: work(tell)))
    task.add_done_callback(lambda _: tell(over))
    try:
        while (news := await queue.get()) is not over:
            yield news
        try:
            task.result()
        except EngineError as error:
            LOG.error("The engine failed: %s", error)
            raise Refusal(
                503, "The engine that samples failed; the service's log says why.", None, "engine"
            ) from None
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def checked(completion: Completion, policy: str) -> Completion:
    """Return a completion; Refusal (500) for one of weights that are broken."""
    if not all(map(math.isfinite, completion.logprobs)):
        raise Refusal(
            500, f"The weights of '{policy}' are broken: their log-probs are not finite.", None, "weights"
        )
    return completion


def too_long(message: str) -> Refusal:
    """Return the refusal of a prompt that the model cannot read."""
    refusal = wrong(message, "messages")
    refusal.code = "context_length_exceeded"
    return refusal


# -------- Tokens as text while they come: whole characters only, and nothing that a stop string may still take back


class Words:
    """The text of one answer as it grows."""

    def __init__(
        self,
        spoken: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        marks: Sequence[str] = (),
        *,
        trims: bool = False,
    ) -> None:
        """Decode by `spoken`; end before a `mark`, such as the tag of a tool call: what follows is told at the end.

        `trims`: spaces wait for the word behind them, because before a mark they are no part of the words.
        """
        self._spoken = spoken
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._marks = tuple(marks)
        self._trims = trims
        self._ids: list[int] = []
        self._from = self._read = 0
        """The window of tokens that is decoded anew: what is before it has no effect on what follows."""
        self._text = ""
        self.told = ""
        """What has been told so far."""

    def hear(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return what can be told now."""
        self._ids += ids
        before = self._spoken(self._ids[self._from : self._read])
        now = self._spoken(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self._tell(self._text[: len(self._text) - self._held] if self._held else self._text)

    def end(self, text: str) -> str:
        """Return what is left of the whole text."""
        return self._tell(text, whole=True)

    def _tell(self, text: str, *, whole: bool = False) -> str:
        if not whole:
            for mark in self._marks:
                text = text[: _before(text, mark)]
            text = text.rstrip() if self._trims else text
        news = text[len(self.told) :]
        self.told += news
        return news


def _before(text: str, mark: str) -> int:
    """Return where a mark, or what may become one, begins in a text; its length where there is none."""
    place = text.find(mark)
    if place >= 0:
        return place
    begun = next((k for k in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:k])), 0)
    return len(text) - begun


# -------- One agent's answer to one request: whole, or as the chunks of a stream


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
