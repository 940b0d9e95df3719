"""Answers of one agent: its policy, sampled by the rollout engine beside all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
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
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.randomness import derive_seed
from kapelle.services.binding import LOG
from kapelle.services.policy.chat_form import (
    ChatRequest,
    Decode,
    Head,
    chunk_row,
    message_of,
    read_messages,
    token_rows,
    usage_row,
    weights_row,
)
from kapelle.services.refusals import Refusal, wrong
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
    """A prompt of one agent, and how its answers are sampled."""

    agent: str
    messages: tuple[Message, ...]
    """Its whole conversation."""
    ids: tuple[int, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    """One for each choice."""


@dataclass(frozen=True, slots=True)
class News:
    """New tokens of a choice."""

    choice: int
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Done:
    """A complete choice."""

    choice: int
    completion: Completion
    prompt_tokens: int
    turn: int | None = None
    """Its number in its episode; None if no episode is played."""


Tell = Callable[[Any], None]
"""Passes news on to the listener."""


class Agents:
    """The agents of a team, each asked on its own."""

    def __init__(self, play: Play, thread: LoopThread) -> None:
        self.play = play
        self.thread = thread

    def prompt(
        self, agent: str, request: ChatRequest, messages: Sequence[Message], ids: Sequence[int] | None
    ) -> Prompt:
        """Return the prompt of a request to an agent; Refusal (400) if it is too long.

        `messages` are the whole conversation; `ids` are its tokens, if they are known already.
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
        """Return what turns an agent's tokens into text; None if its engine cannot."""
        renderer = self.play.engine.renderer(self.play.team.policy(agent).name)
        return renderer if isinstance(renderer, Decodes) else None

    async def complete(self, prompt: Prompt) -> list[Completion]:
        """Return a completion for each seed."""
        return [
            each.completion async for each in self.answers(prompt, listening=False) if isinstance(each, Done)
        ]

    def answers(self, prompt: Prompt, *, listening: bool) -> AsyncIterator[News | Done]:
        """Yield the choices in order; `listening` yields tokens as they come instead, and each choice when it is complete."""
        return told(self.thread, lambda tell: self._complete(prompt, tell, listening=listening))

    @property
    def knows_alternatives(self) -> bool:
        """Whether the engine knows which other tokens were likely."""
        return self.thread.begun and isinstance(self.play.engine, KnowsAlternatives)

    async def alternatives(self, prompt: Prompt, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the `count` likeliest tokens in the place of each id of a completion."""
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

            completion = await stream_or_generate(self.play.engine, request, on_tokens if listening else None)
            if not all(map(math.isfinite, completion.logprobs)):
                raise Refusal(
                    500,
                    f"The weights of '{policy}' are broken: their log-probs are not finite.",
                    None,
                    "weights",
                )
            if listening:
                tell(Done(choice, completion, len(prompt.ids)))
            return completion

        completions = await asyncio.gather(*(one(k, seed) for k, seed in enumerate(prompt.seeds)))
        if not listening:
            for choice, completion in enumerate(completions):
                tell(Done(choice, completion, len(prompt.ids)))


async def told(
    thread: LoopThread, work: Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]]
) -> AsyncIterator[Any]:
    """Run work beside the engine and yield what it tells; closing the iterator cancels the work.

    Raises Refusal if the engine fails.
    """
    here = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    over = object()

    def tell(news: Any) -> None:
        with suppress(RuntimeError):  # the server was closed meanwhile, and its loop with it
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


def too_long(message: str) -> Refusal:
    """Return the refusal of a prompt that the model cannot read."""
    refusal = wrong(message, "messages")
    refusal.code = "context_length_exceeded"
    return refusal


# -------- Tokens as text while they come: whole characters, without what a stop string may still remove


class TextStream:
    """The text of one answer as it grows."""

    def __init__(
        self,
        spoken: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        marks: Sequence[str] = (),
        *,
        trims: bool = False,
    ) -> None:
        """Decode by `spoken`; stop before a `mark`, such as the tag of a tool call, and tell the rest at the end.

        `trims` holds spaces back until the next word, because those before a mark are dropped.
        """
        self._spoken = spoken
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._marks = tuple(marks)
        self._trims = trims
        self._ids: list[int] = []
        self._from = self._read = 0
        """The window of tokens that is decoded again: tokens before it have no effect on what follows."""
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
                place = text.find(mark)
                if place < 0:  # the text may end with the beginning of a mark
                    longest = min(len(mark) - 1, len(text))
                    begun = next((k for k in range(longest, 0, -1) if text.endswith(mark[:k])), 0)
                    place = len(text) - begun
                text = text[:place]
            text = text.rstrip() if self._trims else text
        news = text[len(self.told) :]
        self.told += news
        return news


# -------- One agent's answer to one request: whole, or as the chunks of a stream


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that is being answered."""

    model: str
    agent: str
    request: ChatRequest
    prompt: Prompt
    head: Head
    decodes: Decodes | None
    session: str | None = None
    """Its session; None on a server that records nothing."""

    @property
    def extra(self) -> dict[str, Json]:
        """Fields of the answer beyond OpenAI's form."""
        return {} if self.session is None else {"session": self.session}

    @property
    def decode(self) -> Decode | None:
        """What turns single tokens into text, if log-probs are asked for."""
        return self.decodes.decode if self.decodes is not None and self.request.logprobs else None

    @property
    def tools(self) -> bool:
        """Whether tool calls are read from the answer."""
        return self.request.calls_tools

    def whole(self, done: Sequence[Done], alternatives: Sequence[Sequence[Likeliest]]) -> Json:
        """Return the answer; `alternatives` are those of each choice's tokens, empty if they are not asked for."""
        completions = [each.completion for each in done]
        choices = []
        for k, each in enumerate(completions):
            message, reason = message_of(each, tools=self.tools)
            logprobs = None
            if self.decode is not None:
                logprobs = {"content": token_rows(each.ids, each.logprobs, self.decode, alternatives[k])}
            choices.append({"index": k, "message": message, "logprobs": logprobs, "finish_reason": reason})
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
            k: TextStream(self.decodes.spoken, stops, marks, trims=self.tools)
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

    def _last_words(
        self, completion: Completion, words: TextStream | None
    ) -> tuple[list[dict[str, Json]], str]:
        """Return the rest of a choice, words first and then each call, and why it ended."""
        message, reason = message_of(completion, tools=self.tools)
        text = message["content"] or ""
        left = text if words is None else words.end(text)
        # Each call in a piece of its own, as OpenAI sends them: some clients read only the first one of a piece.
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
    """Return a chat that lacks its prompt's tokens, and the conversation that the agent reads; Refusal (400)."""
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
    """Return a chat with its prompt's tokens: those of `ids`, else of the rendered conversation; Refusal (400)."""

    def render() -> Prompt:
        return agents.prompt(chat.agent, chat.request, messages, None if ids is None else ids())

    return replace(chat, prompt=await asyncio.to_thread(render))  # long conversations take a while
