"""Debates on a motion before a judge, between the sides PRO and CON or between any number of sides.

Sides are assigned to agents in turn (the first agent argues PRO, the second CON, the third PRO). A rule-based judge scores
evidence, structure and consistency, and explains each score (`grading.text.argument`). Alternatively, a language model is the judge
and compares every pair of sides in both orders.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from kapelle.environment import (
    Outcome,
    QuestionCounts,
    Reporting,
    Scripted,
)
from kapelle.environments.base import BaseState, need_movers
from kapelle.environments.grading.asking import AnyJudge, Asking, EndpointJudge, ModelJudge
from kapelle.environments.grading.judge import Ask, JudgeEndpoint, judge_pair, query_endpoint
from kapelle.environments.grading.text.argument import score_argument
from kapelle.environments.judged import UsesJudges
from kapelle.environments.questions import split_of
from kapelle.errors import ConfigError, DataError, EpisodeError
from kapelle.types import Json, Message, Split, Task

Reward = Literal["score", "win", "zero_sum"]


def _judge(judge: object) -> object:
    """Accept an instance of `JudgeEndpoint`. Raises ValueError for a string other than `rules`."""
    if isinstance(judge, str) and judge != "rules":
        raise ValueError("The judge must be `rules`, `{endpoint: …, model: …}` or `{path: …}`")
    return judge.model_dump() if type(judge) is JudgeEndpoint else judge


class DebateTopics(UsesJudges, Reporting, Scripted):
    """Debates in which every agent gives `rounds` speeches on a motion and a judge then gives a verdict."""

    name: Literal["debate_topics"] = "debate_topics"
    path: str | None = None
    """A text file with one motion per line, or a JSON file with a list of motions. If null, the 40 built-in motions are used."""
    sides: tuple[str, ...] = Field(default=("PRO", "CON"), min_length=2)
    """The names of the sides. Sides are assigned to the agents in team order."""
    rounds: int = Field(default=2, ge=1)
    """The number of speeches that each agent gives."""
    together: bool = False
    """Whether the agents give the speeches of a round simultaneously. If false, agents speak one after another and read all earlier
    speeches."""
    reward: Reward = "win"
    """How the verdict determines the rewards. `win`: 1 for the winning side and 0 for the other sides; tied sides share the 1.
    `zero_sum`: a value in [-1, 1], such that the gains of the winners equal the losses of the other sides. `score`: the score of
    each side in [0, 1]."""
    judge: Annotated[Literal["rules"] | EndpointJudge | ModelJudge, BeforeValidator(_judge)] = "rules"
    """The judge, which is `rules`, a model at an endpoint (`endpoint`, `model`), or a frozen model in this process (`path`). A model
    as judge also has the settings `cache`, `budget` and `concurrency`. In Python, the method `judged_by` accepts any engine."""

    @model_validator(mode="after")
    def _different(self) -> DebateTopics:
        if len(set(self.sides)) < len(self.sides):
            raise ValueError(f"`sides` contains the same side twice: {', '.join(self.sides)}.")
        return self

    @property
    def asked(self) -> Sequence[tuple[AnyJudge, QuestionCounts]]:
        """The model that judges, if any, with the number of queries per episode (two for each pair of sides)."""
        pairs = len(self.sides) * (len(self.sides) - 1) // 2
        return [] if isinstance(self.judge, str) else [(self.judge, QuestionCounts(episode=2 * pairs))]

    @property
    def constant_sum(self) -> bool:
        """Whether the gains of each side equal the losses of the other sides."""
        return self.reward == "zero_sum"

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum reward, which depend on the setting `reward`."""
        return (-1.0, 1.0) if self.reward == "zero_sum" else (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the motions of each split. A hash of a motion determines its split."""
        motions = self.path or "kapelle's built-in motions"
        return {"train": f"{motions}, 4 of 5", "test": f"{motions}, the others"}

    def _motions(self, split: Split) -> tuple[str, ...]:
        return tuple(motion for motion in _read(self.path) if split_of(motion) == split)

    @property
    def alive(self) -> Sequence[str]:
        """The judge if it is a model at an endpoint, because its verdicts may vary."""
        return [f"`judge` ({self.judge.model})"] if isinstance(self.judge, JudgeEndpoint) else []

    def check(self, agents: Sequence[str]) -> None:
        """Check that all sides have the same number of agents and that the motions can be read.

        Raises ConfigError for an unsuitable number of agents and DataError if motions cannot be read or are missing.
        """
        if len(agents) % len(self.sides):
            raise ConfigError(
                f"`debate_topics` has {len(self.sides)} sides ({', '.join(self.sides)}), but the team has {len(agents)} "
                f"agents ({', '.join(agents)}). Make the number of `team.agents` a multiple of {len(self.sides)}."
            )
        for split in ("train", "test"):
            if not self._motions(split):
                raise DataError(f"No motion of {self.path} is in the {split} split. Add motions.")
        if isinstance(self.judge, JudgeEndpoint):
            query_endpoint(self.judge)

    def size(self, split: Split) -> int | None:
        """Return the number of motions in a split."""
        return len(self._motions(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, whose question is a motion."""
        return Task(f"{split}-{index}", self._motions(split)[index])

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DebateState:
        """Start a debate on one motion and return its state."""
        query = self._ask
        if query is None and not isinstance(self.judge, str):
            query = self._judges.of(self.judge)
        return DebateState(self, task, agents, query)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a speech without substance, which demonstrates only the format of a speech."""
        motion = task.question.rstrip(".?!")
        last = messages[-1].content if messages else ""
        side = next((side for side in self.sides if f"You argue {side}." in last), self.sides[0])
        return (
            f"I argue {side} on the motion that {motion[:1].lower()}{motion[1:]}. First, a study of 2019 looked at this "
            "question with care. Second, for example, many cities have tried it in recent years. This matters because "
            "people live with the result every day. In conclusion, the case is clear."
        )


@lru_cache(maxsize=8)
def _read(path: str | None) -> tuple[str, ...]:
    if path is None:
        return tuple((files("kapelle.environments") / "motions.txt").read_text("utf-8").splitlines())
    try:
        text = Path(path).expanduser().read_text("utf-8")
        found = json.loads(text) if path.endswith(".json") else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"The motions in '{path}' cannot be read: {error}. Give a text file or a JSON list."
        ) from error
    if not isinstance(found, list) or not all(isinstance(motion, str) for motion in found):
        raise DataError(f"'{path}' needs one motion per line, or a JSON list of strings.")
    return tuple(dict.fromkeys(motion.strip() for motion in found if motion.strip()))


class DebateState(BaseState):
    """The state of one debate."""

    def __init__(self, settings: DebateTopics, task: Task, agents: Sequence[str], ask: Ask | None) -> None:
        super().__init__(task, agents)
        self._settings = settings
        self._ask = ask
        self._side = {agent: settings.sides[k % len(settings.sides)] for k, agent in enumerate(agents)}
        self._speeches: list[tuple[str, str]] = []
        self._scores: dict[str, float] = {}
        self._why: dict[str, Json] = {}

    def observe(self, agent: str) -> str:
        """Return the motion, the side of the agent and all speeches so far."""
        number = sum(who == agent for who, _ in self._speeches) + 1
        speeches = [f"{who} ({self._side[who]}): {text}" for who, text in self._speeches]
        opening = f"Motion: {self.task.question}\nYou argue {self._side[agent]}."
        return "\n".join(
            [opening, *speeches, f"Speech {min(number, self._settings.rounds)} of {self._settings.rounds}."]
        )

    def movers(self) -> tuple[str, ...]:
        """Return the agents that speak next, or an empty tuple after the last round.

        If `together` is true, all agents speak next; otherwise, the agents speak one at a time.
        """
        count = len(self._speeches)
        if count >= self._settings.rounds * len(self.agents):
            return ()
        return self.agents if self._settings.together else (self.agents[count % len(self.agents)],)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Add the speeches of the agents. After the last speech, query the judge.

        Raises EpisodeError if the agents that act are not exactly the agents whose turn it is.
        """
        movers = self.movers()
        need_movers(actions, movers)
        self._speeches.extend((agent, actions[agent]) for agent in movers)
        if not self.movers():
            await self._judge()
        return {}

    def _texts(self, side: str) -> list[str]:
        return [text for who, text in self._speeches if self._side[who] == side]

    async def _judge(self) -> None:
        sides = self._settings.sides
        if self._ask is None:
            for side in sides:
                others = [other for other in sides if other != side]
                rivals = [text for other in others for text in self._texts(other)]
                verdict = score_argument(self._texts(side), self.task.question, side, rivals, others)
                self._scores[side] = verdict.total
                self._why[side] = dict(verdict.explanations)
            return
        points: dict[str, list[float]] = {side: [] for side in sides}
        for one, other in itertools.combinations(sides, 2):
            texts = ["\n\n".join(self._texts(side)) for side in (one, other)]
            grade = await judge_pair(self._ask, f"Who argues better on: {self.task.question}", *texts)
            if grade.status == "ungraded":
                if isinstance(self._ask, Asking):
                    self._ask.ungraded += 1
                raise EpisodeError(f"The judge gave no verdict on {one} against {other}: {grade.explanation}")
            points[one].append(grade.score)
            # The other side receives the complement of the score, or 0 if both sides are empty.
            points[other].append(
                0.0 if grade.status == "no_answer" and not texts[1].strip() else 1.0 - grade.score
            )
            self._why[f"{one} against {other}"] = grade.explanation
        self._scores = {side: fmean(own) for side, own in points.items()}

    def outcome(self) -> Outcome:
        """Return the outcome with the reward of each agent. An unfinished debate is truncated and has no rewards."""
        info: dict[str, Json] = {"sides": dict(self._side)}
        if not self._scores:
            return Outcome({}, None, info, truncated=True)
        best = max(self._scores.values())
        winners = [side for side, score in self._scores.items() if score == best > 0.0]
        info |= {"scores": dict(self._scores), "winners": winners, "explanations": dict(self._why)}
        n, k, reward = len(self._scores), len(winners), self._settings.reward
        rewards = dict(self._scores)
        # If all scores are 0, there is no winner, and all rewards are 0. With `zero_sum`, the rewards of the sides sum to 0, and a
        # single winner receives 1.
        if reward != "score":
            won, lost = (1.0 / k if k else 0.0, 0.0)
            if reward == "zero_sum" and winners:
                won, lost = (n - k) / (k * (n - 1)), -1.0 / (n - 1)
            rewards = {side: won if side in winners else lost for side in self._scores}
        return Outcome({agent: rewards[side] for agent, side in self._side.items()}, None, info)
