"""Adapter for tasks of inspect_ai. The samples of a task become the questions, and its scorers give the reward.

    environment: {name: inspect, path: "my_tasks.py:capitals", args: {level: hard}}

The team replaces the model in the task's solver. The question is the prompt that the solver sends to its model: the sample with its
system message, template or lettered choices. The scorer receives the answer that the solver extracts from the completion. The
episode fails if the solver calls its model more than once or uses tools.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NoReturn

from pydantic import Field

from kapelle.environment import Reads, Reporting
from kapelle.environments.adapters.plain import need_package
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import Answers, Questions, split_of
from kapelle.environments.taught import WithTeacher
from kapelle.errors import ConfigError, EpisodeError, KapelleError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_object
from kapelle.types import Json, Message, Split, Task


class Inspect(WithTeacher, Questions, Reporting, Reads):
    """Questions from a task of inspect_ai. The reward is a scorer's value from 0 to 1 (C counts as 1, P as 0.5, and I and N as 0)."""

    name: Literal["inspect"] = "inspect"
    path: str = Field(min_length=1)
    """The function that returns the task, written as `module:function` or `path/file.py:function`."""
    args: Mapping[str, Json] = Field(default={})
    """Keyword arguments for the function that returns the task."""
    scorer: int = Field(default=0, ge=0)
    """The index of the scorer that gives the reward."""
    value: str | None = None
    """The name of the value that is used as the reward if the scorer returns several values."""

    @property
    def answers(self) -> Answers:
        """The grader of answers, which calls the task's scorer."""
        return Answers(self._grade, lambda text: text.strip() or None)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test samples. A hash of a sample's input determines its split."""
        own = f"samples of inspect's {self.path}, by a hash of the input"
        return {"train": f"{own}, 4 of 5", "test": f"{own}, the other samples"}

    @property
    def alive(self) -> Sequence[str]:
        """The task's scorer, whose results may vary because it may call a model."""
        return (f"the scorer of inspect's `{self.path}`",)

    def contents(self) -> Mapping[str, str]:
        """Return a hash of the task's samples."""
        return {f"samples of inspect's {self.path}": self._loaded.content}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package is missing, the task is invalid or the scorer index is out of range."""
        scorers = len(self._loaded.task.scorer or ())
        if self.scorer >= scorers:
            raise ConfigError(
                f"`environment.scorer` is {self.scorer}, but inspect's {self.path} has {scorers} scorers, numbered from 0. Set the index of one of them."
            )
        self.check_teacher()

    def size(self, split: Split) -> int | None:
        """Return the number of samples in a split."""
        return len(self._loaded.samples[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. The question of the task is the solver's prompt for the sample."""
        sample = self._loaded.samples[split][index]
        data: dict[str, Json] = {"split": split, "index": index}
        if isinstance(sample.target, str):
            data["answer"] = sample.target
        return Task(f"{split}-{index}", _question(self._loaded, sample), data)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the text of the `teacher` if one is set. If no `teacher` is set, return the sample's target.

        The target is preceded by `ANSWER:` if the sample has lettered choices.
        """
        if self.teacher is not None:
            return super().script(agent, task, messages, seed)
        sample = self._loaded.samples[task.data["split"]][task.data["index"]]
        target = sample.target if isinstance(sample.target, str) else sample.target[0]
        return f"ANSWER: {target}" if sample.choices else target

    @property
    def _loaded(self) -> InspectSamples:
        return _load(self.path, json.dumps(dict(self.args), sort_keys=True))

    async def _grade(self, text: str, task: Task) -> Grade:
        from inspect_ai.scorer import Target, value_to_float

        loaded = self._loaded
        sample = self._loaded.samples[task.data["split"]][task.data["index"]]
        try:
            state = await _solved(loaded, sample, text)
            target = Target(sample.target if isinstance(sample.target, str) else list(sample.target))
            score = await loaded.task.scorer[self.scorer](state, target)
        except KapelleError:
            raise
        except Exception as error:
            raise EpisodeError(f"inspect's {self.path} failed on {task.id}: {reason(error)}") from error
        if score is None:
            raise EpisodeError(f"The scorer of inspect's {self.path} returned no score for {task.id}.")
        value = score.value
        if isinstance(value, Mapping):
            if self.value not in value:
                raise EpisodeError(
                    f"The scorer of inspect's {self.path} returned several values: {', '.join(map(str, value))}. Choose one with `environment.value`."
                )
            value = value[self.value]
        number = float(value_to_float()(value))
        if not math.isfinite(number) or not 0.0 <= number <= 1.0:
            raise EpisodeError(
                f"The scorer of inspect's {self.path} returned {value!r:.60}, not a number from 0 to 1."
            )
        return Grade(
            number, score.answer if isinstance(score.answer, str) else None, score.explanation or f"{value}"
        )


@dataclass(frozen=True)
class InspectSamples:
    """A task of inspect_ai with its samples, which is loaded once per process."""

    task: Any
    samples: Mapping[Split, Sequence[Any]]
    content: str


@lru_cache(maxsize=16)
def _load(path: str, args: str) -> InspectSamples:
    task_class = need_package("inspect", "inspect_ai", "'kapelle[inspect]'").Task
    make = find_object(path, "task of inspect", "environment.path")
    try:
        made = make(**json.loads(args))
    except Exception as error:
        raise ConfigError(
            f"inspect's {path} cannot be created with `environment.args: {args}`: {reason(error)}"
        ) from error
    if not isinstance(made, task_class):
        raise ConfigError(
            f"environment.path: {path} returns {made!r:.60}, which is not a task of inspect_ai."
        )
    samples: dict[Split, list[Any]] = {"train": [], "test": []}
    digest = hashlib.blake2b(digest_size=16)
    for sample in made.dataset:
        key = json.dumps([_texts(sample.input), sample.choices])
        samples[split_of(key)].append(sample)
        digest.update(json.dumps([key, sample.target]).encode())
    return InspectSamples(made, samples, digest.hexdigest())


def _texts(messages: Any) -> list[str]:
    return [messages] if isinstance(messages, str) else [f"{each.role}: {each.text}" for each in messages]


class _Prompt(Exception):
    """Raised instead of calling a model when `_question` needs the solver's prompt. The exception holds the prompt."""

    def __init__(self, messages: Sequence[Any]) -> None:
        super().__init__("prompt")
        self.messages = messages


def _state(sample: Any) -> Any:
    from inspect_ai.model import ChatMessageUser, ModelName
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState

    messages = (
        [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else deepcopy(sample.input)
    )
    return TaskState(
        model=ModelName("kapelle/team"),
        sample_id=sample.id or 0,
        epoch=1,
        input=sample.input,
        messages=messages,
        target=Target(sample.target),
        choices=list(sample.choices) if sample.choices else None,
        metadata=deepcopy(sample.metadata or {}),
    )


def _question(loaded: InspectSamples, sample: Any) -> str:
    """Return the prompt that the solver sends to its model as a single string."""

    async def generate(state: Any, *given: Any, **named: Any) -> NoReturn:
        raise _Prompt(state.messages)

    work = loaded.task.solver(_state(sample), generate)
    try:
        # This needs no event loop, because a supported solver awaits nothing before it calls its model.
        work.send(None)
    except _Prompt as prompt:
        return "\n\n".join(each.text for each in prompt.messages)
    except StopIteration:
        raise ConfigError(
            "The solver of an inspect task does not call a model. Use a task whose solver calls `generate`."
        ) from None
    finally:
        work.close()
    raise ConfigError(
        "The solver of an inspect task awaits something before it calls a model, which is not supported. Use another solver."
    )


async def _solved(loaded: InspectSamples, sample: Any, text: str) -> Any:
    """Run the solver with `text` as the model's completion and return the resulting state of the sample."""
    from inspect_ai.model import ModelOutput

    calls = 0

    async def generate(state: Any, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1 or state.tools:
            raise EpisodeError(
                "The solver of an inspect task calls its model more than once or with tools. Use a solver with a single call and no tools."
            )
        state.output = ModelOutput.from_content("kapelle/team", text)
        state.messages.append(state.output.message)
        return state

    return await loaded.task.solver(_state(sample), generate)
