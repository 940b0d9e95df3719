"""Adapter for environment classes written for siiRL. The questions come from another environment of kapelle.

The class responds to each turn of the whole team:

    class MyEnv:
        def reset(self):                                 # optional, sync or async; returns None, a string, or a string per agent
            return first_obs
        async def step(self, actions, ground_truth):     # `actions`: the agents' texts in order
            return next_obs, reward, should_stop         # a string per agent, a number, a boolean

The environment set in `questions` supplies the tasks and the gold answers, and grades the last answer. The class is the user's own
code and runs in the process of the environment, outside the sandbox.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import EpisodeState, Outcome, Resets, Retriable, reset_state
from kapelle.environments.questions import HandsOnQuestions, InnerQuestions
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_class
from kapelle.types import Json, Task

NO_GROUND_TRUTH = -1
"""The value of `ground_truth` that the class receives if `rewards_with_env` is false."""


class SiirlEnv(HandsOnQuestions):
    """Questions whose observations and rewards in each turn come from an environment class in the format of siiRL."""

    name: Literal["siirl_env"] = "siirl_env"
    env_path: str
    """The environment class, written as `path/file.py:Class` or `module:Class`."""
    questions: InnerQuestions
    """Settings of the environment that provides the questions and answers, such as `{name: math, …}`."""
    rewards_with_env: bool = True
    """Whether the class gives the reward of each turn. If false, the environment in `questions` grades the last answer, and the class
    does not receive the gold answer."""
    reward_range: tuple[float, float] = Field(default=(0.0, 1.0))
    """The minimum and maximum total reward of an agent in an episode."""

    def check(self, agents: Sequence[str]) -> None:
        """Construct one object of the class as a test. Raises ConfigError if the class or its method `step` or `reset` is invalid."""
        super().check(agents)
        step, reset = getattr(self._class, "step", None), getattr(self._class, "reset", None)
        if not callable(step):
            raise ConfigError(
                f"environment.env_path: {self.env_path} has no method `step(self, actions, ground_truth)`. Add it to the class."
            )
        try:
            inspect.signature(step).bind(None, actions=[], ground_truth=None)
            if reset is not None:
                inspect.signature(reset).bind(None, **dict.fromkeys(_named(reset)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"environment.env_path: a method of {self.env_path} has the wrong arguments: {error}. Write `async def step(self, actions, "
                f"ground_truth)` and `def reset(self)`, which may also name {', '.join(f'`{each}`' for each in RESET_WITH)}."
            ) from None
        try:
            self._class()
        except Exception as error:
            raise ConfigError(
                f"environment.env_path: {self.env_path} cannot be constructed: {reason(error)}. It is called without arguments, as in siiRL."
            ) from error

    @property
    def _class(self) -> type[Any]:
        return find_class("siiRL environment", self.env_path, {})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SiirlState:
        """Construct a new object of the class for one question and return the state of the episode."""
        gold = task.data.get("answer", dict(task.data)) if self.rewards_with_env else NO_GROUND_TRUTH
        return SiirlState(self._class(), gold, self.questions.start(task, agents, seed), agents, self, seed)


RESET_WITH = ("question", "ground_truth", "seed")
"""Names of the parameters of `reset` that receive a value. siiRL itself passes no arguments to `reset`."""


def _named(reset: Any) -> list[str]:
    return [name for name in inspect.signature(reset).parameters if name in RESET_WITH]


class SiirlState(Resets, Retriable):
    """The state of one question. The environment object receives the agents' texts and returns the agents' observations.

    The object's `reset` returns text that is shown after the question: one string for all agents, a list with one string per agent,
    or None if there is no text. As in siiRL, the reward of a turn goes to the last agent that acts. `success` is the grade of the
    last answer.
    """

    def __init__(
        self,
        made: Any,
        gold: Json,
        question: EpisodeState,
        agents: Sequence[str],
        settings: SiirlEnv,
        seed: int,
    ) -> None:
        self._made, self._gold, self._path = made, gold, settings.env_path
        self._seed = seed
        self._question = question
        self._agents = tuple(agents)
        self._gives_rewards = settings.rewards_with_env
        self._observations: dict[str, str] = {}
        self._most = 1
        self._turns = 0
        self._over = False

    async def reset(self) -> None:
        """Reset the question and the environment object. Raises EpisodeError if the object's `reset` returns an invalid result."""
        await reset_state(self._question)
        reset = getattr(self._made, "reset", None)
        if reset is None:
            return
        question = self._question.observe(self._agents[0])
        arguments = {"question": question, "ground_truth": self._gold, "seed": self._seed}
        shown = reset(**{name: arguments[name] for name in _named(reset)})
        if inspect.isawaitable(shown):
            shown = await shown
        if isinstance(shown, tuple) and len(shown) == 2 and isinstance(shown[1], Mapping):
            shown = shown[0]  # Gymnasium's format: an observation and an info dictionary
        if shown is None:
            return
        texts = [shown] * len(self._agents) if isinstance(shown, str) else shown
        if not _are_texts(texts, len(self._agents)):
            raise EpisodeError(
                f"`reset` of {self._path} returned {shown!r:.80}. Return None, a string, or a list of {len(self._agents)} strings, "
                "one per agent."
            )
        for agent, text in zip(self._agents, texts, strict=True):
            if text:
                self._observations[agent] = f"{self._question.observe(agent)}\n\n{text}"

    def allow_answers(self, most: int) -> None:
        """Set the maximum number of turns of the team to `most`."""
        self._most = most

    def observe(self, agent: str) -> str:
        """Return the last text that the environment object returned for the agent.

        Before the first step, the observation is the question, followed by the text that the object's `reset` returned.
        """
        return self._observations[agent] if agent in self._observations else self._question.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """Return all agents, or an empty tuple after the end of the episode."""
        return () if self._over else self._agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Pass the agents' texts to the environment object and return the rewards of the turn.

        Raises EpisodeError if the result of the object is invalid or the episode is over.
        """
        if self._over or not actions:
            raise EpisodeError("No agent acted, or the episode is over.")
        last, texts = list(actions)[-1], list(actions.values())
        result = self._made.step(actions=texts.copy(), ground_truth=self._gold)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, tuple) or len(result) != 3:
            raise EpisodeError(
                f"`step` of {self._path} returned {result!r:.80}. Return `next_obs, reward, should_stop`."
            )
        shown, reward, stop = result
        if not _are_texts(shown, len(texts)):
            raise EpisodeError(
                f"`step` of {self._path} returned the observations {shown!r:.80}. Return a list of {len(texts)} strings."
            )
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise EpisodeError(
                f"`step` of {self._path} returned the reward {reward!r}, which is not a finite number."
            )
        self._observations |= dict(zip(actions, shown, strict=True))
        self._turns += 1
        self._over = bool(stop) or self._turns >= self._most
        if self._over:
            answer = actions[last] if final is None else final
            await self._question.step({last: answer}, answer)
        return {last: float(reward)} if self._gives_rewards else {}

    def outcome(self) -> Outcome:
        """Return the outcome of the episode.

        If the class gives the rewards, the outcome contains no rewards, because they were given in the turns.
        """
        graded = self._question.outcome()
        info: dict[str, Json] = {**graded.info, "turns_answered": self._turns}
        rewards = {} if self._gives_rewards else graded.rewards
        return Outcome(rewards, graded.success, info, graded.truncated)

    async def close(self) -> None:
        """Close the question's episode."""
        await self._question.close()


def _are_texts(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(isinstance(v, str) for v in value)
