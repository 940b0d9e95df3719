"""Adapter for environments of the package `verifiers`, through its classic API (`vf.load_environment`, versions 0.2.1 to 0.3).

Version 0.4 has no classic API; `verifiers_v1.py` is the adapter for it.

    environment: {name: verifiers, id: my-env, args: {difficulty: easy}}

The `rollout` method of the package runs the episode, and the team replaces the model of the rollout (`TeamModel`). User turns,
tools, stop conditions and subclasses of `MultiTurnEnv` therefore work as in the package, and the environment's rubric gives the
reward.

A single-turn environment becomes an environment of questions: several agents can answer, debate or work in a chain, and each text
is graded in a separate rollout. Any other environment becomes a conversation in which one agent moves at a time (`TeamMoves`).
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
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import (
    Answerable,
    Described,
    Outcome,
    Reads,
    Reporting,
    Resets,
    Scripted,
    TeamMoves,
)
from kapelle.environments.adapters.plain import one_text
from kapelle.environments.base import BaseState, StatedRewards
from kapelle.environments.grading.text.tool_call import Form, NotCalls, beside_calls, parse_calls
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import QuestionState, answer_of, split_of
from kapelle.environments.taught import WithTeacher
from kapelle.environments.tools.contract import Listing, signatures_prompt, tools_prompt
from kapelle.errors import AbsentPackage, ConfigError, EpisodeError, KapelleError
from kapelle.runtime.deadlines import patience_here, pause_deadline, within
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_object, importable_here
from kapelle.types import Json, Message, Split, Task

NEEDED = (
    "The environment `verifiers` needs the package verifiers with its classic API, {found}. Install it with "
    "`pip install 'kapelle[verifiers]'`."
)


class Verifiers(StatedRewards, WithTeacher, Described, Reads, Reporting):
    """An environment of the package `verifiers`, with its own rubric and task sets."""

    name: Literal["verifiers"] = "verifiers"
    id: str = Field(min_length=1)
    """The id of the environment: the name of an installed environment or of a module in the current folder, as for
    `vf.load_environment`, or a path such as `path/file.py`."""
    args: Mapping[str, Json] = Field(default={})
    """Keyword arguments for the environment's `load_environment`."""
    demonstration: str = "{answer}"
    """The format of the correct answer in demonstrations for single-turn environments, such as `<answer>{answer}</answer>`."""
    form: Form = "hermes"
    """The format in which agents write tool calls, which is `hermes` (Hermes, Qwen), `llama` (JSON) or `pythonic`."""
    listing: Listing = "schemas"
    """How the tools of the environment are described to agents: with `schemas`, or with `signatures` (one line per tool) for very
    small models."""

    @property
    def offered(self) -> frozenset[type]:
        """The capabilities of this environment beyond those of its class.

        A single-turn environment has comparable answers and demonstrations. A conversation has demonstrations only if a `teacher`
        is set.
        """
        if self._loaded.single:
            return frozenset({Answerable, Scripted})
        return frozenset({TeamMoves} if self.teacher is None else {TeamMoves, Scripted})

    @property
    def alive(self) -> Sequence[str]:
        """The code of the environment, whose results may vary because it may call external programs."""
        return (f"the code of verifiers' `{self.id}`",)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test tasks, with the version of the package.

        If the environment has only one task set, a hash of the prompt determines the split of a task.
        """
        found = self._loaded.sources.items()
        return {
            split: f"classic environment of verifiers {version('verifiers')}, {source}"
            for split, source in found
        }

    def contents(self) -> Mapping[str, str]:
        """Return a hash of the tasks of the environment."""
        return {f"tasks of verifiers' {self.id}": self._loaded.content}

    def skipped(self) -> Mapping[Split, str]:
        """Return how many train tasks are excluded because they are also in the evaluation set."""
        return self._loaded.skipped

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package or environment is missing, or if the rubric compares rollouts with one another."""
        self.check_teacher()
        if self._loaded.environment.requires_group_rollouts:
            raise ConfigError(
                f"The rubric of verifiers' '{self.id}' compares the rollouts of a group, which is not supported. Use an environment whose "
                "reward functions read a single rollout."
            )

    def size(self, split: Split) -> int | None:
        """Return the number of tasks in a split."""
        return len(self._loaded.rows[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index."""
        loaded = self._loaded
        row = loaded.rows[split][index]
        question = _opening(_plain_messages(row["prompt"])) if loaded.single else ""
        data: dict[str, Json] = {"split": split, "index": index}
        if isinstance(answer := row.get("answer"), str | int | float) and not isinstance(answer, bool):
            data["answer"] = answer
        return Task(f"{split}-{index}", question, data)

    def extract(self, text: str) -> str | None:
        """Return the answer that the environment's parser finds in a text, or None if there is none."""
        return self._loaded.answer_in(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the text of the `teacher` if one is set.

        If no `teacher` is set, return the correct answer in the format of `demonstration`.
        """
        if self.teacher is not None:
            return super().script(agent, task, messages, seed)
        return self.demonstration.replace("{answer}", str(answer_of(task)))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SingleTurnState | RolloutState:
        """Return the state of a new episode, which is a question for a single-turn environment and otherwise a conversation."""
        loaded = self._loaded
        row = loaded.rows[task.data["split"]][task.data["index"]]
        if loaded.single:
            return SingleTurnState(task, agents, loaded, row, self)
        return RolloutState(task, agents, loaded, row, self)

    @property
    def _loaded(self) -> LoadedEnvironment:
        return _load(self.id, json.dumps(dict(self.args), sort_keys=True))


# -------- Loading: the package, the environment, its tasks


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment of the package `verifiers` with its tasks, which is loaded once per process."""

    id: str
    environment: Any
    single: bool
    """Whether every episode has only one turn."""
    rows: Mapping[Split, Sequence[Mapping[str, Any]]]
    sources: Mapping[Split, str]
    skipped: Mapping[Split, str]
    content: str

    def answer_in(self, text: str) -> str | None:
        """Return the answer that the environment's parser finds in a text, or None if there is none or the parser fails."""
        try:
            found = self.environment.parser.parse_answer([{"role": "assistant", "content": text}])
        except Exception:  # noqa: BLE001 - a third-party parser
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
        raise ConfigError(
            f"{NEEDED.format(found=f'but the installed version {vf.__version__} lacks it')} For environments of verifiers 0.4, set "
            "`environment.name: verifiers_v1`."
        ) from error
    try:
        with _no_signal_handlers(), importable_here():  # `vf.load_environment` imports a module of that name
            if name.endswith(".py"):
                find = find_object(f"{name}:load_environment", "environment")
            made = find(**json.loads(args))
            train, test = made.build_dataset(), made.build_eval_dataset()
    except KapelleError:
        raise
    except Exception as error:
        why = reason(error.__cause__ if error.__cause__ is not None else error)
        raise ConfigError(
            f"verifiers cannot load the environment '{name}' with `environment.args: {args}`: {why}. Check that the package of the environment is installed "
            "and that its `load_environment` accepts these arguments."
        ) from error
    _log_to_rollouts()
    rows: dict[Split, list[Mapping[str, Any]]] = {"train": [], "test": []}
    skipped: dict[Split, str] = {}
    if train is None or test is None:
        for row in train if test is None else test:
            rows[split_of(_key(row))].append(row)
        kind = "tasks" if test is None else "evaluation tasks"
        sources: dict[Split, str] = {
            "train": f"{kind} of verifiers' {name}, 4 of 5 by a hash of the prompt",
            "test": f"{kind} of verifiers' {name}, 1 of 5 by a hash of the prompt",
        }
    else:
        rows["test"] = list(test)
        held_out = set(map(_key, rows["test"]))
        rows["train"] = [row for row in train if _key(row) not in held_out]
        sources = {
            "train": f"the data set of verifiers' {name}",
            "test": f"the evaluation set of verifiers' {name}",
        }
        if excluded := len(train) - len(rows["train"]):
            skipped = {"train": f"{excluded} of {len(train)} rows, which are also in the evaluation set"}
    digest = hashlib.blake2b(digest_size=16)
    for split, part in rows.items():
        for row in part:
            digest.update(json.dumps([split, _key(row), str(row.get("answer"))]).encode())
    return LoadedEnvironment(name, made, _is_single(made), rows, sources, skipped, digest.hexdigest())


def _key(row: Mapping[str, Any]) -> str:
    """Return a string that identifies a task and is derived from the task's prompt."""
    return json.dumps(_plain_messages(row["prompt"]), sort_keys=True)


def _is_single(made: Any) -> bool:
    from verifiers import EnvGroup, SingleTurnEnv

    if isinstance(made, EnvGroup):
        return all(map(_is_single, made.envs))
    return isinstance(made, SingleTurnEnv) and not made.tool_defs


@contextmanager
def _no_signal_handlers() -> Iterator[None]:
    """Prevent environments of the package from installing signal handlers, because kapelle itself handles Ctrl-C during a run."""
    module: Any = sys.modules.get("verifiers.envs.environment")
    if module is None:
        from importlib import import_module

        module = import_module("verifiers.envs.environment")
    real = module.signal
    silent = ModuleType("signal")
    vars(silent).update(vars(real))
    vars(silent)["signal"] = lambda _number, _handler: None
    module.signal = silent
    try:
        yield
    finally:
        module.signal = real


# -------- If a reward function raises an exception, the package logs it and gives reward 0, which would mislead training

_errors: ContextVar[list[str] | None] = ContextVar("errors", default=None)


class _RewardErrors(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        errors = _errors.get()
        if errors is not None and "reward function" in (message := record.getMessage()):
            errors.append(message)


def _log_to_rollouts() -> None:
    logger = logging.getLogger("verifiers")
    if not any(isinstance(each, _RewardErrors) for each in logger.handlers):
        logger.addHandler(_RewardErrors(logging.ERROR))


# -------- One rollout of the package, with the team as the model


@dataclass(frozen=True, slots=True)
class Rolled:
    """The result of one rollout."""

    reward: float
    metrics: Mapping[str, float]
    truncated: bool


TeamModel = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Json]]], Awaitable[str]]
"""A function that takes a conversation (a list of messages as dictionaries) and the schemas of the tools, and returns the next
completion."""


async def roll(
    loaded: LoadedEnvironment, row: Mapping[str, Any], model: TeamModel, settings: Verifiers
) -> Rolled:
    """Run the package's rollout for one row of the task set and score the rollout with the rubric.

    Raises EpisodeError if the environment's code or a reward function fails, or if the reward is outside `rewards`.
    """
    made = loaded.environment
    client = _client(model, settings.form)
    # These are the calls that `generate` makes for one example. `check` has excluded group scores.
    state = await made.rollout({**row}, client, "kapelle", {})
    if (error := state.get("error")) is not None:
        raise EpisodeError(f"verifiers' '{loaded.id}' failed: {reason(error)}")
    errors: list[str] = []
    token = _errors.set(errors)
    try:
        await made.rubric.score_rollout(state)
        await made.rubric.cleanup(state)
    finally:
        _errors.reset(token)
    if errors:
        raise EpisodeError(f"The rubric of verifiers' '{loaded.id}' failed. {errors[0]}")
    reward, (low, high) = state.get("reward"), settings.rewards
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EpisodeError(
            f"The rubric of verifiers' '{loaded.id}' returned the reward {reward!r:.60}, which is not a finite number."
        )
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    if not low - slack <= reward <= high + slack:
        raise EpisodeError(
            f"The rubric of verifiers' '{loaded.id}' returned the reward {reward:g}, outside `environment.rewards` {list(settings.rewards)}. "
            "Set `environment.rewards` to the smallest and largest possible reward."
        )
    metrics = {
        str(name): float(value)
        for name, value in (state.get("metrics") or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    truncated = bool(state.get("timed_out") or state.get("is_truncated"))
    return Rolled(min(high, max(low, float(reward))), metrics, truncated)


def _client(team: TeamModel, form: Form) -> Any:
    """Return a client of the package `verifiers` that calls `team` for every completion."""
    from verifiers import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class TeamClient(Client):  # type: ignore[misc]
        """A client that calls the team in this process. Messages are not converted to the format of an API."""

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_given: Any
        ) -> Any:
            schemas = [
                {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
                for tool in tools or ()
            ]
            text = await team(_plain_messages(prompt), schemas)
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
    """Split a completion into its text without tool calls and a list of its tool calls.

    Each call has a `name` and `arguments` as a JSON string. If the calls are invalid, the whole completion is returned as text.
    """
    calls = None
    with suppress(NotCalls):
        calls = parse_calls(text, (form,), schemas)
    if not calls:
        return text, []
    return beside_calls(text, form), [
        {"name": c.name, "arguments": json.dumps(dict(c.arguments), default=float)} for c in calls
    ]


# -------- The package's messages as strings


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Convert messages in any format of the package to dictionaries with the string values `role` and `content`."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    plain = []
    for each in messages:
        message = dict(each) if isinstance(each, Mapping) else each.model_dump()
        content = message.get("content")
        if isinstance(content, list):
            parts = [dict(part) if isinstance(part, Mapping) else part.model_dump() for part in content]
            if any(part.get("type") != "text" for part in parts):
                raise EpisodeError(
                    "A message of the environment contains an image or audio, which is not supported."
                )
            content = "".join(str(part["text"]) for part in parts)
        plain.append(
            {"role": str(message.get("role", "user")), "content": "" if content is None else str(content)}
        )
    return plain


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as a single string. Role names are included only if the prompt contains assistant messages (few-shot examples)."""
    if any(each["role"] == "assistant" for each in messages):
        return "\n\n".join(f"{str(each['role']).capitalize()}: {each['content']}" for each in messages)
    return "\n\n".join(str(each["content"]) for each in messages if each["content"])


def _news(messages: Sequence[Mapping[str, Any]], known: int) -> str:
    """Return the messages after the last assistant message as a string. The earlier messages are already in the agent's conversation."""
    last = max((k for k, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    return _opening(messages[last + 1 :] if known and last >= 0 else messages)


# -------- Episodes


class SingleTurnState(QuestionState):
    """The state of one question. Each text is graded in a separate rollout, whose reward comes from the rubric."""

    def __init__(
        self,
        task: Task,
        agents: Sequence[str],
        loaded: LoadedEnvironment,
        row: Mapping[str, Any],
        settings: Verifiers,
    ) -> None:
        self._rolled: dict[str, Rolled] = {}
        self._actions: dict[str, str] = {}
        low, high = settings.rewards

        async def graded(text: str) -> Grade:
            if text not in self._rolled:

                async def model(messages: Any, tools: Any) -> str:
                    return text

                self._rolled[text] = await roll(loaded, row, model, settings)
            reward = self._rolled[text].reward
            return Grade(
                (reward - low) / (high - low), loaded.answer_in(text), f"The rubric's reward is {reward:g}."
            )

        super().__init__(task, agents, graded, {})

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Grade the agents' texts as described in `QuestionState`."""
        self._actions = dict(actions)
        return await super().step(actions, final)

    def outcome(self) -> Outcome:
        """Return the outcome with the rubric's rewards.

        The `info` of the outcome contains the value of each function of the rubric, for each agent if there are several agents.
        """
        ended = super().outcome()
        rolled = {
            agent: self._rolled[text] for agent, text in self._actions.items() if agent in ended.rewards
        }
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


class RolloutState(BaseState, Resets):
    """The state of a conversation. The package's rollout runs as an asyncio task, which waits for each text of the team.

    Any agent may move. If the workflow does not name an agent, the agent that moved last moves again.
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
        self._observation = ""
        self._turns = 0
        self._answer: asyncio.Future[str] | None = None
        self._waiting = asyncio.Event()
        self._running: asyncio.Task[Rolled] | None = None
        self._rolled: Rolled | None = None
        self._mover = self.agents[-1]

    async def reset(self) -> None:
        """Start the rollout and return when it waits for the first text."""
        patience = patience_here.get().environment
        what = f"The rollout of verifiers' '{self._loaded.id}'"
        # The time limit of the rollout excludes the time in which it waits for the model (`_answer_of_team`).
        rollout = roll(self._loaded, self._row, self._answer_of_team, self._settings)
        self._running = asyncio.ensure_future(_awaiting(within(what, "environment", patience, rollout)))
        try:
            await self._next()
        except BaseException:  # if an episode fails to begin, nothing else closes it
            await self.close()
            raise

    async def _answer_of_team(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Json]]
    ) -> str:
        news = _news(messages, self._turns)
        if tools and not self._turns:
            listed = tools_prompt if self._settings.listing == "schemas" else signatures_prompt
            news = f"{listed([dict(each) for each in tools], self._settings.form)}\n\n{news}"
        self._observation = news
        self._turns += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._waiting.set()
        resume_deadline = pause_deadline()
        try:
            return await self._answer
        finally:
            resume_deadline()

    async def _next(self) -> None:
        """Wait until the rollout needs another text or has ended."""
        assert self._running is not None, "`reset` starts it"
        waiting = asyncio.ensure_future(self._waiting.wait())
        try:
            await asyncio.wait((waiting, self._running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self._waiting.clear()
        if self._running.done():
            self.over = True
            try:
                self._rolled = self._running.result()
            except (KapelleError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise EpisodeError(f"verifiers' '{self._loaded.id}' raised {reason(error)}") from error

    def observe(self, agent: str) -> str:
        """Return the messages that were added since the team's last answer."""
        return self._observation

    def movers(self) -> tuple[str, ...]:
        """Return the agent that moves, or an empty tuple after the end of the rollout."""
        return () if self.over else (self._mover,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Pass `final`, or the only text, to the rollout as the completion.

        Raises EpisodeError if there are several texts and no `final`, or if the rollout does not expect a text.
        """
        if self.over or self._answer is None or self._answer.done():
            raise EpisodeError("The conversation is over, or does not expect a text.")
        self._mover, text = one_text(actions, self.agents, final)
        self._answer.set_result(text)
        await self._next()
        return {}

    def outcome(self) -> Outcome:
        """Return the outcome with the rubric's reward for the last agent that moved.

        An unfinished conversation has no reward and no score.
        """
        if self._rolled is None:
            return Outcome({}, None, {"turns": self._turns}, truncated=True)
        low, high = self._settings.rewards
        reward = self._rolled.reward
        info: dict[str, Json] = {"turns": self._turns, **_metrics({self._mover: self._rolled})}
        return Outcome({self._mover: reward}, (reward - low) / (high - low), info, self._rolled.truncated)

    async def close(self) -> None:
        """Cancel the rollout if it is still running. After the cancellation, the package frees its resources."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._running


async def _awaiting(work: Awaitable[Rolled]) -> Rolled:
    return await work
