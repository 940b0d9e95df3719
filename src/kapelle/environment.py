"""What an environment is: tasks, and a single-use world for each episode.

An environment is a value: the same settings give the same task for the same split and index in every
process, so that all episodes of a group have the same task. A world lives for one episode. It decides what
each agent sees, who may move, and what a move pays. What it shows to one agent never contains what only
another agent may know.

What an environment can do beyond that is a *capability*: a class below that it inherits from (`class Sums(Settings,
Scripted)`), in which each method is documented. A capability is declared, never guessed: a setting that happens to be
called `script` or `members` is only a setting. `offers` asks for one.
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
from kapelle.runtime.deadlines import GaveUp, Patience
from kapelle.runtime.foreign_code import Unfit, asked, environment_error
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.types import Episode, Image, Json, Message, Split, Task

C = TypeVar("C")

PAID_BY = "reward/"
"""Prefix of what each reward function or judge returned, in an episode's `info`; None where it had nothing to say."""
FAILED = "failed"
"""What stands there in an episode that failed because this reward raised or gave no verdict."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended, as the environment sees it."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Terminal reward of each agent that is scored; agents that are not scored are left out."""
    success: float | None = None
    """The team's score in [0, 1], or None where there is none."""
    info: Mapping[str, Json] = field(default_factory=dict)
    truncated: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    """See `Episode.roles`."""


class World(Protocol):
    """One episode of an environment. Used once, then closed."""

    def observe(self, agent: str) -> str:
        """Return what this agent may see now, including its private view."""
        ...

    def movers(self) -> tuple[str, ...]:
        """Return who may move now: one agent, several at once, or none when the episode is over."""
        ...

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take the texts of the agents that moved; return what each is paid for its move now (often nothing).

        `final` is the text that counts as the team's answer where a workflow names one (a vote, the
        last of a chain); None leaves it to the environment.
        """
        ...

    def outcome(self) -> Outcome:
        """Return how it ended; called once, after the last step."""
        ...

    async def close(self) -> None:
        """Free what the world holds; called exactly once, even after a failure."""
        ...


class Environment(Protocol):
    """A source of tasks and worlds: frozen settings with behaviour."""

    @property
    def name(self) -> str:
        """The name by which its class is found; a settings field."""
        ...

    @property
    def reward_range(self) -> tuple[float, float]:
        """Smallest and largest total that one agent can earn in an episode."""
        ...

    @property
    def sources(self) -> Mapping[Split, str]:
        """Where the tasks of each split come from, in words; the two never overlap."""
        ...

    def check(self, agents: Sequence[str]) -> None:
        """Refuse what cannot be played, before anything expensive happens.

        Raises DataError for data that are missing or corrupt, ConfigError when these agents (names in
        seat order) do not fit. Cheap: it may read the data, never a model.
        """
        ...

    def size(self, split: Split) -> int | None:
        """Return how many tasks a split has; None when they are generated without end."""
        ...

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index: the same in every process."""
        ...

    def start(self, task: Task, agents: Sequence[str], seed: int) -> World:
        """Open the world of one episode for these agents, in seat order."""
        ...


class Answerable:
    """An environment whose tasks are questions with one answer: it can compare answers."""

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text in a normal form, None when it has none."""
        raise NotImplementedError


class ShowsImages:
    """An environment whose worlds show pictures (`SeenWorld`): every agent needs a model that sees."""


class SeenWorld:
    """A world of an environment that `ShowsImages`."""

    def images(self, agent: str) -> Sequence[Image]:
        """Return the pictures that belong to what this agent may see now.

        Those that its conversation does not have yet stand before the next text that it reads.
        """
        raise NotImplementedError


class ListsMoves:
    """An environment whose worlds know what an agent that is to move may write (`KnowsMoves`): `sampling.choices: legal`."""


class KnowsMoves:
    """A world of an environment that `ListsMoves`."""

    def legal(self, agent: str) -> Sequence[str]:
        """Return every text by which this agent may move now, as it is to be written; empty where it is not to move."""
        raise NotImplementedError


class Mixed:
    """An environment whose tasks belong to several environments; `Task.part` names the one."""

    @property
    def members(self) -> Mapping[str, Environment]:
        """Return the environments by the name of their part."""
        raise NotImplementedError


def offers(environment: object, capability: type[C]) -> TypeIs[C]:
    """Return whether an environment has a capability: its class declares it, or it was described as having it."""
    return isinstance(environment, capability) or (
        isinstance(environment, Described) and capability in environment.offered
    )


def asks_questions(environment: Environment) -> bool:
    """Return whether all tasks are questions whose answers can be compared; for a mixture, whether all its members' are."""
    members = environment.members.values() if offers(environment, Mixed) else ()
    return offers(environment, Answerable) and all(asks_questions(member) for member in members)


def is_opposed(environment: object) -> bool:
    """Return whether what one player wins the others lose: nothing is learned from a mean over them, or from a player's games with itself."""
    return offers(environment, Opposed) and environment.constant_sum


class Scorable:
    """A world that can score a text as an answer before the episode is over."""

    async def score(self, agent: str, text: str) -> float:
        """Return the score in [0, 1] of a text as this agent's answer; the world stays as it is."""
        raise NotImplementedError


class Retriable:
    """A world of a question that accepts another answer after a wrong one."""

    def allow_answers(self, most: int) -> None:
        """Stay open after a wrong `final` text until there have been `most` of them; called before the first step.

        `observe` then reports that the answer was wrong, but never the right one. Only the last answer counts.
        """
        raise NotImplementedError


class Resets:
    """A world that has something to do, once, before anybody sees it, and may wait for it."""

    async def reset(self) -> None:
        """Begin; awaited after `Environment.start` and before the first `observe`."""
        raise NotImplementedError


async def reset_world(world: object) -> None:
    """Begin a world inside another one, if it has something to do."""
    if isinstance(world, Resets):
        await world.reset()


class Alive:
    """An environment that may call something whose answers vary, so that an episode cannot be replayed."""

    @property
    def alive(self) -> Sequence[str]:
        """Return, in words, the settings to blame (servers, endpoints); empty when its worlds repeat exactly."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AskedServer:
    """A server that a run will ask."""

    who: str
    """What it is in the run, as the beginning of a sentence: `The judge`."""
    url: str
    probe: str
    """What is fetched to see whether it is there; whether there is such a page does not matter."""
    key_env: str
    """Environment variable that holds its key."""


class AsksServers:
    """Settings, of an environment or of a part of one, whose episodes ask servers: they are tried before models load."""

    def servers(self) -> Sequence[AskedServer]:
        """Return the servers."""
        raise NotImplementedError


class StartsProgram:
    """Settings of a part of an environment that start a program or ask a server to find out what it offers.

    It is left out where a recipe is only looked at.
    """

    @property
    def server(self) -> str:
        """Return the command or the address, to be shown."""
        raise NotImplementedError


class PlayedFromOutside:
    """An environment whose episodes an outside program plays: it calls this process, which therefore serves."""

    @property
    def demonstrates(self) -> bool:
        """Whether its settings name a script for demonstrations, if it is `Scripted`."""
        return False

    def check_server(self, processes: int = 1) -> None:
        """Raise ConfigError where the server that programs call could not be started safely, or not be reached.

        Also where it cannot be run by each of several `processes`.
        """
        raise NotImplementedError

    def serve(self, play: Any, say: Callable[[str, str], None]) -> AbstractContextManager[None]:
        """Run the server while the block runs: it serves the agents of `play` (`rollout.play.Play`); `say` tells the user."""
        raise NotImplementedError


class InMemory:
    """An environment that may hold what other processes cannot make anew from its settings."""

    @property
    def in_memory(self) -> Sequence[str]:
        """Return in words what lives in this process's memory alone; empty where its settings are all there is."""
        raise NotImplementedError

    def keep(self, folder: Path) -> None:
        """Write what can be read again into a run's folder."""
        raise NotImplementedError

    def recall(self, folder: Path) -> None:
        """Read what `keep` wrote into a run's folder, if it did."""
        raise NotImplementedError


class Connecting:
    """An environment that has to ask a server what it is, before its capabilities are known."""

    def connect(self) -> None:
        """Ask; raises ConfigError or EngineError where there is no answer."""
        raise NotImplementedError


class Progressive:
    """An environment whose train tasks change while a run goes on, such as a game that begins small (a curriculum)."""

    def task_after(self, played: int, index: int) -> Task:
        """Return the train task at an index where `played` tasks of the run, in order, come before it."""
        raise NotImplementedError


class Opposed:
    """An environment that knows whether its agents' rewards always add up to the same number."""

    @property
    def constant_sum(self) -> bool:
        """Return whether one agent wins what the others lose: a shared reward would then teach nothing."""
        raise NotImplementedError


class PlaysSeats:
    """An environment that can play an agent's seat itself, by a player of its own: at random, by search, by a solution.

    Its `start` lets those of `Task.seats_of_world` play; their agents are never to move, and are paid like all others.
    """

    def check_player(self, player: str) -> None:
        """Raise ConfigError, which names those that there are, for a player that it does not have."""
        raise NotImplementedError


class Skipping:
    """An environment of rows that leaves out those it cannot use, up to a stated share."""

    def skipped(self) -> Mapping[Split, str]:
        """Return, by split, how many rows are left out, where the first ones are and why; empty where all are used."""
        raise NotImplementedError


class Doubting:
    """An environment that can look its data through for what it takes seconds to find."""

    def doubts(self) -> Sequence[str]:
        """Return a sentence for each thing in the data that will fail episodes; asked by `kapelle validate` alone."""
        raise NotImplementedError


class Remarking:
    """An environment that knows what a reader of its settings may not expect; a run prints it at its start."""

    def remarks(self) -> Sequence[str]:
        """Return a sentence for each such thing."""
        raise NotImplementedError


class Reads:
    """Settings, of an environment or of a part of one, that read files or a data set."""

    def contents(self) -> Mapping[str, str]:
        """Return what they read, by name, with a hash of its content: a resumed run reports what has changed."""
        raise NotImplementedError


class Holding:
    """An environment whose worlds hold pipes or connections open; episodes wait where there would be too many."""

    def descriptors(self, agents: int) -> int:
        """Return the most descriptors that one world of a team of this many agents holds open."""
        raise NotImplementedError


class Scripted:
    """An environment that can demonstrate how an agent in a role should answer."""

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the text of the scripted expert in this role; `seed` decides where its intended flaws occur."""
        raise NotImplementedError


class Teachable:
    """An environment in whose demonstrations a function of the user's may answer for the agents: the setting `teacher`."""

    teacher: str | None

    def teacher_hash(self) -> str | None:
        """Return a hash of the code of the `teacher`; None without one, or where its code is not found."""
        raise NotImplementedError


class OneSeat:
    """An environment of moves with one seat, whoever sits there: its worlds take one text a move, from any agent of the team.

    So a team works on each move together (the workflow `chain`), and who speaks for it is paid.
    """


class PaysEpisodes:
    """An environment that pays an episode when it is over, by all of its turns."""

    async def pay(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Return the outcome with its rewards; `episode` has its turns, and `outcome` is what the world found.

        Called where the agents are played, not where the world lives. What it raises fails the episode.
        """
        raise NotImplementedError


class PaysGroups:
    """An environment that pays the episodes of a group by comparing them, once all of them are over."""

    @property
    def compared(self) -> Sequence[str]:
        """Return, in words, the settings that compare episodes; empty where each is paid for itself alone."""
        raise NotImplementedError

    async def pay_group(self, episodes: Sequence[Episode]) -> Sequence[Outcome]:
        """Return how each episode of a group ended, in order: what it has earned so far, and what the comparison pays.

        Called once for a group, where its agents are played, with the episodes that did not fail. What it raises fails them all.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that answers greedily and is not trained."""

    path: str
    """A model, or the folder of an adapter (PEFT)."""
    max_tokens: int
    """Most tokens of a reply."""


class ModelsInPlace(Protocol):
    """Frozen models where episodes are played."""

    def ask(self, model: FrozenModel) -> Callable[[Sequence[Message]], Awaitable[str]]:
        """Return what asks a model: it takes a conversation and returns the reply's text."""
        ...

    def close(self) -> None:
        """Free all of them."""
        ...


class AsksModels:
    """An environment that asks frozen models, such as judges: whoever plays it loads them."""

    @property
    def frozen_models(self) -> Sequence[FrozenModel]:
        """Return the models that it asks."""
        raise NotImplementedError

    def asking(self, models: ModelsInPlace) -> Environment:
        """Return the same environment, which asks these models."""
        raise NotImplementedError

    def release_models(self) -> None:
        """Free the models that it was given, if it was given any."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class QuestionCounts:
    """How often a model that pays episodes is asked, at most: what it has answered already is not asked again."""

    episode: int = 0
    """Questions about each episode, one after another."""
    group: int = 0
    """Questions about all episodes of a group together, one after another; none about a group of one."""
    at_once: int = 0
    """Most questions that wait for a reply together; 0 sets no bound."""

    def of_step(self, tasks: int, group: int) -> int:
        """Return the most questions about so many tasks with a `group` of episodes each."""
        return tasks * (self.episode * group + self.group * (group > 1))


class CountsCosts:
    """An environment that counts what paying costs, such as the questions to a judge."""

    def questions(self) -> Mapping[str, QuestionCounts]:
        """Return how often each model that it asks is asked, by its path or name; empty where that is not known."""
        return {}

    def costs(self) -> Mapping[str, float]:
        """Return metrics of what it cost in this process since the last call, by full name."""
        raise NotImplementedError


class Recorded:
    """An environment of recorded answers, which cannot reward any others."""

    def answers_per_task(self) -> int:
        """Return the largest number of recorded answers of one task: so many episodes of a group differ."""
        raise NotImplementedError

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return this agent's text in its turn (from 0), in record `sample` of the task; or its message with tool calls."""
        raise NotImplementedError


class Private:
    """An environment that declares what only one agent may see, so that it can be checked."""

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        """Return texts that the world may show this agent and no other.

        `kapelle validate` looks for them in the views of the others by a plain search for the same characters, at the start
        and after every step: `"7"` is found in "17 points" too, so name texts that stand nowhere else ("Your number is 7").
        What somebody has said is no longer looked for.
        """
        raise NotImplementedError


class Symmetric:
    """An environment that can declare its seats alike: exchanging the texts exchanges the rewards."""

    @property
    def symmetric(self) -> bool:
        """Whether all seats are alike."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Decision:
    """One information state of a game, as its player meets it."""

    key: str
    """The game's name of it."""
    seat: int
    """Who moves, from 0."""
    text: str
    """What the player is shown."""
    actions: tuple[int, ...]
    """The legal moves by number, and in the same order by the text that plays each."""
    moves: tuple[str, ...]
    before: tuple[tuple[str, int], ...]
    """The player's own earlier moves on the way here: information state and action."""


class Enumerable:
    """A game small enough to enumerate: what policies are worth in it is known exactly (`evaluation.exploitability`)."""

    @property
    def players(self) -> int:
        """Number of seats."""
        raise NotImplementedError

    def decisions(self) -> Iterator[Decision]:
        """Yield every information state once; ConfigError where they cannot be listed."""
        raise NotImplementedError

    def check_moves(self) -> None:
        """Raise ConfigError unless each move is one text, whose probability is that of its tokens."""
        raise NotImplementedError

    def exact_values(self, policy: Mapping[str, Mapping[int, float]]) -> tuple[tuple[float, ...], float]:
        """Return the expected return of each seat and NashConv; `policy` has each information state's probabilities."""
        raise NotImplementedError

    def best_response(
        self, policy: Mapping[str, Mapping[int, float]], seat: int
    ) -> tuple[float, Mapping[str, int]]:
        """Return the most that a seat (from 0) can earn against the others' policy, and the move in each of its states that does."""
        raise NotImplementedError

    def visits(self, policy: Mapping[str, Mapping[int, float]]) -> Mapping[str, float]:
        """Return how often each information state is met in a game on average."""
        raise NotImplementedError


def enumerable(environment: object, seats: int, most: int) -> Enumerable | None:
    """Return the game if it has so many seats and its policies can be tabulated in at most `most` information states; None otherwise."""
    if not most or not offers(environment, Enumerable) or environment.players != seats:
        return None
    try:
        decisions = sum(1 for _ in zip(environment.decisions(), range(most + 1), strict=False))
        environment.check_moves()
    except ConfigError:
        return None
    return environment if decisions <= most else None


class Described:
    """An environment that learns what it offers by asking, once it is connected: one on other machines."""

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities that it has beside those that its class declares."""
        raise NotImplementedError


CAPABILITIES = (
    *(
        Alive,
        Answerable,
        AsksServers,
        Connecting,
        Doubting,
        Enumerable,
        Holding,
        InMemory,
        ListsMoves,
        Mixed,
        Opposed,
    ),
    *(
        OneSeat,
        PaysEpisodes,
        PlayedFromOutside,
        PlaysSeats,
        Private,
        Progressive,
        Reads,
        Recorded,
        Scripted,
        ShowsImages,
        Skipping,
        Teachable,
    ),
    *(AsksModels, CountsCosts, PaysGroups),
    Symmetric,
)
"""What an environment can declare; `SeenWorld`, `KnowsMoves`, `Scorable` and `Retriable` are declared by worlds, and `OpensWorlds` by what plays on servers."""


def environment_class(name: str) -> type:
    """Return the class of an environment by name, `module:Class`, `path/file.py:Class` or entry point."""
    return find_class("environment", name, catalogue("kapelle.environments"))


# -------- Remote worlds: worlds that live in another process, a worker on this machine or a server on another one


class WorkerLost(Exception):
    """The process or the server that held a world is gone, and the world with it."""

    def __init__(self, how: str, *, blamed: bool) -> None:
        """Keep how it ended, and whether this world was at work when it did."""
        super().__init__(how)
        self.blamed = blamed


class RemoteWorld:
    """A world in another process, played over the protocol of `wire/worlds.py`; subclasses carry the requests there.

    The workflow asks who may move and what each agent sees without waiting. So every answer of the other process brings
    what has changed of both, and they are answered from here.
    """

    scorable = False
    """Whether it can score a text before the episode is over."""

    def __init__(self, name: str, patience: Patience) -> None:
        """Take the environment's name, for messages, and how long calls may take."""
        self._name, self._patience = name, patience
        self._movers: Mapping[str, Any] = {}
        self._shown: dict[str, Mapping[str, Any]] = {}
        self._allowed: dict[str, int] = {}
        """What is passed on with the next move."""

    @property
    def lost(self) -> WorkerLost | None:
        """How the world was lost with its process; None while that lives."""
        raise NotImplementedError

    async def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """Return the answer to a request about this world, within the time limit of a method; raises what the world raised."""
        raise NotImplementedError

    def release(self) -> None:
        """Note that the world is closed."""
        raise NotImplementedError

    async def reset(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the world and return the answer; nothing is left behind when that fails."""
        try:
            answer: Mapping[str, Any] = await self.call("start", {"call": "reset", **request})
        except (asyncio.CancelledError, GaveUp):  # the other process may still open it
            with suppress(GaveUp):  # it closes what it opens
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
        """Return what an agent sees, or raise what the environment raised."""
        shown = self._shown[agent]
        if "error" in shown:
            raise environment_error(*shown["error"])
        return str(shown["value"])

    def legal(self, agent: str) -> Sequence[str]:
        """Return the moves that an agent has now; see `KnowsMoves`."""
        return tuple(self._shown[agent].get("legal", ()))

    def movers(self) -> tuple[str, ...]:
        """Return who may move, or raise what the environment raised."""
        if "error" in self._movers:
            raise environment_error(*self._movers["error"])
        return tuple(self._movers["value"])

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `World`."""
        allowed, self._allowed = self._allowed, {}
        answer = await self.call("step", {"call": "act", "actions": actions, "final": final, **allowed})
        self._update(answer["view"])
        rewards: Mapping[str, float] = answer["rewards"]
        return rewards

    async def score(self, agent: str, text: str) -> float:
        """See `Scorable`."""
        return float(await self.call("score", {"call": "score", "agent": agent, "text": text}))

    def allow_answers(self, most: int) -> None:
        """See `Retriable`; the other process hears of it with the first step."""
        self._allowed = {"allow_answers": most}

    async def outcome(self) -> Outcome:
        """See `World`."""
        return Outcome(**await self.call("outcome", {"call": "outcome"}))

    async def close(self) -> None:
        """See `World`; a world that was lost with its process is closed already."""
        try:
            if self.lost is None:
                await self.call("close", {"call": "close"})
        except WorkerLost:
            pass
        finally:
            self.release()


class OpensWorlds:
    """An environment that opens its worlds on other machines itself."""

    async def open_world(
        self, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> RemoteWorld:
        """Open the world of one episode."""
        raise NotImplementedError


_listeners: list[Callable[[str], None]] = []


@contextmanager
def told_of_changes(listen: Callable[[str], None]) -> Iterator[None]:
    """Call `listen`, while the block runs, when a server plays another environment than before."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def report_change(line: str) -> None:
    """Tell those who listen that a server plays another environment than before."""
    for listen in tuple(_listeners):
        listen(line)


# -------- What an environment says of itself, looked at before it is trained on: its code may be anybody's


def check_declared(environment: Environment, seconds: float = Patience.environment) -> None:
    """Raise Unfit unless `reward_range` is two finite numbers and `sources` says in words where both splits come from."""
    bounds: object = asked("reward_range", seconds, lambda: environment.reward_range)
    if not isinstance(bounds, Sequence) or isinstance(bounds, str) or len(bounds) != 2:
        raise Unfit(f"`reward_range` is {bounds!r:.60}; give the smallest and the largest reward.")
    if not all(isinstance(b, int | float) and math.isfinite(b) for b in bounds) or bounds[0] > bounds[1]:
        raise Unfit(f"`reward_range` is {bounds!r:.60}; declare two finite numbers, the smaller first.")
    sources: object = asked("sources", seconds, lambda: environment.sources)
    if not isinstance(sources, Mapping) or not all(
        isinstance(sources.get(split), str) for split in ("train", "test")
    ):
        raise Unfit(
            f"`sources` is {sources!r:.60}; say in words where the tasks of `train` and `test` come from."
        )


def size_of(environment: Environment, split: Split, seconds: float = Patience.environment) -> int | None:
    """Return how many tasks a split has, None for no end; Unfit for an answer that is neither."""
    size: object = asked("size", seconds, environment.size, split)
    if size is None:
        return None
    try:
        count = -1 if isinstance(size, bool) else operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if not 0 <= count <= sys.maxsize:
        raise Unfit(
            f"`size('{split}')` returns {size!r:.60}; return the number of tasks, or None where they come without end."
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
    """Return a task of an environment; Unfit where that is none, or takes longer than `environment.timeout` (or `seconds`).

    `played` is how many train tasks of the run come before it, for an environment that is `Progressive`.
    """
    if seconds is None:
        seconds = float(getattr(environment, "timeout", Patience.environment))
    task: object
    if played is not None and offers(environment, Progressive):
        task = asked(f"task_after({played}, {index})", seconds, environment.task_after, played, index)
    else:
        task = asked(f"task('{split}', {index})", seconds, environment.task, split, index)
    if not isinstance(task, Task):
        raise Unfit(f"`task('{split}', {index})` returns {task!r:.60}; return a kapelle.Task.")
    for name, value in (("id", task.id), ("question", task.question)):
        if not isinstance(value, str):
            raise Unfit(f"`task('{split}', {index})` has the {name} {value!r:.60}, which is no text.")
    return task


def check_capabilities(environment: Environment, agents: int, seconds: float = Patience.environment) -> None:
    """Raise Unfit where a declared capability cannot be asked, or answers with something of another type."""

    def promise(
        capability: type, part: str, promised: tuple[type, ...], in_words: str, *given: object
    ) -> None:
        if isinstance(environment, capability):
            found: object = asked(part, seconds, lambda: getattr(environment, part))
            if callable(vars(capability)[part]):
                found = asked(part, seconds, cast("Callable[..., object]", found), *given)
            if not isinstance(found, promised) or (isinstance(found, str) and str not in promised):
                raise Unfit(f"`{part}` gives {found!r:.60}; `{capability.__name__}` promises {in_words}.")

    promise(Alive, "alive", (Sequence,), "a tuple of words")
    promise(Opposed, "constant_sum", (bool,), "True or False")
    promise(Symmetric, "symmetric", (bool,), "True or False")
    promise(Mixed, "members", (Mapping,), "a mapping of environments")
    promise(Holding, "descriptors", (int,), "a whole number", agents)
    promise(Recorded, "answers_per_task", (int,), "a whole number")
    promise(Skipping, "skipped", (Mapping,), "a mapping of splits to words")
    # A mixture answers only where all of its members do.
    if asks_questions(environment):
        promise(Answerable, "extract", (str, type(None)), "a text or None", "")
