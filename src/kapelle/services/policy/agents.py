"""Answers of one agent: its policy, sampled by the rollout engine beside all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
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
    Head,
    message_of,
    read_messages,
    token_rows,
    usage_row,
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


@dataclass(frozen=True, slots=True)
class Heard:
    """New words of a choice, which may be none yet."""

    choice: int
    words: str
    tokens: list[Json] | None
    """The tokens that they came with and their log-probs; None unless they are asked for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A complete choice: its words and tokens that were not heard before, and the whole of it."""

    choice: int
    words: str
    tokens: list[Json] | None
    message: Mapping[str, Json]
    """As OpenAI's clients read it in a chat completion: `content`, `tool_calls`."""
    reason: str
    """Why it ended."""
    usage: tuple[int, int]
    """How many tokens were read and written."""
    about: Mapping[str, Json]
    """What kapelle says of it beside OpenAI's form."""


Tell = Callable[[Any], None]
"""Passes news on to the listener."""


class Agents:
    """The agents of a team, each asked on its own."""

    def __init__(self, play: Play, thread: LoopThread) -> None:
        self.play = play
        self.thread = thread

    def answers(self, prompt: Prompt, *, listening: bool) -> AsyncIterator[News | Done]:
        """Yield the choices in order; `listening` yields tokens as they come instead, and each choice when it is complete."""

        async def work(tell: Tell) -> None:
            choices = (self._choice(prompt, k, tell, listening=listening) for k in range(len(prompt.seeds)))
            done = await asyncio.gather(*choices)
            if not listening:
                for each in done:
                    tell(each)

        return told(self.thread, work)

    async def _choice(self, prompt: Prompt, choice: int, tell: Tell, *, listening: bool) -> Done:
        def on_tokens(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            tell(News(choice, ids, logprobs))

        request = self._request(prompt, prompt.seeds[choice])
        completion = await stream_or_generate(self.play.engine, request, on_tokens if listening else None)
        if not all(map(math.isfinite, completion.logprobs)):
            raise Refusal(
                500,
                f"The weights of '{request.policy}' are broken: their log-probs are not finite.",
                None,
                "weights",
            )
        done = Done(choice, completion, len(prompt.ids))
        if listening:
            tell(done)
        return done

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
    return Refusal(400, message, "messages", "context_length_exceeded")


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
        text = self._text[: len(self._text) - self._held] if self._held else self._text
        for mark in self._marks:
            place = text.find(mark)
            if place < 0:  # the text may end with the beginning of a mark
                longest = min(len(mark) - 1, len(text))
                begun = next((k for k in range(longest, 0, -1) if text.endswith(mark[:k])), 0)
                place = len(text) - begun
            text = text[:place]
        return self.end(text.rstrip() if self._trims else text)

    def end(self, text: str) -> str:
        """Return what of the whole text has not been told yet."""
        news = text[len(self.told) :]
        self.told += news
        return news


# -------- One agent's answer to one request: whole, or as the chunks of a stream


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that is being answered."""

    agents: Agents
    request: ChatRequest
    prompt: Prompt
    head: Head
    decodes: Decodes | None

    async def prompted(self, ids: Callable[[], Sequence[int]] | None = None) -> Chat:
        """Return it with its prompt's tokens: those of `ids`, else of the rendered conversation.

        Refusal (400) if they are too many for the agent's model.
        """
        play, agent = self.agents.play, self.prompt.agent
        renderer = play.engine.renderer(play.team.policy(agent).name)
        try:  # long conversations take a while
            known = tuple(await asyncio.to_thread(ids or partial(renderer.start, self.prompt.messages)))
        except ContextError as error:
            raise too_long(str(error)) from None
        room = renderer.context - len(known)
        if room <= 0:
            raise too_long(
                f"The prompt has {len(known):,} tokens; the agent's model reads {renderer.context:,}."
            )
        sampling = self.prompt.sampling
        seed = secrets.randbits(62) if self.request.seed is None else self.request.seed
        seeds = (seed, *(derive_seed(seed, "choice", k) for k in range(1, self.request.n)))
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return replace(self, prompt=replace(self.prompt, ids=known, sampling=sampling, seeds=seeds))

    async def whole(self, answers: AsyncIterator[News | Done]) -> Json:
        """Return the answer."""
        ended = [each async for each in self.heard(answers) if isinstance(each, Ended)]
        choices = [
            {
                "index": k,
                "message": each.message,
                "logprobs": _rows(each.tokens),
                "finish_reason": each.reason,
            }
            for k, each in enumerate(ended)
        ]
        about = ended[0].about
        return {
            **self.head.row("chat.completion"),
            "choices": choices,
            "usage": _usage(ended),
            "system_fingerprint": about["weights_hash"],
            "kapelle": {**about, **self.head.extra},
        }

    async def chunks(self, answers: AsyncIterator[News | Done]) -> AsyncIterator[Json | str]:
        """Yield the answer in pieces."""
        ended: list[Ended] = []
        for k in range(self.request.n):
            yield self.head.opening(k)
        async with aclosing(self.heard(answers)) as coming:
            async for each in coming:
                k, rows = each.choice, _rows(each.tokens)
                if isinstance(each, Heard):
                    if each.words or rows is not None:
                        yield self.head.chunk(k, {"content": each.words}, rows)
                    continue
                # The rest of a choice: its words, and then each call in a piece of its own, as OpenAI sends them: some clients
                # read only the first one of a piece.
                ended.append(each)
                calls: list[dict[str, Json]] = [
                    {"tool_calls": [{"index": n, **call}]}
                    for n, call in enumerate(each.message.get("tool_calls", ()))
                ]
                none = None if rows is None else _rows([])
                for delta in [*([{"content": each.words}] if each.words or not calls else []), *calls]:
                    yield self.head.chunk(k, delta, rows)
                    rows = none
                yield self.head.chunk(k, {}, none, each.reason, each.about)
        if self.request.wants_usage:
            yield {**self.head.row("chat.completion.chunk"), "choices": [], "usage": _usage(ended)}
        yield "[DONE]"

    async def heard(self, answers: AsyncIterator[News | Done]) -> AsyncGenerator[Heard | Ended, None]:
        """Yield the words of the answer as they come, and each choice when it is complete."""
        tools = self.request.calls_tools
        marks = ("<tool_call>",) if tools else ()
        stops = self.prompt.sampling.stop
        words = {
            k: TextStream(self.decodes.spoken, stops, marks, trims=tools)
            for k in range(self.request.n)
            if self.decodes is not None
        }
        told = [0] * self.request.n
        async with aclosing(answers) as coming:  # type: ignore[type-var]
            async for each in coming:
                k = each.choice
                if isinstance(each, News):
                    told[k] += len(each.ids)
                    text = words[k].hear(each.ids) if k in words else ""
                    yield Heard(k, text, self._tokens(each.ids, each.logprobs))
                    continue
                completion = each.completion
                message, reason = message_of(completion, tools=tools)
                text = message["content"] or ""
                left = words[k].end(text) if k in words else text
                # `top_logprobs` are asked for only where nothing was told before.
                others = await self.agents.alternatives(
                    self.prompt, completion.ids, self.request.top_logprobs
                )
                rows = self._tokens(completion.ids[told[k] :], completion.logprobs[told[k] :], others)
                usage = each.prompt_tokens, len(completion.ids)
                about = {"version": completion.version, "weights_hash": completion.weights_hash}
                yield Ended(k, left, rows, message, reason, usage, about)

    def _tokens(
        self, ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Likeliest] = ()
    ) -> list[Json] | None:
        """Return sampled tokens with their log-probs; None unless they are asked for."""
        if self.decodes is None or not self.request.logprobs:
            return None
        return token_rows(ids, logprobs, self.decodes.decode, alternatives)


def _rows(tokens: list[Json] | None) -> Json:
    return None if tokens is None else {"content": tokens}


def _usage(ended: Sequence[Ended]) -> Json:
    """Return how many tokens were read, once for all choices, and written."""
    return usage_row(ended[0].usage[0], sum(each.usage[1] for each in ended))


def read_chat(agents: Agents, model: str, agent: str, request: ChatRequest) -> Chat:
    """Return a chat that lacks only its prompt's tokens; Refusal (400) for what cannot be asked of the agent."""
    renderer = agents.play.engine.renderer(agents.play.team.policy(agent).name)
    decodes = renderer if isinstance(renderer, Decodes) else None
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
    if request.top_logprobs and not (
        agents.thread.begun.is_set() and isinstance(agents.play.engine, KnowsAlternatives)
    ):
        raise wrong("What the agents might have said instead is not known here.", "top_logprobs")
    tools = request.tools if request.calls_tools else ()
    known = agents.play.team[agent]
    messages = tuple(read_messages(request.messages, tools, known.system))
    prompt = Prompt(agent, messages, (), request.sampling(known.sampling), ())
    return Chat(agents, request, prompt, Head(model), decodes)
