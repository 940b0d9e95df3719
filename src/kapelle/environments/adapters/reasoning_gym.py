"""Adapter for Reasoning Gym (arXiv:2505.24760), which has about a hundred kinds of generated problems, each with its own verifier."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import Reporting
from kapelle.environments.adapters.plain import need_package
from kapelle.environments.grading.text.extraction import ExtractionRule, extract
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import TEST_SHARE, Answers, Questions, split_of
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.foreign_code import reason
from kapelle.types import Json, Message, Split, Task

DRAWS = 64
"""The maximum number of problems that are generated in search of one that belongs to the split of the task."""
SIZE = 2**22
"""The size with which a data set is created. Most data sets generate problems on demand and ignore this number; `gsm_symbolic` and
`list_functions` build a list of that length."""
NONSENSE = ("", "x", "nan")
"""Strings that are never a correct answer, used to find verifiers that accept nonsense."""


class ReasoningGym(Questions, Reporting):
    """Problems from one data set of Reasoning Gym. The reward is the score that the data set's verifier gives, from 0 to 1."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = "leg_counting"
    """The name of the data set in Reasoning Gym."""
    arguments: Mapping[str, Json] = Field(default={})
    """Settings of the data set, such as its difficulty."""
    seed: int = Field(default=0, ge=0)
    """The seed of the problem generator. Different seeds generate different problems."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("tag", "whole"), min_length=1)
    """Rules that extract the answer from an agent's text."""

    @property
    def answers(self) -> Answers:
        """The grader of answers, which calls the verifier of the data set."""
        return Answers(self._grade, lambda text: extract(text, self.extraction).text)

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test problems. A hash of the question determines its split."""
        kind = f"generated problems of reasoning_gym's {self.dataset}"
        return {"train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE}", "test": f"{kind}, the other problems"}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the package is missing, or if the data set or one of its settings is unknown."""
        self._problems()

    def doubts(self) -> Sequence[str]:
        """Return a warning for each string in `NONSENSE` that receives the full reward, because training would exploit this."""
        tasks = [self.task("train", index) for index in range(4)]
        return [
            f"The verifier of reasoning_gym's {self.dataset} gives the full reward for the answer {text!r}. Use another data set."
            for text in NONSENSE
            if any(
                self._score(text, task).score == 1.0 and self.script("", task, (), 0) != text
                for task in tasks
            )
        ]

    def _problems(self) -> Any:
        return _load(self.dataset, json.dumps(dict(self.arguments), sort_keys=True), self.seed)

    def task(self, split: Split, index: int) -> Task:
        """Return the problem at an index. Raises ConfigError if none of `DRAWS` generated problems belongs to the split."""
        problems = self._problems()
        with suppress(IndexError):  # some kinds have only `size` problems
            for place in range(index * DRAWS, (index + 1) * DRAWS):
                question = str(problems[place]["question"]).strip()
                if split_of(question) == split:
                    return Task(f"{split}-{index}", question, {"place": place})
        raise ConfigError(
            f"reasoning_gym's {self.dataset} with environment.arguments {dict(self.arguments)} has too few different "
            f"questions: none of {DRAWS} draws belongs to the {split} split. Set arguments that give more different questions."
        )

    def _grade(self, text: str, task: Task) -> Grade:
        answer = self.extract(text)
        if answer is None:
            return Grade(0.0, None, "The text contains no answer.", "no_answer")
        return self._score(answer, task)

    def _score(self, answer: str, task: Task) -> Grade:
        problems = self._problems()
        try:
            score = float(problems.score_answer(answer, problems[task.data["place"]]))
        except Exception as error:  # noqa: BLE001 - some verifiers raise on unexpected texts
            return Grade(0.0, answer, f"The verifier cannot read the answer: {reason(error)}.", "no_answer")
        return Grade(min(1.0, max(0.0, score)), answer, f"The verifier says {score:g}.")

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the correct answer of the problem, or an empty string if the problem has no stored answer."""
        answer = self._problems()[task.data["place"]].get("answer")
        return "" if answer is None else str(answer)


EVALUATORS = frozenset({"eval", "exec", "compile", "parse_expr", "sympify"})
"""Names of functions that execute a string as code, including the parsers of SymPy."""


def evaluated_by(kind: type) -> str | None:
    """Return the name of the function with which a verifier executes a string as code, or None if the verifier executes no strings.

    The search follows calls of the verifier's methods and of functions of its package. A function that the package itself defines
    under one of the names in `EVALUATORS` is considered harmless.
    """
    package = kind.__module__.partition(".")[0]
    names = vars(inspect.getmodule(kind))
    own = {
        name: part
        for name, part in names.items()
        if inspect.isfunction(part) and part.__module__.partition(".")[0] == package
    }
    waiting: list[Any] = [kind.__dict__["score_answer"]] if "score_answer" in kind.__dict__ else []
    seen: set[str] = set()
    while waiting:
        tree = ast.parse(textwrap.dedent(inspect.getsource(waiting.pop())))
        for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
            match call:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    plain = isinstance(call, ast.Name)
                case _:
                    continue
            if name in EVALUATORS and not (name in own and plain):
                return name
            followed = own.get(name) if plain else kind.__dict__.get(name)
            if inspect.isfunction(followed) and name not in seen:
                seen.add(name)
                waiting.append(followed)
    return None


@cache
def _load(dataset: str, arguments: str, seed: int) -> Any:
    reasoning_gym = need_package("reasoning_gym", "reasoning_gym", "reasoning-gym")
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise ConfigError(
            f"environment.dataset: unknown data set '{dataset}'.{did_you_mean(dataset, DATASETS)}"
        )
    if dataset == "composite":
        raise ConfigError(
            "environment.dataset: composite is not supported. Set a single data set, or combine several `reasoning_gym` environments with "
            "the environment `mixture`."
        )
    registered = DATASETS[dataset]  # the class, or in some versions a tuple with the class of its settings
    if danger := evaluated_by(registered[0] if isinstance(registered, tuple) else registered):
        raise ConfigError(
            f"The verifier of reasoning_gym's '{dataset}' runs an agent's text as code (`{danger}`). Use another data set, or the environments "
            "`math` and `code`."
        )
    try:
        return reasoning_gym.create_dataset(dataset, **{"size": SIZE, "seed": seed, **json.loads(arguments)})
    except (TypeError, AssertionError, ValueError, RecursionError) as error:
        raise ConfigError(f"reasoning_gym cannot create '{dataset}' with {arguments}: {error}") from error
