"""The interface of environments: an environment provides tasks and creates an `EpisodeState` for each episode.

An environment is an immutable value: the same settings give the same task for the same split and index in every process.
All episodes of a group therefore have the same task. An `EpisodeState` holds the state of one episode: the observation of
each agent, which agents may move, and the reward of each move. The observation of one agent never contains information
that is private to another agent.

All optional methods of an environment belong to *capabilities*. A capability is a class of this module from which the environment
inherits (`class Sums(Settings, Scripted)`). Only inheritance declares a capability; a setting named `script` or `members` has no such
effect. The function `offers(environment, Capability)` returns whether an environment has a capability.
"""

from __future__ import annotations

import asyncio
import math
import operator
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import TypeIs

from kapelle.errors import ConfigError
from kapelle.runtime.deadlines import DeadlineExceeded, Patience
from kapelle.runtime.foreign_code import Unfit, call_user_code, environment_error
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.types import Episode, Image, Json, Message, Split, Task

C = TypeVar("C")

REWARD_PREFIX = "reward/"
"""Prefix of the keys in an episode's `info` that contain the result of each reward function or judge. The value is None if the reward
function does not apply to the episode."""
FAILED = "failed"
"""Value of such an entry in `info` if the episode failed because the reward function raised an error or the judge returned no verdict."""
EXPLANATIONS = "explanations"
"""Key of an episode's `info` for what the environment reports on the agents' last messages, such as failed tests: a string, or a mapping
from agents to strings. Agents do not read it; the algorithm `self_distill` can learn from it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an episode."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mapping from each agent that receives a terminal reward to this reward."""
    success: float | None = None
    """Score of the team in [0, 1], or None if the environment defines no such score."""
    info: Mapping[str, Json] = field(default_factory=dict)
    truncated: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    """Mapping from agents to their roles in the episode; see `Episode.roles`."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of individual turns, keyed by `Turn.index`. These rewards are added to `Turn.reward`."""


class EpisodeState(Protocol):
    """The state of one episode. Each state is used for a single episode and then closed."""

    def observe(self, agent: str) -> str:
        """Return this agent's current observation, including its private information."""
        ...

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move now.

        The result contains several agents if they move simultaneously, and is empty at the end of the episode.
        """
        ...

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the messages of the agents that moved, and return their immediate rewards (often an empty mapping).

        The argument `final` is the message that the workflow selected as the team's answer, such as the result of a vote or the last
        message of a chain. If `final` is None, the environment decides which message is the answer.
        """
        ...

    def outcome(self) -> Outcome:
        """Return the result of the episode. This method is called once, after the last step."""
        ...

    async def close(self) -> None:
        """Free all resources of the episode. This method is called exactly once, even after a failure."""
        ...


class Environment(Protocol):
    """A source of tasks and episodes. An environment consists of frozen settings and methods."""

    @property
    def name(self) -> str:
        """The name by which the class of the environment is found. The name is a field of the settings."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """The smallest and the largest return that one agent can receive in an episode."""
        ...

    @property
    def sources(self) -> Mapping[Split, str]:
        """A description of the source of the tasks of each split. The tasks of the two splits must not overlap."""
        ...

    def check(self, agents: Sequence[str]) -> None:
        """Check the data and the team before any expensive computation.

        Raises DataError if data is missing or corrupt, and ConfigError if the environment does not support these agents (names in
        team order). The check must be fast: the method may read the data, but must not load a model.
        """
        ...

    def size(self, split: Split) -> int | None:
        """Return the number of tasks of a split, or None if the number is unlimited."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index of a split. The task must be the same in every process."""
        ...

    def start(self, task: Task, agents: Sequence[str], seed: int) -> EpisodeState:
        """Return the state of a new episode for these agents, which are given in team order."""
        ...


def environment_class(name: str) -> type:
    """Return the class of an environment, given its name, `module:Class`, `path/file.py:Class` or the name of an entry point."""
    return find_class("environment", name, catalogue("kapelle.environments"))


# -------- Capabilities of episode states


class Scorable:
    """A capability of episode states: a text can be scored as an answer before the end of the episode."""

    async def score(self, agent: str, text: str) -> float:
        """Return the score in [0, 1] of a text as this agent's answer, without changing the episode."""
        raise NotImplementedError


class Retriable:
    """A capability of episode states: the episode can continue after an incorrect answer and accept another answer."""

    def allow_answers(self, most: int) -> None:
        """Accept up to `most` messages as final answers until an answer is correct.

        This method is called before the first step.

        After an incorrect answer, `observe` reports that the answer was incorrect, but does not reveal the correct answer. Only the
        last answer is scored.
        """
        raise NotImplementedError


class Resets:
    """A capability of episode states: asynchronous work is done once, before the first observation."""

    async def reset(self) -> None:
        """Do the asynchronous work. This method is awaited after `Environment.start` and before the first call of `observe`."""
        raise NotImplementedError


async def reset_state(state: object) -> None:
    """Reset an episode state that another episode state contains, if it has the capability `Resets`."""
    if isinstance(state, Resets):
        await state.reset()


class KnowsMoves:
    """A capability of episode states of an environment with the capability `ListsMoves`."""

    def legal(self, agent: str) -> Sequence[str]:
        """Return every legal move of this agent in the required notation. The result is empty if the agent may not move now."""
        raise NotImplementedError


class StateWithImages:
    """A capability of episode states of an environment with the capability `ShowsImages`."""

    def images(self, agent: str) -> Sequence[Image]:
        """Return the images that belong to this agent's current observation.

        Images that are not yet part of the agent's conversation are placed before the next text that the agent reads.
        """
        raise NotImplementedError


# -------- Capabilities of environments: tasks and answers


class Answerable:
    """An environment in which each task has one answer, so that answers can be compared."""

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text in normalised form, or None if the text contains no final answer."""
        raise NotImplementedError


class Scripted:
    """An environment that can demonstrate how an agent in a role should answer."""

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the message of the scripted expert for this role.

        The argument `seed` determines which of its messages contain deliberate mistakes.
        """
        raise NotImplementedError


class Teachable:
    """An environment with the setting `teacher`, a user's function that writes the messages of the agents in demonstrations."""

    teacher: str | None

    def teacher_hash(self) -> str | None:
        """Return a hash of the code of the `teacher` function, or None if there is no teacher or its code cannot be found."""
        raise NotImplementedError


class Recorded:
    """An environment with recorded answers. Other answers cannot be rewarded."""

    def answers_per_task(self) -> int:
        """Return the maximum number of recorded answers per task. At most this many episodes of a group differ."""
        raise NotImplementedError

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return the recorded text of an agent's turn (from 0) in record number `sample` of the task.

        If the record contains tool calls, the result is a `Message` instead of a string.
        """
        raise NotImplementedError


class Progressive:
    """An environment whose train tasks change during a run, such as a game that starts on a small board."""

    def task_after(self, played: int, index: int) -> Task:
        """Return the train task at an index, given the number of earlier train tasks of the run (`played`)."""
        raise NotImplementedError


class Mixed:
    """An environment that combines the tasks of several environments. The field `Task.part` names the environment of a task."""

    @property
    def members(self) -> Mapping[str, Environment]:
        """Return a mapping from the name of each part to its environment."""
        raise NotImplementedError


# -------- Capabilities of environments: agents and moves


class ShowsImages:
    """An environment whose episodes show images (`StateWithImages`). Every agent needs a vision-language model."""


class ListsMoves:
    """An environment whose episodes list the legal moves (`KnowsMoves`), as `sampling.choices: legal` requires."""


class TeamMoves:
    """An environment with one role, which any agent of the team can take. Each move is a single message.

    The agents of the team can therefore prepare each move together (workflow `chain`). The agent that moves receives the reward.
    """


class HasPlayers:
    """An environment that provides its own players for an agent's role, such as random, search or equilibrium players.

    The method `start` assigns these players to the roles listed in `Task.environment_players`. Agents in these roles never move; they
    receive rewards like all other agents.
    """

    def check_player(self, player: str) -> None:
        """Raise ConfigError if the player is unknown; the message lists the known players."""
        raise NotImplementedError


class Private:
    """An environment that declares which information is private to one agent, so that leaks of private information can be detected."""

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        """Return strings that the episode may show to this agent but to no other agent.

        `kapelle validate` searches for them in the observations of other agents, at the start and after every step. The search
        compares characters: the string `"7"` is also found in "17 points". Return strings that are unique, such as "Your number is
        7". A string is no longer private after the agent has written it in a message.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Decision:
    """One information state of a game."""

    key: str
    """Identifier of the information state in the game."""
    player: int
    """Index of the player to move, from 0."""
    text: str
    """The observation of this player."""
    actions: tuple[int, ...]
    """The numbers of the legal moves. The field `moves` contains the text of each move in the same order."""
    moves: tuple[str, ...]
    before: tuple[tuple[str, int], ...]
    """The player's earlier moves that lead to this information state, as pairs of an information state and an action."""


class Enumerable:
    """A game that is small enough to enumerate, so that the values of policies can be computed exactly (`evaluation.exploitability`)."""

    @property
    def players(self) -> int:
        """The number of players."""
        raise NotImplementedError

    def decisions(self) -> Iterator[Decision]:
        """Yield every information state once. Raises ConfigError if the information states cannot be listed."""
        raise NotImplementedError

    def check_moves(self) -> None:
        """Raise ConfigError unless each move is a single string, whose probability is the probability of its tokens."""
        raise NotImplementedError

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return the expected return of each player and NashConv for a policy.

        The argument `policy` contains the probability of each move in each information state.
        """
        raise NotImplementedError

    def best_response(
        self, policy: Mapping[str, Mapping[int, float]], player: int
    ) -> tuple[float, Mapping[str, int]]:
        """Return the value of the best response of a player (from 0) to the policies of the other players, and its move in each state."""
        raise NotImplementedError

    def visits(self, policy: Mapping[str, Mapping[int, float]]) -> Mapping[str, float]:
        """Return the expected number of visits of each information state per game."""
        raise NotImplementedError


# -------- Capabilities of environments: rewards


class RewardsEpisodes:
    """An environment that computes rewards from complete episodes, or by comparing the episodes of a group."""

    async def reward_episode(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Return the outcome with the rewards of a complete episode.

        The argument `episode` contains all turns, and `outcome` is the result of the `EpisodeState`. This method is called in the
        process that runs the agents. If the method raises an exception, the episode fails.
        """
        raise NotImplementedError

    @property
    def compared(self) -> Sequence[str]:
        """Return the names of the settings that compare episodes.

        The result is empty (the default) if `reward_episode` computes all rewards.
        """
        return ()

    async def reward_group(self, episodes: Sequence[Episode]) -> Sequence[Outcome]:
        """Return the outcomes of the episodes of a group, in order, with the rewards from the comparison added to the earlier rewards.

        This method is called once for each group, with the episodes that did not fail. If the method raises an exception, all of
        these episodes fail.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that is not trained and uses greedy decoding."""

    path: str
    """Path of a model, or of a folder with a PEFT adapter."""
    max_tokens: int
    """Maximum number of tokens of a reply."""


class ModelsInPlace(Protocol):
    """The frozen models that are loaded in the process that runs episodes."""

    def ask(self, model: FrozenModel) -> Callable[[Sequence[Message]], Awaitable[str]]:
        """Return a function that queries a model. The function takes a conversation and returns the text of the reply."""
        ...

    def close(self) -> None:
        """Free all frozen models."""
        ...


@dataclass(frozen=True, slots=True)
class QuestionCounts:
    """The maximum number of queries to a model that computes rewards. Cached replies are not counted."""

    episode: int = 0
    """Number of queries about each episode. These queries are sent one after another."""
    group: int = 0
    """Number of queries that compare the episodes of a group, sent one after another. A group with only one episode needs no such
    queries."""
    at_once: int = 0
    """Maximum number of simultaneous queries; 0 means no limit."""

    def of_step(self, tasks: int, group: int) -> int:
        """Return the maximum number of queries about this many tasks with `group` episodes each."""
        return tasks * (self.episode * group + self.group * (group > 1))


class UsesModels:
    """An environment that queries frozen models, such as judges. The process that runs its episodes loads them."""

    @property
    def frozen_models(self) -> Sequence[FrozenModel]:
        """Return the frozen models that the environment queries."""
        raise NotImplementedError

    def with_models(self, models: ModelsInPlace) -> Environment:
        """Return a copy of the environment that queries these loaded models."""
        raise NotImplementedError

    def release_models(self) -> None:
        """Free the models that the environment received, if any."""
        raise NotImplementedError

    def questions(self) -> Mapping[str, QuestionCounts]:
        """Return the number of queries to each model, keyed by its path or name.

        The result is empty (the default) if the number is unknown.
        """
        return {}

    def costs(self) -> Mapping[str, float]:
        """Return the cost metrics of this process since the last call, keyed by their full names."""
        return {}


# -------- Capabilities of environments: reports, data, and other programs


class Reporting:
    """An environment that provides descriptions of its episodes, settings and data. All methods are optional."""

    @property
    def alive(self) -> Sequence[str]:
        """Return the settings of servers and endpoints whose responses may vary.

        The result is empty if episodes can be replayed exactly.
        """
        return ()

    @property
    def constant_sum(self) -> bool:
        """Return whether the agents' rewards have a constant sum, so that a reward shared by all agents would carry no signal."""
        return False

    @property
    def symmetric(self) -> bool | None:
        """Return whether exchanging the messages of two roles also exchanges their rewards, or None if this is unknown."""
        return None

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of pipes and connections that one episode of this many agents keeps open.

        If too few are available, further episodes wait.
        """
        return 0

    def skipped(self) -> Mapping[Split, str]:
        """Return a message for each split with unusable rows: their number, the positions of the first ones, and why they are excluded."""
        return {}

    def remarks(self) -> Sequence[str]:
        """Return messages about effects of the settings that users may not expect. The messages are printed when a run starts."""
        return ()

    def doubts(self) -> Sequence[str]:
        """Return a message for each property of the data that will make episodes fail.

        Only `kapelle validate` calls this method, because the check may take several seconds.
        """
        return ()


class Reads:
    """Settings of an environment, or of a part of an environment, that read files or a data set."""

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each input, keyed by the name of the input, so that a resumed run can report changes."""
        raise NotImplementedError


class InMemory:
    """An environment that may hold data that other processes cannot rebuild from its settings."""

    @property
    def in_memory(self) -> Sequence[str]:
        """Return descriptions of the data that exists only in the memory of this process.

        The result is empty if the settings describe all data.
        """
        raise NotImplementedError

    def keep(self, folder: Path) -> None:
        """Write the data in memory to the folder of a run, in a format that `recall` can read."""
        raise NotImplementedError

    def recall(self, folder: Path) -> None:
        """Read the data that `keep` wrote to the folder of a run, if there is any."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """A server that a run calls."""

    who: str
    """Role of the server in the run, as the beginning of a sentence, such as `The judge`."""
    url: str
    probe: str
    """The URL that is requested to test whether the server responds. Any HTTP status is accepted."""
    key_env: str
    """Name of the environment variable that contains the server's API key."""


class UsesServers:
    """Settings of an environment, or of a part of an environment, that call servers during episodes.

    The servers are tested before models are loaded.
    """

    def servers(self) -> Sequence[ExternalServer]:
        """Return the servers that episodes call."""
        raise NotImplementedError


class StartsProgram:
    """Settings of a part of an environment that start a program or call a server to find out which tools it offers.

    Such a part is removed when a recipe is only inspected and not run.
    """

    @property
    def server(self) -> str:
        """Return the command or the address, for display."""
        raise NotImplementedError


class DrivenByPrograms:
    """An environment whose episodes are run by an external program. The program calls a server in this process."""

    programs: int
    """Maximum number of programs that run at the same time; other episodes wait."""

    @property
    def demonstrates(self) -> bool:
        """Whether the settings specify a script that produces demonstrations (for environments with the capability `Scripted`)."""
        return False

    def check_server(self, processes: int = 1) -> None:
        """Raise ConfigError if the server that the programs call cannot be started safely or cannot be reached.

        Also raises ConfigError if there are several `processes` and they cannot each run their own server.
        """
        raise NotImplementedError

    def serve(self, setup: Any, say: Callable[[str, str], None]) -> AbstractContextManager[None]:
        """Serve the agents of `setup` (`rollout.setup.RolloutSetup`) within the block. The function `say` prints messages."""
        raise NotImplementedError


class Described:
    """An environment whose capabilities are only known at run time, such as an environment on a server."""

    def connect(self) -> None:
        """Query the server, if there is one. Raises ConfigError or EngineError if the server does not respond."""

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities of this environment in addition to those that its class declares."""
        raise NotImplementedError


# -------- Which capabilities an environment has


CAPABILITIES: tuple[type, ...] = (
    *(
        Answerable,
        DrivenByPrograms,
        Enumerable,
        HasPlayers,
        InMemory,
        ListsMoves,
        Mixed,
        Private,
        Progressive,
    ),
    *(Reads, Recorded, Reporting, RewardsEpisodes, Scripted, ShowsImages, Teachable, TeamMoves),
    *(UsesModels, UsesServers),
)
"""All capabilities of environments. The capabilities of episode states are `StateWithImages`, `KnowsMoves`, `Scorable`, `Retriable` and
`Resets`."""
OPTIONAL = frozenset(
    {
        *(name for name in vars(Reporting) if not name.startswith("_")),
        *("compared", "costs", "demonstrates", "questions", "reward_group"),
    }
)
"""Names of the methods and properties of capabilities that have a default implementation."""


def offers(environment: object, capability: type[C]) -> TypeIs[C]:
    """Return whether an environment has a capability, either declared by its class or reported by its server."""
    return isinstance(environment, capability) or (
        isinstance(environment, Described) and capability in environment.offered
    )


def report_of(environment: object) -> Reporting:
    """Return the environment if it is a `Reporting`, or else a `Reporting` with the default values."""
    return environment if offers(environment, Reporting) else Reporting()


def has_comparable_answers(environment: Environment) -> bool:
    """Return whether all tasks are questions with comparable answers.

    For a mixture of environments, this must hold for all of its members.
    """
    members = environment.members.values() if offers(environment, Mixed) else ()
    return offers(environment, Answerable) and all(has_comparable_answers(member) for member in members)


def enumerable(environment: object, players: int, most: int) -> Enumerable | None:
    """Return the environment if it is an enumerable game with this many players and at most `most` information states, or else None."""
    if not most or not offers(environment, Enumerable) or environment.players != players:
        return None
    try:
        decisions = sum(1 for _ in zip(environment.decisions(), range(most + 1), strict=False))
        environment.check_moves()
    except ConfigError:
        return None
    return environment if decisions <= most else None


# -------- Episodes in another process: a worker on this machine or a server on another one


class WorkerLost(Exception):
    """The process or server that held an episode has ended, so the episode is lost."""

    def __init__(self, how: str, *, blamed: bool) -> None:
        """Set the reason (`how`) and whether this episode was running a call when the process ended (`blamed`)."""
        super().__init__(how)
        self.blamed = blamed


class RemoteState:
    """An episode state in another process, accessed through the protocol of `wire/worlds.py`.

    Subclasses implement the transport of the requests.

    The methods `movers` and `observe` are synchronous. Every response of the other process therefore contains their new values, which
    this class caches.
    """

    scorable = False
    """Whether the episode can score a text before it ends."""

    def __init__(self, name: str, patience: Patience) -> None:
        """Set the name of the environment, which is used in messages, and the time limits of calls."""
        self._name, self._patience = name, patience
        self._movers: Mapping[str, Any] = {}
        self._shown: dict[str, Mapping[str, Any]] = {}
        self._allowed: dict[str, int] = {}
        """Arguments that are sent with the next move."""

    @property
    def lost(self) -> WorkerLost | None:
        """The error that describes how the episode was lost with its process, or None while the process runs."""
        raise NotImplementedError

    async def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """Return the response to a request within the time limit of the method. Raises the exception that the other process reports."""
        raise NotImplementedError

    def release(self) -> None:
        """Record that the episode is closed."""
        raise NotImplementedError

    async def reset(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the episode in the other process and return the response. If the episode cannot be opened, all resources are freed."""
        try:
            answer: Mapping[str, Any] = await self.call("start", {"call": "reset", **request})
        except (asyncio.CancelledError, DeadlineExceeded):  # the other process may still open it
            with suppress(DeadlineExceeded):  # the other process closes the episode that it opens
                await self.close()
            raise
        except BaseException:
            self.release()
            raise
        self.scorable = answer["scorable"]
        self._update(answer["view"])
        return answer

    def _update(self, view: Mapping[str, Any]) -> None:
        self._movers = view["movers"]
        self._shown.update(view["shown"])

    def observe(self, agent: str) -> str:
        """Return an agent's observation. Raises the exception that the environment raised."""
        shown = self._shown[agent]
        if "error" in shown:
            raise environment_error(*shown["error"])
        return str(shown["value"])

    def legal(self, agent: str) -> Sequence[str]:
        """Return an agent's legal moves; see `KnowsMoves`."""
        return tuple(self._shown[agent].get("legal", ()))

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move. Raises the exception that the environment raised."""
        if "error" in self._movers:
            raise environment_error(*self._movers["error"])
        return tuple(self._movers["value"])

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `EpisodeState`."""
        allowed, self._allowed = self._allowed, {}
        answer = await self.call("step", {"call": "act", "actions": actions, "final": final, **allowed})
        self._update(answer["view"])
        rewards: Mapping[str, float] = answer["rewards"]
        return rewards

    async def score(self, agent: str, text: str) -> float:
        """See `Scorable`."""
        return float(await self.call("score", {"call": "score", "agent": agent, "text": text}))

    def allow_answers(self, most: int) -> None:
        """See `Retriable`. The limit is sent with the first step."""
        self._allowed = {"allow_answers": most}

    async def outcome(self) -> Outcome:
        """See `EpisodeState`."""
        return Outcome(**await self.call("outcome", {"call": "outcome"}))

    async def close(self) -> None:
        """See `EpisodeState`. An episode that was lost with its process is already closed."""
        try:
            if self.lost is None:
                await self.call("close", {"call": "close"})
        except WorkerLost:
            pass
        finally:
            self.release()


class OpensStates:
    """An environment that itself opens its episodes on other machines."""

    async def open_state(
        self, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> RemoteState:
        """Open one episode and return its state."""
        raise NotImplementedError


_listeners: list[Callable[[str], None]] = []


@contextmanager
def on_environment_change(listen: Callable[[str], None]) -> Iterator[None]:
    """Call `listen` whenever a server replaces its environment while the block runs."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def report_change(line: str) -> None:
    """Notify all listeners that a server has replaced its environment."""
    for listen in tuple(_listeners):
        listen(line)


# -------- Checks of an environment's declarations before training, because its code may come from any user


def check_declared(environment: Environment, seconds: float = Patience.environment) -> None:
    """Raise Unfit unless `reward_range` is a pair of finite numbers and `sources` describes both splits."""
    bounds: object = call_user_code("reward_range", seconds, lambda: environment.reward_range)
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise Unfit(f"`reward_range` is {bounds!r:.60}. Give the smallest and the largest reward.")
    if not all(isinstance(b, int | float) and math.isfinite(b) for b in bounds) or bounds[0] > bounds[1]:
        raise Unfit(f"`reward_range` is {bounds!r:.60}. Give two finite numbers, the smaller first.")
    sources: object = call_user_code("sources", seconds, lambda: environment.sources)
    if not isinstance(sources, Mapping) or not all(
        isinstance(sources.get(split), str) for split in ("train", "test")
    ):
        raise Unfit(
            f"`sources` is {sources!r:.60}. Give a description of the source of the tasks for `train` and for `test`."
        )


def size_of(environment: Environment, split: Split, seconds: float = Patience.environment) -> int | None:
    """Return the number of tasks of a split, or None if it is unlimited. Raises Unfit if `size` returns another value."""
    size: object = call_user_code("size", seconds, environment.size, split)
    if size is None:
        return None
    try:
        count = -1 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= sys.maxsize:
        raise Unfit(
            f"`size('{split}')` returns {size!r:.60}. Return the number of tasks, or None if it is unlimited."
        )
    return count


def task_of(
    environment: Environment,
    split: Split,
    index: int,
    seconds: float | None = None,
    *,
    played: int | None = None,
) -> Task:
    """Return a task of an environment.

    Raises Unfit if the result is not a `Task`, or if the call takes longer than `seconds` (default `environment.timeout`). The
    argument `played` is the number of earlier train tasks of the run, for an environment with the capability `Progressive`.
    """
    if seconds is None:
        seconds = float(getattr(environment, "timeout", Patience.environment))
    task: object
    if played is not None and offers(environment, Progressive):
        task = call_user_code(
            f"task_after({played}, {index})", seconds, environment.task_after, played, index
        )
    else:
        task = call_user_code(f"task('{split}', {index})", seconds, environment.task, split, index)
    if not isinstance(task, Task):
        raise Unfit(f"`task('{split}', {index})` returns {task!r:.60}. Return a kapelle.Task.")
    for name, value in (("id", task.id), ("question", task.question)):
        if not isinstance(value, str):
            raise Unfit(f"`task('{split}', {index})` has the {name} {value!r:.60}, which is not a string.")
    return task


def check_capabilities(environment: Environment, agents: int, seconds: float = Patience.environment) -> None:
    """Raise Unfit if a method or property of a declared capability raises an error or returns a value of the wrong type."""

    def promise(
        capability: type, part: str, promised: tuple[type, ...], in_words: str, *given: object
    ) -> None:
        if isinstance(environment, capability):
            found: object = call_user_code(part, seconds, lambda: getattr(environment, part))
            if callable(vars(capability)[part]):
                found = call_user_code(part, seconds, cast("Callable[..., object]", found), *given)
            if not isinstance(found, promised) or (isinstance(found, str) and str not in promised):
                raise Unfit(f"`{part}` is {found!r:.60}, but `{capability.__name__}` requires {in_words}.")

    promise(Mixed, "members", (Mapping,), "a mapping from names to environments")
    promise(Recorded, "answers_per_task", (int,), "a whole number")
    promise(Reporting, "alive", (Sequence,), "a tuple of strings")
    promise(Reporting, "constant_sum", (bool,), "True or False")
    promise(Reporting, "symmetric", (bool, type(None)), "True, False or None")
    promise(Reporting, "descriptors", (int,), "a whole number", agents)
    promise(Reporting, "skipped", (Mapping,), "a mapping from splits to strings")
    # A mixture can compare answers only if all of its members can.
    if has_comparable_answers(environment):
        promise(Answerable, "extract", (str, type(None)), "a string or None", "")
