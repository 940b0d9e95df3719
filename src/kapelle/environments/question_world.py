"""The world of one question with one answer: every agent reads it, and those that answer are graded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from kapelle.environment import Outcome
from kapelle.errors import EpisodeError, did_you_mean
from kapelle.grading.verdict import Grade
from kapelle.runtime.deadlines import call, patience_here, within
from kapelle.types import Json, Task

RIGHT, WRONG = "This answer is right.", "This answer is wrong."
"""All that an agent reads about an answer: a grader's explanation may name the gold answer."""


def need_seats(actions: Collection[str], seats: Collection[str], did: str = "acted") -> None:
    """Raise EpisodeError when nobody acted, or somebody who does not play."""
    if not actions:
        raise EpisodeError(f"Nobody {did}. Hand the world the text of one agent at least.")
    for name in actions:
        if name not in seats:
            raise EpisodeError(f"'{name}' {did} and has no seat.{did_you_mean(name, seats)}")


_GRADING = "Grading an answer"


class QuestionWorld:
    """One attempt at a question. The first step answers it and ends the episode.

    Where more answers are allowed it stays open after a `final` text that is not right: all agents read that it
    was wrong, and what the last answers earn counts.

    Each agent that acts earns the score of its own text. The team's success is the score of `final`,
    or the mean over the agents that acted where no text counts as the team's.
    """

    def __init__(
        self,
        task: Task,
        agents: Sequence[str],
        grade: Callable[[str], Grade | Awaitable[Grade]],
        info: Mapping[str, Json],
    ) -> None:
        self._task = task
        self._agents = tuple(agents)
        self._grade = grade
        """Returns a grade at once where it can; a grader that would block returns an awaitable."""
        self._info = info
        """What the outcome reports about the task itself."""
        self._outcome: Outcome | None = None
        self._most = 1
        self._given = 0
        self._over = False

    def allow_answers(self, most: int) -> None:
        """Take so many answers, one after another, until one is right."""
        self._most = most

    def observe(self, agent: str) -> str:
        """Return the question; after an answer, where more are allowed, whether it was right."""
        if self._most == 1 or self._outcome is None:
            return self._task.question
        return RIGHT if self._outcome.success == 1.0 else WRONG

    def movers(self) -> tuple[str, ...]:
        """Return every agent until the question is answered, then none."""
        return () if self._over else self._agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Grade the answers; EpisodeError for one answer too many, a stranger, or a grader that gave up."""
        if self._over:
            raise EpisodeError(
                "The question has been answered already. A world takes one step, or as many as `allow_answers` allows."
            )
        need_seats(actions, self._agents, "answered")
        grades = {name: await self._graded(text) for name, text in actions.items()}
        rewards = {name: grade.score for name, grade in grades.items()}
        info: dict[str, Json] = {
            **self._info,
            "answers": {name: grade.answer for name, grade in grades.items()},
            "explanations": {name: grade.explanation for name, grade in grades.items()},
        }
        success = sum(rewards.values()) / len(rewards)
        if final is not None:
            verdict = await self._graded(final)
            success, info["final"] = verdict.score, verdict.answer
        self._given += 1
        if self._most > 1:
            info["answers_given"] = self._given
        self._over = final is None or success == 1.0 or self._given >= self._most
        self._outcome = Outcome(rewards, success, info)
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return what a text would earn now; the question stays open."""
        return (await self._graded(text)).score

    async def _graded(self, text: str) -> Grade:
        seconds = patience_here.get().grader
        answer = call(_GRADING, "grader", seconds, self._grade, text)
        grade = answer if isinstance(answer, Grade) else await within(_GRADING, "grader", seconds, answer)
        if grade.status == "ungraded":
            raise EpisodeError(f"The grader gave up: {grade.explanation}")
        return grade

    def outcome(self) -> Outcome:
        """Return the scores; an episode that ended without an answer is truncated and earns nothing."""
        return self._outcome or Outcome({}, 0.0, self._info, truncated=True)

    async def close(self) -> None:
        """Hold nothing."""
