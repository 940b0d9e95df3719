"""Task folders for an existing coding agent, which is a command-line program that runs unchanged in a sandbox.

    the agent ── HTTP ─▶ relay of the sandbox ── Unix socket ─▶ policy server ─▶ the episode's agents (workflow `external`)

The program calls `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL` and cannot reach any other server: the sandbox has no network, and the socket only returns
responses of the trained agents. The tests of the task run when the program ends or its time limit is reached.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kapelle.environment import (
    DrivenByPrograms,
    Outcome,
    Scripted,
)
from kapelle.environments.external import SERVER, External, ExternalState, WaitingEpisode, board_of
from kapelle.environments.grading.text.tool_call import Form
from kapelle.environments.programs.processes import SHOWN
from kapelle.environments.task_folders.attempt import Workplace
from kapelle.environments.task_folders.bubblewrapped import INSTRUCTION, PORT
from kapelle.environments.task_folders.environment import FolderSettings, finish, verdict_info
from kapelle.environments.task_folders.provider import Room, WorkspaceClosed
from kapelle.environments.taught import WithTeacher
from kapelle.errors import ConfigError, EpisodeError, SandboxError
from kapelle.runtime.plugins import find_object
from kapelle.settings.base import FROM_HERE_ON
from kapelle.types import Split, Task

MODEL = "team"
"""The name of the trained team on the policy server. The agents of the team are available as the models `team/NAME`."""
ADDRESS_MB = 128 << 10
"""Maximum address space in mebibytes of each program of a coding agent. The limit is large because `fetch` of Node reserves 10
GiB for a WebAssembly module. `memory_mb` limits how much of the reserved space is used."""


class CodingAgent(FolderSettings, WithTeacher, DrivenByPrograms, Scripted):
    """An environment in which a coding agent works on task folders and calls the trained team; the tests give the reward.

    Each episode starts the coding agent once, in the folder of the task. Calls to the models `team/NAME` become turns of the
    agents with these names.
    """

    name: Literal["coding_agent"] = "coding_agent"
    command: Annotated[tuple[str, ...], FROM_HERE_ON] = Field(min_length=1)
    """The coding agent: a program with its arguments. The placeholder `{instruction}` is replaced with the instruction of the
    task and `{model}` with the model of the first agent."""
    files: tuple[str, ...] = ()
    """Paths of files of the coding agent, which are copied to `/agent/NAME` in the sandbox."""
    visible: tuple[str, ...] = ()
    """Folders and files of the host, such as a virtual environment, that are visible (read-only) in the sandbox at the same
    path."""
    env: Mapping[str, str] = Field(default={})
    """Additional environment variables for the coding agent."""
    time_limit: float | None = Field(default=None, gt=0.0)
    """Maximum time in seconds for the coding agent, excluding the time in which it waits for responses. With null, the time
    limit of the task is used."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=4, ge=1)
    """Maximum number of coding agents that run concurrently."""
    tool_form: Form | None = None
    """Format in which the trained agents call the tools of the coding agent. With null, this is the format of their chat
    template, or `hermes` if the template has none."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The task folders and the program, by split."""
        test = self.test_path or f"every fifth of {self.path}"
        return {
            "train": f"task folders of {self.path}, for {self.command[0]}",
            "test": f"task folders: {test}, for {self.command[0]}",
        }

    @property
    def alive(self) -> Sequence[str]:
        """The external program, whose episodes cannot be repeated."""
        return ("the coding agent",)

    def check(self, agents: Sequence[str]) -> None:
        """Read every task and check the sandbox.

        Raises DataError, ConfigError or SandboxError if a task, a setting or the sandbox cannot be used on this machine.
        """
        self._server().check(agents)
        if self.sandbox != "bubblewrap":
            raise ConfigError(
                f"`environment.sandbox` is `{self.sandbox}`, but a coding agent runs only in `bubblewrap`. Remove the setting, or use the "
                "environment `task_folders`."
            )
        own = (
            "OPENAI_BASE_URL",
            "OPENAI_API_BASE",
            "OPENAI_API_KEY",
            "ANTHROPIC_BASE_URL",
            "ANTHROPIC_API_KEY",
        )
        for name in self.env:
            if name in own:
                raise ConfigError(
                    f"`environment.env` sets {name}, but kapelle sets this variable itself. Remove it."
                )
        self.check_folders(self._room(None))

    def descriptors(self, agents: int) -> int:
        """Return the number of file descriptors of one sandbox and of the connections of its program."""
        return 12 + agents

    @property
    def demonstrates(self) -> bool:
        """Whether a `teacher` is configured."""
        return self.teacher is not None

    def check_server(self, processes: int = 1) -> None:
        """Accept any number of processes, because each process serves its own episodes."""

    @contextmanager
    def serve(self, setup: Any, say: Callable[[str, str], None]) -> Iterator[None]:
        """Run the server for programs, with a socket for sandboxes, while the context is active."""
        with tempfile.TemporaryDirectory(prefix="kapelle-") as folder:
            Path(folder).chmod(
                0o711
            )  # the socket has a random name, which sandboxes receive only from kapelle
            door = Path(folder) / secrets.token_hex(8)
            served: AbstractContextManager[None] = find_object(SERVER, "server")(
                self._server(), setup, say, key=self.key, door=door
            )
            with served:
                yield

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalState:
        """Create the state of one episode; raise EpisodeError if no server is running."""
        board, folder = board_of(self.key), self.folder_of(task)
        place = Workplace(folder, self._room(board.door))
        seconds = self.time_limit or folder.agent_s

        async def begin(episode: WaitingEpisode, waits: Callable[[], bool]) -> RunningAgent:
            address = f"http://127.0.0.1:{PORT}/sessions/{episode.name}"
            env = {
                **self.env,
                "OPENAI_BASE_URL": f"{address}/v1",
                "OPENAI_API_BASE": f"{address}/v1",
                "OPENAI_API_KEY": "none",
                "ANTHROPIC_BASE_URL": address,
                "ANTHROPIC_API_KEY": "none",
                "KAPELLE_INSTRUCTION": INSTRUCTION,
                "KAPELLE_SEED": str(seed),
            }
            values = {"{instruction}": folder.instruction, "{model}": f"{MODEL}/{agents[0]}"}
            command = [_filled(word, values) for word in self.command]
            return RunningAgent(place, self.room(), command, env, seconds, episode, waits)

        return ExternalState(board, task, seed, tuple(agents), begin, self.programs)

    @property
    def key(self) -> str:
        """The key with which episodes find the server of the environment."""
        return self.model_dump_json()

    def _server(self) -> External:
        """Return the settings of the server for programs, which uses a free port and is reachable only from this machine."""
        return External(
            command=self.command,
            port=0,
            programs=self.programs,
            tool_form=self.tool_form,
            teacher=self.teacher,
        )

    def _room(self, socket: str | None) -> Room:
        return replace(
            self.room(), visible=self.visible, files=self.files, socket=socket, address_mb=ADDRESS_MB
        )


def _filled(word: str, values: Mapping[str, str]) -> str:
    # All placeholders are replaced in one pass, because an instruction may itself contain such placeholders.
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], word)


class RunningAgent:
    """A coding agent and the tests after it, which run in one thread until the end of the episode."""

    timed = True

    def __init__(
        self,
        place: Workplace,
        room: Room,
        command: Sequence[str],
        env: Mapping[str, str],
        seconds: float,
        episode: WaitingEpisode,
        waits: Callable[[], bool],
    ) -> None:
        self._place, self._room, self._command, self._env = place, room, command, env
        self._seconds, self._episode, self._waits = seconds, episode, waits
        self._stop = threading.Event()
        # A sandbox ends with the thread that started it, so each agent has its own thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kapelle-coding-agent")
        self._over = asyncio.get_running_loop().run_in_executor(self._thread, self._play)

    async def ended(self) -> Outcome | EpisodeError:
        """Wait for the tests and return the outcome, which gives the reward to all agents that were called."""
        return await asyncio.shield(self._over)

    async def end(self) -> None:
        """Stop the coding agent and its sandbox, but wait for tests that are already running."""
        self._stop.set()
        await asyncio.wait((self._over,))
        self._thread.shutdown()

    def _play(self) -> Outcome | EpisodeError:
        try:
            code, output = self._place.play(
                self._command, self._env, self._seconds, 8192, waits=self._waits, stop=self._stop
            )
        except WorkspaceClosed as over:
            code, output = None, str(over)
        except SandboxError as error:
            return EpisodeError(f"The sandbox of the coding agent could not be used: {error}")
        last = " ".join(output.split())[-SHOWN:]
        if self._stop.is_set():
            return EpisodeError("The episode has ended.")
        if not self._episode.answering:
            self._place.close()
            return EpisodeError(
                f"The coding agent ended with code {code} before any agent had responded. Check that it calls `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL` and finds "
                f"its files (`environment.files`, `visible`, `packages`). Its output: {last or '(nothing)'}"
            )
        try:
            verdict = finish(self._place, self._room)
        except EpisodeError as error:
            return error
        called = [agent for agent in self._episode.agents if agent in self._episode.answering]
        info = {**verdict_info(verdict), "code": code, "said": last}
        return Outcome(dict.fromkeys(called, verdict.reward), verdict.reward, info)
