"""Questions whose answers a reward server pays: `kapelle serve reward`, or whatever speaks like it.

    environment:
      name: reward_server
      address: http://127.0.0.1:8001
      questions: {name: arithmetic, digits: 2}

Agents earn the score of their own answers, from 0 to 1. Whether the team succeeded is what the questions' own
environment finds, as everywhere: so a run shows where scores and truth part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import (
    AskedServer,
    AsksServers,
    Outcome,
    Resets,
    Retriable,
    Scorable,
    World,
    reset_world,
)
from kapelle.environments.grading.served_scores import ServedScores
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import HandsOnQuestions, InnerQuestions
from kapelle.errors import EpisodeError
from kapelle.runtime.credentials import bearer
from kapelle.runtime.deadlines import patience_here, within
from kapelle.settings.base import FREE, FROM_HERE_ON, Address
from kapelle.types import Task


class RewardServer(HandsOnQuestions, AsksServers):
    """Questions of another environment; a server's scores of the answers are the reward."""

    name: Literal["reward_server"] = "reward_server"
    questions: InnerQuestions
    """Settings of the environment that asks: `{name: math, …}`."""
    address: Annotated[Address, FROM_HERE_ON]
    """Such as `http://127.0.0.1:8001`."""
    token_env: Annotated[str, FREE] = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable that holds the server's token; the token itself is never stored."""
    attempt_s: Annotated[float, Field(gt=0.0), FREE] = 60.0
    """Seconds for one attempt, from connecting to the last byte."""
    retries: Annotated[int, Field(ge=0), FREE] = 6
    """Further attempts, with increasing pauses, if the server is busy, late or unreachable."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """Of a score."""
        return (0.0, 1.0)

    @property
    def alive(self) -> Sequence[str]:
        """The server, and what the questions' own environment names."""
        return (f"`address` ({self.address})", *super().alive)

    def servers(self) -> Sequence[AskedServer]:
        """The server."""
        return (AskedServer("The reward server", self.address, self.address, self.token_env),)

    def check(self, agents: Sequence[str]) -> None:
        """Check the questions; ConfigError for games, and for a token that others on the network could read."""
        bearer(self.token_env, self.address)
        super().check(agents)

    @cached_property
    def _scores(self) -> ServedScores:
        return ServedScores(self.address, self.token_env, self.attempt_s, self.retries)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ScoredWorld:
        """Open the world of one question."""
        scores = self._scores
        return ScoredWorld(
            self.questions.start(task, agents, seed), lambda text: scores.grade(task.question, text)
        )


class ScoredWorld(Resets, Scorable, Retriable):
    """Another world, in which agents earn the scores of their last answers."""

    def __init__(self, world: World, grade: Callable[[str], Awaitable[Grade]]) -> None:
        self._world, self._grade = world, grade
        self._earned: dict[str, float] = {}

    async def reset(self) -> None:
        """Begin the world inside."""
        await reset_world(self._world)

    def allow_answers(self, most: int) -> None:
        """Take so many answers, one after another, until one is right."""
        assert isinstance(self._world, Retriable), "worlds of questions accept another answer"
        self._world.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return what the agent sees of the world."""
        return self._world.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """Return who may move there."""
        return self._world.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Move, then have the texts scored; EpisodeError where one is ungraded."""
        await self._world.step(actions, final)
        scores = await asyncio.gather(*(self._scored(text) for text in actions.values()))
        self._earned |= zip(actions, scores, strict=True)
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the server's score of a text; the question stays open."""
        return await self._scored(text)

    async def _scored(self, text: str) -> float:
        grade = await within("Scoring an answer", "grader", patience_here.get().grader, self._grade(text))
        if grade.status == "ungraded":
            raise EpisodeError(f"The answer is ungraded. {grade.explanation}")
        return grade.score

    def outcome(self) -> Outcome:
        """Return how the world ended, with the scores in place of what it would have paid."""
        ended = self._world.outcome()
        return replace(ended, rewards=dict(self._earned), info={**ended.info, "graded": dict(ended.rewards)})

    async def close(self) -> None:
        """Close the world."""
        await self._world.close()
