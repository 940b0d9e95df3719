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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from typing_extensions import TypeIs

from kapelle.runtime.plugins import catalogue, find_class
from kapelle.types import Episode, Json, Message, Split, Task

C = TypeVar("C")


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


class Alive:
    """An environment that may call something whose answers vary, so that an episode cannot be replayed."""

    @property
    def alive(self) -> Sequence[str]:
        """Return, in words, the settings to blame (servers, endpoints); empty when its worlds repeat exactly."""
        raise NotImplementedError


class Connecting:
    """An environment that has to ask somebody else what it is, before it says what it offers."""

    def connect(self) -> None:
        """Ask; raises ConfigError or EngineError where there is no answer."""
        raise NotImplementedError


class Opposed:
    """An environment that knows whether its agents' rewards always add up to the same number."""

    @property
    def constant_sum(self) -> bool:
        """Return whether one agent wins what the others lose: a shared reward would then teach nothing."""
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


class PaysEpisodes:
    """An environment that pays an episode when it is over, by everything that was said in it."""

    async def pay(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Return the outcome with its rewards; `episode` has its turns, and `outcome` is what the world found.

        Called where the agents are played, not where the world lives. What it raises fails the episode.
        """
        raise NotImplementedError


class Recorded:
    """An environment of recorded answers, which cannot reward any others."""

    def answers_per_task(self) -> int:
        """Return the largest number of recorded answers of one task: so many episodes of a group differ."""
        raise NotImplementedError

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return this agent's text in its turn (from 0), in record `sample` of the task."""
        raise NotImplementedError


class Private:
    """An environment that declares what only one agent may see, so that it can be checked."""

    def private(self, task: Task, agent: str, agents: Sequence[str]) -> Sequence[str]:
        """Return texts that the world may show this agent and no other."""
        raise NotImplementedError


class Symmetric:
    """An environment that can declare its seats alike: exchanging the texts exchanges the rewards."""

    @property
    def symmetric(self) -> bool:
        """Whether all seats are alike."""
        raise NotImplementedError


class Described:
    """An environment that learns what it offers by asking, once it is connected: one on other machines."""

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities that it has beside those that its class declares."""
        raise NotImplementedError


CAPABILITIES = (
    *(Alive, Answerable, Connecting, Doubting, Holding, Mixed, Opposed, PaysEpisodes),
    *(Private, Reads, Recorded, Scripted, Skipping, Symmetric),
)
"""What an environment can declare; `Scorable` and `Retriable` are declared by worlds."""


def environment_class(name: str) -> type:
    """Return the class of an environment by name, `module:Class`, `path/file.py:Class` or entry point."""
    return find_class("environment", name, catalogue("kapelle.environments"))
