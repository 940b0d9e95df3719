"""Task folders for agents that use a shell tool in the folder of the task; the tests of the task give the reward."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kapelle.environment import Outcome, Reads, Reporting, Scripted
from kapelle.environments.base import BaseState
from kapelle.environments.grading.text.tool_call import ReadCall, write_calls
from kapelle.environments.questions import require_agents
from kapelle.environments.task_folders.attempt import PROVIDERS, TaskRunResult, Workplace, built, grade
from kapelle.environments.task_folders.forms import RunLines, Runner, TaskFolder, read_task, task_folders
from kapelle.environments.task_folders.provider import Room, WorkspaceClosed
from kapelle.environments.tool_questions import CallSettings, ToolsState
from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, one_text
from kapelle.errors import ConfigError, DataError, EpisodeError, SandboxError
from kapelle.runtime.deadlines import pause_deadline
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.types import Json, Message, Split, Task

HELD_OUT = 5
"""Reciprocal of the fraction of test tasks in a single folder: every fifth task is a test task."""


class FolderSettings(Settings, Reads, Reporting):
    """Settings of both environments with task folders: the tasks and the limits of the sandbox."""

    path: str
    """Path of a task folder, or of a folder that contains task folders, in the format of Harbor (`task.toml`) or terminal-bench
    (`task.yaml`)."""
    test_path: str | None = None
    """Path of a separate folder with the test tasks. With null, every fifth task of `path` is held out for testing, selected by
    a hash of the name of the task."""
    sandbox: Literal["bubblewrap", "podman", "docker"] = "bubblewrap"
    """Where tasks run. With `bubblewrap`, tasks use the programs of this machine. With `podman` or `docker`, each task runs in
    containers of its image, which the engine builds or pulls."""
    tests: Runner = "script"
    """How the tests of a task are run. `script` runs the test script of the task. `pytest` runs the files `test_….py` of the
    task; all of their tests must pass."""
    run_lines: RunLines = "refuse"
    """How RUN lines of a Dockerfile are handled. With `refuse`, a RUN line raises an error. With `skip`, RUN lines are skipped.
    With `run`, RUN lines run in the sandbox without network access and without root permissions. `kapelle validate` lists
    the lines that were skipped or failed. Images of `podman` and `docker` include all RUN lines."""
    unplayable: Literal["refuse", "leave_out"] = "refuse"
    """How unsupported tasks are handled. With `refuse`, an unsupported task stops the run before it begins. With `leave_out`,
    the task is excluded and reported."""
    packages: tuple[str, ...] = ("pytest",)
    """Installed Python packages that are available in the sandbox, together with their dependencies. The sandboxes `podman` and
    `docker` have the packages of their image instead."""
    memory_mb: Annotated[int, FROM_HERE_ON] = Field(default=1024, ge=64)
    """Maximum memory in mebibytes for all programs and files of an episode. A task may set a lower limit."""
    disk_mb: Annotated[int, FROM_HERE_ON] = Field(default=128, ge=1)
    """Maximum total size in mebibytes of the files in one writable folder of the sandbox."""
    left_mb: int = Field(default=32, ge=1)
    """Maximum total size in mebibytes of the files at the end of an episode. If the files are larger, the episode receives the
    minimum reward."""
    processes: Annotated[int, FROM_HERE_ON] = Field(default=64, ge=8)
    """Maximum number of processes and threads in an episode."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum reward, which are 0 and 1."""
        return (0.0, 1.0)

    def room(self) -> Room:
        """Return the limits and contents of the sandbox."""
        return Room(
            self.memory_mb, self.disk_mb, self.left_mb, self.processes, self.packages, sandbox=self.sandbox
        )

    def folders(self, split: Split) -> tuple[TaskFolder, ...]:
        """Return the tasks of a split; raise DataError for an invalid or unsupported task."""
        return self._split(split).tasks

    def _split(self, split: Split) -> FolderSplit:
        leave_out = self.unplayable == "leave_out"
        images = self.sandbox != "bubblewrap"
        return _splits(self.path, self.test_path, self.tests, self.run_lines, leave_out, images)[split]

    def skipped(self) -> Mapping[Split, str]:
        """Return the number of excluded folders of each split and the reason why the first folder is excluded."""
        splits: tuple[Split, ...] = ("train", "test")
        found = {split: self._split(split).excluded for split in splits}
        return {split: f"{len(why)} task folders; the first: {why[0]}" for split, why in found.items() if why}

    def size(self, split: Split) -> int | None:
        """Return the number of tasks of a split."""
        return len(self.folders(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index; tasks are sorted by name."""
        folder = self.folders(split)[index]
        return Task(f"{split}-{folder.name}", folder.instruction, {"split": split, "index": index})

    def folder_of(self, task: Task) -> TaskFolder:
        """Return the task folder of a task."""
        return self.folders(task.data["split"])[task.data["index"]]

    def check_folders(self, room: Room) -> None:
        """Check the tasks, packages and sandbox; raise DataError, ConfigError or SandboxError if they cannot be used."""
        for split in ("train", "test"):
            if not self.folders(split):
                why = self.skipped().get(split)
                raise ConfigError(
                    f"`environment.path` ({self.path}) has too few tasks for a test split. Add tasks, or set `environment.test_path` to a "
                    f"folder of test tasks.{f' Excluded: {why}' if why else ''}"
                )
        PROVIDERS[self.sandbox].check(room)

    def contents(self) -> Mapping[str, str]:
        """Return a mapping from the path of each task folder to a hash of the task."""
        found = {}
        for split, place in (("train", self.path), ("test", self.test_path or self.path)):
            for folder in self.folders("train" if split == "train" else "test"):
                found[f"{place}/{folder.name}"] = hashlib.sha256(repr(folder).encode()).hexdigest()
        return found

    def doubts(self) -> Sequence[str]:
        """Return warnings about training on a benchmark and about tasks whose RUN lines were skipped or failed."""
        benchmarks = [folder.name for folder in self.folders("train") if folder.benchmark]
        message = (
            f"{len(benchmarks)} training tasks are marked as part of a benchmark, on which models should never be trained "
            f"({', '.join(benchmarks[:3])}). Move them to the folder `environment.test_path`."
        )
        every = (*self.folders("train"), *self.folders("test"))
        failed = [
            (folder.name, line)
            for folder in every
            if folder.run
            for line in built(folder, self.room()).failed
        ]
        return [
            *[message] * bool(benchmarks),
            *(
                f"The task {name} is used although a line of its Dockerfile failed: RUN {line[:60]}"
                for name, line in failed
            ),
            *(
                f"The task {folder.name} is used without {len(folder.without)} lines of its Dockerfile ({folder.without[0][:60]})."
                for folder in every
                if folder.without
            ),
        ]


@dataclass(frozen=True, slots=True)
class FolderSplit:
    """The tasks of one split."""

    tasks: tuple[TaskFolder, ...]
    excluded: tuple[str, ...]
    """The reasons why folders are excluded, one reason per folder."""


@cache
def _splits(
    path: str, test_path: str | None, tests: Runner, run_lines: RunLines, leave_out: bool, images: bool
) -> Mapping[Split, FolderSplit]:
    def read(places: Sequence[Path]) -> FolderSplit:
        tasks, why = [], []
        for place in places:
            try:
                tasks.append(read_task(place, tests, run_lines, images=images))
            except DataError as error:
                if not leave_out:
                    raise DataError(
                        f"{error} To exclude such tasks, set `environment.unplayable: leave_out`."
                    ) from None
                why.append(str(error))
        return FolderSplit(tuple(tasks), tuple(why))

    places = task_folders(path)
    if test_path is not None:
        if Path(test_path).resolve() == Path(path).resolve():
            raise ConfigError(
                "`environment.path` and `environment.test_path` are the same folder. Use different folders, or omit `test_path`."
            )
        return {"train": read(places), "test": read(task_folders(test_path))}
    order = sorted(places, key=lambda place: hashlib.sha256(place.name.encode()).hexdigest())
    held = set(order[: -(-len(order) // HELD_OUT)]) if len(order) > 1 else set()
    return {
        "train": read([each for each in places if each not in held]),
        "test": read([each for each in places if each in held]),
    }


# -------- Agents with a shell tool


class TaskFolders(CallSettings, FolderSettings, Scripted):
    """An environment of shell tasks: agents run commands in a copy of the task folder, and its tests give all agents the same reward."""

    name: Literal["task_folders"] = "task_folders"
    max_turns: int = Field(default=16, ge=1)
    """Maximum number of turns of an agent. If an agent has sent no final message after this number of turns, the reward is 0."""
    call_s: Annotated[float, FREE] = Field(default=60.0, gt=0.0)
    """Maximum time in seconds for one command."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The task folders, by split."""
        test = self.test_path or f"every fifth of {self.path}"
        return {"train": f"task folders of {self.path}", "test": f"task folders: {test}"}

    def check(self, agents: Sequence[str]) -> None:
        """Read every task; raise DataError for an unsupported task and SandboxError if no sandbox is available."""
        self.check_folders(self.room())

    def descriptors(self, agents: int) -> int:
        """Return the number of file descriptors of one sandbox."""
        return 8

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ToolsState:
        """Create the state of one episode; its sandbox starts with the first command."""
        folder = self.folder_of(task)
        place = Workplace(folder, self.room())
        boxes = {agent: [Shell(place, self.call_s, self.max_characters)] for agent in agents}
        schemas = [tool.schema for tool in boxes[agents[0]][0].tools]
        # A command has its own time limit, but the commands of other agents may run first.
        waiting = self.model_copy(update={"call_s": (self.call_s + 60.0) * len(agents)})
        return ToolsState(FolderState(task, agents, place, self.room()), boxes, schemas, waiting)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the solution of the task as one command, then a final message; raise ConfigError if the task has no solution."""
        solution = self.folder_of(task).solution
        if solution is None:
            raise ConfigError(f"The task {task.id} has no solution. Add the file solution/solve.sh.")
        if messages and not messages[-1].content.endswith(task.question):
            return "Done."
        return write_calls([ReadCall("shell", {"command": solution})], self.form)


class Shell(Toolbox):
    """The tool `shell`, which runs a command in the folder of the team."""

    def __init__(self, place: Workplace, call_s: float, most: int) -> None:
        self._place, self._call_s, self._most = place, call_s, most
        schema = one_text(
            "shell", "Runs a command of bash in the task's folder and returns what it prints.", "command"
        )
        super().__init__(Tool(schema, self.run))

    def run(self, arguments: Mapping[str, Json]) -> str:
        """Run the string `command` and return its output; raise ToolFault if the sandbox has stopped."""
        command = arguments["command"]
        if "\0" in command or len(command) > 100_000:
            raise ToolFault(
                "A command must not contain NUL characters and must not exceed 100,000 characters."
            )
        try:
            code, output = self._place.run(["bash", "-c", command], self._call_s, 4 * self._most)
        except WorkspaceClosed as ended:
            raise ToolFault(f"The shell has ended: {ended}.") from None
        except SandboxError as error:
            raise EpisodeError(str(error)) from None
        if code is None:
            return f"{output}\n(ended: it took more than {self._call_s:g} s)"
        output = output.rstrip()
        return output if code == 0 and output.strip() else f"{output}\n(exit code {code})".lstrip()

    def close(self) -> None:
        """Stop the sandbox of the team."""
        self._place.close()


class FolderState(BaseState):
    """The state of one episode; the tests run after the final messages of the team."""

    def __init__(self, task: Task, agents: Sequence[str], place: Workplace, room: Room) -> None:
        super().__init__(task, agents)
        self._place, self._room = place, room
        self._verdict: TaskRunResult | None = None

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Run the tests on the files of the team and set the rewards."""
        require_agents(actions, self.agents, "answered")
        resume_deadline = pause_deadline()  # tests have their own time limit
        try:
            self._verdict = await asyncio.to_thread(finish, self._place, self._room)
        finally:
            resume_deadline()
        self.success = self._verdict.reward
        self.rewards = dict.fromkeys(actions, self._verdict.reward)
        self.over = True
        return {}

    def outcome(self) -> Outcome:
        """Return the result of the tests as the outcome of the episode."""
        if self._verdict is None:
            return Outcome({}, 0.0, truncated=True)
        return Outcome(self.rewards, self.success, verdict_info(self._verdict))


def finish(place: Workplace, room: Room) -> TaskRunResult:
    """Stop the sandbox of the agents and grade their files; raise EpisodeError if no sandbox is available for the tests."""
    try:
        entries, why = place.take()
        return (
            TaskRunResult(0.0, f"No tests ran: {why}.")
            if why is not None
            else grade(place.task, entries, room)
        )
    except SandboxError as error:
        raise EpisodeError(f"The tests of {place.task.name} could not be run: {error}") from None


def verdict_info(verdict: TaskRunResult) -> dict[str, Json]:
    """Return the result of the tests in the form in which the record of an episode stores it."""
    return {"tests": verdict.why, "tests_said": verdict.said, "rewards": dict(verdict.parts)}
