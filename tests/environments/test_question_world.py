from __future__ import annotations

import pytest

from kapelle.environments.grading.verdict import Grade
from kapelle.environments.questions import QuestionWorld
from kapelle.errors import EpisodeError
from kapelle.types import Task

TASK = Task("train-0", "2+2", {"answer": 4})


def grade(text: str) -> Grade:
    if text == "?":
        return Grade(0.0, None, "the checker ran out of time", "ungraded")
    return Grade(float(text == "4"), text, "")


def world() -> QuestionWorld:
    return QuestionWorld(TASK, ["a", "b"], grade, {"source": "made up"})


async def test_each_is_scored_by_its_own_text_and_the_team_by_the_final_one() -> None:
    asked = world()
    assert asked.observe("a") == asked.observe("b") == "2+2"
    assert asked.movers() == ("a", "b")
    assert await asked.step({"a": "5", "b": "4"}, final="5") == {}
    assert asked.movers() == ()
    outcome = asked.outcome()
    assert outcome.rewards == {"a": 0.0, "b": 1.0}
    assert outcome.success == 0.0
    assert outcome.info["answers"] == {"a": "5", "b": "4"}
    assert outcome.info["source"] == "made up"
    assert not outcome.truncated


async def test_without_a_final_text_the_team_scores_the_mean() -> None:
    asked = world()
    await asked.step({"a": "5", "b": "4"})
    assert asked.outcome().success == 0.5


@pytest.mark.parametrize(("answer", "final"), [("?", None), ("4", "?")])
async def test_a_grader_that_gave_up_is_an_error_never_a_zero(answer: str, final: str | None) -> None:
    with pytest.raises(EpisodeError, match="the checker ran out of time"):
        await world().step({"a": answer}, final=final)


async def test_steps_that_make_no_sense() -> None:
    asked = world()
    with pytest.raises(EpisodeError, match="Nobody answered"):
        await asked.step({})
    with pytest.raises(EpisodeError, match="'c' answered and has no seat"):
        await asked.step({"c": "4"})
    await asked.step({"a": "4"})
    with pytest.raises(EpisodeError, match="answered already"):
        await asked.step({"a": "4"})


def test_a_question_that_nobody_answered_is_truncated() -> None:
    outcome = world().outcome()
    assert outcome.truncated
    assert (outcome.rewards, outcome.success) == ({}, 0.0)
