"""Episodes that are controlled by an external program. The program calls the agents over HTTP and posts their reward or an answer.

The tasks are defined by the program or by the environment in the setting `questions`, which also grades answers. Episodes run in
the event loop of the sampler, and a server on a different thread receives the calls of the program. A `Switchboard` connects
episodes and programs. The docstring of each method states whether the server or the episode calls the method.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import itertools
import json
import os
import re
import secrets
import ssl
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from kapelle.environment import (
    DrivenByPrograms,
    Environment,
    Outcome,
    Reporting,
    RewardsEpisodes,
    Scripted,
    UsesModels,
    has_comparable_answers,
    offers,
    report_of,
    reset_state,
)
from kapelle.environments.base import StatedRewards
from kapelle.environments.data.source import DataSettings
from kapelle.environments.grading.text.tool_call import Form
from kapelle.environments.programs.processes import ForkServer, Program, ProgramEnded, StartedProgram
from kapelle.environments.questions import InnerQuestions
from kapelle.environments.taught import WithTeacher
from kapelle.errors import AbsentCode, AbsentPackage, ConfigError, EpisodeError
from kapelle.runtime.batch_barrier import current_participant
from kapelle.runtime.credentials import LEAST_TOKEN, TOKEN, is_loopback
from kapelle.runtime.deadlines import pause_deadline
from kapelle.runtime.plugins import find_object, split_target
from kapelle.settings.base import FREE, FROM_HERE_ON
from kapelle.types import Episode, Json, Split, Task

# -------- The switchboard: it connects calls of outside programs with waiting episodes


class Over(Exception):
    """Raised if the episode or the whole run has ended, so that calls are no longer answered."""


@dataclass(frozen=True, slots=True)
class OutsideCall:
    """A call that an external program makes to an agent."""

    number: int
    """The number of the call within its episode."""
    agent: str
    request: Mapping[str, Json]
    """The request for the workflow `external`, with the keys `messages`, `after`, `max_tokens` and `stop`."""
    answer: Future[Mapping[str, Json]]
    """The future of the answer, which is cancelled when the caller disconnects."""


News = OutsideCall | Outcome | EpisodeError | None
"""An event of an episode: a call of an agent, the final reward, an error, or None to wake the episode. If the caller of a call
disconnects, the call is sent a second time."""


@dataclass(eq=False)
class WaitingEpisode:
    """An episode that is controlled by an external program."""

    name: str
    """The name of the session of the episode."""
    task: Task
    seed: int
    agents: tuple[str, ...]
    row: Mapping[str, Json] = field(default_factory=dict)
    """The row of the data set from which the task was created, or an empty mapping if there is no such row."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    """The queue of events that the episode has not processed yet."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[Future[Mapping[str, Json]]] = field(default_factory=set)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set when a program has taken the episode."""
    answering: set[str] = field(default_factory=set)
    """The agents that have answered at least one call."""
    truncated: dict[str, bool] = field(default_factory=dict)
    """Mapping from an agent to whether its latest answer was truncated at `max_tokens`."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Mapping from the number of a turn to the reward that the program has given to this turn."""
    closed: bool = False

    @property
    def given(self) -> dict[str, Json]:
        """The task in the form in which the program receives it."""
        split, _, index = self.task.id.rpartition("-")
        return {
            "id": self.task.id,
            "split": split.rpartition("/")[2],
            "index": int(index),
            "question": self.task.question,
            "row": self.row,
        }

    def variables(self, url: str, token: str | None) -> dict[str, str]:
        """Return the environment variables for the program of the episode, given the URL and the token of the server."""
        task = self.given
        return {
            "OPENAI_BASE_URL": f"{url}/sessions/{self.name}/v1",
            "OPENAI_API_KEY": token or "none",
            "ANTHROPIC_BASE_URL": f"{url}/sessions/{self.name}",  # its client appends `/v1`
            "ANTHROPIC_API_KEY": token or "none",
            "KAPELLE_SESSION": self.name,
            "KAPELLE_TASK": task["id"],
            "KAPELLE_SPLIT": task["split"],
            "KAPELLE_INDEX": str(task["index"]),
            "KAPELLE_SEED": str(self.seed),
        }

    def take(self) -> None:
        """Start the episode after a program has taken it. The server calls this method. Raises Over if the episode has ended."""
        self._in_loop(self.taken.set)

    def call(self, agent: str, request: Mapping[str, Json]) -> Future[Mapping[str, Json]]:
        """Pass a call to the episode and return the future of the answer. The server calls this method.

        If the caller disconnects, the server cancels the future, and the episode receives the call a second time. Raises Over if
        the episode has ended.
        """
        answer: Future[Mapping[str, Json]] = Future()
        with self._lock:
            if self.closed:
                raise Over
            self._open.add(answer)
            call = OutsideCall(next(self._numbers), agent, request, answer)
        self._in_loop(partial(self.news.put_nowait, call))

        def cancelled(answer: Future[Mapping[str, Json]]) -> None:
            if answer.cancelled():
                with suppress(Over):
                    self._in_loop(partial(self.news.put_nowait, call))

        answer.add_done_callback(cancelled)
        return answer

    def finish(self, outcome: Outcome) -> None:
        """End the episode with its rewards. The server calls this method. Raises Over if the episode has already ended."""
        self._in_loop(partial(self.news.put_nowait, outcome))

    def fail(self, error: EpisodeError) -> None:
        """End the episode without rewards. The server calls this method. Raises Over if the episode has already ended."""
        self._in_loop(partial(self.news.put_nowait, error))

    def answered(self, call: OutsideCall, answer: Mapping[str, Json]) -> None:
        """Send the answer to a call. The episode calls this method."""
        with self._lock:
            self._open.discard(call.answer)
            if "turn" in answer:
                self.answering.add(call.agent)
                self.truncated[call.agent] = answer["finish_reason"] == "length"
        if call.answer.set_running_or_notify_cancel():
            call.answer.set_result(answer)

    def close(self) -> None:
        """Stop answering calls. The episode calls this method."""
        with self._lock:
            self.closed = True
            unanswered, self._open = self._open, set()
        for answer in unanswered:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(Over())

    def _in_loop(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self.closed:
                raise Over
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the loop of the step has ended
            raise Over from None


MOST_REASONS = 1024
"""The maximum number of errors of failed episodes that are kept for later calls."""


class Switchboard:
    """Connects episodes that wait for a program with programs that wait for an episode."""

    def __init__(self, url: str, token: str | None, say: Callable[[str], None] = lambda _: None) -> None:
        """Store the URL and the token for programs. The function `say` prints a message for the user."""
        self.url = url
        self.token = token
        self.door: str | None = None
        """The path of the Unix socket for programs in sandboxes, or None if there is no such socket."""
        self.forks: ForkServer | None = None
        """The process that is forked for each episode, or None if there is no such process."""
        self.say = say
        self._quiet_until: dict[str, float] = {}
        """Mapping from the kind of a message to the time (of the monotonic clock) from which the message may be printed again."""
        self._unreported = 0
        """The number of failures since the last message about a failure."""
        self._failures: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._free: deque[WaitingEpisode] = deque()
        self._taken: dict[str, WaitingEpisode] = {}
        self._waiting: deque[Future[WaitingEpisode]] = deque()
        self._closed = False

    def offer(self, episode: WaitingEpisode) -> None:
        """Offer the episode to the next program that requests one. The episode calls this method."""
        with self._lock:
            if self._closed:
                raise EpisodeError("The server for outside programs was closed.")
            while self._waiting:
                waiting = self._waiting.popleft()
                if waiting.set_running_or_notify_cancel():
                    self._taken[episode.name] = episode
                    waiting.set_result(episode)
                    return
            self._free.append(episode)

    def give(self, episode: WaitingEpisode) -> None:
        """Register the episode, so that calls reach it by its name immediately. The episode calls this method."""
        with self._lock:
            self._taken[episode.name] = episode

    def withdraw(self, episode: WaitingEpisode) -> None:
        """Remove the episode and close it. The episode calls this method."""
        with self._lock:
            self._taken.pop(episode.name, None)
            with suppress(ValueError):
                self._free.remove(episode)
        episode.close()

    def take(self) -> Future[WaitingEpisode]:
        """Return the future of the next episode. The server calls this method. The future raises Over if no more episodes will start."""
        taken: Future[WaitingEpisode] = Future()
        with self._lock:
            if self._closed:
                taken.set_exception(Over())
            elif self._free:
                episode = self._free.popleft()
                self._taken[episode.name] = episode
                taken.set_running_or_notify_cancel()
                taken.set_result(episode)
            else:
                self._waiting.append(taken)
        return taken

    def running(self, name: str) -> WaitingEpisode | None:
        """Return the running episode with the given session name, or None if there is no such episode. The server calls this method."""
        with self._lock:
            return self._taken.get(name)

    def _may_report(self, kind: str, seconds: float) -> bool:
        """Return whether a message of this kind may be printed now.

        A message of a kind is printed at most once in the given number of seconds.
        """
        now = time.monotonic()
        if now < self._quiet_until.get(kind, 0.0):
            return False
        self._quiet_until[kind] = now + seconds
        return True

    def failed(self, episode: WaitingEpisode, why: str) -> None:
        """Report that the program of an episode failed. Frequent failures are combined into one message. The episode calls this method."""
        with self._lock:
            self._failures[episode.name] = why
            if len(self._failures) > MOST_REASONS:
                self._failures.popitem(last=False)
            if not self._may_report("failed", 10.0):
                self._unreported += 1
                return
            others, self._unreported = self._unreported, 0
        more = f" ({others} more episodes have failed since the last message.)" if others else ""
        self.say(f"the episode of task {episode.task.id} failed: {why}{more}")

    def why_over(self, name: str) -> str | None:
        """Return the reason why the episode of a session failed, or None if the reason is unknown. The server calls this method."""
        with self._lock:
            return self._failures.get(name)

    def warn_if_idle(self) -> None:
        """Print a message, at most once in five minutes, if episodes are waiting and no program has taken an episode.

        The episode calls this method.
        """
        with self._lock:
            waiting = len(self._free)
            if not waiting or self._taken or not self._may_report("idle", 300.0):
                return
        self.say(
            f"{waiting} episodes are waiting, but no program has requested one. Start your program, or check that it calls "
            f"POST {self.url}/v1/task."
        )

    def close(self) -> None:
        """Close all episodes and cancel all requests for episodes."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            episodes = [*self._free, *self._taken.values()]
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(Over())
        for episode in episodes:
            episode.close()


_boards: dict[str, Switchboard] = {}


@contextmanager
def switched_on(key: str, board: Switchboard) -> Iterator[None]:
    """Register the switchboard of an environment while the block runs. Raises ConfigError if the environment already has a switchboard."""
    if key in _boards:
        raise ConfigError(
            "Another trainer in this process already serves this `external` environment. Close that trainer first."
        )
    _boards[key] = board
    try:
        yield
    finally:
        del _boards[key]
        board.close()


def board_of(key: str) -> Switchboard:
    """Return the switchboard of an environment. Raises EpisodeError if no server is running for the environment."""
    if key not in _boards:
        raise EpisodeError(
            "This process has no server for outside programs. Train or evaluate with `kapelle`."
        )
    return _boards[key]


StartsIt = Callable[[WaitingEpisode, Callable[[], bool]], Awaitable[StartedProgram]]
"""A function that starts the program of an episode, given the episode and a function that returns whether the program is waiting for
an answer."""

# -------- The episode of an outside program: the program's calls decide which agent moves next

NOTICE_S = 60.0
"""The time in seconds for which episodes wait for a program before a message is printed."""

SERVER = "kapelle.services.policy.outside:serve_outside"
"""The path of the function that makes the agents of a run available to programs."""

ANSWER = "answer"
"""The key of the program's answer in the `info` of an episode."""
Grades = Callable[[Outcome, Sequence[str]], Awaitable[Outcome]]
"""A function that grades the answer in the outcome's `info` and returns the outcome with the rewards of the agents that acted."""

_free_programs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)
"""Mapping from an event loop to the semaphore that limits the number of running programs."""


class ExternalState:
    """The state of an episode that is controlled by an external program.

    A step without actions waits until there are new calls, a caller has disconnected, or the program has posted the reward. A step
    with actions answers calls and can run while another step is waiting. Observations and actions are JSON strings of the workflow
    `external`.
    """

    def __init__(
        self,
        board: Switchboard,
        task: Task,
        seed: int,
        agents: tuple[str, ...],
        start: StartsIt | None,
        programs: int,
        least: float = 0.0,
        row: Mapping[str, Json] | None = None,
        grade: Grades | None = None,
    ) -> None:
        """Prepare the episode.

        If `start` is given, it starts a separate program for the episode, and at most `programs` programs run at once.

        `least` is the reward if the program ends after a truncated answer. `row` is passed to the program as the data of its task,
        and `grade` computes the rewards for the program's answer.
        """
        self._board = board
        self._episode = WaitingEpisode(f"e-{secrets.token_hex(8)}", task, seed, agents, row or {})
        self._grade = grade
        self._start = start
        self._programs = programs
        self._least = least
        self._program: StartedProgram | None = None
        self._begun = False
        self._open: dict[int, OutsideCall] = {}
        """The calls that have not been answered yet, by number."""
        self._new: list[int] = []
        """The numbers of the calls that arrived during the last step."""
        self._disconnected: list[OutsideCall] = []
        """The calls whose caller disconnected during the last step."""
        self._outcome: Outcome | None = None
        self._running: asyncio.Semaphore | None = None

    def observe(self, agent: str) -> str:
        """Return a JSON string with the agent's new calls and the numbers of the calls whose caller has disconnected."""
        calls = [
            [number, self._open[number].request] for number in self._new if self._open[number].agent == agent
        ]
        return json.dumps(
            {"calls": calls, "gone": [call.number for call in self._disconnected if call.agent == agent]}
        )

    def movers(self) -> tuple[str, ...]:
        """Return the agents with new events, or an empty tuple after the program has posted its reward."""
        if self._outcome is not None:
            return ()
        news = [*(self._open[number] for number in self._new), *self._disconnected]
        return tuple(dict.fromkeys(call.agent for call in news))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Answer calls or, if there are no actions, wait for the program. Raises EpisodeError if the program ends without a reward."""
        if actions:
            for answer in actions.values():
                number, content = json.loads(answer)
                if (call := self._open.pop(number, None)) is not None:
                    self._episode.answered(call, content)
            self._episode.news.put_nowait(None)
            return {}
        participant = current_participant()
        if participant is not None:
            participant.give_up()  # a slow program must not hold back the batch
        self._new, self._disconnected = [], []
        if not self._begun:
            await self._begin()
        while not (self._new or self._disconnected or self._outcome):
            # The time limit excludes the time in which the program waits for our answers.
            timed = self._program is not None and self._program.timed
            resume_deadline = pause_deadline() if self._open or timed else None
            news = [await self._next()]
            if resume_deadline is not None:
                resume_deadline()
            while not self._episode.news.empty():
                news.append(self._episode.news.get_nowait())
            for event in news:
                if isinstance(event, EpisodeError):
                    self._board.failed(self._episode, str(event))
                    # Frameworks raise an exception on a truncated response. Without this reward, excessive length would have no cost.
                    if not (isinstance(event, ProgramEnded) and any(self._episode.truncated.values())):
                        raise event
                    rewards = dict.fromkeys(self._episode.answering, self._least)
                    event = Outcome(rewards, None, {"program": str(event)})  # noqa: PLW2901
                if isinstance(event, Outcome):
                    self._outcome = event
                    self._episode.close()
                    if ANSWER in event.info and self._grade is not None:
                        acted = [agent for agent in self._episode.agents if agent in self._episode.answering]
                        self._outcome = await self._grade(event, acted)
                elif isinstance(event, OutsideCall) and not event.answer.cancelled():
                    self._open[event.number] = event
                    self._new.append(event.number)
                elif isinstance(event, OutsideCall) and self._open.pop(event.number, None) is not None:
                    if event.number in self._new:
                        self._new.remove(event.number)  # no agent has read this call
                    else:
                        self._disconnected.append(event)
        return {}

    async def _begin(self) -> None:
        self._begun = True
        resume_deadlines = pause_deadline(outer_too=True)
        if self._start is None:
            self._board.offer(self._episode)
            while not self._episode.taken.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(NOTICE_S):
                        await self._episode.taken.wait()
                    break
                self._board.warn_if_idle()
            resume_deadlines()
            return
        loop = asyncio.get_running_loop()
        semaphore = _free_programs.setdefault(loop, asyncio.Semaphore(self._programs))
        await semaphore.acquire()
        resume_deadlines()
        self._running = semaphore
        self._board.give(self._episode)
        self._program = await self._start(self._episode, lambda: bool(self._open))

    async def _next(self) -> News:
        if self._program is None:
            return await self._episode.news.get()
        coming = asyncio.ensure_future(self._episode.news.get())
        ending = asyncio.ensure_future(self._program.ended())
        try:
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            await asyncio.sleep(0)  # the program's last post may not have reached the queue yet
            empty = self._episode.news.empty()
            return ending.result() if empty else self._episode.news.get_nowait()
        finally:
            for task in (coming, ending):
                task.cancel()
                with suppress(asyncio.CancelledError, EpisodeError):
                    await task

    def outcome(self) -> Outcome:
        """Return the outcome that the program has posted, with the rewards of individual turns."""
        return replace(
            self._outcome or Outcome(truncated=True), turn_rewards=dict(self._episode.turn_rewards)
        )

    async def close(self) -> None:
        """Stop answering calls and terminate the program."""
        self._board.withdraw(self._episode)
        try:
            if self._program is not None:
                await self._program.end()
        finally:
            if self._running is not None:
                self._running.release()


class External(StatedRewards, WithTeacher, Reporting, DrivenByPrograms, Scripted, RewardsEpisodes):
    """Episodes that are controlled by an external program. The program calls the agents through an OpenAI-compatible API.

    At the end of an episode, the program posts the reward. With the setting `entry` or `command`, each episode starts the program,
    which reads the URL of the server from `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`. Without these settings, the user starts the
    program, which requests episodes with `POST /v1/task`. See docs/programs.md and docs/serving.md.
    """

    name: Literal["external"] = "external"
    entry: Annotated[str | None, FROM_HERE_ON] = None
    """The function that runs one episode, written as `path/file.py:name` or `module:name`. The function takes the task as its argument
    (`episode(task)`) and may be `async`. The packages that the function uses are imported once, and each episode runs in a forked
    process."""
    python: Annotated[str | None, FROM_HERE_ON] = None
    """The Python interpreter that runs `entry`, such as the interpreter of a virtual environment. If null, the interpreter that runs
    kapelle is used."""
    command: Annotated[tuple[str, ...], FROM_HERE_ON] = ()
    """The program that is started for each episode, with its arguments. The setting must be empty if `entry` is set or the user starts
    the program. If the first word is `python`, the interpreter that runs kapelle is used."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=8, ge=1)
    """The maximum number of programs of `entry` or `command` that run at the same time."""
    questions: InnerQuestions | None = None
    """Settings of the environment that supplies the tasks for the program and grades its answers, such as `{name: math, …}`. If null,
    the program defines its own tasks."""
    port: Annotated[int, FREE] = Field(default=8000, ge=0, le=65_535)
    """The port of the server for programs. With 0, a free port is selected."""
    host: Annotated[str, FREE] = Field(default="127.0.0.1", min_length=1)
    """The network address of the server. An address other than a loopback address requires TLS and a token in the environment variable
    KAPELLE_TOKEN."""
    address: Annotated[str | None, FREE] = None
    """The host name or IP address under which programs reach the server, as in the TLS certificate. If null, `host` is used."""
    tls_cert: Annotated[str | None, FREE] = None
    """The PEM file with the TLS certificate and its chain. If null, the server uses HTTP without TLS."""
    tls_key: Annotated[str | None, FREE] = None
    """The PEM file with the private key of the certificate."""
    tasks: int | None = Field(default=None, ge=1)
    """The number of training tasks if `questions` is null. If null, the number of tasks is unlimited."""
    tool_form: Form | None = None
    """The format in which agents call the tools of the program. If null, the format of the model's chat template is used, or `hermes`
    if the template defines no format."""
    absence: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Maximum time in seconds for which a program that the user has started may be disconnected before its episode fails."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the tasks of each split, from the environment in `questions` if it is set and otherwise from the program."""
        if self.questions is not None:
            return self.questions.sources
        who = self.entry or (self.command[0] if self.command else "an outside program")
        return {"train": f"tasks of {who}", "test": f"tasks of {who} for the split `test`"}

    @property
    def alive(self) -> Sequence[str]:
        """The external program, because its episodes cannot be repeated exactly."""
        return ("the outside program",)

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum of `rewards` and of the rewards of `questions`."""
        ranges = [self.rewards] if self.questions is None else [self.rewards, self.questions.reward_range]
        return (min(low for low, _ in ranges), max(high for _, high in ranges))

    def skipped(self) -> Mapping[Split, str]:
        """Return a report on the excluded rows of `questions`."""
        return report_of(self.questions).skipped()

    @property
    def starts(self) -> bool:
        """Whether kapelle starts the program."""
        return bool(self.command) or self.entry is not None

    def descriptors(self, agents: int) -> int:
        """Return the maximum number of pipes and connections that one program holds open."""
        return 6 + agents

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if a package is missing, settings are inconsistent or a `teacher` is set without `entry` or `command`."""
        if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
            raise AbsentPackage(
                "`environment.name: external` needs an extra. Run: pip install 'kapelle[serve]'."
            )
        if self.teacher is not None:
            if not self.starts:
                raise ConfigError(
                    "`environment.teacher` needs a program that kapelle starts. Set `environment.entry` or "
                    "`environment.command`."
                )
            self.check_teacher()
        self._check_entry()
        if self.questions is not None:
            self._check_questions(self.questions, agents)

    def _check_entry(self) -> None:
        if self.entry is None:
            if self.python is not None:
                raise ConfigError(
                    "`environment.python` is set, but not `environment.entry`, which it runs. Set both, or remove `environment.python`."
                )
            return
        if self.command:
            raise ConfigError(
                "Both `environment.entry` and `environment.command` are set. Remove one of them."
            )
        if not hasattr(os, "fork"):
            raise ConfigError(
                "`environment.entry` needs an operating system that supports fork. Set `environment.command` instead."
            )
        module, name = split_target(self.entry)
        if not name:
            raise ConfigError(
                f"`environment.entry` is '{self.entry}', which does not name a function. Write `path/file.py:name` or `module:name`."
            )
        if module.endswith(".py") and not Path(module).is_file():
            raise AbsentCode(
                f"`environment.entry`: the file '{module}' does not exist. Give a path relative to the current folder."
            )

    def _check_questions(self, questions: Environment, agents: Sequence[str]) -> None:
        if self.tasks is not None:
            raise ConfigError(
                "`environment.questions` already defines the number of tasks. Remove `environment.tasks`."
            )
        if not has_comparable_answers(questions):
            raise ConfigError(
                f"`environment.questions` is `{questions.name}`, a game. Use an environment of questions, such as `math` or "
                "`rewarded`."
            )
        if offers(questions, UsesModels) and questions.frozen_models:
            raise ConfigError(
                f"A judge of `environment.questions` is '{questions.frozen_models[0].path}', a model in this process, which "
                "`external` does not support. Use an endpoint."
            )
        questions.check(agents)

    @property
    def demonstrates(self) -> bool:
        """Whether a `teacher` is set."""
        return self.teacher is not None

    def serve(self, setup: Any, say: Callable[[str, str], None]) -> AbstractContextManager[None]:
        """Run the server for programs while the `with` block runs."""
        # Imported by name, because services are a layer above environments.
        server: AbstractContextManager[None] = find_object(SERVER, "server")(self, setup, say)
        return server

    def check_server(self, processes: int = 1) -> None:
        """Raise ConfigError if the server for programs would be unsafe or unreachable.

        If there are several `processes`, each process serves its own episodes at its own address. Only the programs that a process
        starts know this address.
        """
        if processes > 1 and (not self.starts or self.port):
            raise ConfigError(
                f"With `environment.name: external`, each of the {processes} processes serves its own episodes. Set "
                "`environment.entry` or `environment.command`, and `environment.port: 0`, or train in one process."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "TLS needs two files: set both `environment.tls_cert` and `environment.tls_key`."
            )
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:  # ssl.SSLError is a subclass
                raise ConfigError(
                    f"`environment.tls_cert` and `environment.tls_key` cannot be used ({self.tls_cert}, {self.tls_key}): "
                    f"{error.strerror or error}."
                ) from None
        if (
            self.address is not None
            and _ip(self.address) is None
            and not re.fullmatch(r"[\w.-]+", self.address, re.ASCII)
        ):
            raise ConfigError(
                f"`environment.address` is '{self.address}'. Give only a name or an IP address, without a scheme or a port."
            )
        if is_loopback(self.host):
            return
        missing = [] if self.tls_cert else ["TLS (`environment.tls_cert` and `environment.tls_key`)"]
        if len(os.environ.get(TOKEN, "")) < LEAST_TOKEN:
            missing.append(
                f"a token of at least {LEAST_TOKEN} characters (in the environment variable {TOKEN})"
            )
        if missing:
            raise ConfigError(
                f"Other machines can reach `environment.host: {self.host}`, which needs {' and '.join(missing)}. Add what is missing, or remove "
                "`environment.host` to serve this machine only."
            )
        host = _ip(self.host)
        if self.address is None and host is not None and host.is_unspecified:
            raise ConfigError(
                f"`environment.host: {self.host}` listens on all addresses of this machine. Set `environment.address` to the name or IP "
                "address in the certificate, which programs then call."
            )

    def size(self, split: Split) -> int | None:
        """Return the number of tasks in a split, or None if it is unlimited. Without `questions`, the number of test tasks is unlimited."""
        if self.questions is not None:
            return self.questions.size(split)
        return self.tasks if split == "train" else None

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. Without `questions`, the task contains only its split and index, which the program interprets."""
        if self.questions is not None:
            return self.questions.task(split, index)
        return Task(f"{split}-{index}", "", {"split": split, "index": index})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalState:
        """Create an episode for the program and return its state. Raises EpisodeError if no server is running."""
        board = board_of(self.key)

        async def begin(episode: WaitingEpisode, waits: Callable[[], bool]) -> Program:
            variables = episode.variables(board.url, board.token)
            given = {**episode.given, "seed": seed}
            if board.forks is not None:
                return await board.forks.start(variables, given)
            return await Program.start(with_own_python(self.command), variables, given)

        row: Mapping[str, Json] = {}
        if self.questions is not None:
            rows = self.questions.rows if isinstance(self.questions, DataSettings) else None
            row = task.data if rows is None else rows.row_of(task.id).fields
        grade = None if self.questions is None else partial(graded, self.questions, task, seed)
        starts = begin if self.starts else None
        return ExternalState(
            board, task, seed, tuple(agents), starts, self.programs, self.rewards[0], row, grade
        )

    @contextmanager
    def forking(self, board: Switchboard) -> Iterator[None]:
        """Run the process that is forked for each episode while the block runs, if `entry` is set.

        Raises ConfigError if `entry` cannot be imported.
        """
        if self.entry is None:
            yield
            return
        # An API client that an imported package creates must not reach a running episode.
        variables = {
            "OPENAI_BASE_URL": f"{board.url}/sessions/importing/v1",
            "OPENAI_API_KEY": board.token or "none",
            "ANTHROPIC_BASE_URL": f"{board.url}/sessions/importing",
            "ANTHROPIC_API_KEY": board.token or "none",
        }
        with ForkServer(self.python or sys.executable, self.entry, variables) as board.forks:
            yield

    # -------- Rewards of questions that reward whole episodes, such as `rewarded`

    async def reward_episode(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Return the outcome with the rewards that `questions` assigns to the answer. A reward from the program is left unchanged."""
        questions: object = self.questions
        if offers(questions, RewardsEpisodes) and ANSWER in outcome.info:
            return await questions.reward_episode(episode, outcome)
        return outcome

    @property
    def compared(self) -> Sequence[str]:
        """The settings of `questions` that compare the episodes of a group."""
        questions: object = self.questions
        return questions.compared if offers(questions, RewardsEpisodes) else ()

    async def reward_group(self, episodes: Sequence[Episode]) -> Sequence[Outcome]:
        """Return the outcomes after `questions` has compared the episodes of a group."""
        questions: object = self.questions
        assert offers(questions, RewardsEpisodes), "`compared` is empty otherwise"
        return await questions.reward_group(episodes)

    @property
    def key(self) -> str:
        """The key under which episodes find the server of this environment."""
        return self.model_dump_json()


def with_own_python(command: Sequence[str]) -> list[str]:
    """Return a command in which a first word `python` or `python3` is replaced by the path of the interpreter that runs kapelle."""
    first, *others = command
    return [sys.executable if first in ("python", "python3") else first, *others]


async def graded(
    questions: Environment, task: Task, seed: int, outcome: Outcome, agents: Sequence[str]
) -> Outcome:
    """Return the outcome in which each agent receives the reward of the answer.

    Raises EpisodeError if one answer does not end the episode.
    """
    answer, first = str(outcome.info[ANSWER]), agents[0]
    state = questions.start(task, (first,), seed)
    try:
        await reset_state(state)
        await state.step({first: answer})
        if state.movers():
            raise EpisodeError(
                f"`environment.questions` ({questions.name}) has tasks that do not end after one answer. Use an environment with single-answer tasks."
            )
        found = state.outcome()
    finally:
        await state.close()
    rewards = {agent: found.rewards[first] for agent in agents if first in found.rewards}
    return replace(outcome, rewards=rewards, success=found.success, info={**found.info, **outcome.info})


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(address)
    return None
