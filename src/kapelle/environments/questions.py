"""What every environment of questions with one answer shares: how answers are graded, compared and written.

An environment of questions is a subclass of `Questions` with two parts of its own: `task`, which asks, and `answers`, which
says what kind of answer counts. `numbers` and `words` are the two common kinds.

    class Capitals(Questions):
        name: Literal["capitals:Capitals"] = "capitals:Capitals"

        @property
        def answers(self) -> Answers:
            return words(str.casefold)
        …

Tasks that are drawn by seed need still less: see `kapelle.environments.questions.Generated`.
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
    Alive,
    Answerable,
    Environment,
    Outcome,
    Reporting,
    Retriable,
    Scorable,
    Scripted,
    asks_questions,
    offers,
)
from kapelle.environments.base import BaseWorld
from kapelle.environments.grading.math.numeric import grade_numeric, normal_form, parse_number, read_number
from kapelle.environments.grading.text.extraction import ExtractionRule, answer_in, marked, read_answer
from kapelle.environments.grading.verdict import Grade, right, wrong
from kapelle.errors import ConfigError, DataError, EpisodeError, did_you_mean, need_known
from kapelle.runtime.deadlines import call, patience_here, within
from kapelle.runtime.foreign_code import Unfit
from kapelle.settings.base import EnvironmentSettings, Plugged, Settings, named_settings
from kapelle.types import Json, Message, Split, Task

# -------- The world of one question with one answer: every agent reads it, and those that answer are graded

RIGHT, WRONG = "This answer is right.", "This answer is wrong."
"""All that an agent reads about an answer: a grader's explanation may name the gold answer."""


def need_seats(actions: Collection[str], seats: Collection[str], did: str = "acted") -> None:
    """Raise EpisodeError if no agent acted, or an unknown one did."""
    if not actions:
        raise EpisodeError(f"Nobody {did}. Hand the world the text of one agent at least.")
    for name in actions:
        if name not in seats:
            raise EpisodeError(f"'{name}' {did} and has no seat.{did_you_mean(name, seats)}")


_GRADING = "Grading an answer"


class QuestionWorld(BaseWorld, Scorable, Retriable):
    """One attempt at a question. The first step answers it and ends the episode.

    If more answers are allowed, it stays open after a wrong `final` text: all agents read that it
    was wrong, and the last answers are paid.

    Each agent that acts earns the score of its own text. The team's success is the score of `final`,
    or the mean over the agents that acted where no text counts as the team's.
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
        """Returns a grade at once where it can; a grader that would block returns an awaitable."""
        self._info = info
        """What the outcome reports about the task itself."""
        self._outcome: Outcome | None = None
        self._most = 1
        self._given = 0

    def allow_answers(self, most: int) -> None:
        """Take so many answers, one after another, until one is right."""
        self._most = most

    def observe(self, agent: str) -> str:
        """Return the question; after an answer, where more are allowed, whether it was right."""
        if self._most == 1 or self._outcome is None:
            return self.task.question
        return RIGHT if self._outcome.success == 1.0 else WRONG

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Grade the answers; EpisodeError for one answer too many, a stranger, or a grader that gave up."""
        if self.over:
            raise EpisodeError(
                "The question has been answered already. A world takes one step, or as many as `allow_answers` allows."
            )
        need_seats(actions, self.agents, "answered")
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
        """Return what a text would earn now; the question stays open."""
        return (await self._graded(text)).score

    async def _graded(self, text: str) -> Grade:
        seconds = patience_here.get().grader
        answer = call(_GRADING, "grader", seconds, self._grade, text)
        grade = answer if isinstance(answer, Grade) else await within(_GRADING, "grader", seconds, answer)
        if grade.status == "ungraded":
            raise EpisodeError(f"The grader gave up: {grade.explanation}")
        return grade

    def outcome(self) -> Outcome:
        """Return the scores; an episode that ended without an answer is truncated and earns nothing."""
        return self._outcome or Outcome({}, 0.0, self._info, truncated=True)


# -------- Settings of whatever is graded between nothing and all


class Graded(Settings):
    """Its episodes pay each agent a score from 0 to 1."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """From nothing to all."""
        return (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Answers:
    """One kind of answer: how a text is graded, how equal answers become equal texts, and how one is written."""

    grade: Callable[[str, Task], Grade | Awaitable[Grade]]
    """What a text earns on a task, in [0, 1]; what would block comes as an awaitable."""
    normal_form: Callable[[str], str | None]
    """The answer of a text in the normal form in which votes and debates compare it; None if it has none."""
    written: Callable[[str], str] = str
    """A right answer as an agent should write it, with the mark that graders look for."""


class Questions(Graded, Answerable, Scripted):
    """Base of environments whose tasks have one answer each. The world is a `QuestionWorld`."""

    @property
    @abstractmethod
    def answers(self) -> Answers:
        """What kind of answer the tasks have."""

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return what an episode's `info` records about its task; nothing unless a subclass overrides this."""
        return {}

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team."""

    def size(self, split: Split) -> int | None:
        """Return None: the supply of tasks is endless."""
        return None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionWorld:
        """Open the world of one question."""
        answers = self._kind()
        return QuestionWorld(task, agents, lambda text: answers.grade(text, task), self.about(task))

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text in its normal form, so that equal answers are equal texts; None without one."""
        return self._kind().normal_form(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the answer, `task.data["answer"]`, in the form that is looked for first."""
        return self._kind().written(str(answer_of(task)))

    def _kind(self) -> Answers:
        kind: object = self.answers
        if not isinstance(kind, Answers):
            raise Unfit(
                f"`answers` is {kind!r:.60}. Write it as a property that returns `numbers(…)`, `words(…)` or `Answers(…)`."
            )
        return kind


def answer_of(task: Task) -> Json:
    """Return a task's own answer, `task.data["answer"]`; EpisodeError where there is none."""
    if "answer" not in task.data:
        raise EpisodeError(f'Task {task.id} has no answer. Put it into its data: `{{"answer": …}}`.')
    return task.data["answer"]


_RULES = get_args(ExtractionRule)


def _known_rules(rules: Sequence[ExtractionRule]) -> Sequence[ExtractionRule]:
    wrong = [rules] if isinstance(rules, str) else [rule for rule in rules if rule not in _RULES]
    if wrong or not rules:
        named = f"{wrong[0]!r:.60}" if wrong else "nothing"
        raise Unfit(
            f"The rules that look for an answer are {named}. Give a tuple such as ('last_number',).{did_you_mean(str(named), _RULES)}"
        )
    return rules


def numbers(rules: Sequence[ExtractionRule]) -> Answers:
    """Return the kind of answer that is one number, `task.data["answer"]`, found by the first rule that applies."""
    _known_rules(rules)

    def grade(text: str, task: Task) -> Grade:
        gold = parse_number(str(answer_of(task)))
        if gold is None:
            raise EpisodeError(
                f"The answer of task {task.id} is {answer_of(task)!r:.60}, no number. Let `answers` return `words(…)`, or give a number."
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
    """Return the kind of answer that is right if `read` reads it the same as `task.data["answer"]`.

    `read` returns the normal form of what a rule has found, and None if that is not an answer; the explanation then
    calls it `otherwise`.
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


# -------- Tasks without end, drawn by seed: the same in every process, and never one problem in both splits

TEST_SHARE = 5
"""One problem in this many belongs to the test split."""

TRIES = 2_000
"""Most draws for one task; if none of them fits the split, the settings are refused."""


def _ordered(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] > span[1] or span[0] < 1:
        raise ValueError(f"`difficulty: {list(span)}` is no range. Write [easiest, hardest], both from 1")
    return span


Difficulty = Annotated[tuple[int, int], AfterValidator(_ordered)]
"""Easiest and hardest level of a task, both included; levels are drawn evenly."""


def up_to(hardest: int) -> AfterValidator:
    """Return a validator that refuses levels above the hardest one, for the type of a `difficulty`."""

    def check(span: tuple[int, int]) -> tuple[int, int]:
        if span[1] > hardest:
            raise ValueError(f"`difficulty` goes to {span[1]}; the hardest is {hardest}")
        return span

    return AfterValidator(check)


HeldOutBy = Literal["problem", "template"]
"""What lies in one split as a whole."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What one draw made."""

    question: str
    data: Mapping[str, Json]
    key: str
    """What makes it this problem: equal keys are one problem in other words, and lie in one split."""
    template: str | None = None
    """What is left of it without its numbers and names; None where nobody says so (`held_out: template`)."""


def split_of(key: str) -> Split:
    """Return the split that a problem belongs to, by a hash of its key."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % TEST_SHARE == 0 else "train"


def draw_task(
    name: str,
    seed: int,
    split: Split,
    index: int,
    difficulty: tuple[int, int],
    make: Callable[[random.Random, int], Problem],
    held_out: HeldOutBy = "problem",
) -> Task:
    """Return the task at an index: a level, then the first problem of that level that belongs to the split.

    With `held_out: template` whole templates belong to a split. Raises DataError if a level has no problem for the split.
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
                    f"`problem` gives no `template`, and `environment.held_out: template` of `{name}` asks for it. Give each "
                    "kapelle.environments.Problem one, or set it to `problem`."
                )
            key = f"{name}, template: {problem.template}"
        if split_of(key) == split:
            return Task(f"{split}-{index}", problem.question, {**problem.data, "difficulty": level})
    raise DataError(
        f"`{name}` finds no problem of difficulty {level} for the {split} split in {TRIES} draws"
        f"{': all its templates lie in the other one' if held_out == 'template' else ''}. Set `environment.difficulty` higher."
    )


def describe(what: str, difficulty: tuple[int, int], held_out: HeldOutBy = "problem") -> dict[Split, str]:
    """Return where the tasks of both splits come from, in words."""
    kind = f"generated {what} of difficulty {difficulty[0]} to {difficulty[1]}"
    return {
        "train": f"{kind}, {TEST_SHARE - 1} of {TEST_SHARE} {held_out}s",
        "test": f"{kind}, the other {held_out}s",
    }


class Generated(Questions):
    """Base of environments that draw their tasks: a subclass has settings `difficulty` and `seed`, `answers`, and `problem`."""

    things: ClassVar[str] = "problems"
    """What is generated, in words."""
    if TYPE_CHECKING:  # settings of each subclass, which stand in an order of their own; its `name` is a literal, and declared there alone
        difficulty: tuple[int, int]
        seed: int

    held_out: HeldOutBy = "problem"
    """What tests never share with training: problems; or templates, what is left of a problem without its numbers and names."""

    @abstractmethod
    def problem(self, draw: random.Random, level: int) -> Problem:
        """Return a problem of a level, drawn from `draw` alone."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Generated; a hash of each problem decides its split."""
        return describe(self.things, self.difficulty, self.held_out)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index: the same in every process."""
        name = cast("Environment", self).name
        return draw_task(name, self.seed, split, index, self.difficulty, self.problem, self.held_out)

    def about(self, task: Task) -> Mapping[str, Json]:
        """Return the task's difficulty."""
        return {"difficulty": task.data["difficulty"]}


# -------- Bad habits of scripted experts: in a stated share of the demonstrations, an agent makes its mistake


def _shares(flaws: Mapping[str, float]) -> Mapping[str, float]:
    for agent, share in flaws.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"`flaws.{agent}` is {share}; it is a share between 0 and 1.")
    return flaws


Flaws = Annotated[Mapping[str, float], AfterValidator(_shares)]
"""Agent → share of the demonstrations in which its script is flawed, in [0, 1]."""


def check_flaws(flaws: Mapping[str, float], agents: Sequence[str]) -> None:
    """Raise ConfigError when `flaws` names an unknown agent."""
    for agent in flaws:
        need_known("environment.flaws", "agent", agent, agents)


def flawed(flaws: Mapping[str, float], agent: str, seed: int) -> bool:
    """Return whether this agent's demonstration with this seed is a flawed one."""
    return random.Random(f"{seed}/{agent}").random() < flaws.get(agent, 0.0)


# -------- Environments that hand on the questions of another one, whose settings stand inside theirs


_UNNAMED = "`questions` names no environment. Write `questions: {name: math}`, for example."
InnerQuestions = Annotated[
    EnvironmentSettings, Plugged(), BeforeValidator(partial(named_settings, missing=_UNNAMED))
]
"""Settings of the environment that asks: `{name: math, …}`."""


class HandsOnQuestions(Settings, Answerable, Scripted, Alive, Reporting):
    """Base of environments with a setting `questions`: another environment asks, reads answers and demonstrates."""

    if TYPE_CHECKING:  # it stands where it belongs among a subclass's own
        questions: InnerQuestions

    @property
    def sources(self) -> Mapping[Split, str]:
        """The questions' own."""
        return self.questions.sources

    @property
    def alive(self) -> Sequence[str]:
        """What the environment that asks names."""
        return self.questions.alive if offers(self.questions, Alive) else ()

    def skipped(self) -> Mapping[Split, str]:
        """Return what the environment that asks leaves out."""
        return self.questions.skipped() if offers(self.questions, Reporting) else {}

    def doubts(self) -> Sequence[str]:
        """Return what the environment that asks doubts."""
        return self.questions.doubts() if offers(self.questions, Reporting) else ()

    def check(self, agents: Sequence[str]) -> None:
        """Check the environment that asks; ConfigError for a game."""
        if not asks_questions(self.questions):
            raise ConfigError(
                f"`{self.questions.name}` is a game of moves, and `{cast('Environment', self).name}` takes questions with one answer. Set "
                "`environment.questions` to math, arithmetic or another environment of questions."
            )
        self.questions.check(agents)

    def size(self, split: Split) -> int | None:
        """Return the number of questions."""
        return self.questions.size(split)

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        return self.questions.task(split, index)

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text as the questions' environment reads it."""
        assert offers(self.questions, Answerable), "`check` refuses games"
        return self.questions.extract(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return what the questions' own script writes, without any calls; ConfigError if they have none."""
        if not offers(self.questions, Scripted):
            raise ConfigError(f"`{self.questions.name}` has no script that could demonstrate anything.")
        return self.questions.script(agent, task, messages, seed)
