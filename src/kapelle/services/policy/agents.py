"""What answers a call of one agent: its policy, sampled by the rollout engine beside all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
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
from kapelle.services.policy.chat_form import ChatRequest
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.types import Message, Sampling, Task


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
