"""Task folders for a coding agent of somebody else's: a program of the command line, which runs in the sandbox as it is.

    the agent ── HTTP ─▶ relay of the sandbox ── Unix socket ─▶ policy server ─▶ the episode's agents (workflow `external`)

The program finds `OPENAI_BASE_URL` in its environment, and nothing else can be reached: the sandbox has no network, and at the
socket only answers of the agents are to be had. When it ends, or its time is over, the task's tests run.
"""

from __future__ import annotations

import asyncio
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
    Alive,
    Holding,
    Outcome,
    PlayedFromOutside,
    Scripted,
)
from kapelle.environments.external import SERVER, SHOWN, External, ExternalWorld, WaitingEpisode, board_of
from kapelle.environments.grading.text.tool_call import Form
from kapelle.environments.task_folders.attempt import INSTRUCTION, PORT, Room, Workplace, WorkplaceOver
from kapelle.environments.task_folders.environment import FolderSettings, finish, told
from kapelle.environments.taught import WithTeacher
from kapelle.errors import ConfigError, EpisodeError, SandboxError
from kapelle.runtime.plugins import find_object
from kapelle.settings.base import FROM_HERE_ON
from kapelle.types import Split, Task

MODEL = "team"
"""What the policy server calls a team in training: its agents are `team/NAME`."""
ADDRESS_MB = 128 << 10
"""Mebibytes of address space of an agent's programs: a WebAssembly module of Node reserves 10 GiB (its `fetch` has one).
What they use of it is bounded by `memory_mb`."""


class CodingAgent(FolderSettings, WithTeacher, Alive, Holding, PlayedFromOutside, Scripted):
    """A coding agent of the command line works on task folders in a sandbox and calls the team; the tasks' tests pay.

    It is started once for each episode, in the task's folder. Its calls become turns of the agents that it calls by their
    models' names, `team/NAME`.
    """

    name: Literal["coding_agent"] = "coding_agent"
    command: Annotated[tuple[str, ...], FROM_HERE_ON] = Field(min_length=1)
    """The program with its arguments, in which `{instruction}` and `{model}` stand for the task and the first agent's model."""
    files: tuple[str, ...] = ()
    """Files of the program, which the sandbox has as `/agent/NAME`."""
    visible: tuple[str, ...] = ()
    """Folders and files of this machine that the agent's sandbox has at the same place, to read: a virtual environment, a program."""
    env: Mapping[str, str] = Field(default={})
    """Further variables of the program."""
    time_limit: float | None = Field(default=None, gt=0.0)
    """Seconds that the program may take beside the time in which it waits for answers; null for what the task says."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=4, ge=1)
    """Most programs that run at once."""
    tool_form: Form | None = None
    """How agents call the tools that the program offers; null for the form of their chat template, or else `hermes`."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The folders, and who works on them."""
        test = self.test_path or f"every fifth of {self.path}"
        return {
            "train": f"task folders of {self.path}, for {self.command[0]}",
            "test": f"task folders: {test}, for {self.command[0]}",
        }

    @property
    def alive(self) -> Sequence[str]:
        """The program: its episodes cannot be replayed."""
        return ("the coding agent",)

    def check(self, agents: Sequence[str]) -> None:
        """Read every task; DataError, ConfigError or SandboxError for what cannot be played on this machine."""
        self._server().check(agents)
        for name in self.env:
            if name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"):
                raise ConfigError(f"`environment.env` sets {name}, which kapelle sets. Leave it out.")
        self.check_folders(self._room(None))

    def descriptors(self, agents: int) -> int:
        """Return what one sandbox holds open, and the connections of its program."""
        return 12 + agents

    @property
    def demonstrates(self) -> bool:
        """Whether there is a `teacher`."""
        return self.teacher is not None

    def check_server(self, processes: int = 1) -> None:
        """Accept any number of processes: each serves its own episodes."""

    @contextmanager
    def serve(self, play: Any, say: Callable[[str, str], None]) -> Iterator[None]:
        """Run the server that programs call, with a socket for sandboxes, while the block runs."""
        with tempfile.TemporaryDirectory(prefix="kapelle-") as folder:
            Path(folder).chmod(0o711)  # its socket is found by who knows its name: the sandboxes' user, by us
            door = Path(folder) / secrets.token_hex(8)
            served: AbstractContextManager[None] = find_object(SERVER, "server")(
                self._server(), play, say, key=self.key, door=door
            )
            with served:
                yield

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalWorld:
        """Open the world of one attempt; EpisodeError where nobody serves it."""
        board, folder = board_of(self.key), self.folder_of(task)
        place = Workplace(folder, self._room(board.door))
        seconds = self.time_limit or folder.agent_s

        async def begin(seat: WaitingEpisode, waits: Callable[[], bool]) -> RunningAgent:
            address = f"http://127.0.0.1:{PORT}/sessions/{seat.name}/v1"
            env = {
                **self.env,
                "OPENAI_BASE_URL": address,
                "OPENAI_API_BASE": address,
                "OPENAI_API_KEY": "none",
                "KAPELLE_INSTRUCTION": INSTRUCTION,
                "KAPELLE_SEED": str(seed),
            }
            words = {"{instruction}": folder.instruction, "{model}": f"{MODEL}/{agents[0]}"}
            command = [_filled(word, words) for word in self.command]
            return RunningAgent(place, self.room(), command, env, seconds, seat, waits)

        return ExternalWorld(board, task, seed, tuple(agents), begin, self.programs)

    @property
    def key(self) -> str:
        """What its worlds and its server find each other by."""
        return self.model_dump_json()

    def _server(self) -> External:
        """Return the settings of what serves the agents: a port of its own, on this machine alone."""
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


def _filled(word: str, words: Mapping[str, str]) -> str:
    # At once: an instruction may have such braces itself.
    for key, value in words.items():
        if key in word:
            before, _, after = word.partition(key)
            return _filled(before, words) + value + _filled(after, words)
    return word


class RunningAgent:
    """A coding agent in its sandbox, and then its tests: all of it in one thread, which ends with the episode."""

    timed = True

    def __init__(
        self,
        place: Workplace,
        room: Room,
        command: Sequence[str],
        env: Mapping[str, str],
        seconds: float,
        seat: WaitingEpisode,
        waits: Callable[[], bool],
    ) -> None:
        self._place, self._room, self._command, self._env = place, room, command, env
        self._seconds, self._seat, self._waits = seconds, seat, waits
        self._stop = threading.Event()
        # A sandbox ends with the thread that started it. So it has one, which nobody else waits for.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kapelle-coding-agent")
        self._over = asyncio.get_running_loop().run_in_executor(self._thread, self._play)

    async def ended(self) -> Outcome | EpisodeError:
        """Wait until its tests have run, and return what they say of all agents that it has called."""
        return await asyncio.shield(self._over)

    async def end(self) -> None:
        """End it, and its sandbox; tests that run are waited for."""
        self._stop.set()
        await asyncio.wait((self._over,))
        self._thread.shutdown()

    def _play(self) -> Outcome | EpisodeError:
        try:
            code, said = self._place.play(
                self._command, self._env, self._seconds, 8192, waits=self._waits, stop=self._stop
            )
        except WorkplaceOver as over:
            code, said = None, str(over)
        except SandboxError as error:
            return EpisodeError(f"The coding agent's sandbox could not be had: {error}")
        last = " ".join(said.split())[-SHOWN:]
        if self._stop.is_set():
            return EpisodeError("The episode is over.")
        if not self._seat.answering:
            self._place.close()
            return EpisodeError(
                f"The coding agent ended with code {code} and was answered by nobody, so there is nothing to learn from. Look whether it calls "
                f"`OPENAI_BASE_URL` and finds its files (`environment.files`, `visible`, `packages`). It said: {last or '(nothing)'}"
            )
        try:
            verdict = finish(self._place, self._room)
        except EpisodeError as error:
            return error
        spoke = [agent for agent in self._seat.agents if agent in self._seat.answering]
        info = {**told(verdict), "code": code, "said": last}
        return Outcome(dict.fromkeys(spoke, verdict.reward), verdict.reward, info)
