"""The routes of the policy server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kapelle.errors import did_you_mean
from kapelle.services.http.application import Answer, Call, Route, Stream
from kapelle.services.http.refusals import Refusal, busy
from kapelle.services.policy.agents import Agents
from kapelle.services.policy.chat_form import ChatRequest, read_request
from kapelle.services.policy.completions import Head, choice_row, usage_row, weights_row
from kapelle.types import Json


@dataclass(frozen=True, slots=True)
class Limits:
    """What a policy server takes on."""

    calls: int = 1024
    """Answers under way at once, each of `n` choices counted; further calls are told to come again (429)."""
    seconds: float = 600.0
    """For which one call may take, its time in the queue included."""


class PolicyService:
    """Answers chat completions by the agents of a team."""

    def __init__(self, name: str, agents: Agents, limits: Limits, started: int) -> None:
        """Serve a team under a name; `started` is the time that clients are told its models are from, in Unix seconds."""
        self.name = name
        self._agents = agents
        self._limits = limits
        self._started = started
        self._under_way = 0

    def routes(self) -> Sequence[Route]:
        """Return what it answers."""
        return (
            Route("GET", "/health", self.health),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/", self.model),
            Route("POST", "/v1/chat/completions", self.chat),
        )

    async def health(self, call: Call) -> Answer:
        """Return that it serves, and how much."""
        return Answer(
            {"status": "ok", "under_way": self._under_way, "room": self._limits.calls - self._under_way}
        )

    async def models(self, call: Call) -> Answer:
        """Return the team and its agents as models."""
        return Answer({"object": "list", "data": [self._row(name) for name in self.names]})

    async def model(self, call: Call) -> Answer:
        """Return one of them."""
        return Answer(self._row(self._known(call.path)))

    async def chat(self, call: Call) -> Answer | Stream:
        """Return what an agent answers."""
        request = read_request(call.body)
        model = self._known(request.model)
        with self._room(request.n):
            try:
                async with asyncio.timeout(self._limits.seconds):
                    return await self._ask(model.rpartition("/")[2], model, request)
            except TimeoutError:
                raise Refusal(504, f"No answer within {self._limits.seconds:g} s.", None, "timeout") from None

    async def _ask(self, agent: str, model: str, request: ChatRequest) -> Answer:
        prompt = await asyncio.to_thread(self._agents.prompt, agent, request)
        completions = await self._agents.complete(prompt)
        decode = self._agents.decode(agent) if request.logprobs else None
        choices = [
            choice_row(k, completion, tools=bool(request.tools), decode=decode)
            for k, completion in enumerate(completions)
        ]
        return Answer(
            {
                **Head(model).row("chat.completion"),
                "choices": choices,
                "usage": usage_row(len(prompt.ids), completions),
                "system_fingerprint": completions[0].weights_hash,
                "kapelle": weights_row(completions[0]),
            }
        )

    @contextmanager
    def _room(self, answers: int) -> Iterator[None]:
        if self._under_way + answers > self._limits.calls:
            raise busy(
                f"{self._under_way} answers are under way, of {self._limits.calls} at most. Try again later."
            )
        self._under_way += answers
        try:
            yield
        finally:
            self._under_way -= answers

    @property
    def names(self) -> list[str]:
        """What clients may name as `model`."""
        return [f"{self.name}/{agent}" for agent in self._agents.play.team.names]

    def _known(self, model: str) -> str:
        if model not in self.names:
            hint = did_you_mean(model[:200], self.names)
            raise Refusal(404, f"There is no such model here.{hint}", "model", "model_not_found")
        return model

    def _row(self, model: str) -> Json:
        return {"id": model, "object": "model", "created": self._started, "owned_by": "kapelle"}
