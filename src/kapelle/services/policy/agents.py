"""What answers a call of one agent: its prompt as ids, its policy, and the rollout engine beside all other calls."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.errors import ContextError, EngineError
from kapelle.rollout.play import Play
from kapelle.runtime.seeds import derive_seed
from kapelle.services.http.refusals import Refusal, wrong
from kapelle.services.policy.chat_form import ChatRequest
from kapelle.services.policy.completions import Decode
from kapelle.services.policy.conversation import read_messages
from kapelle.services.policy.engine_thread import EngineThread
from kapelle.types import Message, Sampling, Task


@runtime_checkable
class Decodes(Protocol):
    """A renderer that turns single tokens into text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones as they are written."""
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


class Agents:
    """The agents of a team, each asked by itself."""

    def __init__(self, play: Play, thread: EngineThread) -> None:
        self.play = play
        self._thread = thread

    def prompt(self, agent: str, request: ChatRequest) -> Prompt:
        """Return what an agent is asked by a request; Refusal (400) for one that it cannot read."""
        known = self.play.team[agent]
        tools = request.tools if request.tool_choice == "auto" else ()
        messages = tuple(read_messages(request.messages, tools, known.system))
        renderer = self.play.engine.renderer(self.play.team.policy(agent).name)
        try:
            ids = renderer.start(messages)
        except ContextError as error:
            raise too_long(str(error)) from None
        room = renderer.context - len(ids)
        if room <= 0:
            raise too_long(
                f"The prompt has {len(ids):,} tokens; the agent's model reads {renderer.context:,}."
            )
        sampling = request.sampling(known.sampling)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        seeds = (seed, *(derive_seed(seed, "choice", k) for k in range(1, request.n)))
        return Prompt(
            agent, messages, ids, replace(sampling, max_tokens=min(sampling.max_tokens, room)), seeds
        )

    def decode(self, agent: str) -> Decode:
        """Return what turns an agent's tokens into text; Refusal (400) where its engine has none."""
        renderer = self.play.engine.renderer(self.play.team.policy(agent).name)
        if not isinstance(renderer, Decodes):
            raise wrong(
                f"The tokens of '{agent}' are not known here, and so neither are their log-probs.", "logprobs"
            )
        return renderer.decode

    async def complete(self, prompt: Prompt) -> Sequence[Completion]:
        """Return a completion for each seed, sampled beside everything else that is asked."""
        return await self._thread.ask(lambda: self._complete(prompt))

    async def _complete(self, prompt: Prompt) -> Sequence[Completion]:
        policy = self.play.team.policy(prompt.agent).name
        task = Task("served", prompt.messages[-1].content)
        requests = [
            Request(policy, prompt.agent, prompt.messages, prompt.ids, prompt.sampling, seed, task)
            for seed in prompt.seeds
        ]
        try:
            completions = await asyncio.gather(*map(self.play.engine.generate, requests))
        except EngineError as error:
            raise Refusal(
                503, "The engine that samples failed; the service's log says why.", None, "engine"
            ) from error
        if not all(math.isfinite(logprob) for each in completions for logprob in each.logprobs):
            raise Refusal(
                500, f"The weights of '{policy}' are broken: their log-probs are not finite.", None, "weights"
            )
        return completions


def too_long(message: str) -> Refusal:
    """Return the refusal of a prompt that the model cannot read."""
    refusal = wrong(message, "messages")
    refusal.code = "context_length_exceeded"
    return refusal
