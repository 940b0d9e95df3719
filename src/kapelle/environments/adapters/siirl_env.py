"""An environment class written for siiRL, over questions from an environment of kapelle's.

In siiRL the tasks come from elsewhere. The class answers each turn of a whole team:

    class MyEnv:
        def reset(self):                                 # optional, sync or async; None, a text, or one for each agent
            return first_obs
        async def step(self, actions, ground_truth):     # texts of the agents in order
            return next_obs, reward, should_stop         # a text for each of them, a number, a truth value

`questions` gives the tasks and the gold answers, and grades the last answer. The class is code of the user's own, from a
file of theirs: it runs in this process, outside the sandbox.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import Outcome, Resets, Retriable, World, reset_world
from kapelle.environments.questions import HandsOnQuestions, InnerQuestions
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_class
from kapelle.types import Json, Task

NO_GROUND_TRUTH = -1
"""What siiRL hands to `step` where `rewards_with_env` is false."""


class SiirlEnv(HandsOnQuestions):
    """Questions whose turns are answered, and as a rule paid, by a class in siiRL's form."""

    name: Literal["siirl_env"] = "siirl_env"
    env_path: str
    """The class: `path/file.py:Class` or `module:Class`."""
    questions: InnerQuestions
    """Settings of the environment that asks and knows the answers: `{name: math, …}`."""
    rewards_with_env: bool = True
    """True: the class pays, turn by turn. False: `questions` pays the last answer, which is hidden from the class."""
    reward_range: tuple[float, float] = Field(default=(0.0, 1.0))
    """Least and greatest total that an agent can earn in an episode, over all turns if the class pays."""

    def check(self, agents: Sequence[str]) -> None:
        """Make one object of the class; ConfigError where that fails, `step` has another form, or games are asked."""
        super().check(agents)
        step = getattr(self._class, "step", None)
        if not callable(step):
            raise ConfigError(
                f"environment.env_path: {self.env_path} has no method `step(self, actions, ground_truth)`. Add it to the class."
            )
        try:
            inspect.signature(step).bind(None, actions=[], ground_truth=None)
        except TypeError as error:
            raise ConfigError(
                f"environment.env_path: `step` of {self.env_path} cannot be called with `actions` and `ground_truth`: {error}. "
                "Write `async def step(self, actions, ground_truth)`."
            ) from None
        reset = getattr(self._class, "reset", None)
        if reset is not None:
            try:
                named = _named(reset)
                inspect.signature(reset).bind(None, **dict.fromkeys(named))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"environment.env_path: `reset` of {self.env_path} cannot be called: {error}. Write `def reset(self)`; it may also "
                    f"name {', '.join(f'`{each}`' for each in RESET_WITH)}."
                ) from None
        try:
            self._class()
        except Exception as error:
            raise ConfigError(
                f"environment.env_path: {self.env_path} cannot be made: {reason(error)}. siiRL makes it "
                "without arguments, once for each episode."
            ) from error

    @property
    def _class(self) -> type[Any]:
        return find_class("siiRL environment", self.env_path, {})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SiirlWorld:
        """Open the world of one question, with an object of the class for it alone."""
        gold = task.data.get("answer", dict(task.data)) if self.rewards_with_env else NO_GROUND_TRUTH
        return SiirlWorld(self._class(), gold, self.questions.start(task, agents, seed), agents, self, seed)


RESET_WITH = ("question", "ground_truth", "seed")
"""What `reset` is handed if it names it: siiRL's has no parameters."""


def _named(reset: Any) -> list[str]:
    return [name for name in inspect.signature(reset).parameters if name in RESET_WITH]


class SiirlWorld(Resets, Retriable):
    """One question; what the agents say goes to the object, and what it shows goes to them.

    The object's `reset` comes first. What it returns follows the question: one text for all agents, or a list with a text for each
    in seat order; nothing where it returns None, as in siiRL's own classes.

    The last agent to act is paid, as in siiRL, after every turn. `success` is the questions' own verdict on the last
    answer.
    """

    def __init__(
        self, made: Any, gold: Json, question: World, agents: Sequence[str], settings: SiirlEnv, seed: int
    ) -> None:
        self._made, self._gold, self._path = made, gold, settings.env_path
        self._seed = seed
        self._question = question
        self._agents = tuple(agents)
        self._pays = settings.rewards_with_env
        self._shown: dict[str, str] = {}
        self._most = 1
        self._turns = 0
        self._over = False

    async def reset(self) -> None:
        """Begin the question, then the object; EpisodeError unless it shows nothing, one text, or as many as there are agents."""
        await reset_world(self._question)
        reset = getattr(self._made, "reset", None)
        if reset is None:
            return
        asked = self._question.observe(self._agents[0])
        given = {"question": asked, "ground_truth": self._gold, "seed": self._seed}
        shown = reset(**{name: given[name] for name in _named(reset)})
        if inspect.isawaitable(shown):
            shown = await shown
        if isinstance(shown, tuple) and len(shown) == 2 and isinstance(shown[1], Mapping):
            shown = shown[0]  # Gymnasium's form: an observation and what is to be known of it
        if shown is None:
            return
        texts = [shown] * len(self._agents) if isinstance(shown, str) else shown
        if (
            not isinstance(texts, list | tuple)
            or len(texts) != len(self._agents)
            or not all(isinstance(one, str) for one in texts)
        ):
            raise EpisodeError(
                f"`reset` of {self._path} returned {shown!r:.80}. It returns None, a text, or a list with a text for each of the "
                f"{len(self._agents)} agents."
            )
        for agent, text in zip(self._agents, texts, strict=True):
            if text:
                self._shown[agent] = f"{self._question.observe(agent)}\n\n{text}"

    def allow_answers(self, most: int) -> None:
        """Take so many turns of the team, until the object ends the episode."""
        self._most = most

    def observe(self, agent: str) -> str:
        """Return the question and what `reset` showed, later what the object showed to this agent last."""
        return self._shown[agent] if agent in self._shown else self._question.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """Return every agent until it is over."""
        return () if self._over else self._agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Hand over the texts in the order in which they stand there.

        EpisodeError for one turn too many, and unless the answer is `next_obs, reward, should_stop`.
        """
        if self._over or not actions:
            raise EpisodeError("Nobody acted, or the episode is over.")
        last, texts = list(actions)[-1], list(actions.values())
        said = self._made.step(actions=texts.copy(), ground_truth=self._gold)
        if inspect.isawaitable(said):
            said = await said
        if not isinstance(said, tuple) or len(said) != 3:
            raise EpisodeError(
                f"`step` of {self._path} returned {said!r:.80}, not `next_obs, reward, should_stop`."
            )
        shown, reward, stop = said
        if (
            not isinstance(shown, list | tuple)
            or len(shown) != len(texts)
            or not all(isinstance(one, str) for one in shown)
        ):
            raise EpisodeError(
                f"`step` of {self._path} was handed {len(texts)} texts and showed {shown!r:.80}: a list of as many texts "
                "goes there."
            )
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise EpisodeError(f"`step` of {self._path} paid {reward!r}, which is no finite number.")
        self._shown |= dict(zip(actions, shown, strict=True))
        self._turns += 1
        self._over = bool(stop) or self._turns >= self._most
        if self._over:
            answer = actions[last] if final is None else final
            await self._question.step({last: answer}, answer)
        return {last: float(reward)} if self._pays else {}

    def outcome(self) -> Outcome:
        """Return how it ended; what the object paid stands on the turns."""
        ended = self._question.outcome()
        info: dict[str, Json] = {**ended.info, "turns_answered": self._turns}
        return Outcome({} if self._pays else ended.rewards, ended.success, info, ended.truncated)

    async def close(self) -> None:
        """Close the question's world."""
        await self._question.close()
