"""Environments written for the package verifiers (its classic form, 0.2.1 to 0.3: `vf.load_environment`).

    environment: {name: verifiers, id: my-env, args: {difficulty: easy}}

The package's own `rollout` plays: it asks a model for each answer, and here that model is the team (`ask`). So whatever an
environment of theirs does between two answers (user turns, tools, stop conditions, its own subclass of `MultiTurnEnv`) happens
as it does there, and its own rubric pays.

An environment of single turns becomes one of questions: several agents may answer, debate or work in a chain, each text is
graded by a rollout of its own. Any other is a conversation with one seat (`OneSeat`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import (
    Alive,
    Answerable,
    Described,
    OneSeat,
    Outcome,
    Reads,
    Resets,
    Scripted,
    Skipping,
)
from kapelle.environments.base import BaseWorld, StatedRewards
from kapelle.environments.grading.text.tool_call import Form, NotCalls, beside_calls, parse_calls
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import QuestionWorld, answer_of, split_of
from kapelle.environments.taught import WithTeacher
from kapelle.environments.tools.contract import Listing, signatures_prompt, tools_prompt
from kapelle.errors import AbsentPackage, ConfigError, DataError, EpisodeError, KapelleError
from kapelle.runtime.deadlines import patience_here, pause_deadline, within
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_object, importable_here
from kapelle.types import Json, Message, Split, Task

NEEDED = (
    "The environment `verifiers` needs the package verifiers in its classic form, {found}. Install it with "
    "`pip install 'kapelle[verifiers]'`, into an environment of its own where other packages disagree."
)


class Verifiers(StatedRewards, WithTeacher, Described, Alive, Reads, Skipping):
    """An environment of the package verifiers by its id; its rubric pays, and its own sets of tasks are the splits."""

    name: Literal["verifiers"] = "verifiers"
    id: str = Field(min_length=1)
    """Name of an installed environment, as `vf.load_environment` takes it, of a module in the current folder, or `path/file.py`."""
    args: Mapping[str, Json] = Field(default={})
    """Keyword arguments of its `load_environment`."""
    demonstration: str = "{answer}"
    """How the right answer of a single turn is written when it is demonstrated, `<answer>{answer}</answer>` for instance."""
    form: Form = "hermes"
    """How the agents' model writes calls of its tools: `hermes` (Hermes, Qwen), `llama` (JSON) or `pythonic`."""
    listing: Listing = "schemas"
    """How agents read of its tools: `schemas`, or a line each (`signatures`) for tiny models."""

    @property
    def offered(self) -> frozenset[type]:
        """Single turns are questions; a conversation has one seat, and demonstrations where a `teacher` gives them."""
        if self._loaded.single:
            return frozenset({Answerable, Scripted})
        return frozenset({OneSeat} if self.teacher is None else {OneSeat, Scripted})

    @property
    def alive(self) -> Sequence[str]:
        """Its code may call anything."""
        return (f"the code of verifiers' `{self.id}`",)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Its two sets of tasks; where there is one only, a hash of the prompt decides."""
        return self._loaded.sources

    def contents(self) -> Mapping[str, str]:
        """Return a hash of its tasks."""
        return {f"tasks of verifiers' {self.id}": self._loaded.content}

    def skipped(self) -> Mapping[Split, str]:
        """Return the train tasks that are left out because they are test tasks, too."""
        return self._loaded.skipped

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for a missing package or environment, and for a rubric that compares rollouts."""
        self.check_teacher()
        if self._loaded.environment.requires_group_rollouts:
            raise ConfigError(
                f"The rubric of verifiers' '{self.id}' compares the rollouts of a group, and kapelle pays each episode by "
                "itself. Take an environment whose reward functions look at one rollout; groups are compared by the algorithm."
            )

    def size(self, split: Split) -> int | None:
        """Return how many tasks a split has."""
        return len(self._loaded.rows[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index."""
        loaded = self._loaded
        row = loaded.row(split, index)
        question = _opening(_plain_messages(row["prompt"])) if loaded.single else ""
        data: dict[str, Json] = {"split": split, "index": index}
        if isinstance(answer := row.get("answer"), str | int | float) and not isinstance(answer, bool):
            data["answer"] = answer
        return Task(f"{split}-{index}", question, data)

    def extract(self, text: str) -> str | None:
        """Return the answer of a text as the environment's own parser finds it."""
        return self._loaded.answer_in(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return what the `teacher` answers; without one the task's answer in the form of `demonstration`."""
        if self.teacher is not None:
            return super().script(agent, task, messages, seed)
        return self.demonstration.replace("{answer}", str(answer_of(task)))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SingleTurnWorld | RolloutWorld:
        """Open the world of one question, or of one conversation."""
        loaded = self._loaded
        row = loaded.row("train" if task.data["split"] == "train" else "test", int(task.data["index"]))
        if loaded.single:
            return SingleTurnWorld(task, agents, loaded, row, self)
        return RolloutWorld(task, agents, loaded, row, self)

    @property
    def _loaded(self) -> LoadedEnvironment:
        return _load(self.id, json.dumps(dict(self.args), sort_keys=True))


# -------- Loading: the package, the environment, its tasks


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment of theirs with its tasks, loaded once in a process."""

    id: str
    environment: Any
    single: bool
    """Whether every episode is one answer."""
    rows: Mapping[Split, Sequence[Mapping[str, Any]]]
    sources: Mapping[Split, str]
    skipped: Mapping[Split, str]
    content: str

    def row(self, split: Split, index: int) -> Mapping[str, Any]:
        """Return the row of a task; DataError for one that there is not."""
        rows = self.rows[split]
        if not 0 <= index < len(rows):
            raise DataError(f"verifiers' '{self.id}' has {len(rows)} {split} tasks, and none at {index}.")
        return rows[index]

    def answer_in(self, text: str) -> str | None:
        """Return what its parser finds in a text."""
        try:
            found = self.environment.parser.parse_answer([{"role": "assistant", "content": text}])
        except Exception:  # noqa: BLE001 - a parser of anybody's, given anything
            return None
        return None if found is None else str(found).strip()


@lru_cache(maxsize=16)
def _load(name: str, args: str) -> LoadedEnvironment:
    try:
        import verifiers as vf
    except ImportError as error:
        raise AbsentPackage(NEEDED.format(found="which is not installed")) from error
    try:
        find = partial(vf.load_environment, name)
    except AttributeError as error:
        raise ConfigError(NEEDED.format(found=f"and {vf.__version__} is installed, without it")) from error
    try:
        with _no_signal_handlers(), importable_here():  # `vf.load_environment` imports a module of that name
            if name.endswith(".py"):
                find = find_object(f"{name}:load_environment", "environment")
            made = find(**json.loads(args))
            train, test = made.build_dataset(), made.build_eval_dataset()
    except KapelleError:
        raise
    except Exception as error:
        told = reason(error.__cause__ if error.__cause__ is not None else error)
        raise ConfigError(
            f"verifiers loads no environment '{name}' with `environment.args: {args}`: {told}. Is its package installed, and are "
            "these the arguments of its `load_environment`?"
        ) from error
    _listen()
    rows: dict[Split, Sequence[Mapping[str, Any]]] = {"train": [], "test": []}
    sources: dict[Split, str]
    skipped: dict[Split, str] = {}
    if train is None or test is None:
        (one,) = (each for each in (train, test) if each is not None)
        for row in one:
            key = _key(row)
            rows[split_of(key)] = [*rows[split_of(key)], row]
        kind = "tasks" if test is None else "evaluation tasks"
        sources = {
            "train": f"{kind} of verifiers' {name}, 4 of 5 by a hash of the prompt",
            "test": f"{kind} of verifiers' {name}, 1 of 5 by a hash of the prompt",
        }
    else:
        rows["test"] = list(test)
        held_out = {_key(row) for row in rows["test"]}
        rows["train"] = [row for row in train if _key(row) not in held_out]
        sources = {
            "train": f"the data set of verifiers' {name}",
            "test": f"the evaluation set of verifiers' {name}",
        }
        if left_out := len(train) - len(rows["train"]):
            skipped = {"train": f"{left_out} of {len(train)} rows, which are in the evaluation set too"}
    digest = hashlib.blake2b(digest_size=16)
    for split in ("train", "test"):
        for row in rows["train" if split == "train" else "test"]:
            digest.update(json.dumps([split, _key(row), str(row.get("answer"))]).encode())
    return LoadedEnvironment(name, made, _is_single(made), rows, sources, skipped, digest.hexdigest())


def _key(row: Mapping[str, Any]) -> str:
    """Return what makes a task this one: its prompt."""
    return json.dumps(_plain_messages(row["prompt"]), sort_keys=True)


def _is_single(made: Any) -> bool:
    from verifiers import EnvGroup, SingleTurnEnv

    if isinstance(made, EnvGroup):
        return all(map(_is_single, made.envs))
    return isinstance(made, SingleTurnEnv) and not made.tool_defs


@contextmanager
def _no_signal_handlers() -> Iterator[None]:
    """Keep the package's environments from catching this process's signals: a run answers Ctrl-C by a checkpoint."""
    module: Any = sys.modules.get("verifiers.envs.environment")
    if module is None:
        from importlib import import_module

        module = import_module("verifiers.envs.environment")
    real = module.signal
    still = ModuleType("signal")
    vars(still).update(vars(real))
    vars(still)["signal"] = lambda _number, _handler: None
    module.signal = still
    try:
        yield
    finally:
        module.signal = real


# -------- A reward function that raises: the package logs it and pays 0, which would be learned from

_broken: ContextVar[list[str] | None] = ContextVar("broken", default=None)


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        kept = _broken.get()
        if kept is not None and "reward function" in (said := record.getMessage()):
            kept.append(said)


def _listen() -> None:
    logger = logging.getLogger("verifiers")
    if not any(isinstance(each, _Listener) for each in logger.handlers):
        logger.addHandler(_Listener(logging.ERROR))


# -------- One rollout of the package, in which the team is the model


@dataclass(frozen=True, slots=True)
class Rolled:
    """How a rollout ended."""

    reward: float
    metrics: Mapping[str, float]
    truncated: bool


Ask = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Json]]], Awaitable[str]]
"""Returns the answer to a conversation (messages as plain dictionaries), given the schemas of the tools."""


async def roll(loaded: LoadedEnvironment, row: Mapping[str, Any], ask: Ask, settings: Verifiers) -> Rolled:
    """Play a row by the package's own rollout and score it by its rubric.

    EpisodeError where its code fails, a reward function raises, or the reward is outside `rewards`.
    """
    made = loaded.environment
    client = _client(ask, settings.form)
    # `rollout` and the rubric are what `generate` calls, for one example each; group scores are refused by `check`.
    state = await made.rollout({**row}, client, "kapelle", {})
    if (error := state.get("error")) is not None:
        raise EpisodeError(f"verifiers' '{loaded.id}' failed: {reason(error)}")
    broken: list[str] = []
    token = _broken.set(broken)
    try:
        await made.rubric.score_rollout(state)
        await made.rubric.cleanup(state)
    finally:
        _broken.reset(token)
    if broken:
        raise EpisodeError(f"The rubric of verifiers' '{loaded.id}' failed. {broken[0]}")
    reward, (low, high) = state.get("reward"), settings.rewards
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EpisodeError(f"The rubric of verifiers' '{loaded.id}' pays {reward!r:.60}, no finite number.")
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    if not low - slack <= reward <= high + slack:
        raise EpisodeError(
            f"The rubric of verifiers' '{loaded.id}' pays {reward:g}, outside `environment.rewards` {list(settings.rewards)}. "
            "Set it to the least and greatest sum of its weighted functions."
        )
    metrics = {
        str(name): float(value)
        for name, value in (state.get("metrics") or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    truncated = bool(state.get("timed_out") or state.get("is_truncated"))
    return Rolled(min(high, max(low, float(reward))), metrics, truncated)


def _client(ask: Ask, form: Form) -> Any:
    """Return a client of the package whose answers are the team's."""
    from verifiers import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class TeamClient(Client):  # type: ignore[misc]
        """Hands each call to `ask`; there is no wire, so nothing is converted."""

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_given: Any
        ) -> Any:
            schemas = [
                {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
                for tool in tools or ()
            ]
            text = await ask(_plain_messages(prompt), schemas)
            content, calls = read_calls(text, form, schemas) if schemas else (text, [])
            message = ResponseMessage(
                content=content,
                tool_calls=[ToolCall(id=f"call_{k}", **call) for k, call in enumerate(calls)] or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="kapelle", created=0, model=model, usage=None, message=message)

        def setup_client(self, config: Any) -> Any: ...

        async def to_native_tool(self, tool: Any) -> Any: ...

        async def to_native_prompt(self, messages: Any) -> Any: ...

        async def get_native_response(self, prompt: Any, *given: Any, **named: Any) -> Any: ...

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any: ...

        async def close(self) -> None: ...

    return TeamClient(None)


def read_calls(text: str, form: Form, schemas: Sequence[Json] = ()) -> tuple[str, list[dict[str, str]]]:
    """Return what a text says beside its calls, and the calls, `name` and `arguments` as JSON; one that is broken is only text."""
    try:
        calls = parse_calls(text, (form,), schemas)
    except NotCalls:
        return text, []
    if not calls:
        return text, []
    return beside_calls(text, form), [
        {"name": c.name, "arguments": json.dumps(dict(c.arguments), default=float)} for c in calls
    ]


# -------- What agents read: the package's messages as texts


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages, of any of the package's forms, as plain dictionaries with `role` and `content` as text."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    plain = []
    for each in messages:
        message = dict(each) if isinstance(each, Mapping) else each.model_dump()
        content = message.get("content")
        if isinstance(content, list):
            parts = [dict(part) if isinstance(part, Mapping) else part.model_dump() for part in content]
            if any(part.get("type") != "text" for part in parts):
                raise EpisodeError("A message of the environment has a picture or a sound; agents read text.")
            content = "".join(str(part["text"]) for part in parts)
        plain.append(
            {"role": str(message.get("role", "user")), "content": "" if content is None else str(content)}
        )
    return plain


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as one text: with the speakers' roles only where somebody has answered in it (examples)."""
    if any(each["role"] == "assistant" for each in messages):
        return "\n\n".join(f"{str(each['role']).capitalize()}: {each['content']}" for each in messages)
    return "\n\n".join(str(each["content"]) for each in messages if each["content"])


def _news(messages: Sequence[Mapping[str, Any]], known: int) -> str:
    """Return what follows an agent's last answer: its own texts are in its conversation already."""
    last = max((k for k, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    fresh = messages[last + 1 :] if known and last >= 0 else messages
    return _opening(fresh)


# -------- Worlds


class SingleTurnWorld(QuestionWorld):
    """One question; every text is a rollout of its own, and earns what the rubric pays for it."""

    def __init__(
        self,
        task: Task,
        agents: Sequence[str],
        loaded: LoadedEnvironment,
        row: Mapping[str, Any],
        settings: Verifiers,
    ) -> None:
        self._rolled: dict[str, Rolled] = {}
        self._said: dict[str, str] = {}
        low, high = settings.rewards

        async def graded(text: str) -> Grade:
            if text not in self._rolled:

                async def ask(messages: Any, tools: Any) -> str:
                    return text

                self._rolled[text] = await roll(loaded, row, ask, settings)
            paid = self._rolled[text].reward
            return Grade((paid - low) / (high - low), loaded.answer_in(text), f"The rubric pays {paid:g}.")

        super().__init__(task, agents, graded, {})

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Have the texts scored; see `QuestionWorld`."""
        self._said = dict(actions)
        return await super().step(actions, final)

    def outcome(self) -> Outcome:
        """Return what the rubric pays, with its functions' values by name: a number, or one for each of several agents."""
        ended = super().outcome()
        rolled = {agent: self._rolled[text] for agent, text in self._said.items() if agent in ended.rewards}
        rewards = {agent: one.reward for agent, one in rolled.items()}
        return replace(ended, rewards=rewards, info={**ended.info, **_metrics(rolled)})


def _metrics(rolled: Mapping[str, Rolled]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name in dict.fromkeys(name for one in rolled.values() for name in one.metrics):
        values: dict[str, Json] = {
            agent: one.metrics[name] for agent, one in rolled.items() if name in one.metrics
        }
        found[name] = next(iter(values.values())) if len(rolled) == 1 else values
    return found


class RolloutWorld(BaseWorld, Resets):
    """One rollout of the package, which runs beside the episode and waits for each answer.

    There is one seat: any agent may answer, in a team of several the last one unless the workflow has another speak.
    """

    def __init__(
        self,
        task: Task,
        agents: Sequence[str],
        loaded: LoadedEnvironment,
        row: Mapping[str, Any],
        settings: Verifiers,
    ) -> None:
        super().__init__(task, agents)
        self._loaded, self._row, self._settings = loaded, row, settings
        self._reads = ""
        self._turns = 0
        self._answer: asyncio.Future[str] | None = None
        self._asked = asyncio.Event()
        self._running: asyncio.Task[Rolled] | None = None
        self._rolled: Rolled | None = None
        self._mover = self.agents[-1]

    async def reset(self) -> None:
        """Begin the rollout; returns when it asks for the first answer."""
        patience = patience_here.get().environment
        what = f"The rollout of verifiers' '{self._loaded.id}'"
        # A limit of its own, in which the wait for the model does not count (`_ask`).
        played = roll(self._loaded, self._row, self._ask, self._settings)
        self._running = asyncio.ensure_future(_awaiting(within(what, "environment", patience, played)))
        try:
            await self._next()
        except BaseException:  # nobody closes a world that has not begun
            await self.close()
            raise

    async def _ask(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Json]]) -> str:
        news = _news(messages, self._turns)
        if tools and not self._turns:
            listed = tools_prompt if self._settings.listing == "schemas" else signatures_prompt
            news = f"{listed([dict(each) for each in tools], self._settings.form)}\n\n{news}"
        self._reads = news
        self._turns += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set()
        go_on = pause_deadline()
        try:
            return await self._answer
        finally:
            go_on()

    async def _next(self) -> None:
        """Wait until the rollout asks again, or is over."""
        assert self._running is not None, "`reset` starts it"
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((asked, self._running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        self._asked.clear()
        if self._running.done():
            self.over = True
            try:
                self._rolled = self._running.result()
            except (KapelleError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise EpisodeError(f"verifiers' '{self._loaded.id}' raises {reason(error)}") from error

    def observe(self, agent: str) -> str:
        """Return what the conversation says since the last answer."""
        return self._reads

    def movers(self) -> tuple[str, ...]:
        """Return the agent in the seat, the last one, until the rollout is over."""
        return () if self.over else (self._mover,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Answer with `final` or the one text that was said; EpisodeError for several without it."""
        if self.over or self._answer is None or self._answer.done():
            raise EpisodeError("The conversation is over, or waits for nobody.")
        if len(actions) != 1 and final is None:
            raise EpisodeError(
                f"This world has one seat, and {len(actions)} agents spoke. Let a workflow name the text that counts."
            )
        for agent in actions:
            if agent not in self.agents:
                raise EpisodeError(f"'{agent}' acted and has no seat.")
        self._mover = [*actions][-1] if actions else self._mover
        self._answer.set_result(next(iter(actions.values())) if final is None else final)
        await self._next()
        return {}

    def outcome(self) -> Outcome:
        """Return what the rubric pays to who answered last; an unfinished conversation earns nothing and has no score."""
        if self._rolled is None:
            return Outcome({}, None, {"turns": self._turns}, truncated=True)
        low, high = self._settings.rewards
        paid = self._rolled.reward
        info: dict[str, Json] = {"turns": self._turns, **_metrics({self._mover: self._rolled})}
        return Outcome({self._mover: paid}, (paid - low) / (high - low), info, self._rolled.truncated)

    async def close(self) -> None:
        """End the rollout where it still waits; the package cleans up after it."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._running


async def _awaiting(work: Awaitable[Rolled]) -> Rolled:
    return await work
