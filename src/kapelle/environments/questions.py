"""What every environment of questions with one answer shares: how answers are graded, compared and written.

An environment of questions is a subclass of `Questions` with two parts of its own: `task`, which asks, and `answers`, which
says what kind of answer counts. `numbers` and `words` are the two common kinds.

    class Capitals(Questions):
        name: Literal["capitals:Capitals"] = "capitals:Capitals"

        @property
        def answers(self) -> Answers:
            return words(str.casefold)
        …

Tasks that are drawn by seed need still less: see `kapelle.environments.procedural.Generated`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kapelle.environments.graded import Graded
from kapelle.environments.question_world import QuestionWorld
from kapelle.grading.math.numeric import grade_numeric, normal_form, parse_number, read_number
from kapelle.grading.text.extraction import ExtractionRule, answer_in, marked, read_answer
from kapelle.grading.verdict import Grade, right, wrong
from kapelle.types import Json, Message, Split, Task


@dataclass(frozen=True, slots=True)
class Answers:
    """One kind of answer: how a text is graded, how equal answers become equal texts, and how one is written."""

    grade: Callable[[str, Task], Grade | Awaitable[Grade]]
    """What a text earns on a task, in [0, 1]; what would block comes as an awaitable."""
    normal_form: Callable[[str], str | None]
    """The answer of a text in the one form in which votes and debates compare it; None where it has none."""
    written: Callable[[str], str] = str
    """A right answer as an agent should write it, with the mark that graders look for."""


class Questions(Graded):
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
        """Return None: tasks are generated without end."""
        return None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> QuestionWorld:
        """Open the world of one question."""
        answers = self.answers
        return QuestionWorld(task, agents, lambda text: answers.grade(text, task), self.about(task))

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text in its normal form, so that equal answers are equal texts; None without one."""
        return self.answers.normal_form(text)

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return the answer, `task.data["answer"]`, in the form that is looked for first."""
        return self.answers.written(str(task.data["answer"]))


def numbers(rules: Sequence[ExtractionRule]) -> Answers:
    """Return the kind of answer that is one number, `task.data["answer"]`, found by the first rule that applies."""

    def grade(text: str, task: Task) -> Grade:
        gold = parse_number(str(task.data["answer"]))
        assert gold is not None, "a task's own answer is a number"
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
    """Return the kind of answer that is right when `read` makes the same of it as of `task.data["answer"]`.

    `read` returns the normal form of what a rule has found, and None for what is no answer; the explanation then
    calls it `otherwise`.
    """

    def grade(text: str, task: Task) -> Grade:
        answer = read_answer(text, rules, read, otherwise)
        if isinstance(answer, Grade):
            return answer
        gold = str(task.data["answer"])
        gold = read(gold) or gold
        return right(answer) if answer == gold else wrong(answer, gold)

    return Answers(grade, lambda text: answer_in(text, rules, read), lambda answer: marked(answer, rules[0]))
