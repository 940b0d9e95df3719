"""The environment `remote`, which sends every request to an environment server."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, PrivateAttr, field_validator

from kapelle.environment import (
    Answerable,
    Described,
    Environment,
    EpisodeState,
    Mixed,
    OpensStates,
    Reads,
    Recorded,
    RemoteState,
    Reporting,
    Scripted,
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
"""Additional time in seconds to wait for a response after the time limit of the call."""
READING_SECONDS = 600.0
"""Maximum time in seconds for a server to read the data of a new environment."""


class Remote(Settings, Described, Reporting, Reads, OpensStates):
    """An environment on one or more servers.

    A run with this environment gives the same results as a run with the environment in the local process. `connect` reads the
    description of the environment on the servers. Afterwards, `offered` contains the capabilities of that environment.
    """

    name: Literal["remote"] = "remote"
    address: Annotated[tuple[str, ...], FREE] = Field(min_length=1)
    """The address of a server as `host:port`, or a list of addresses of servers with the same environment."""
    serves: str = ""
    """The name of the environment on the servers. The name is optional if the servers have only one environment."""
    certificate: Annotated[str | None, FREE] = None
    """Path of the PEM file with the certificate of the servers, or of the certificate authority that signed it. With null, the
    certificate authorities of this machine are trusted."""
    token_env: Annotated[str, FREE] = "KAPELLE_TOKEN"  # noqa: S105 - the name of a variable
    """Name of the environment variable that contains the token for the servers. The token is never written to recipes or run
    directories."""
    retry_seconds: Annotated[float, FREE] = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Maximum time in seconds for which all servers may be unavailable before the run stops."""

    _connected: bool = PrivateAttr(default=False)

    @field_validator("address", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            found = _ADDRESS.fullmatch(each)
            if found is None or not 0 < int(found[1]) <= 65_535:
                raise ValueError(f"'{each}' is not a host and port such as localhost:50051")
        if len(set(value)) < len(value):
            raise ValueError("the same server is listed twice")
        return value

    @property
    def servers(self) -> Servers:
        """The connections of this process to the servers.

        Raises ConfigError if an optional package or the token is missing.
        """
        if importlib.util.find_spec("websockets") is None:
            raise AbsentPackage("`environment.name: remote` needs an extra: pip install 'kapelle[serve]'.")
        hosts = [each.rpartition(":")[0].strip("[]") for each in self.address]
        tls = tuple(self.certificate is not None or not is_loopback(host) for host in hosts)
        token = os.environ.get(self.token_env)
        if token is None and not all(map(is_loopback, hosts)):
            raise ConfigError(
                f"The environment servers at {', '.join(self.address)} are on other machines and require a token. Set the environment "
                f"variable {self.token_env}, or set `environment.token_env` to the variable that holds the token."
            )
        from kapelle.environments.remote.servers import servers_at

        return servers_at(
            os.getpid(), self.address, self.serves, self.certificate, token, tls, self.retry_seconds
        )

    def connect(self) -> None:
        """Read the description of the environment from the servers.

        Raises ConfigError if the servers reject the request or have different environments, and EngineError if no server is
        reachable.
        """
        self._connected = self.description is not None

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities of the environment on the servers; empty before `connect` is called."""
        if not self._connected:
            return frozenset()
        description = self.description
        found = {
            Answerable: description.answerable,
            Scripted: description.scripted,
            Recorded: description.answers_per_task,
            Mixed: description.members,
        }
        return frozenset(capability for capability, has in found.items() if has)

    @property
    def members(self) -> Mapping[str, Environment]:
        """The parts of the environment on the servers if it is a mixture, by name."""
        found = self.description.members.items()
        return {name: cast("Environment", _Member(each, self.extract)) for name, each in found}

    def answers_per_task(self) -> int:
        """Return the maximum number of recorded answers for one task."""
        return self.description.answers_per_task

    @property
    def description(self) -> Description:
        """The description of the environment, as received from the servers."""
        return self.servers.describe()

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum reward of the environment on the servers."""
        return (self.description.least_reward, self.description.greatest_reward)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The sources of the tasks of the environment on the servers, by split."""
        return self.description.sources

    @property
    def alive(self) -> Sequence[str]:
        """The external programs of the environment on the servers."""
        return self.description.alive

    @property
    def constant_sum(self) -> bool:
        """Whether the sum of all rewards is constant."""
        return self.description.constant_sum

    def skipped(self) -> Mapping[Split, str]:
        """Return a description of the rows that the environment on the servers excludes, by split."""
        return self.description.skipped

    def contents(self) -> Mapping[str, str]:
        """Return the hash of the environment on the servers, computed from its class, settings and files."""
        return {f"environment '{self.description.name}' of the servers": self.description.content}

    def check(self, agents: Sequence[str]) -> None:
        """Connect to the servers and let their environment check the agents."""
        self.connect()
        self._call("check", agents=list(agents))

    def size(self, split: Split) -> int | None:
        """Return the number of tasks of a split, or None if it is unlimited."""
        return self.description.sizes[split]

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index; the task is the same on every server."""
        return task_from(self._call("task", split=split, index=index))

    def _call(self, call: str, **fields: Any) -> Any:
        request = {"call": call, "environment": self.serves, **fields}
        seconds = float(getattr(self, "timeout", Patience.environment)) + SPARE_SECONDS
        return self.servers.call(request, seconds)

    def extract(self, text: str) -> str | None:
        """Return the final answer that the environment on the servers extracts from a text, or None if there is none."""
        found: str | None = self._call("extract", text=text)
        return found

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the response of the scripted expert of the environment on the servers."""
        forms = [message_form(each) for each in messages]
        return str(self._call("script", agent=agent, task=task_form(task), messages=forms, seed=seed))

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return a recorded response from the environment on the servers."""
        return str(self._call("recorded", agent=agent, task=task_form(task), turn=turn, sample=sample))

    def register(self, name: str, settings: Mapping[str, Any]) -> int:
        """Add an environment to a server, or replace it, and return its version.

        `settings` are the settings of the environment. Raises ConfigError if the server rejects the environment, and
        EngineError if no server is reachable.
        """
        request = {"call": "register", "name": name, "settings": settings}
        return int(self.servers.call(request, READING_SECONDS)["version"])

    async def open_state(
        self, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> RemoteState:
        """Open an episode on the server with the fewest episodes, or on another server if that server fails."""
        request = {
            "environment": self.serves,
            "agents": list(agents),
            "task": task_form(task),
            "seed": seed,
            "call_seconds": patience.environment,
            "grader_seconds": patience.grader,
        }
        return await self.servers.open_state(request, self.name, patience)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> EpisodeState:
        """Open an episode and wait until it is open; this method is used by environments that contain this environment as a part."""
        from kapelle.environments.remote.servers import InnerState, ScorableInnerState, ServerState

        patience = patience_here.get()
        state = run_async(lambda: self.open_state(task, agents, seed, patience))
        assert isinstance(state, ServerState), "`open_state` returns a ServerState"
        return (ScorableInnerState if state.scorable else InnerState)(state, patience)


class _Member(Described, Reporting):
    """A part of a mixture on the servers."""

    def __init__(self, description: Description, extract: Callable[[str], str | None]) -> None:
        self.name = description.kind
        self.reward_range = (description.least_reward, description.greatest_reward)
        self.description = description
        self.extract = extract

    @property
    def constant_sum(self) -> bool:
        """Whether the sum of all rewards of this part is constant."""
        return self.description.constant_sum

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities of this part of the mixture."""
        return frozenset({Answerable} if self.description.answerable else ())
