"""An environment that lives on environment servers: its tasks, its answers and its worlds are asked for there."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, PrivateAttr, field_validator

from kapelle.environment import (
    Alive,
    Answerable,
    Connecting,
    Described,
    Environment,
    Mixed,
    OpensWorlds,
    Opposed,
    Reads,
    Recorded,
    RemoteWorld,
    Scripted,
    Skipping,
    World,
)
from kapelle.errors import AbsentPackage, ConfigError
from kapelle.runtime.credentials import is_loopback
from kapelle.runtime.deadlines import Patience, patience_here
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.wire.worlds import Description, message_form, task_form, task_from
from kapelle.settings.base import FREE, Settings
from kapelle.types import Message, Split, Task

if TYPE_CHECKING:
    from kapelle.environments.remote.servers import Servers

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):([0-9]{1,5})")
SPARE_SECONDS = 30.0
"""Seconds that the server has to answer beyond the time of the call itself."""
READING_SECONDS = 600.0
"""For which a server may read the data of an environment that is registered."""


@dataclass(frozen=True, slots=True)
class Calling:
    """How servers are called."""

    token: str | None = field(repr=False)
    tls: tuple[bool, ...]
    """Whether the connection is encrypted, by server: always beyond loopback."""


class Remote(Settings, Alive, Connecting, Described, Opposed, Skipping, Reads, OpensWorlds):
    """The environment that servers hold; a run plays it as if it were here, with the same results.

    Which one it is, is known when the servers have been asked (`connect`): it offers (`offered`)
    answers that can be compared, a script, records and parts only where their environment has them.
    """

    name: Literal["remote"] = "remote"
    address: Annotated[tuple[str, ...], FREE] = Field(min_length=1)
    """`host:port` of a server, or a list of several that hold the same environment."""
    serves: str = ""
    """The environment's name there; may be left out where the servers hold only one."""
    certificate: Annotated[str | None, FREE] = None
    """PEM file of the servers' certificate, or of the authority that signed it; null trusts this machine's authorities."""
    token_env: Annotated[str, FREE] = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable that holds the servers' token, which is kept out of recipes and run directories."""
    retry_seconds: Annotated[float, FREE] = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Seconds for which all servers may be unavailable before the run stops."""

    _connected: bool = PrivateAttr(default=False)

    @field_validator("address", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _places(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            found = _ADDRESS.fullmatch(each)
            if found is None or not 0 < int(found[1]) <= 65_535:
                raise ValueError(f"'{each}' is no host and port, such as localhost:50051")
        if len(set(value)) < len(value):
            raise ValueError("a server is listed twice")
        return value

    # Which environment it is.

    @property
    def calling(self) -> Calling:
        """How the servers are called. ConfigError where an extra or the token is missing."""
        if importlib.util.find_spec("websockets") is None:
            raise AbsentPackage("`environment.name: remote` needs an extra: pip install 'kapelle[serve]'.")
        hosts = [each.rpartition(":")[0].strip("[]") for each in self.address]
        tls = tuple(self.certificate is not None or not is_loopback(host) for host in hosts)
        token = os.environ.get(self.token_env)
        if token is None and not all(map(is_loopback, hosts)):
            raise ConfigError(
                f"The environment servers at {', '.join(self.address)} are on other machines and ask for a token. Set the "
                f"environment variable {self.token_env}, or name another one with `environment.token_env`."
            )
        return Calling(token, tls)

    @property
    def servers(self) -> Servers:
        """This process's connections to the servers; see `calling`."""
        calling = self.calling
        from kapelle.environments.remote.servers import servers_at

        return servers_at(
            os.getpid(),
            self.address,
            self.serves,
            self.certificate,
            calling.token,
            calling.tls,
            self.retry_seconds,
        )

    def connect(self) -> None:
        """Ask the servers which environment they hold, and offer what that one offers.

        Raises ConfigError if they refuse or disagree, EngineError if no server is reachable.
        """
        self._connected = self.description is not None

    @property
    def offered(self) -> frozenset[type]:
        """What the servers' environment can do; empty until it is connected."""
        if not self._connected:
            return frozenset()
        said = self.description
        found = {
            Answerable: said.answerable,
            Scripted: said.scripted,
            Recorded: said.answers_per_task,
            Mixed: said.members,
        }
        return frozenset(capability for capability, has in found.items() if has)

    @property
    def members(self) -> Mapping[str, Environment]:
        """The parts of a mixture that the servers hold, as far as runs ask about them."""
        found = self.description.members.items()
        return {name: cast("Environment", _Member(each, self.extract)) for name, each in found}

    def answers_per_task(self) -> int:
        """Return the largest number of recorded answers of one task."""
        return self.description.answers_per_task

    @property
    def description(self) -> Description:
        """What the servers say that it is."""
        return self.servers.describe()

    @property
    def reward_range(self) -> tuple[float, float]:
        """That of the servers' environment."""
        return (self.description.least_reward, self.description.greatest_reward)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Those of the servers' environment."""
        return self.description.sources

    @property
    def alive(self) -> Sequence[str]:
        """What the servers' environment names."""
        return self.description.alive

    @property
    def constant_sum(self) -> bool:
        """Whether what one agent wins the others lose."""
        return self.description.constant_sum

    def skipped(self) -> Mapping[Split, str]:
        """Return the rows that the servers' environment leaves out."""
        return self.description.skipped

    def contents(self) -> Mapping[str, str]:
        """Return the content of the servers' environment: a hash of its class, its settings and what it reads."""
        return {f"environment '{self.description.name}' of the servers": self.description.content}

    def check(self, agents: Sequence[str]) -> None:
        """Let the servers' environment check these agents."""
        self.connect()
        self._ask("check", agents=list(agents))

    def size(self, split: Split) -> int | None:
        """Return how many tasks a split has; None if the supply is endless."""
        return self.description.sizes[split]

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, as every server has it."""
        return task_from(self._ask("task", split=split, index=index))

    def _ask(self, call: str, **fields: Any) -> Any:
        request = {"call": call, "environment": self.serves, **fields}
        seconds = float(getattr(self, "timeout", Patience.environment)) + SPARE_SECONDS
        return self.servers.call(request, seconds)

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, as the servers' environment reads it."""
        found: str | None = self._ask("extract", text=text)
        return found

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the text of the servers' expert."""
        read = [message_form(each) for each in messages]
        return str(self._ask("script", agent=agent, task=task_form(task), messages=read, seed=seed))

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return what the servers' environment has recorded."""
        return str(self._ask("recorded", agent=agent, task=task_form(task), turn=turn, sample=sample))

    def register(self, name: str, settings: Mapping[str, Any]) -> int:
        """Add or replace an environment on the server, given as its settings, and return its version.

        Raises ConfigError if the server refuses, EngineError if it is unreachable.
        """
        request = {"call": "register", "name": name, "settings": settings}
        return int(self.servers.call(request, READING_SECONDS)["version"])

    # Worlds.

    async def open_world(
        self, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> RemoteWorld:
        """Open the world of one episode on the server with the fewest, or on another one where that is gone."""
        request = {
            "environment": self.serves,
            "agents": list(agents),
            "task": task_form(task),
            "seed": seed,
            "call_seconds": patience.environment,
            "grader_seconds": patience.grader,
        }
        return await self.servers.open_world(request, self.name, patience)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> World:
        """Open the world of one episode and wait for it, for environments that have this one as a part."""
        from kapelle.environments.remote.servers import InnerWorld, ScorableInnerWorld, ServerWorld

        patience = patience_here.get()
        world = run_async(lambda: self.open_world(task, agents, seed, patience))
        assert isinstance(world, ServerWorld), "`open_world` opens them"
        return (ScorableInnerWorld if world.scorable else InnerWorld)(world, patience)


class _Member(Described):
    """A part of a mixture that the servers hold: what runs ask about it."""

    def __init__(self, description: Description, extract: Callable[[str], str | None]) -> None:
        self.name = description.kind
        self.reward_range = (description.least_reward, description.greatest_reward)
        self.constant_sum = description.constant_sum
        self.answerable = description.answerable
        self.extract = extract

    @property
    def offered(self) -> frozenset[type]:
        """What this part of it can do."""
        return frozenset({Opposed, Answerable} if self.answerable else {Opposed})
