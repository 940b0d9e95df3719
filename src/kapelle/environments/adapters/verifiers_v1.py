"""Adapter for environments of the package `verifiers` in its form `verifiers.v1` (0.4): tasksets, and programs of several agents.

    environment: {name: verifiers_v1, id: kuhn-poker, tasks: 1000, rewards: [-2, 2]}
    workflow: {name: external}
    team: {agents: [{name: player0}, {name: player1}]}

The package runs the episode (`Env.run`, `finalize`, the rewards of each trace) in its own process, as a program of the environment
`external` does. Each role calls the agent of the same name through kapelle's OpenAI-compatible address, so that every completion is
recorded with its tokens. See `verifiers_v1_program.py`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kapelle.environment import DrivenByPrograms, Reads, Reporting, Scripted
from kapelle.environments.base import StatedRewards
from kapelle.environments.external import SERVER, External, ExternalState, WaitingEpisode, board_of
from kapelle.environments.grading.text.tool_call import Form
from kapelle.environments.programs.processes import IMPORT_S, Program
from kapelle.environments.questions import place_of, split_of
from kapelle.environments.taught import WithTeacher
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.plugins import find_object
from kapelle.settings.base import FROM_HERE_ON
from kapelle.types import Json, Split, Task

PROGRAM = Path(__file__).with_name("verifiers_v1_program.py")


class VerifiersV1(StatedRewards, WithTeacher, Reads, Reporting, DrivenByPrograms, Scripted):
    """An environment of the package `verifiers`, version 0.4, whose roles are the agents of the team."""

    name: Literal["verifiers_v1"] = "verifiers_v1"
    id: str = Field(min_length=1)
    """The id of the taskset: the name of an installed package or of a module in the current folder that exports the taskset."""
    args: Mapping[str, Json] = Field(default={})
    """The block `[env]` of the package without its taskset: `id` selects an environment such as `user-sim` for the taskset, a role's
    name gives the settings of this role (`harness`, `runtime`, `max_turns`), and other keys are the environment's own settings."""
    taskset: Mapping[str, Json] = Field(default={})
    """The settings of the taskset, such as `{split: train}`."""
    evaluation: Mapping[str, Json] | None = None
    """The settings of the taskset for evaluation tasks, such as `{split: test}`. If null, a hash of each task determines its split."""
    tasks: int | None = Field(default=None, ge=1)
    """The number of tasks that are read from the taskset, which infinite tasksets need. If null, all tasks are read."""
    python: Annotated[str | None, FROM_HERE_ON] = None
    """The Python interpreter in whose environment `verifiers` and the taskset are installed. If null, the interpreter that runs
    kapelle is used."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=8, ge=1)
    """The maximum number of episodes that run at the same time."""
    tool_form: Form | None = None
    """The format in which agents call tools. If null, the format of the model's chat template is used, or `hermes` if the template
    defines no format."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test tasks with the version of the package and the roles."""
        found = self._taskset
        what = f"v1 environment of verifiers {found.version}, {found.environment}, {found.roles_text}"
        if self.evaluation is not None:
            return {"train": what, "test": f"the same, with {json.dumps(dict(self.evaluation))}"}
        return {"train": f"{what}; 4 of 5 tasks by a hash", "test": "1 of 5 tasks by a hash"}

    @property
    def alive(self) -> Sequence[str]:
        """The code of the environment, whose episodes cannot be repeated exactly."""
        return (f"the code of verifiers' `{self.id}`",)

    def contents(self) -> Mapping[str, str]:
        """Return a hash of the tasks."""
        digest = hashlib.blake2b(json.dumps(self._taskset.rows, sort_keys=True).encode(), digest_size=16)
        return {f"tasks of verifiers' {self.id}": digest.hexdigest()}

    def skipped(self) -> Mapping[Split, str]:
        """Return how many train tasks are excluded because they are also evaluation tasks."""
        excluded = self._taskset.excluded
        return {"train": f"{excluded} tasks, which are also evaluation tasks"} if excluded else {}

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of pipes and connections that one episode holds open."""
        return self._server().descriptors(agents)

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package or environment cannot be loaded, or the roles and the agents do not match."""
        self._server().check(agents)
        self.check_teacher()
        found, players = self._taskset, self._players(agents)
        missing = [role for role in found.roles if role not in players and role not in found.pinned]
        unknown = [agent for agent in agents if agent not in players.values()]
        if missing or unknown:
            raise ConfigError(
                f"The roles of verifiers' '{self.id}' are {', '.join(found.roles)}, but the agents are {', '.join(agents)}. Give the "
                "agents in `team.agents` the names of the roles; a role without an agent needs its own `model` and `client` in "
                "`environment.args`."
            )

    @property
    def demonstrates(self) -> bool:
        """Whether a `teacher` is set."""
        return self.teacher is not None

    def check_server(self, processes: int = 1) -> None:
        """Accept any number of processes, because each process serves its own episodes."""

    def serve(self, setup: Any, say: Callable[[str, str], None]) -> AbstractContextManager[None]:
        """Run the server that the roles call while the `with` block runs."""
        server: AbstractContextManager[None] = find_object(SERVER, "server")(
            self._server(), setup, say, key=self.key
        )
        return server

    def size(self, split: Split) -> int | None:
        """Return the number of tasks in a split."""
        return len(self._taskset.rows[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index."""
        row = self._taskset.rows[split][index]
        return Task(f"{split}-{index}", row["prompt"], {"split": split, "index": index})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalState:
        """Create the state of one episode. Raises EpisodeError if no server is running."""
        board = board_of(self.key)
        split, index = place_of(task.id)
        data = self._taskset.rows[split][index]["data"]
        row = {**self.request(split), "players": self._players(agents), "data": data}

        async def begin(episode: WaitingEpisode, waits: Callable[[], bool]) -> Program:
            if board.forks is None:
                raise EpisodeError("The process that runs the environment has ended.")
            return await board.forks.start(episode.variables(board.url, board.token), episode.given)

        return ExternalState(board, task, seed, tuple(agents), begin, self.programs, self.rewards[0], row)

    def request(self, split: Split) -> dict[str, Json]:
        """Return the settings that the program reads, for the tasks of a split."""
        taskset = self.evaluation if split == "test" and self.evaluation is not None else self.taskset
        return {
            "id": self.id,
            "args": dict(self.args),
            "taskset": dict(taskset),
            "players": {},
            "tasks": self.tasks,
            "rewards": self.rewards,
        }

    def _players(self, agents: Sequence[str]) -> dict[str, str]:
        """Return the agent of each role. The only agent plays the only role, whatever its name."""
        roles = self._taskset.roles
        if len(roles) == len(agents) == 1:
            return {roles[0]: agents[0]}
        return {role: role for role in roles if role in agents}

    @property
    def key(self) -> str:
        """The key under which episodes find the server of this environment."""
        return self.model_dump_json()

    def _server(self) -> External:
        return External(
            entry=f"{PROGRAM}:episode",
            python=self.python,
            programs=self.programs,
            port=0,
            rewards=self.rewards,
            tool_form=self.tool_form,
            teacher=self.teacher,
        )

    @property
    def _taskset(self) -> LoadedTaskset:
        requests = [self.request("train")]
        if self.evaluation is not None:
            requests.append(self.request("test"))
        return _load(self.python or sys.executable, *(json.dumps(each, sort_keys=True) for each in requests))


@dataclass(frozen=True)
class LoadedTaskset:
    """What the package reported about an environment, which is read once per process."""

    version: str
    environment: str
    roles: Sequence[str]
    pinned: Sequence[str]
    """The roles that call an endpoint of their own."""
    frozen: Sequence[str]
    """The roles that the environment excludes from training."""
    rows: Mapping[Split, Sequence[Mapping[str, Any]]]
    excluded: int
    """The number of train tasks that are also evaluation tasks."""

    @property
    def roles_text(self) -> str:
        """The roles, for a message."""
        notes = dict.fromkeys(self.frozen, " (not trained there; set `weights: frozen`)")
        return f"roles {', '.join(role + notes.get(role, '') for role in self.roles)}"


@lru_cache(maxsize=16)
def _load(python: str, train: str, test: str | None = None) -> LoadedTaskset:
    found = _described(python, train)
    rows: dict[Split, list[Mapping[str, Any]]] = {"train": [], "test": []}
    excluded = 0
    if test is None:
        for row in found["tasks"]:
            rows[split_of(_key(row))].append(row)
    else:
        rows["test"] = _described(python, test)["tasks"]
        held_out = set(map(_key, rows["test"]))
        rows["train"] = [row for row in found["tasks"] if _key(row) not in held_out]
        excluded = len(found["tasks"]) - len(rows["train"])
    about = {name: found[name] for name in ("version", "environment", "roles", "pinned", "frozen")}
    return LoadedTaskset(**about, rows=rows, excluded=excluded)


def _key(row: Mapping[str, Any]) -> str:
    """Return a string that identifies a task by its content, without its position in the taskset."""
    return json.dumps({name: value for name, value in row["data"].items() if name != "idx"}, sort_keys=True)


def _described(python: str, request: str) -> dict[str, Any]:
    """Return the description that the program prints. Raises ConfigError with the program's error."""
    command, what = [python, str(PROGRAM)], json.loads(request)["id"]
    try:
        ran = subprocess.run(  # noqa: S603 - the user's interpreter, our own file
            command, input=request, capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"`environment.python` ({python}) cannot be run: {error}. Set it to a Python interpreter with verifiers 0.4."
        ) from None
    try:
        found: dict[str, Any] = json.loads(ran.stdout)
    except (ValueError, RecursionError):
        raise ConfigError(
            f"{python} cannot import verifiers: {' '.join(ran.stderr.split())[-500:]} Repair its installation of verifiers 0.4."
        ) from None
    if "error" in found:
        raise ConfigError(
            f"verifiers cannot load '{what}' with {python}: {found['error'].rstrip('.')}. Install verifiers>=0.4,<0.5 "
            "and the package of the taskset in the environment of `environment.python`."
        )
    return found
