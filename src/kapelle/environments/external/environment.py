"""Tasks of an outside program: kapelle counts them, the program knows what they are."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from kapelle.environments.external.switchboard import board_of
from kapelle.environments.external.world import ExternalWorld
from kapelle.errors import ConfigError
from kapelle.runtime.tokens import LEAST_TOKEN, TOKEN, is_loopback
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.types import Split, Task


class External(Settings):
    """An outside program plays: it calls the agents as OpenAI's chat completions and posts their reward.

    With a `command` it is started once for each episode, and finds the server in `OPENAI_BASE_URL`. Without one you start
    it yourself: it asks for episodes by `POST /v1/task`. The page docs/serving.md has both.
    """

    name: Literal["external"] = "external"
    command: Annotated[tuple[str, ...], FROM_HERE_ON] = ()
    """The program with its arguments; empty when you start it yourself."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=8, ge=1)
    """Most programs of `command` that run at once."""
    port: Annotated[int, FREE] = Field(default=8000, ge=0, le=65_535)
    """Where programs call; 0 takes a free port."""
    host: Annotated[str, FREE] = Field(default="127.0.0.1", min_length=1)
    """Address at which the server listens. Any but this machine's own needs TLS and a token in KAPELLE_TOKEN."""
    address: Annotated[str | None, FREE] = None
    """The name or number by which programs reach it, as in the certificate; null for `host`."""
    tls_cert: Annotated[str | None, FREE] = None
    """PEM file of its TLS certificate, chain included; null speaks plain HTTP."""
    tls_key: Annotated[str | None, FREE] = None
    """PEM file of the certificate's private key."""
    tasks: int | None = Field(default=None, ge=1)
    """How many tasks the program has to train on; null for tasks without end."""
    rewards: tuple[FiniteFloat, FiniteFloat] = (0.0, 1.0)
    """Least and greatest reward of an agent; one outside is refused when it is posted."""

    absence: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Seconds for which a program that asked for its episode may have no connection open before it counts as dead."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`."""
        return self.rewards

    @property
    def sources(self) -> Mapping[Split, str]:
        """The program itself."""
        who = self.command[0] if self.command else "an outside program"
        return {"train": f"tasks of {who}", "test": f"tasks of {who} for the split `test`"}

    @property
    def alive(self) -> Sequence[str]:
        """The program: its episodes cannot be replayed."""
        return ("the outside program",)

    def descriptors(self, agents: int) -> int:
        """Return the pipes and connections of one program."""
        return 4 + agents

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError where the package that speaks HTTP is missing, or the range of rewards is empty."""
        if importlib.util.find_spec("uvicorn") is None:
            raise ConfigError("`environment.name: external` needs an extra: pip install 'kapelle[serve]'.")
        if self.rewards[0] >= self.rewards[1]:
            raise ConfigError(f"environment.rewards is {list(self.rewards)}. Put the lower end first.")

    def check_server(self) -> None:
        """Raise ConfigError where the server that programs call could not be started safely, or not be reached."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "TLS needs a certificate and its key: set both `environment.tls_cert` and `environment.tls_key`."
            )
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(
                    f"`environment.tls_cert` and `environment.tls_key` cannot be used ({self.tls_cert}, {self.tls_key}): "
                    f"{error.strerror or error}."
                ) from None
        named = self.address is not None and not _is_number(self.address)
        if named and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.address or ""):
            raise ConfigError(
                f"`environment.address` is '{self.address}'. Give the name or number alone, without a scheme or a port."
            )
        if is_loopback(self.host):
            return
        lacking = [] if self.tls_cert else ["TLS (`environment.tls_cert` and `environment.tls_key`)"]
        if len(os.environ.get(TOKEN, "")) < LEAST_TOKEN:
            lacking.append(f"a token of {LEAST_TOKEN} characters or more (the environment variable {TOKEN})")
        if lacking:
            raise ConfigError(
                f"`environment.host: {self.host}` can be reached from other machines, and that needs {' and '.join(lacking)}. "
                "Add what is missing, or leave it out to serve programs of this machine only."
            )
        if self.address is None and _is_number(self.host) and ipaddress.ip_address(self.host).is_unspecified:
            raise ConfigError(
                f"`environment.host: {self.host}` listens at all addresses of this machine, and programs need one to call. Set "
                "`environment.address` to the name or number in the certificate."
            )

    def size(self, split: Split) -> int | None:
        """Return how many tasks there are to train on; those to test on come without end."""
        return self.tasks if split == "train" else None

    def task(self, split: Split, index: int) -> Task:
        """Return a number by which the program knows its task."""
        return Task(f"{split}-{index}", "", {"split": split, "index": index})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalWorld:
        """Offer an episode to the program."""
        return ExternalWorld(board_of(self.key), task, seed, tuple(agents), self.command, self.programs)

    @property
    def key(self) -> str:
        """What its worlds and its server find each other by."""
        return self.model_dump_json()


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
