"""The interface of environments: tasks, and a single-use episode state (`EpisodeState`) for each episode.

An environment is an immutable value: the same settings give the same task for the same split and index in every process.
All episodes of a group therefore have the same task. An `EpisodeState` holds the state of one episode: the observation of
each agent, which agents may move, and the reward of each move. The observation of one agent never contains information
that is private to another agent.

Everything else that an environment can do is a *capability*: a class below that it inherits from (`class Sums(Settings,
Scripted)`). A capability is declared by inheritance; a setting named `script` or `members` does not declare one.
`offers(environment, Capability)` tests for one.
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
"""Prefix of the key of each reward function's or judge's result in an episode's `info`; the value is None if it does not apply."""
FAILED = "failed"
"""The value of that entry if the episode failed because this reward raised an error or returned no verdict."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an episode."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Terminal reward of each agent that is scored."""
    success: float | None = None
    """The team's score in [0, 1]; None if it is undefined."""
    info: Mapping[str, Json] = field(default_factory=dict)
    truncated: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    """See `Episode.roles`."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of individual turns, by `Turn.index`; they are added to `Turn.reward`."""


class EpisodeState(Protocol):
    """The state of one episode. Used once, then closed."""

    def observe(self, agent: str) -> str:
        """Return this agent's current observation, including its private information."""
        ...

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move now: one, several at once, or an empty tuple at the end of the episode."""
        ...

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the messages of the agents that moved; return the immediate reward of each (often an empty mapping).

        `final` is the message that counts as the team's answer if a workflow selects one (the result of a vote, or the
        last message of a chain); with None, the environment decides.
        """
        ...

    def outcome(self) -> Outcome:
        """Return the result; called once, after the last step."""
        ...

    async def close(self) -> None:
        """Free all resources; called exactly once, even after a failure."""
        ...


class Environment(Protocol):
    """A source of tasks and episodes: frozen settings with behaviour."""

    @property
    def name(self) -> str:
        """The name by which its class is found; this is a field of the settings."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """Smallest and largest return of one agent in an episode."""
        ...

    @property
    def sources(self) -> Mapping[Split, str]:
        """A description of the source of the tasks of each split; the two splits never overlap."""
        ...

    def check(self, agents: Sequence[str]) -> None:
        """Check the data and the team before any expensive work.

        Raises DataError if data is missing or corrupt, and ConfigError if these agents (names in team
        order) do not fit. It must be cheap: it may read the data, but must not load a model.
        """
        ...

    def size(self, split: Split) -> int | None:
        """Return the number of tasks of a split; None if it is unlimited."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, which is the same in every process."""
        ...

    def start(self, task: Task, agents: Sequence[str], seed: int) -> EpisodeState:
        """Return the state of a new episode for these agents, in team order."""
        ...


def environment_class(name: str) -> type:
    """Return the class of an environment by name, `module:Class`, `path/file.py:Class` or entry point."""
    return find_class("environment", name, catalogue("kapelle.environments"))


# -------- Capabilities of episode states


class Scorable:
    """An episode that can score a text as an answer before its end."""

    async def score(self, agent: str, text: str) -> float:
        """Return the score in [0, 1] of a text as this agent's answer, without changing the episode."""
        raise NotImplementedError


class Retriable:
    """An episode of a question that can accept another answer after an incorrect one."""

    def allow_answers(self, most: int) -> None:
        """Accept up to `most` `final` messages until one is correct; called before the first step.

        `observe` then reports that the answer was incorrect, but never the correct one. Only the last answer counts.
        """
        raise NotImplementedError


class Resets:
    """An episode with asynchronous work to do once, before the first observation."""

    async def reset(self) -> None:
        """Do this work; it is awaited after `Environment.start` and before the first `observe`."""
        raise NotImplementedError


async def reset_state(state: object) -> None:
    """Reset an episode inside another one, if it `Resets`."""
    if isinstance(state, Resets):
        await state.reset()


class KnowsMoves:
    """An episode of an environment that `ListsMoves`."""

    def legal(self, agent: str) -> Sequence[str]:
        """Return every legal move of this agent in the required notation; empty if it may not move now."""
        raise NotImplementedError


class StateWithImages:
    """An episode of an environment that `ShowsImages`."""

    def images(self, agent: str) -> Sequence[Image]:
        """Return the images that belong to this agent's current observation.

        Images that its conversation does not contain yet are placed before the next text that it reads.
        """
        raise NotImplementedError


# -------- Capabilities of environments: tasks and answers


class Answerable:
    """An environment with one answer for each task, so that answers can be compared."""

    def extract(self, text: str) -> str | None:
        """Return the final answer in a text in normalised form; None if there is none."""
        raise NotImplementedError


class Scripted:
    """An environment that can demonstrate how an agent in a role should answer."""

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the message of the scripted expert in this role; `seed` determines where its deliberate mistakes occur."""
        raise NotImplementedError


class Teachable:
    """An environment with the setting `teacher`: a user's function that answers for the agents in demonstrations."""

    teacher: str | None

    def teacher_hash(self) -> str | None:
        """Return a hash of the code of the `teacher`; None if there is no teacher or its code is not found."""
        raise NotImplementedError


class Recorded:
    """An environment of recorded answers, which cannot reward other answers."""

    def answers_per_task(self) -> int:
        """Return the maximum number of recorded answers to one task; at most this many episodes of a group differ."""
        raise NotImplementedError

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return this agent's text in its turn (from 0) in record `sample` of the task, or its message if that has tool calls."""
        raise NotImplementedError


class Progressive:
    """An environment that changes its train tasks during a run, such as a game that starts on a small board."""

    def task_after(self, played: int, index: int) -> Task:
        """Return the train task at an index that follows `played` earlier tasks of the run."""
        raise NotImplementedError


class Mixed:
    """An environment with the tasks of several environments; `Task.part` names the environment of a task."""

    @property
    def members(self) -> Mapping[str, Environment]:
        """Return the environments, keyed by the name of their part."""
        raise NotImplementedError


# -------- Capabilities of environments: agents and moves


class ShowsImages:
    """An environment that shows images in its episodes (`StateWithImages`): every agent needs a vision-language model."""


class ListsMoves:
    """An environment that lists the legal moves in its episodes (`KnowsMoves`): `sampling.choices: legal`."""


class TeamMoves:
    """An environment with one role, which any agent of the team can fill; its episodes take one message per move.

    So the team works on each move together (the workflow `chain`), and the agent that moves receives the reward.
    """


class HasPlayers:
    """An environment that provides its own players for an agent's role, such as random, search or equilibrium players.

    Its `start` assigns them the roles of `Task.environment_players`. The agents in these roles never move, and receive the
    same rewards as other agents.
    """

    def check_player(self, player: str) -> None:
        """Raise ConfigError, which lists the known players, for an unknown player."""
        raise NotImplementedError


class Private:
    """An environment that declares which information is private to one agent, so that this can be checked."""

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        """Return strings that the episode may show to this agent but to no other.

        `kapelle validate` searches for them in the observations of other agents, at the start and after every step. It
        compares characters: `"7"` is also found in "17 points", so return unique strings ("Your number is 7"). A string
        that an agent has written itself is no longer private.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Decision:
    """One information state of a game."""

    key: str
    """Its name in the game."""
    player: int
    """The player to move, from 0."""
    text: str
    """The observation of this player."""
    actions: tuple[int, ...]
    """The numbers of the legal moves, and in the same order their text."""
    moves: tuple[str, ...]
    before: tuple[tuple[str, int], ...]
    """The player's earlier moves that lead to this state, as (information state, action)."""


class Enumerable:
    """A game small enough to enumerate, so that the values of policies are exact (`evaluation.exploitability`)."""

    @property
    def players(self) -> int:
        """Number of players."""
        raise NotImplementedError

    def decisions(self) -> Iterator[Decision]:
        """Yield every information state once; raise ConfigError if they cannot be listed."""
        raise NotImplementedError

    def check_moves(self) -> None:
        """Raise ConfigError unless each move is one string, whose probability is that of its tokens."""
        raise NotImplementedError

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return the expected return of each player and NashConv; `policy` contains the probabilities in each information state."""
        raise NotImplementedError

    def best_response(
        self, policy: Mapping[str, Mapping[int, float]], player: int
    ) -> tuple[float, Mapping[str, int]]:
        """Return the value of one player's (from 0) best response to the policy of the others, and its move in each state."""
        raise NotImplementedError

    def visits(self, policy: Mapping[str, Mapping[int, float]]) -> Mapping[str, float]:
        """Return the expected number of visits of each information state per game."""
        raise NotImplementedError


# -------- Capabilities of environments: rewards


class RewardsEpisodes:
    """An environment that computes rewards from complete episodes, or by comparing the episodes of a group."""

    async def reward_episode(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Return the outcome with its rewards; `episode` has all turns, and `outcome` is the result of the `EpisodeState`.

        Called in the process that runs the agents. An exception fails the episode.
        """
        raise NotImplementedError

    @property
    def compared(self) -> Sequence[str]:
        """Return the settings that compare episodes; empty (the default) if `reward_episode` computes all rewards."""
        return ()

    async def reward_group(self, episodes: Sequence[Episode]) -> Sequence[Outcome]:
        """Return the outcome of each episode of a group, in order: its rewards so far, plus the rewards from the comparison.

        Called once for each group, with the episodes that did not fail. An exception fails them all.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that is not trained and samples greedily."""

    path: str
    """Path of a model, or of the folder of an adapter (PEFT)."""
    max_tokens: int
    """Maximum tokens of a reply."""


class ModelsInPlace(Protocol):
    """The frozen models in the process that runs episodes."""

    def ask(self, model: FrozenModel) -> Callable[[Sequence[Message]], Awaitable[str]]:
        """Return a function that queries a model: it takes a conversation and returns the reply's text."""
        ...

    def close(self) -> None:
        """Free all of them."""
        ...


@dataclass(frozen=True, slots=True)
class QuestionCounts:
    """The maximum number of queries to a model that computes rewards; cached replies are not counted."""

    episode: int = 0
    """Number of queries about each episode, sent one after another."""
    group: int = 0
    """Number of queries about all episodes of a group together, sent one after another; a group of one episode has none."""
    at_once: int = 0
    """Maximum number of simultaneous queries; 0 sets no limit."""

    def of_step(self, tasks: int, group: int) -> int:
        """Return the maximum number of queries about this many tasks with `group` episodes each."""
        return tasks * (self.episode * group + self.group * (group > 1))


class UsesModels:
    """An environment that queries frozen models, such as judges. The process that runs its episodes loads them."""

    @property
    def frozen_models(self) -> Sequence[FrozenModel]:
        """Return the models."""
        raise NotImplementedError

    def with_models(self, models: ModelsInPlace) -> Environment:
        """Return the same environment with these models."""
        raise NotImplementedError

    def release_models(self) -> None:
        """Free the models that it was given, if any."""
        raise NotImplementedError

    def questions(self) -> Mapping[str, QuestionCounts]:
        """Return the number of queries to each model, by its path or name; empty (the default) if it is unknown."""
        return {}

    def costs(self) -> Mapping[str, float]:
        """Return this process's cost metrics since the last call, by full name."""
        return {}


# -------- Capabilities of environments: reports, data, and other programs


class Reporting:
    """An environment that describes its episodes, settings and data. Each member is optional."""

    @property
    def alive(self) -> Sequence[str]:
        """Return the settings (servers, endpoints) whose answers may vary; empty if its episodes can be replayed exactly."""
        return ()

    @property
    def constant_sum(self) -> bool:
        """Return whether one agent wins exactly what the others lose, so that a shared reward carries no signal."""
        return False

    @property
    def symmetric(self) -> bool | None:
        """Return whether exchanging the messages of two roles exchanges their rewards; None if that is unknown."""
        return None

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of pipes and connections that one episode of this many agents holds open; others wait for free ones."""
        return 0

    def skipped(self) -> Mapping[Split, str]:
        """Return, by split, how many unusable rows are excluded, where the first of them are, and why."""
        return {}

    def remarks(self) -> Sequence[str]:
        """Return messages about effects that a reader of the settings may not expect; they are printed when a run starts."""
        return ()

    def doubts(self) -> Sequence[str]:
        """Return a message for each property of the data that will fail episodes.

        Only `kapelle validate` calls this, because it may take seconds.
        """
        return ()


class Reads:
    """Settings, of an environment or of a part of one, that read files or a data set."""

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each input by name, so that a resumed run can report changes."""
        raise NotImplementedError


class InMemory:
    """An environment that may hold data that other processes cannot rebuild from its settings."""

    @property
    def in_memory(self) -> Sequence[str]:
        """Return descriptions of the data that exists only in this process's memory; empty if the settings describe everything."""
        raise NotImplementedError

    def keep(self, folder: Path) -> None:
        """Write this data into a run's folder, in a form that `recall` can read."""
        raise NotImplementedError

    def recall(self, folder: Path) -> None:
        """Read the data that `keep` wrote into a run's folder, if there is any."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """A server that a run calls."""

    who: str
    """Its role in the run, as the beginning of a sentence: `The judge`."""
    url: str
    probe: str
    """The URL that is fetched to test whether the server answers; any HTTP status is accepted."""
    key_env: str
    """Environment variable that holds its key."""


class UsesServers:
    """Settings, of an environment or of a part of one, that call servers in episodes; the servers are tested before models are loaded."""

    def servers(self) -> Sequence[ExternalServer]:
        """Return the servers."""
        raise NotImplementedError


class StartsProgram:
    """Settings of a part of an environment that start a program or call a server to find out which tools it offers.

    Such a part is removed if a recipe is only inspected.
    """

    @property
    def server(self) -> str:
        """Return the command or the address, for display."""
        raise NotImplementedError


class DrivenByPrograms:
    """An environment whose episodes are run by an external program, which calls the server in this process."""

    programs: int
    """Maximum number of programs that run at once; other episodes wait."""

    @property
    def demonstrates(self) -> bool:
        """Whether the settings specify a script that produces demonstrations (for `Scripted` environments)."""
        return False

    def check_server(self, processes: int = 1) -> None:
        """Raise ConfigError if the server that programs call cannot be started safely or reached.

        Also raise it if there are several `processes` and each one cannot run its own server.
        """
        raise NotImplementedError

    def serve(self, setup: Any, say: Callable[[str, str], None]) -> AbstractContextManager[None]:
        """Serve the agents of `setup` (`rollout.setup.RolloutSetup`) while the block runs; `say` prints messages."""
        raise NotImplementedError


class Described:
    """An environment that learns its capabilities at run time, such as one on a server."""

    def connect(self) -> None:
        """Query the server, if there is one; raises ConfigError or EngineError if it does not answer."""

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities that it has in addition to those that its class declares."""
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
"""Capabilities of environments; the capabilities of episodes are `StateWithImages`, `KnowsMoves`, `Scorable`, `Retriable`, `Resets`."""
OPTIONAL = frozenset(
    {
        *(name for name in vars(Reporting) if not name.startswith("_")),
        *("compared", "costs", "demonstrates", "questions", "reward_group"),
    }
)
"""Methods and properties of capabilities that have a default."""


def offers(environment: object, capability: type[C]) -> TypeIs[C]:
    """Return whether an environment has a capability, which its class declares or its server reports."""
    return isinstance(environment, capability) or (
        isinstance(environment, Described) and capability in environment.offered
    )


def report_of(environment: object) -> Reporting:
    """Return the environment as a `Reporting`; the defaults if it is not one."""
    return environment if offers(environment, Reporting) else Reporting()


def has_comparable_answers(environment: Environment) -> bool:
    """Return whether all tasks, in all members of a mixture, are questions with comparable answers."""
    members = environment.members.values() if offers(environment, Mixed) else ()
    return offers(environment, Answerable) and all(has_comparable_answers(member) for member in members)


def enumerable(environment: object, players: int, most: int) -> Enumerable | None:
    """Return the game if it has this many players and at most `most` information states; None otherwise."""
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
    """The process or server that held an episode has ended, and so has the episode."""

    def __init__(self, how: str, *, blamed: bool) -> None:
        """Set the reason, and whether this episode was running a call at the time."""
        super().__init__(how)
        self.blamed = blamed


class RemoteState:
    """An episode in another process, which uses the protocol of `wire/worlds.py`; subclasses transport the requests.

    `movers` and `observe` are synchronous. Every answer of the other process therefore contains the changes of both, and
    this class caches them.
    """

    scorable = False
    """Whether it can score a text before the episode ends."""

    def __init__(self, name: str, patience: Patience) -> None:
        """Set the environment's name, for messages, and how long calls may take."""
        self._name, self._patience = name, patience
        self._movers: Mapping[str, Any] = {}
        self._shown: dict[str, Mapping[str, Any]] = {}
        self._allowed: dict[str, int] = {}
        """Arguments to send with the next move."""

    @property
    def lost(self) -> WorkerLost | None:
        """How the episode was lost with its process; None while the process runs."""
        raise NotImplementedError

    async def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """Return the answer to a request within the method's time limit; raises the exception of the other process."""
        raise NotImplementedError

    def release(self) -> None:
        """Record that the episode is closed."""
        raise NotImplementedError

    async def reset(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the episode and return the answer; a failure frees everything."""
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
        """Return an agent's observation, or raise the environment's exception."""
        shown = self._shown[agent]
        if "error" in shown:
            raise environment_error(*shown["error"])
        return str(shown["value"])

    def legal(self, agent: str) -> Sequence[str]:
        """Return an agent's legal moves; see `KnowsMoves`."""
        return tuple(self._shown[agent].get("legal", ()))

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move, or raise the environment's exception."""
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
        """See `Retriable`; sent with the first step."""
        self._allowed = {"allow_answers": most}

    async def outcome(self) -> Outcome:
        """See `EpisodeState`."""
        return Outcome(**await self.call("outcome", {"call": "outcome"}))

    async def close(self) -> None:
        """See `EpisodeState`; an episode that was lost with its process is already closed."""
        try:
            if self.lost is None:
                await self.call("close", {"call": "close"})
        except WorkerLost:
            pass
        finally:
            self.release()


class OpensStates:
    """An environment that opens its episodes on other machines itself."""

    async def open_state(
        self, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> RemoteState:
        """Open one episode."""
        raise NotImplementedError


_listeners: list[Callable[[str], None]] = []


@contextmanager
def on_environment_change(listen: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, call `listen` whenever a server replaces its environment."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def report_change(line: str) -> None:
    """Report that a server has replaced its environment."""
    for listen in tuple(_listeners):
        listen(line)


# -------- Checks of an environment's declarations before training, because its code may come from any user


def check_declared(environment: Environment, seconds: float = Patience.environment) -> None:
    """Raise Unfit unless `reward_range` is two finite numbers and `sources` describes both splits."""
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
    """Return the number of tasks of a split, or None if it is unlimited; raise Unfit for anything else."""
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
    """Return a task; raise Unfit if it is not a `Task`, or takes longer than `environment.timeout` (or `seconds`).

    `played` is the number of earlier train tasks of the run, for an environment that is `Progressive`.
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
    """Raise Unfit if a part of a declared capability raises an error or returns a wrong type."""

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
