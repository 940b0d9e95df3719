"""Self-play between a proposer and solvers. One agent of the team writes problems, and the environment checks them.

The proposer reads a number and writes an arithmetic problem that begins with this number. The environment parses the problem,
computes the answer, and gives an accepted problem to all solvers simultaneously. The fraction p of correct answers determines the
reward of the proposer:

    47  →  proposer: 47+85  →  solvers: 132, 122, 132, 132  →  p = 3/4; the reward of each solver is that of its own answer

The reward of the proposer is highest for problems that the solvers solve only sometimes, so the difficulty of the problems follows
the ability of the solvers. Test problems are fixed and are given only to the solvers; a proposal that belongs to the test split is
rejected.

The method is based on R-Zero (arXiv:2508.05004: the uncertainty of the solver is the reward of the proposer), Absolute Zero
(arXiv:2505.03335: an executor checks the tasks) and SPICE (arXiv:2510.24684: the proposer reads a different text each time). This
environment differs from these methods in three ways. The environment knows the correct answer, whereas R-Zero uses the majority
answer. The given number replaces a penalty for repetition. The proposer and the solvers are trained in the same step, whereas
R-Zero trains one of them while the other is frozen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from kapelle.environment import Outcome, Retriable, Scripted
from kapelle.environments.arithmetic import TRIES, Arithmetic, written
from kapelle.environments.base import BaseEnvironment, BaseState, need_movers
from kapelle.environments.grading.math.calculation import (
    Expression,
    Operation,
    Value,
    parse_expression,
    work_out,
)
from kapelle.environments.grading.text.extraction import ExtractionRule, extract, marked
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import flawed
from kapelle.errors import ConfigError, DataError, did_you_mean, need_known
from kapelle.types import Json, Message, Split, Task

FRONTIERS: Mapping[str, Callable[[float], float]] = {
    "uncertainty": lambda p: 1.0 - abs(2.0 * p - 1.0),
    "variance": lambda p: 4.0 * p * (1.0 - p),
    "difficulty": lambda p: 1.0 - p if 0.0 < p < 1.0 else 0.0,
}
"""Functions that compute the reward of the proposer from the fraction p of correct answers. The reward is from 0 to 1, and it is 0 for
p = 0 and p = 1."""


class Proposals(BaseEnvironment, Scripted):
    """Arithmetic problems that one agent writes and all other agents solve."""

    name: Literal["proposals"] = "proposals"
    problems: Arithmetic = Arithmetic()
    """Settings of the environment `arithmetic` for accepted problems and test problems. A proposal may have fewer digits and
    operations, but it may use only these operators. In the fraction of demonstrations that `problems.flaws` sets, the scripted
    proposer writes a problem without carries (or without × and ÷)."""
    proposer: str = "proposer"
    """The agent that writes problems. All other agents solve the problems."""
    pays: Literal["uncertainty", "variance", "difficulty"] = "uncertainty"
    """The reward of the proposer for a fraction p of correct answers. `uncertainty`: 1 − |2p − 1| (R-Zero). `variance`: 4p(1 − p).
    `difficulty`: 1 − p, or 0 if p is 0 (Absolute Zero)."""
    extraction: tuple[ExtractionRule, ...] = Field(default=("whole",), min_length=1)
    """Rules that extract the problem from the text of the proposer. The rules in `problems.extraction` extract the answers."""

    @model_validator(mode="after")
    def _whole_numbers(self) -> Proposals:
        if self.problems.fractions:
            raise ValueError(
                "`problems.fractions: true` is not supported, because a proposal contains only whole numbers. Remove it."
            )
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the proposed problems (none of which belongs to the test split) and of the test problems."""
        tested = self.problems.sources
        return {
            "train": f"problems that `{self.proposer}` writes ({tested['train']})",
            "test": f"{tested['test']}, never proposed",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the first agent is not the proposer, there is no solver or `flaws` names an unknown agent."""
        if self.proposer not in agents:
            raise ConfigError(
                f"`environment.proposer: {self.proposer}` is not an agent of the team ({', '.join(agents)})."
                f"{did_you_mean(self.proposer, agents)}"
            )
        if self.proposer != agents[0]:
            raise ConfigError(
                f"`environment.proposer: {self.proposer}` must be the first agent, which is '{agents[0]}'. Put '{self.proposer}' first "
                "in `team.agents`."
            )
        if len(agents) == 1:
            raise ConfigError(
                f"The proposer, '{self.proposer}', is the only agent of the team. Add agents that solve its problems."
            )
        for agent in self.problems.flaws:
            need_known("environment.problems.flaws", "agent", agent, agents)

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index.

        The question is a number with which the proposed problem must begin or, for tests, a fixed problem for the solvers.
        """
        if split == "test":
            return self.problems.task(split, index)
        draw = random.Random(f"proposals/{self.problems.seed}/{index}")
        low = 0 if self.problems.digits == 1 else 10 ** (self.problems.digits - 1)
        number = draw.randrange(low, 10**self.problems.digits)
        return Task(f"{split}-{index}", str(number), {"given": number})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ProposalState:
        """Start an episode, with one proposal or with one fixed problem, and return its state."""
        return ProposalState(self, task, agents)

    def proposed(self, text: str, given: int) -> Proposed | str:
        """Return the problem in a proposer's text, or the reason why it is rejected. The proposer reads this reason."""
        found = extract(text, self.extraction)
        if found.text is None:
            return f"This proposes nothing: {found.problem}"
        expression = parse_expression(found.text)
        if not isinstance(expression, Operation):
            return "This is not a problem of arithmetic."
        if why := self._misfit(expression, given):
            return why
        value = work_out(expression)
        if value is None or value < 0:
            return "Its answer is below zero." if value is not None else "It divides by zero."
        if self.problems.belongs_to(expression) == "test":
            return "This problem is kept for tests."
        return Proposed(written(expression), int(value))

    def about(self, proposed: Proposed) -> Mapping[str, Json]:
        """Return the properties of a problem that the environment `arithmetic` reports."""
        return self.problems.about(Task("", proposed.question))

    def _misfit(self, expression: Operation, given: int) -> str | None:
        """Return the reason why an expression does not fit the settings in `problems`, or None if it fits."""
        kind, first, operations = self.problems, True, 0
        parts: list[tuple[Expression, int]] = [(expression, kind.digits)]
        while parts:  # depth first, from the left
            part, digits = parts.pop()
            if isinstance(part, Operation):
                operations += 1
                if part.operator not in kind.operators:
                    return f"`{part.operator}` is not among the operators {' '.join(kind.operators)}."
                value = work_out(part)
                if part.operator == "/" and value is not None and value.denominator != 1:
                    return "A division leaves a rest."
                # A dividend is a product, so its first number may have additional digits, as many as the divisor.
                wide = {"*": digits, "/": digits + kind.digits}.get(part.operator, kind.digits)
                parts += [(part.right, kind.digits), (part.left, wide)]
            elif part.number.denominator != 1 or not 0 <= part.number < 10**digits:
                return f"{part.number} is not a whole number from 0 to {10**digits - 1}."
            elif first and part.number != given:
                return f"It does not begin with {given}."
            else:
                first = False
        if operations > kind.operations:
            return f"It has {operations} operations; {kind.operations} is the most."
        if "(" in written(expression) and not kind.brackets:
            return "It has brackets."
        return None

    def script(self, agent: str, task: Task, messages: Sequence[Message], seed: int) -> str:
        """Return a problem that begins with the given number or, for a solver, the answer to the last problem."""
        if agent != self.proposer:
            problems = re.findall(
                r"[0-9(][0-9+\-*/×÷().]*", messages[-1].content if messages else task.question
            )
            if not problems:
                return "?"
            return self.problems.script(agent, Task(task.id, problems[-1], {}), messages, seed)
        given = task.data["given"]
        draw = random.Random(f"proposals/{seed}/{task.id}")
        easy = flawed(self.problems.flaws, agent, seed)
        for _ in range(TRIES):
            like = parse_expression(self.problems.task("train", draw.randrange(2**32)).question)
            assert isinstance(like, Operation), "a generated problem has an operation"
            text = marked(written(_beginning(like, given)), self.extraction[0])
            found = self.proposed(text, given)
            if isinstance(found, Proposed) and not (easy and any(self.about(found).values())):
                return text
        raise DataError(
            f"`proposals` found no problem that begins with {given} in {TRIES} draws. Increase `environment.problems.digits`."
        )


@dataclass(frozen=True, slots=True)
class Proposed:
    """A problem that the environment has accepted."""

    question: str
    """The problem in the notation of the environment `arithmetic`."""
    answer: int


def _beginning(expression: Operation, number: int) -> Operation:
    """Return an expression in which the first number is replaced with the given number."""
    left = expression.left
    begun = _beginning(left, number) if isinstance(left, Operation) else Value(left.number * 0 + number)
    return Operation(expression.operator, begun, expression.right)


class ProposalState(BaseState, Retriable):
    """The state of an episode in which the solvers answer a proposed problem or a fixed problem.

    If several answers are allowed (`allow_answers`), a proposer reads the reason why its proposal was rejected and may write
    another proposal.
    """

    def __init__(self, settings: Proposals, task: Task, agents: Sequence[str]) -> None:
        super().__init__(task, agents)
        self._settings = settings
        self._solvers = tuple(agent for agent in self.agents if agent != settings.proposer)
        self._given: int | None = task.data.get("given")
        """The number with which a proposal must begin, or None for a fixed problem."""
        self._problem = None if self._given is not None else Proposed(task.question, task.data["answer"])
        self._rejected: list[str] = []
        self._tries = 1
        self._answers: dict[str, Grade] = {}

    def allow_answers(self, most: int) -> None:
        """Allow up to `most` proposals, one after another, until a proposal is accepted."""
        self._tries = most

    def observe(self, agent: str) -> str:
        """Return the observation of an agent.

        A solver reads the problem. The proposer reads the given number or the reason why its last proposal was rejected.
        """
        if agent in self._solvers:
            return "" if self._problem is None else self._problem.question
        if self._given is None:
            return ""
        return self._rejected[-1] if self._rejected else self.task.question

    def movers(self) -> tuple[str, ...]:
        """Return the proposer until a proposal is accepted, and then all solvers. After the end of the episode, the result is empty."""
        if self.over:
            return ()
        return (self._settings.proposer,) if self._problem is None else self._solvers

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Process a proposal or the answers of the solvers. Raises EpisodeError if the agents that act are not exactly the movers."""
        need_movers(actions, self.movers())
        if self._problem is None:
            assert self._given is not None, "only a proposer starts without a problem"
            found = self._settings.proposed(actions[self._settings.proposer], self._given)
            if isinstance(found, Proposed):
                self._problem = found
            else:
                self._rejected.append(found)
                self.over = len(self._rejected) >= self._tries
            return {}
        problem = Task(self.task.id, self._problem.question, {"answer": self._problem.answer})
        for agent, text in actions.items():
            grade = self._settings.problems.answers.grade(text, problem)
            assert isinstance(grade, Grade), "numbers are graded at once"
            self._answers[agent] = grade
        self.over = True
        return {}

    def outcome(self) -> Outcome:
        """Return the outcome with the rewards. The success is the fraction of correct answers, or 0 if the proposal was rejected."""
        info: dict[str, Json] = {"refused": list(self._rejected)} if self._rejected else {}
        if self._given is not None:
            info["accepted"] = float(self._problem is not None)
        if self._problem is not None:
            about = self._settings.about(self._problem)
            # Properties of proposals are stored as numbers, which metrics average; tests have a success rate for each property.
            info |= {
                key: float(value) if self._given is not None and isinstance(value, bool) else value
                for key, value in about.items()
            }
            info["problem"] = self._problem.question
        if not self._answers:
            rewards = {} if self._given is None or not self.over else {self._settings.proposer: 0.0}
            return Outcome(rewards, 0.0, info, truncated=not self.over)
        solved = sum(grade.score for grade in self._answers.values()) / len(self._answers)
        info["answers"] = {agent: grade.answer for agent, grade in self._answers.items()}
        rewards = {agent: grade.score for agent, grade in self._answers.items()}
        if self._given is not None:
            info["solved"] = solved
            rewards[self._settings.proposer] = FRONTIERS[self._settings.pays](solved)
        return Outcome(rewards, solved, info)
