"""Environments in which each question has one answer. This module defines how answers are graded, compared and written.

An environment of questions is a subclass of `Questions` that defines `task`, which returns a question, and `answers`, which returns
the kind of answer. The functions `numbers` and `words` return the two most common kinds.

    class Capitals(Questions):
        name: Literal["capitals:Capitals"] = "capitals:Capitals"

        @property
        def answers(self) -> Answers:
            return words(str.casefold)
        …

Tasks that are generated from a seed need even less code: see `kapelle.environments.questions.Generated`.
"""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator

from kapelle.environment import (
    Answerable,
    Environment,
    Outcome,
    Reporting,
    Retriable,
    Scorable,
    Scripted,
    has_comparable_answers,
    offers,
    report_of,
)
from kapelle.environments.base import BaseState
from kapelle.environments.grading.math.numeric import grade_numeric, normal_form, parse_number, read_number
from kapelle.environments.grading.text.extraction import ExtractionRule, answer_in, marked, read_answer
from kapelle.environments.grading.verdict import Grade, right, wrong
from kapelle.errors import ConfigError, DataError, EpisodeError, did_you_mean, need_known
from kapelle.runtime.deadlines import call, patience_here, within
from kapelle.runtime.foreign_code import Unfit
from kapelle.settings.base import EnvironmentSettings, Plugged, Settings, named_settings
from kapelle.types import Json, Message, Split, Task

# -------- An episode of one question: every agent reads the question, and the agents that answer are graded

RIGHT, WRONG = "This answer is right.", "This answer is wrong."
"""The only feedback that agents receive on an answer. A grader's explanation is not shown, because it could contain the gold answer."""


def require_agents(actions: Collection[str], team: Collection[str], did: str = "acted") -> None:
    """Raise EpisodeError if no agent acted or if an agent that acted is unknown."""
    if not actions:
        raise EpisodeError(f"No agent {did}. Pass the text of at least one agent.")
    for name in actions:
        if name not in team:
            raise EpisodeError(f"'{name}' {did}, but is not an agent of the team.{did_you_mean(name, team)}")


_GRADING = "Grading an answer"


class QuestionState(BaseState, Scorable, Retriable):
    """The state of an episode of one question. The first step answers the question and ends the episode.

    If several answers are allowed, the episode continues after an incorrect `final` text: all agents read that this answer was
    incorrect, and the last answers determine the rewards.

    Each agent that acts receives the score of its own text as its reward. The success of the team is the score of `final`. If there
    is no `final`, the success is the mean score of the agents that acted.
    """

    def __init__(
        self,
        task: Task,
        agents: Sequence[str],
        grade: Callable[[str], Grade | Awaitable[Grade]],
        info: Mapping[str, Json],
    ) -> None:
        super().__init__(task, agents)
        self._grade = grade
        """A function that returns the grade of a text, or an awaitable if grading would block the event loop."""
        self._info = info
        """Entries of the outcome's `info` that describe the task."""
        self._outcome: Outcome | None = None
        self._most = 1
        self._given = 0

    def allow_answers(self, most: int) -> None:
        """Allow up to `most` answers, one after another, until an answer is correct."""
        self._most = most

    def observe(self, agent: str) -> str:
        """Return the question. If several answers are allowed, return after each answer whether it was correct."""
        if self._most == 1 or self._outcome is None:
            return self.task.question
        return RIGHT if self._outcome.success == 1.0 else WRONG

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Grade the answers.

        Raises EpisodeError if the question has already been answered, if an agent is unknown, or if the grader returns no verdict.
        """
        if self.over:
            raise EpisodeError(
                "The question has already been answered. An episode allows one step, or as many as `allow_answers` sets."
            )
        require_agents(actions, self.agents, "answered")
        grades = {name: await self._graded(text) for name, text in actions.items()}
        rewards = {name: grade.score for name, grade in grades.items()}
        info: dict[str, Json] = {
            **self._info,
            "answers": {name: grade.answer for name, grade in grades.items()},
            "explanations": {name: grade.explanation for name, grade in grades.items()},
        }
        success = sum(rewards.values()) / len(rewards)
        if final is not None:
            verdict = await self._graded(final)
            success, info["final"] = verdict.score, verdict.answer
        self._given += 1
        if self._most > 1:
            info["answers_given"] = self._given
        self.over = final is None or success == 1.0 or self._given >= self._most
        self._outcome = Outcome(rewards, success, info)
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the score of a text. The text does not count as an answer."""
        return (await self._graded(text)).score

    async def _graded(self, text: str) -> Grade:
        seconds = patience_here.get().grader
        answer = call(_GRADING, "grader", seconds, self._grade, text)
        grade = answer if isinstance(answer, Grade) else await within(_GRADING, "grader", seconds, answer)
        if grade.status == "ungraded":
            raise EpisodeError(f"The grader gave no verdict: {grade.explanation}")
        return grade

    def outcome(self) -> Outcome:
        """Return the outcome with the scores as rewards. An episode without an answer is truncated and has success 0."""
        return self._outcome or Outcome({}, 0.0, self._info, truncated=True)


# -------- Settings of graded environments


class Graded(Settings):
    """Base class of environments with rewards from 0 to 1."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum reward, which are 0 and 1."""
        return (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Answers:
    """A kind of answer, which defines how answers are graded, compared and written."""

    grade: Callable[[str, Task], Grade | Awaitable[Grade]]
    """A function that returns the grade of a text for a task, with a score in [0, 1], or an awaitable if grading would block the event
    loop."""
    normal_form: Callable[[str], str | None]
    """A function that returns the answer of a text in normalised form, for votes and debates, or None if the text contains no answer."""
    written: Callable[[str], str] = str
    """A function that returns a correct answer as an agent should write it, including the mark by which graders find the answer."""


class Questions(Graded, Answerable, Scripted):
    """Base class of environments in which each task has one answer. The state of an episode is a `QuestionState`."""

    @property
    @abstractmethod
    def answers(self) -> Answers:
        """The kind of answer that the tasks have."""

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return entries of an episode's `info` that describe the task. By default, the mapping is empty."""
        return {}

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team."""

    def size(self, split: Split) -> int | None:
        """Return None, because the number of tasks is unlimited."""
        return None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionState:
        """Start an episode of one question and return its state."""
        answers = self._kind()
        return QuestionState(task, agents, lambda text: answers.grade(text, task), self.about(task))

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text in normalised form, so that equal answers give equal strings.

        Returns None if the text contains no answer.
        """
        return self._kind().normal_form(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the correct answer (`task.data["answer"]`) in the format of the first extraction rule."""
        return self._kind().written(str(answer_of(task)))

    def _kind(self) -> Answers:
        kind: object = self.answers
        if not isinstance(kind, Answers):
            raise Unfit(
                f"`answers` is {kind!r:.60}. Define it as a property that returns `numbers(…)`, `words(…)` or `Answers(…)`."
            )
        return kind


def answer_of(task: Task) -> Json:
    """Return the answer of a task (`task.data["answer"]`). Raises EpisodeError if the task has no answer."""
    if "answer" not in task.data:
        raise EpisodeError(f'Task {task.id} has no answer. Add one to the task\'s data: `{{"answer": …}}`.')
    return task.data["answer"]


_RULES = get_args(ExtractionRule)


def _known_rules(rules: Sequence[ExtractionRule]) -> Sequence[ExtractionRule]:
    unknown = [rules] if isinstance(rules, str) else [rule for rule in rules if rule not in _RULES]
    if unknown or not rules:
        named = f"{unknown[0]!r:.60}" if unknown else "empty"
        raise Unfit(
            f"The extraction rules are {named}. Give a tuple such as ('last_number',).{did_you_mean(named, _RULES)}"
        )
    return rules


def numbers(rules: Sequence[ExtractionRule]) -> Answers:
    """Return the kind of answer that consists of one number.

    The number is extracted by the first rule that applies, and compared with `task.data["answer"]`.
    """
    _known_rules(rules)

    def grade(text: str, task: Task) -> Grade:
        gold = parse_number(str(answer_of(task)))
        if gold is None:
            raise EpisodeError(
                f"The answer of task {task.id} is {answer_of(task)!r:.60}, not a number. Use a number, or return `words(…)` from `answers`."
            )
        return grade_numeric(text, gold, rules)

    def final_number(text: str) -> str | None:
        number = answer_in(text, rules, read_number)
        return None if number is None else normal_form(number)

    return Answers(grade, final_number, lambda answer: marked(answer, rules[0]))


def words(
    read: Callable[[str], str | None],
    rules: Sequence[ExtractionRule] = ("whole",),
    otherwise: str = "no answer to this question",
) -> Answers:
    """Return a kind of answer that is correct if `read` returns the same string for the answer and for `task.data["answer"]`.

    `read` returns the normalised form of an extracted text, or None if the text is not an answer. If `read` returns None, the
    explanation of the grade contains `otherwise`.
    """
    _known_rules(rules)

    def grade(text: str, task: Task) -> Grade:
        answer = read_answer(text, rules, read, otherwise)
        if isinstance(answer, Grade):
            return answer
        gold = str(answer_of(task))
        gold = read(gold) or gold
        return right(answer) if answer == gold else wrong(answer, gold)

    return Answers(grade, lambda text: answer_in(text, rules, read), lambda answer: marked(answer, rules[0]))


# -------- Generated tasks: they are the same in every process, and no problem is in both splits

TEST_SHARE = 5
"""The number of problems of which one belongs to the test split, on average."""

TRIES = 2_000
"""The maximum number of problems that are generated for a task. If none of them belongs to the split, an error is raised."""


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1] or span[0] < 1:
        raise ValueError(f"`difficulty: {list(span)}` must be [easiest, hardest], with 1 ≤ easiest ≤ hardest")
    return span


Difficulty = Annotated[tuple[int, int], AfterValidator(_ordered)]
"""The minimum and maximum level of a task. The level of each task is sampled uniformly."""


def up_to(hardest: int) -> AfterValidator:
    """Return a validator that rejects a `difficulty` above `hardest`."""

    def check(span: tuple[int, int]) -> tuple[int, int]:
        if span[1] > hardest:
            raise ValueError(f"`difficulty` goes up to {span[1]}, but the hardest level is {hardest}")
        return span

    return AfterValidator(check)


HeldOutBy = Literal["problem", "template"]
"""What determines the split of a task: the problem, or its template."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A generated problem with the data of its task."""

    question: str
    data: Mapping[str, Json]
    key: str
    """A string that identifies the problem. Problems with equal keys belong to the same split."""
    template: str | None = None
    """The problem without its numbers and names, which is used if `held_out` is `template`, or None if the problem has no template."""


def split_of(key: str) -> Split:
    """Return the split of a problem, which a hash of the key determines."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


def place_of(task_id: str) -> tuple[Split, int]:
    """Return the split and the index of a task, given the id of the task (`<split>-<index>`)."""
    split, _, index = task_id.rpartition("-")
    return ("train" if split == "train" else "test"), int(index)


def draw_task(
    name: str,
    seed: int,
    split: Split,
    index: int,
    difficulty: tuple[int, int],
    make: Callable[[random.Random, int], Problem],
    held_out: HeldOutBy = "problem",
) -> Task:
    """Return the task at an index. A level is sampled first, and then the first generated problem that belongs to the split is used.

    If `held_out` is `template`, all problems of a template belong to the same split. Raises DataError if no problem for the split
    is found.
    """
    draw = random.Random(f"{name}/{seed}/{split}/{index}")
    level = draw.randint(*difficulty)
    for _ in range(TRIES):
        problem: object = make(draw, level)
        if not isinstance(problem, Problem):
            raise Unfit(f"`problem` returns {problem!r:.60}; return a kapelle.environments.Problem.")
        key = problem.key
        if held_out == "template":
            if problem.template is None:
                raise Unfit(
                    f"`environment.held_out: template` of `{name}` needs a `template` for each problem. Set it in each "
                    "kapelle.environments.Problem, or set `environment.held_out: problem`."
                )
            key = f"{name}, template: {problem.template}"
        if split_of(key) == split:
            return Task(f"{split}-{index}", problem.question, {**problem.data, "difficulty": level})
    raise DataError(
        f"`{name}` found no problem of difficulty {level} for the {split} split in {TRIES} draws"
        f"{' because all its templates belong to the other split' if held_out == 'template' else ''}. "
        "Increase `environment.difficulty`."
    )


def describe(what: str, difficulty: tuple[int, int], held_out: HeldOutBy = "problem") -> dict[Split, str]:
    """Return descriptions of the generated tasks of both splits."""
    kind = f"generated {what} of difficulty {difficulty[0]} to {difficulty[1]}"
    return {
        "train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE} {held_out}s",
        "test": f"{kind}, the other {held_out}s",
    }


class Generated(Questions):
    """Base class of environments with generated tasks.

    A subclass defines the settings `difficulty` and `seed`, the property `answers` and the method `problem`.
    """

    things: ClassVar[str] = "problems"
    """The word for the problems of this environment in messages."""
    if (
        TYPE_CHECKING
    ):  # settings of each subclass, which declares them and its literal `name` in its own order
        difficulty: tuple[int, int]
        seed: int

    held_out: HeldOutBy = "problem"
    """What the two splits never have in common: problems, or templates (problems without their numbers and names)."""

    @abstractmethod
    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a problem of the given level. The argument `draw` must be the only source of randomness."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the generated problems of each split. A hash of each problem determines its split."""
        return describe(self.things, self.difficulty, self.held_out)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, which is the same in every process."""
        name = cast("Environment", self).name
        return draw_task(name, self.seed, split, index, self.difficulty, self.problem, self.held_out)

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the difficulty of the task."""
        return {"difficulty": task.data["difficulty"]}


# -------- Deliberate flaws of scripted experts, in a given share of the demonstrations


def _shares(flaws: Mapping[str, float]) -> Mapping[str, float]:
    for agent, share in flaws.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"`flaws.{agent}` is {share}. Set a share between 0 and 1.")
    return flaws


Flaws = Annotated[Mapping[str, float], AfterValidator(_shares)]
"""Mapping from an agent to the fraction, in [0, 1], of the demonstrations in which its script makes a mistake."""


def check_flaws(flaws: Mapping[str, float], agents: Sequence[str]) -> None:
    """Raise ConfigError if `flaws` names an unknown agent."""
    for agent in flaws:
        need_known("environment.flaws", "agent", agent, agents)


def flawed(flaws: Mapping[str, float], agent: str, seed: int) -> bool:
    """Return whether the agent's demonstration with this seed contains a mistake."""
    return random.Random(f"{seed}/{agent}").random() < flaws.get(agent, 0.0)


# -------- Environments that wrap the questions of another environment

_UNNAMED = "`questions` names no environment. Set its name, for example `questions: {name: math}`."
InnerQuestions = Annotated[
    EnvironmentSettings, Plugged(), BeforeValidator(partial(named_settings, missing=_UNNAMED))
]
"""Settings of the environment that provides the questions, such as `{name: math, …}`."""


class HandsOnQuestions(Settings, Answerable, Scripted, Reporting):
    """Base class of environments that take their questions from another environment (setting `questions`).

    The other environment defines the tasks, the grading and the script.
    """

    if TYPE_CHECKING:  # a subclass declares it in its own order
        questions: InnerQuestions

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the questions of each split."""
        return self.questions.sources

    @property
    def alive(self) -> Sequence[str]:
        """The external programs and servers of the questions' environment, whose results may vary."""
        return report_of(self.questions).alive

    def skipped(self) -> Mapping[Split, str]:
        """Return a report on the excluded rows of the questions."""
        return report_of(self.questions).skipped()

    def doubts(self) -> Sequence[str]:
        """Return the warnings about the data of the questions."""
        return report_of(self.questions).doubts()

    def check(self, agents: Sequence[str]) -> None:
        """Check the environment of the questions. Raises ConfigError if it is a game."""
        if not has_comparable_answers(self.questions):
            raise ConfigError(
                f"`{cast('Environment', self).name}` needs questions with one answer, but `{self.questions.name}` is a game. "
                "Set `environment.questions` to math, arithmetic or another environment of questions."
            )
        self.questions.check(agents)

    def size(self, split: Split) -> int | None:
        """Return the number of questions in a split."""
        return self.questions.size(split)

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        return self.questions.task(split, index)

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, as extracted by the environment of the questions."""
        assert offers(self.questions, Answerable), "`check` raises for games"
        return self.questions.extract(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the demonstration from the environment of the questions, which contains no tool calls.

        Raises ConfigError if that environment has no script.
        """
        if not offers(self.questions, Scripted):
            raise ConfigError(
                f"`{self.questions.name}` has no script for demonstrations. Choose other questions, or remove `warmup`."
            )
        return self.questions.script(agent, task, messages, seed)
