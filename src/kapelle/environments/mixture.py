"""A mixture of several environments (of questions or of games) in one run. Each task belongs to one environment, sampled by weight.

`Task.part` names the environment of a task, so that credit assignment compares only episodes of the same game (arXiv:2506.24119,
arXiv:2510.15414). The `info` of an outcome also names the environment, so that success and returns are reported for each
environment.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from kapelle.environment import (
    Answerable,
    Environment,
    EpisodeState,
    HasPlayers,
    KnowsMoves,
    Mixed,
    Outcome,
    Progressive,
    Reporting,
    Resets,
    Retriable,
    Scorable,
    Scripted,
    has_comparable_answers,
    offers,
    report_of,
    reset_state,
)
from kapelle.errors import ConfigError, EpisodeError
from kapelle.settings.base import EnvironmentSettings, Plugged, Settings, named_settings
from kapelle.types import Json, Message, Split, Task


class Part(Settings):
    """An environment in a mixture, with the weight of its tasks."""

    environment: Annotated[
        EnvironmentSettings,
        Plugged(),
        BeforeValidator(partial(named_settings, missing="a part has no `environment.name`")),
    ]
    """Settings of the environment, such as `{name: math, …}`."""
    weight: float = Field(default=1.0, gt=0.0)
    """The weight of the environment. The fraction of tasks from this environment is its weight divided by the sum of all weights."""


def _some(parts: Mapping[str, Part]) -> Mapping[str, Part]:
    if not parts:
        raise ValueError("`parts` is empty. Name at least one environment")
    return parts


class Mixture(
    Settings,
    Answerable,
    Mixed,
    HasPlayers,
    Progressive,
    Reporting,
    Scripted,
):
    """A mixture of environments. The tasks and observations of each environment are unchanged.

    For each training index, an environment is sampled first, and then a task of this environment. If all environments have finite
    test splits, the test split contains every test task once. The environments must be either all questions or all games with
    moves, and the team must fit each of them.
    """

    name: Literal["mixture"] = "mixture"
    parts: Annotated[Mapping[str, Part], AfterValidator(_some)]
    """Mapping from the name of a part, which is used in metrics, to its environment and weight."""
    seed: int = 0
    """The seed of the sampling. Different seeds sample the environments in a different order."""

    @property
    def members(self) -> Mapping[str, Environment]:
        """Mapping from the name of each part to its environment."""
        return {name: part.environment for name, part in self.parts.items()}

    @property
    def constant_sum(self) -> bool:
        """Whether the gains of each agent equal the losses of the other agents in every environment."""
        return all(report_of(part).constant_sum for part in self.members.values())

    def check_player(self, player: str) -> None:
        """Raise ConfigError if an environment of the mixture lacks this player."""
        for name, part in self.members.items():
            if not offers(part, HasPlayers):
                raise ConfigError(f"Part '{name}' of the mixture has no player '{player}'.")
            part.check_player(player)

    @property
    def reward_range(self) -> tuple[float, float]:
        """The smallest range that includes the reward ranges of all environments."""
        ranges = [part.reward_range for part in self.members.values()]
        return (min(low for low, _ in ranges), max(high for _, high in ranges))

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the tasks of every environment in each split."""
        return {
            split: "; ".join(f"{name}: {part.sources[split]}" for name, part in self.members.items())
            for split in ("train", "test")
        }

    @property
    def alive(self) -> Sequence[str]:
        """The external programs and servers of all environments, whose results may vary."""
        return [
            f"{what} (part '{name}')" for name, part in self.members.items() for what in report_of(part).alive
        ]

    def skipped(self) -> Mapping[Split, str]:
        """Return a report on the excluded rows of all environments."""
        found: dict[Split, list[str]] = {}
        for name, part in self.members.items():
            for split, text in report_of(part).skipped().items():
                found.setdefault(split, []).append(f"{name}: {text}")
        return {split: "; ".join(texts) for split, texts in found.items()}

    def doubts(self) -> Sequence[str]:
        """Return the warnings about the data of all environments."""
        return [
            f"{name}: {doubt}" for name, part in self.members.items() for doubt in report_of(part).doubts()
        ]

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of descriptors that an episode of any environment holds open."""
        return max(report_of(part).descriptors(agents) for part in self.members.values())

    def check(self, agents: Sequence[str]) -> None:
        """Check every environment. Raises ConfigError if an environment does not fit the agents, or if questions are mixed with games."""
        kinds = {has_comparable_answers(part): name for name, part in list(self.members.items())[::-1]}
        if len(kinds) > 1:
            question, game = kinds[True], kinds[False]
            raise ConfigError(
                f"Part '{question}' of the mixture (`{self.members[question].name}`) consists of questions, but part '{game}' "
                f"(`{self.members[game].name}`) is a game. No workflow supports both. Use two runs."
            )
        for name, part in self.members.items():
            try:
                part.check(agents)
            except ConfigError as error:
                raise ConfigError(f"Part '{name}' of the mixture is invalid: {error}") from error

    def size(self, split: Split) -> int | None:
        """Return the number of test tasks if it is finite in every environment. The number of training tasks is unlimited (None)."""
        sizes = [part.size(split) for part in self.members.values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if split == "test" and len(known) == len(sizes) else None

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index.

        The task comes from an environment that is sampled by weight. If all test splits are finite, test tasks are returned in
        order instead.
        """
        return self._task(split, index, None)

    def task_after(self, played: int, index: int) -> Task:
        """Return a training task, given the number of tasks that the run has already used (`played`).

        For an environment whose tasks change during a run, `played` is multiplied by the environment's fraction of the tasks.
        """
        return self._task("train", index, played)

    def _task(self, split: Split, index: int, before: int | None) -> Task:
        if self.size(split) is None:
            draw = random.Random(f"mixture/{self.seed}/{split}/{index}")
            [name] = draw.choices(list(self.parts), [part.weight for part in self.parts.values()])
            size = self.members[name].size(split)
            place = index if size is None else draw.randrange(size)
        else:
            place = index
            for each, part in self.members.items():
                size = part.size(split) or 0
                if place < size:
                    name = each
                    break
                place -= size
            else:
                raise IndexError(index)
        chosen = self.members[name]
        if before is not None and offers(chosen, Progressive):
            share = self.parts[name].weight / sum(part.weight for part in self.parts.values())
            task = chosen.task_after(int(before * share), place)
        else:
            task = chosen.task(split, place)
        data = {"part": name, "id": task.id, "data": task.data}
        part_of = f"{name}/{task.part}" if task.part else name
        return replace(task, id=f"{name}/{task.id}", data=data, part=part_of, cast={})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> MixtureState:
        """Start an episode in the environment of the task and return its state."""
        name = str(task.data["part"])
        return MixtureState(task.part, self.members[name].start(_inner(task), agents, seed))

    def extract(self, text: str) -> str | None:
        """Return the normalised answers of a text in all environments as one string, so that equal answers give equal strings."""
        read = [cast("Answerable", part).extract(text) for part in self.members.values()]
        if all(answer is None for answer in read):
            return None
        return " | ".join("" if answer is None else answer for answer in read)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a demonstration from the environment of the task. Raises EpisodeError if this environment has no script."""
        part = self.members[str(task.data["part"])]
        if not offers(part, Scripted):
            raise EpisodeError(
                f"`{part.name}` has no script for demonstrations. Remove it from the mixture, or remove `warmup`."
            )
        return part.script(agent, _inner(task), messages, seed)


def _inner(task: Task) -> Task:
    part = task.part.removeprefix(str(task.data["part"])).removeprefix("/")
    return replace(task, id=str(task.data["id"]), data=task.data["data"], part=part)


class MixtureState(KnowsMoves, Resets, Scorable, Retriable):
    """The state of an episode in one environment of a mixture. The outcome names the environment."""

    def __init__(self, name: str, state: EpisodeState) -> None:
        self._name = name
        self._state = state

    async def reset(self) -> None:
        """Reset the episode of the environment."""
        await reset_state(self._state)

    def allow_answers(self, most: int) -> None:
        """Allow the team to give several answers, if the environment supports this."""
        if isinstance(self._state, Retriable):
            self._state.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return the observation of the environment."""
        return self._state.observe(agent)

    def legal(self, agent: str) -> Sequence[str]:
        """Return the legal moves of the agent, or an empty tuple if the environment does not list moves."""
        return self._state.legal(agent) if isinstance(self._state, KnowsMoves) else ()

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move."""
        return self._state.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the actions in the environment and return the rewards."""
        return await self._state.step(actions, final)

    async def score(self, agent: str, text: str) -> float:
        """Return the score of a text. Raises EpisodeError if the environment cannot score texts before the end of the episode."""
        if not isinstance(self._state, Scorable):
            raise EpisodeError(
                f"Part '{self._name}' of the mixture cannot score a text before the episode ends."
            )
        return await self._state.score(agent, text)

    def outcome(self) -> Outcome:
        """Return the outcome of the environment.

        The `info` of the outcome additionally contains the name of the part (`part`), and the entry `part/<name>`, which
        evaluations use to group results.
        """
        outcome = self._state.outcome()
        info: dict[str, Json] = {**outcome.info, "part": self._name, f"part/{self._name}": True}
        return Outcome(outcome.rewards, outcome.success, info, outcome.truncated, outcome.roles)

    async def close(self) -> None:
        """Close the episode of the environment."""
        await self._state.close()
