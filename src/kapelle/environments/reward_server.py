"""Questions whose rewards come from a server. The server is `kapelle serve reward` or any server with the same routes.

    environment:
      name: reward_server
      address: http://127.0.0.1:8001
      questions: {name: arithmetic, digits: 2}

The reward of an agent is the score from 0 to 1 that the server gives to its answer. `success` is the grade from the environment of
the questions, so a run shows where the scores of the server differ from correctness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import (
    EpisodeState,
    ExternalServer,
    Outcome,
    Resets,
    Retriable,
    Scorable,
    UsesServers,
    reset_state,
)
from kapelle.environments.grading.served_scores import ServedScores
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import HandsOnQuestions, InnerQuestions
from kapelle.errors import EpisodeError
from kapelle.runtime.credentials import bearer
from kapelle.runtime.deadlines import patience_here, within
from kapelle.settings.base import FREE, FROM_HERE_ON, Address
from kapelle.types import Task


class RewardServer(HandsOnQuestions, UsesServers):
    """Questions of another environment. The rewards are the scores of a server."""

    name: Literal["reward_server"] = "reward_server"
    questions: InnerQuestions
    """Settings of the environment that provides the questions, such as `{name: math, …}`."""
    address: Annotated[Address, FROM_HERE_ON]
    """The URL of the server, such as `http://127.0.0.1:8001`."""
    token_env: Annotated[str, FREE] = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
    """The name of the environment variable that holds the server's token. The token itself is never stored."""
    attempt_s: Annotated[float, Field(gt=0.0), FREE] = 60.0
    """Maximum time in seconds for one request, from connecting to receiving the last byte."""
    retries: Annotated[int, Field(ge=0), FREE] = 6
    """The maximum number of retries, with increasing pauses, if the server is busy, too slow or unreachable."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum score of the server, which are 0 and 1."""
        return (0.0, 1.0)

    @property
    def alive(self) -> Sequence[str]:
        """The server, and the external programs of the questions' environment, whose results may vary."""
        return (f"`address` ({self.address})", *super().alive)

    def servers(self) -> Sequence[ExternalServer]:
        """Return the reward server, so that it can be tested before the models are loaded."""
        return (ExternalServer("The reward server", self.address, self.address, self.token_env),)

    def check(self, agents: Sequence[str]) -> None:
        """Check the environment of the questions. Raises ConfigError if it is a game or a token would be sent without encryption."""
        bearer(self.token_env, self.address)
        super().check(agents)

    @cached_property
    def _scores(self) -> ServedScores:
        return ServedScores(self.address, self.token_env, self.attempt_s, self.retries)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ScoredState:
        """Return the state of a new episode of one question."""
        scores = self._scores
        return ScoredState(
            self.questions.start(task, agents, seed), lambda text: scores.grade(task.question, text)
        )


class ScoredState(Resets, Scorable, Retriable):
    """The state of an episode of a question. The rewards are the server's scores of the last answers."""

    def __init__(self, question: EpisodeState, grade: Callable[[str], Awaitable[Grade]]) -> None:
        self._question, self._grade = question, grade
        self._scores: dict[str, float] = {}

    async def reset(self) -> None:
        """Reset the episode of the question."""
        await reset_state(self._question)

    def allow_answers(self, most: int) -> None:
        """Allow up to `most` answers, until an answer is correct."""
        assert isinstance(self._question, Retriable), "questions accept another answer"
        self._question.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return the agent's observation of the question."""
        return self._question.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move."""
        return self._question.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Answer the question and request the scores of the texts. Raises EpisodeError if the server gives no score for a text."""
        await self._question.step(actions, final)
        scores = await asyncio.gather(*(self._scored(text) for text in actions.values()))
        self._scores |= zip(actions, scores, strict=True)
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the server's score of a text. The text does not count as an answer."""
        return await self._scored(text)

    async def _scored(self, text: str) -> float:
        grade = await within("Scoring an answer", "grader", patience_here.get().grader, self._grade(text))
        if grade.status == "ungraded":
            raise EpisodeError(f"The answer is ungraded. {grade.explanation}")
        return grade.score

    def outcome(self) -> Outcome:
        """Return the outcome with the scores as rewards.

        The rewards from the environment of the questions are in `info["graded"]`.
        """
        graded = self._question.outcome()
        return replace(
            graded, rewards=dict(self._scores), info={**graded.info, "graded": dict(graded.rewards)}
        )

    async def close(self) -> None:
        """Close the episode of the question."""
        await self._question.close()
