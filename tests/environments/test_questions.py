"""Kinds of answers of environments of questions, and their grading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import pytest
from pydantic import ValidationError

from kapelle.environment import environment_class
from kapelle.environments.grading.text.extraction import ExtractionRule, extract, marked
from kapelle.environments.grading.verdict import Grade
from kapelle.environments.math import Math
from kapelle.environments.procedural import Algebra
from kapelle.environments.questions import Answers, Questions, numbers, words
from kapelle.errors import ConfigError
from kapelle.types import Split, Task

EVERY_RULE: tuple[ExtractionRule, ...] = get_args(ExtractionRule)


class Capitals(Questions):
    """One question, whose answer is a word in any case."""

    name: Literal["capitals"] = "capitals"

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "one question", "test": "one question"}

    @property
    def answers(self) -> Answers:
        return words(lambda text: text.casefold() if text.isalpha() else None, ("hash",), "no city")

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", "The capital of France?", {"answer": "Paris"})


async def graded(text: str) -> tuple[float, object, str]:
    environment = Capitals()
    world = environment.start(environment.task("train", 0), ["a"], 0)
    await world.step({"a": text})
    outcome = world.outcome()
    return outcome.rewards["a"], outcome.info["answers"]["a"], outcome.info["explanations"]["a"]


async def test_words_are_compared_in_their_normal_form() -> None:
    assert (await graded("#### PARIS"))[:2] == (1.0, "paris")
    assert (await graded("#### Rome"))[:2] == (0.0, "rome")
    assert await graded("#### 75") == (0.0, None, "'75' is no city.")
    assert (await graded("Paris"))[:2] == (0.0, None)


def test_equal_answers_are_equal_texts() -> None:
    environment = Capitals()
    assert environment.extract("#### PARIS") == environment.extract("… #### paris") == "paris"
    assert environment.extract("#### 75") is None
    assert environment.script("a", environment.task("train", 0), [], 0) == "#### Paris"
    assert environment.reward_range == (0.0, 1.0)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_rule_finds_its_mark(rule: ExtractionRule) -> None:
    assert extract(marked("42", rule), (rule,)).text == "42"


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_script_is_correct_with_every_rule(rule: ExtractionRule) -> None:
    answers = numbers((rule,))
    grade = answers.grade(answers.written("42"), Task("t", "", {"answer": 42}))
    assert isinstance(grade, Grade)
    assert (grade.score, grade.answer) == (1.0, "42")
    algebra = Algebra(extraction=(rule,))
    task = algebra.task("train", 0)
    if rule != "last_number":
        assert algebra.extract(algebra.script("a", task, [], 0)) == task.data["answer"]
    assert Math(extraction=(rule,)).answers.normal_form(marked("42", rule)) == "42"


@pytest.mark.parametrize(("name", "hardest"), [("algebra", 5), ("word_problems", 8), ("multi_step", 20)])
def test_levels_have_a_maximum(name: str, hardest: int) -> None:
    kind = environment_class(name)
    assert kind(difficulty=(1, hardest)).difficulty == (1, hardest)
    with pytest.raises(ValidationError, match=f"hardest level is {hardest}"):
        kind(difficulty=(1, hardest + 1))


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k_steps"])
def test_a_flaw_is_a_share_of_a_known_agent(name: str) -> None:
    kind = environment_class(name)
    with pytest.raises(ValidationError, match="share"):
        kind(flaws={"a": 2.0})
    with pytest.raises(ConfigError, match="Did you mean 'actor'"):
        kind(flaws={"actr": 0.5}).check(["actor"])
