"""Tasks of inspect_ai: their samples are the questions, their scorers pay.

    environment: {name: inspect, path: "my_tasks.py:capitals", args: {level: hard}}

The task's solver runs with the team as its model: what it writes around a sample (a system message, a prompt template,
lettered choices) is the question, and what it reads in the answer (the letter that was chosen) reaches the scorer. A
solver that asks its model more than once, or uses tools, is refused when that shows.
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

from kapelle.environment import Alive, Reads
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import Answers, Questions, split_of
from kapelle.environments.taught import WithTeacher
from kapelle.errors import AbsentPackage, ConfigError, DataError, EpisodeError, KapelleError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_object
from kapelle.types import Json, Message, Split, Task


class Inspect(WithTeacher, Questions, Alive, Reads):
    """A task of inspect_ai as questions; a scorer's value between 0 and 1 is the reward (C is 1, P a half, I and N nothing)."""

    name: Literal["inspect"] = "inspect"
    path: str = Field(min_length=1)
    """The function that makes the task: `module:function` or `path/file.py:function`."""
    args: Mapping[str, Json] = Field(default={})
    """Keyword arguments of the function."""
    scorer: int = Field(default=0, ge=0)
    """Which of the task's scorers pays, from 0."""
    value: str | None = None
    """Which value pays, of a scorer that gives several by name."""

    @property
    def answers(self) -> Answers:
        """Whatever the task's scorer reads."""
        return Answers(self._grade, lambda text: text.strip() or None)

    @property
    def sources(self) -> Mapping[Split, str]:
        """A task has one data set; a hash of the input decides."""
        own = f"samples of inspect's {self.path}, by a hash of the input"
        return {"train": f"{own}, 4 of 5", "test": f"{own}, the other ones"}

    @property
    def alive(self) -> Sequence[str]:
        """Its scorer may ask a model."""
        return (f"the scorer of inspect's `{self.path}`",)

    def contents(self) -> Mapping[str, str]:
        """Return a hash of its samples."""
        return {f"samples of inspect's {self.path}": self._loaded.content}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for a missing package, a function that makes no task, and a scorer that there is not."""
        there = len(self._loaded.task.scorer or ())
        if self.scorer >= there:
            raise ConfigError(
                f"inspect's {self.path} has {there} scorers, and `environment.scorer` is {self.scorer}. Count from 0."
            )
        self.check_teacher()

    def size(self, split: Split) -> int | None:
        """Return how many samples a split has."""
        return len(self._loaded.samples[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the sample at an index, as the task's solver shows it to its model."""
        sample = self._sample(split, index)
        data: dict[str, Json] = {"split": split, "index": index}
        if isinstance(sample.target, str):
            data["answer"] = sample.target
        return Task(f"{split}-{index}", _question(self._loaded, sample), data)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return what the `teacher` answers; without one the target, of lettered choices as inspect's own solver reads it, `ANSWER: B`."""
        if self.teacher is not None:
            return super().script(agent, task, messages, seed)
        sample = self._sample("train" if task.data["split"] == "train" else "test", int(task.data["index"]))
        target = sample.target if isinstance(sample.target, str) else sample.target[0]
        return f"ANSWER: {target}" if sample.choices else target

    @property
    def _loaded(self) -> InspectSamples:
        return _load(self.path, json.dumps(dict(self.args), sort_keys=True))

    def _sample(self, split: Split, index: int) -> Any:
        samples = self._loaded.samples[split]
        if not 0 <= index < len(samples):
            raise DataError(f"inspect's {self.path} has {len(samples)} {split} samples, and none at {index}.")
        return samples[index]

    async def _grade(self, text: str, task: Task) -> Grade:
        from inspect_ai.scorer import Target, value_to_float

        loaded = self._loaded
        sample = self._sample("train" if task.data["split"] == "train" else "test", int(task.data["index"]))
        try:
            state = await _solved(loaded, sample, text)
            target = Target(sample.target if isinstance(sample.target, str) else list(sample.target))
            score = await loaded.task.scorer[self.scorer](state, target)
        except KapelleError:
            raise
        except Exception as error:
            raise EpisodeError(f"inspect's {self.path} failed on {task.id}: {reason(error)}") from error
        if score is None:
            raise EpisodeError(f"The scorer of inspect's {self.path} gives no score for {task.id}.")
        value = score.value
        if isinstance(value, Mapping):
            if self.value not in value:
                raise EpisodeError(
                    f"The scorer of inspect's {self.path} gives {', '.join(map(str, value))}. Say in `environment.value` which pays."
                )
            value = value[self.value]
        number = float(value_to_float()(value))
        if not math.isfinite(number) or not 0.0 <= number <= 1.0:
            raise EpisodeError(
                f"The scorer of inspect's {self.path} gives {value!r:.60}, no number in [0, 1]."
            )
        return Grade(
            number, score.answer if isinstance(score.answer, str) else None, score.explanation or f"{value}"
        )


@dataclass(frozen=True)
class InspectSamples:
    """A task with its samples, loaded once in a process."""

    task: Any
    samples: Mapping[Split, Sequence[Any]]
    content: str


@lru_cache(maxsize=16)
def _load(path: str, args: str) -> InspectSamples:
    try:
        from inspect_ai import Task as InspectTask
    except ImportError as error:
        raise AbsentPackage(
            "The environment `inspect` needs the package inspect-ai, which is not installed. Install it with "
            "`pip install 'kapelle[inspect]'`, into an environment of its own where other packages disagree."
        ) from error
    make = find_object(path, "task of inspect", "environment.path")
    try:
        made = make(**json.loads(args))
    except Exception as error:
        raise ConfigError(
            f"inspect's {path} cannot be made with `environment.args: {args}`: {reason(error)}"
        ) from error
    if not isinstance(made, InspectTask):
        raise ConfigError(f"environment.path: {path} returns {made!r:.60}, which is no task of inspect_ai.")
    samples: dict[Split, list[Any]] = {"train": [], "test": []}
    digest = hashlib.blake2b(digest_size=16)
    for sample in made.dataset:
        key = json.dumps([_texts(sample.input), sample.choices])
        samples[split_of(key)].append(sample)
        digest.update(json.dumps([key, sample.target]).encode())
    return InspectSamples(made, samples, digest.hexdigest())


def _texts(messages: Any) -> list[str]:
    return [messages] if isinstance(messages, str) else [f"{each.role}: {each.text}" for each in messages]


class _Asked(Exception):
    """The solver asks its model; what it shows it."""

    def __init__(self, messages: Sequence[Any]) -> None:
        super().__init__("asked")
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
    """Return what the solver shows its model, as one text."""

    async def generate(state: Any, *given: Any, **named: Any) -> NoReturn:
        raise _Asked(state.messages)

    work = loaded.task.solver(_state(sample), generate)
    try:
        # Nothing that it may wait for comes before it asks: its steps are taken by hand, outside an event loop.
        work.send(None)
    except _Asked as asked:
        return "\n\n".join(each.text for each in asked.messages)
    except StopIteration:
        raise ConfigError(
            "The solver of an inspect task asks no model. Take a task whose solver generates."
        ) from None
    finally:
        work.close()
    raise ConfigError(
        "The solver of an inspect task waits for something before it asks a model; that is not supported."
    )


async def _solved(loaded: InspectSamples, sample: Any, text: str) -> Any:
    """Return the state of a sample after the solver, with a text as its model's answer."""
    from inspect_ai.model import ModelOutput

    asked = 0

    async def generate(state: Any, *given: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > 1 or state.tools:
            raise EpisodeError(
                "The solver of an inspect task asks its model more than once, or with tools. Give the task a solver that asks once."
            )
        state.output = ModelOutput.from_content("kapelle/team", text)
        state.messages.append(state.output.message)
        return state

    return await loaded.task.solver(_state(sample), generate)
